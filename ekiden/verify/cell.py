"""One cell of the grid: a real prefill replica hands over to a real decode replica."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping

import grpc
import msgspec

from ekiden.cache.layout import KvLayout
from ekiden.core.types import Completion, PrefillCandidate, Request
from ekiden.rpc import decode_pb2, decode_pb2_grpc, replica_pb2, replica_pb2_grpc
from ekiden.rpc.channel import open_channel
from ekiden.rpc.convert import candidate_to_pb, completion_from_pb, delta_from_pb, request_to_pb

from .compare import Bits, Bound, Reference, rank_bits, whole_cache
from .judge import Verdict, check_kv
from .outcome import CellFailed, Outcome
from .reference import Record, greedy

log = logging.getLogger(__name__)

IDLE_S = 5.0
"""For both replicas to let go of everything once the last answer is through."""
LOOK_S = 0.02


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """A running replica as a cell sees it."""

    candidate: PrefillCandidate
    layout: KvLayout
    model: str


async def run_cell(
    prefill: Peer,
    decode: Peer,
    references: Mapping[str, Reference],
    bound: Bound,
    salt: str,
    timeout_s: float,
) -> Outcome:
    """Run every prompt through the pair and compare tokens and KV with the truth.

    ``salt`` must be fresh, so that nothing an earlier cell left in a cache is reused.
    """
    outcome = Outcome()
    try:
        async with asyncio.timeout(timeout_s):
            await _check_prompts(prefill, decode, references, bound, salt, outcome)
    except TimeoutError:
        outcome.status, outcome.detail = "hung", f"not done within {timeout_s:g} s"
    except CellFailed as failure:
        outcome.status, outcome.detail = failure.status, failure.detail
    except grpc.aio.AioRpcError as error:
        outcome.status, outcome.detail = "failed", f"{error.code().name}: {error.details()}"
    except Exception as error:  # one cell's trouble must not cost the others
        names = prefill.candidate.replica_id, decode.candidate.replica_id
        log.exception("%s -> %s", *names)
        outcome.status, outcome.detail = "failed", repr(error)
    return outcome


async def _check_prompts(
    prefill: Peer,
    decode: Peer,
    references: Mapping[str, Reference],
    bound: Bound,
    salt: str,
    outcome: Outcome,
) -> None:
    async with (
        open_channel(decode.candidate.address) as decode_channel,
        open_channel(prefill.candidate.address) as prefill_channel,
    ):
        cell = _Cell(prefill, decode, decode_channel, prefill_channel, bound, salt, outcome)
        tasks = [asyncio.ensure_future(cell.check(n, r)) for n, r in references.items()]
        try:
            await asyncio.gather(*tasks)
            await cell.check_idle()
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
        bound: Bound,
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
        self._same_kv = prefill.layout.dtype == decode.layout.dtype
        self._bound = bound

    async def check(self, name: str, reference: Reference) -> None:
        """One prompt, going on with the reference's token behind each tie."""
        verdict = Verdict(name, reference, self._bound, self._outcome, same_kv=self._same_kv)
        attempt, again = 0, True
        while again:
            prompt = reference.prompt + reference.tokens[: verdict.start]
            # A retry behind a tie must not find the first attempt's KV in a cache.
            salt = f"{self._salt}/{name}/{attempt}"
            left = len(reference.tokens) - verdict.start
            record, completion = await self._generate(prompt, left, salt)
            self._check_path(completion, len(prompt))
            if left > 1:  # else it ended with the hand-off token, and nobody waits for its KV
                self._check_bytes(completion, len(prompt))
                await self._check_kv(name, prompt, salt)
            again, attempt = verdict.take(record), attempt + 1
        self._outcome.prompts += 1

    async def _generate(
        self, prompt: tuple[int, ...], max_tokens: int, salt: str
    ) -> tuple[Record, Completion]:
        request = Request(
            request_id=f"verify-{salt}",
            model=self._decode.model,
            prompt=prompt,
            sampling=greedy(1, max_tokens),
            salt=salt,
        )
        call = self._generator.Generate(
            decode_pb2.GenerateRequest(
                request=request_to_pb(request), prefill=[candidate_to_pb(self._prefill.candidate)]
            )
        )
        record = Record(prompt)
        async for event in call:
            if event.WhichOneof("kind") == "completion":
                return record, completion_from_pb(event.completion)
            record.add(delta_from_pb(event.delta))
        raise CellFailed("failed", "the stream ended without its completion")

    def _check_path(self, completion: Completion, prompt: int) -> None:
        """The prompt must have come over the wire, all of it, and no other way."""
        for fallback in completion.fallbacks:
            status = "refused" if fallback.kind == "refused" else "failed"
            raise CellFailed(status, fallback.reason)
        sources = completion.sources
        if sources.prefill_computed != prompt:
            raise CellFailed("failed", f"the prompt was not prefilled for this run: {sources}")

    def _check_bytes(self, completion: Completion, prompt: int) -> None:
        expected = (
            prompt
            * sum(r.num_heads * r.num_layers for r in self._decode.layout.ranks)
            * 2
            * self._prefill.layout.row_bytes
        )
        if completion.transfer.bytes != expected:
            raise CellFailed(
                "failed", f"{completion.transfer.bytes} bytes moved instead of {expected}"
            )
        self._outcome.kv_bytes += expected

    async def _check_kv(self, name: str, prompt: tuple[int, ...], salt: str) -> None:
        """The whole blocks that both sides still cache must be equal to the bit."""
        prefill, decode = self._prefill.layout, self._decode.layout
        tokens = min(len(prompt) // kv.block_size * kv.block_size for kv in (prefill, decode))
        if tokens == 0:
            return
        request = replica_pb2.ReadKvRequest(tokens=prompt, salt=salt)
        source = whole_cache(prefill, await self._read("prefill", prefill, request))
        target = await self._read("decode", decode, request)
        check_kv(name, (prefill, source), (decode, target), tokens, self._outcome)

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

    async def check_idle(self) -> None:
        """Nothing is held on either side once all answers are through."""
        try:
            async with asyncio.timeout(IDLE_S):
                for side in self._sides.values():
                    while _busy(await side.Audit(replica_pb2.AuditRequest())):
                        await asyncio.sleep(LOOK_S)
        except TimeoutError:
            books = [await side.Audit(replica_pb2.AuditRequest()) for side in self._sides.values()]
            raise CellFailed(
                "failed",
                f"{IDLE_S:g} s after the last answer something is held: "
                + " | ".join(" ".join(str(b).split()) for b in books if _busy(b)),
            ) from None


def _busy(books: replica_pb2.AuditReply) -> bool:
    return bool(books.held or books.requests or books.sessions)
