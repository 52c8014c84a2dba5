"""Faults that no single request meets: a storm of aborts, and ids that are used twice."""

from __future__ import annotations

import asyncio
import random

import grpc
from chaos_clients import LEFT, MODEL, RIGHT, Ask, Outcome
from chaos_round import Row, audited
from chaos_world import DECODE, World

from ekiden.core.types import PrefillCandidate, Request, SamplingParams
from ekiden.rpc import decode_pb2, decode_pb2_grpc
from ekiden.rpc.channel import open_channel
from ekiden.rpc.convert import candidate_to_pb, delta_from_pb, request_to_pb

STORM, LEAVING = 60, 0.8
SOONEST_S, LATEST_S = 0.01, 0.8
STORM_NAME, TWICE_NAME, TWO_REPLICAS_NAME = (
    "abort storm",
    "one id twice on a replica",
    "one id on two replicas",
)


async def storm(world: World, number: int) -> Row:
    """Sixty clients at once, four fifths of whom leave within a second."""
    row = Row(fault=STORM_NAME, state="any", seen=[], others=[], breaches=[])
    rng = random.Random(f"storm/{number}")
    asks = [
        Ask(
            number=9_000_000 + STORM * number + i,
            length=rng.randint(20, 1500),
            max_tokens=rng.randint(1, 24),
            n=rng.choice([1, 1, 1, 3]),
            stream=rng.random() < 0.7,
        )
        for i in range(STORM)
    ]
    leaves = [asyncio.Event() for _ in asks]
    loop = asyncio.get_running_loop()
    for leave in leaves:
        if rng.random() < LEAVING:
            loop.call_later(rng.uniform(SOONEST_S, LATEST_S), leave.set)
    began = loop.time()
    asked = [world.client.ask(ask, leave=leave) for ask, leave in zip(asks, leaves, strict=True)]
    outcomes = await asyncio.gather(*asked)
    await audited(world, row, number)
    row.recovery_s = loop.time() - began
    await _judge_storm(world, row, asks, outcomes)
    return row


async def _judge_storm(world: World, row: Row, asks: list[Ask], outcomes: list[Outcome]) -> None:
    for ask, outcome in zip(asks, outcomes, strict=True):
        judged = await world.truth.judge(ask, outcome)
        if judged.kind not in (RIGHT, LEFT):
            row.breaches.append(f"{judged.name}: {judged.detail}")
    left = sum(outcome.kind == LEFT for outcome in outcomes)
    row.outcome, row.requests = f"{left} left, {len(outcomes) - left} right", len(outcomes)


async def same_id_on_one(world: World, number: int) -> Row:
    """The second request under an id that is running is refused; the first is not disturbed."""
    row = Row(fault=TWICE_NAME, state="any", seen=[], others=[], breaches=[])
    loop = asyncio.get_running_loop()
    began, asked = loop.time(), _request(number, f"twice-{number}")
    answers = await asyncio.gather(
        *(_generate(world, DECODE[number % 2], asked) for _ in range(2)), return_exceptions=True
    )
    refused = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
    given = [answer for answer in answers if isinstance(answer, list)]
    right = await _generate(world, "calm", asked)
    if [error.code() for error in refused] != [grpc.StatusCode.INVALID_ARGUMENT]:
        row.breaches.append(f"not refused once: {answers}")
    if given != [right]:
        row.breaches.append(f"{given} instead of {right}")
    await audited(world, row, number)
    row.outcome, row.requests, row.recovery_s = "one refused, one right", 2, loop.time() - began
    return row


async def same_id_on_two(world: World, number: int) -> Row:
    """Two clients may draw one id: with two decode replicas both are served, by one prefill."""
    row = Row(fault=TWO_REPLICAS_NAME, state="any", seen=[], others=[], breaches=[])
    loop = asyncio.get_running_loop()
    began, asked = loop.time(), _request(number + 1, f"two-{number}")
    answers = await asyncio.gather(
        *(_generate(world, name, asked) for name in DECODE), return_exceptions=True
    )
    right = await _generate(world, "calm", asked)
    row.breaches += [f"{answer} instead of {right}" for answer in answers if answer != right]
    await audited(world, row, number)
    row.outcome, row.requests, row.recovery_s = "both right", 2, loop.time() - began
    return row


CROWDS = (storm, same_id_on_one, same_id_on_two)


def _request(number: int, request_id: str) -> Request:
    ask = Ask(number=number, length=800)
    sampling = SamplingParams(seed=1, max_tokens=16, temperature=0.0, ignore_eos=True)
    return Request(request_id=request_id, model=MODEL, prompt=tuple(ask.prompt), sampling=sampling)


async def _generate(world: World, name: str, asked: Request) -> list[int]:
    """The tokens that one decode replica gives, by hand-off where it has peers."""
    service = world.calm if name == "calm" else world.services[name]
    prefill = world.services["p-1"]
    candidate = PrefillCandidate(
        replica_id="p-1", address=world.relays["p-1"].address, epoch=prefill.ready["epoch"]
    )
    message = decode_pb2.GenerateRequest(
        request=request_to_pb(asked),
        prefill=[] if name == "calm" else [candidate_to_pb(candidate)],
        local_prefill=name == "calm",
    )
    tokens: list[int] = []
    async with open_channel(service.address) as channel, asyncio.timeout(30):
        async for event in decode_pb2_grpc.DecodeStub(channel).Generate(message):
            if event.WhichOneof("kind") == "delta":
                tokens += delta_from_pb(event.delta).tokens
    return tokens
