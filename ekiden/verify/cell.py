"""One cell of the grid: a real prefill replica hands over to a real decode replica."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

import grpc
import msgspec

from ekiden.cache.layout import KvLayout
from ekiden.core.types import Completion, PrefillCandidate, Request
from ekiden.rpc import decode_pb2, decode_pb2_grpc, replica_pb2, replica_pb2_grpc
from ekiden.rpc.channel import open_channel
from ekiden.rpc.convert import candidate_to_pb, completion_from_pb, request_to_pb

from .compare import (
    Bits,
    KvDifference,
    Reference,
    first_difference,
    first_kv_difference,
    rank_bits,
    whole_cache,
)
from .reference import greedy


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """A running replica as a cell sees it."""

    candidate: PrefillCandidate
    layout: KvLayout
    model: str


class Outcome(msgspec.Struct, kw_only=True):
    """What became of one cell."""

    status: str = "equal"
    """``equal``, ``refused``, ``differs``, ``hung`` or ``failed``."""
    detail: str = ""
    prompts: int = 0
    tokens: int = 0
    ties: int = 0
    kv_bytes: int = 0
    kv_tokens_compared: int = 0

    @property
    def ok(self) -> bool:
        return self.status in ("equal", "refused")


class CellFailed(Exception):
    """The cell is decided; carries status and detail."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


async def run_cell(
    prefill: Peer, decode: Peer, references: Sequence[Reference], salt: str, timeout_s: float
) -> Outcome:
    """Run every prompt through the pair and compare tokens and KV with the truth.

    ``salt`` must be fresh, so that nothing an earlier cell left in a cache is reused.
    """
    outcome = Outcome()
    try:
        async with asyncio.timeout(timeout_s):
            await _check_prompts(prefill, decode, references, salt, outcome)
    except TimeoutError:
        outcome.status, outcome.detail = "hung", f"not done within {timeout_s:g} s"
    except CellFailed as failure:
        outcome.status, outcome.detail = failure.status, failure.detail
    except grpc.aio.AioRpcError as error:
        outcome.status, outcome.detail = "failed", f"{error.code().name}: {error.details()}"
    return outcome


async def _check_prompts(
    prefill: Peer, decode: Peer, references: Sequence[Reference], salt: str, outcome: Outcome
) -> None:
    async with (
        open_channel(decode.candidate.address) as decode_channel,
        open_channel(prefill.candidate.address) as prefill_channel,
    ):
        cell = _Cell(prefill, decode, decode_channel, prefill_channel, salt, outcome)
        tasks = [asyncio.ensure_future(cell.check(n, r)) for n, r in enumerate(references)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class _Cell:
    """The pair, its channels and the running account."""

    def __init__(
        self,
        prefill: Peer,
        decode: Peer,
        decode_channel: grpc.aio.Channel,
        prefill_channel: grpc.aio.Channel,
        salt: str,
        outcome: Outcome,
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._generator = decode_pb2_grpc.DecodeStub(decode_channel)
        self._sides = {
            "prefill": replica_pb2_grpc.ReplicaStub(prefill_channel),
            "decode": replica_pb2_grpc.ReplicaStub(decode_channel),
        }
        self._salt = salt
        self._outcome = outcome

    async def check(self, number: int, reference: Reference) -> None:
        """One prompt, going on with the reference's token behind each tie."""
        start, attempt, total = 0, 0, len(reference.tokens)
        while start < total:
            prompt = reference.prompt + reference.tokens[:start]
            # A retry behind a tie must not find the first attempt's KV in a cache.
            salt = f"{self._salt}/{number}/{attempt}"
            tokens, completion = await self._generate(prompt, number, total - start, salt)
            self._check_path(completion, len(prompt))
            await self._check_kv(number, prompt, salt)
            difference = first_difference(reference, tokens, start)
            if difference is None:
                break
            if not difference.tie:
                raise CellFailed(
                    "differs",
                    f"prompt {number} ({len(reference.prompt)} tokens), output position "
                    f"{difference.position}: {difference.got} instead of {difference.expected}; "
                    "the KV of its whole blocks is equal to the bit",
                )
            self._outcome.ties += 1
            start, attempt = difference.position + 1, attempt + 1
        self._outcome.prompts += 1
        self._outcome.tokens += total

    async def _generate(
        self, prompt: tuple[int, ...], seed: int, max_tokens: int, salt: str
    ) -> tuple[list[int], Completion]:
        request = Request(
            request_id=f"verify-{salt}",
            model=self._decode.model,
            prompt=prompt,
            sampling=greedy(seed + 1, max_tokens),
            salt=salt,
        )
        call = self._generator.Generate(
            decode_pb2.GenerateRequest(
                request=request_to_pb(request), prefill=[candidate_to_pb(self._prefill.candidate)]
            )
        )
        tokens: list[int] = []
        async for event in call:
            if event.WhichOneof("kind") == "completion":
                return tokens, completion_from_pb(event.completion)
            tokens.extend(event.delta.tokens)
        raise CellFailed("failed", "the stream ended without its completion")

    def _check_path(self, completion: Completion, prompt: int) -> None:
        """The prompt must have come over the wire, all of it, and no other way."""
        for fallback in completion.fallbacks:
            status = "refused" if fallback.kind == "refused" else "failed"
            raise CellFailed(status, fallback.reason)
        sources = completion.sources
        if sources.prefill_computed != prompt:
            raise CellFailed("failed", f"the prompt was not prefilled for this run: {sources}")
        expected = (
            prompt
            * sum(r.num_heads * r.num_layers for r in self._decode.layout.ranks)
            * 2
            * self._decode.layout.row_bytes
        )
        if completion.transfer.bytes != expected:
            raise CellFailed(
                "failed", f"{completion.transfer.bytes} bytes moved instead of {expected}"
            )
        self._outcome.kv_bytes += expected

    async def _check_kv(self, number: int, prompt: tuple[int, ...], salt: str) -> None:
        """The whole blocks that both sides still cache must be equal to the bit."""
        size = max(self._prefill.layout.block_size, self._decode.layout.block_size)
        tokens = len(prompt) // size * size
        if tokens == 0:
            return
        request = replica_pb2.ReadKvRequest(tokens=prompt[:tokens], salt=salt)
        prefill = await self._read("prefill", self._prefill.layout, request)
        decode = await self._read("decode", self._decode.layout, request)
        source = whole_cache(self._prefill.layout, prefill)
        difference = first_kv_difference(source, self._decode.layout, decode, tokens)
        if difference is not None:
            raise CellFailed("differs", _describe(number, difference))
        self._outcome.kv_tokens_compared += tokens

    async def _read(
        self, side: str, layout: KvLayout, request: replica_pb2.ReadKvRequest
    ) -> dict[int, Bits]:
        blocks: defaultdict[int, list[bytes]] = defaultdict(list)
        async for block in self._sides[side].ReadKv(request):
            if block.index != len(blocks[block.rank]):
                raise CellFailed("failed", f"{side} sent block {block.index} out of order")
            blocks[block.rank].append(block.data)
        want = len(request.tokens) // layout.block_size
        for rank in range(len(layout.ranks)):
            if len(blocks[rank]) != want:
                raise CellFailed(
                    "failed",
                    f"{side} rank {rank} has {len(blocks[rank])} of the prompt's {want} blocks",
                )
        return {rank: rank_bits(layout, rank, data) for rank, data in blocks.items()}


def _describe(number: int, difference: KvDifference) -> str:
    return (
        f"prompt {number}: the KV differs first at layer {difference.layer}, head "
        f"{difference.head}, position {difference.position} ({difference.part}, decode rank "
        f"{difference.rank})"
    )
