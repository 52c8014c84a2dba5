"""A decode replica without a model: real gRPC, made-up tokens, and every fault on demand.

Choice ``c`` of a prompt answers with the prompt's own tokens, rotated by ``c``, over and over: a
test can say what must come out. Stops, lengths and usage follow the same rules as the engine's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from ekiden.core.errors import EkidenError
from ekiden.core.types import (
    Completion,
    Delta,
    Fallback,
    FinishReason,
    PrefillCandidate,
    Request,
    TimeSplit,
    TokenLogprobs,
    TokenSources,
    TransferStats,
)
from ekiden.registry.record import ReplicaRecord
from ekiden.registry.registration import Registration
from ekiden.rpc import decode_pb2 as pb
from ekiden.rpc import decode_pb2_grpc
from ekiden.rpc.convert import (
    candidate_from_pb,
    completion_to_pb,
    delta_to_pb,
    error_to_pb,
    request_from_pb,
)
from ekiden.rpc.server import RpcServer
from ekiden.text.output import OutputText
from ekiden.text.tokenizer import Tokenizer

MAX_MODEL_LEN = 4096


class FakeDecode(decode_pb2_grpc.DecodeServicer):
    """``gate`` holds tokens back while it is cleared; ``refuse_with`` answers every request."""

    def __init__(self, tokenizer: Tokenizer, *, secret: str = "", group: int = 1) -> None:
        self.tokenizer = tokenizer
        self.group = group
        self.server = RpcServer("127.0.0.1", 0, secret=secret)
        decode_pb2_grpc.add_DecodeServicer_to_server(self, self.server.raw)
        self.requests: list[Request] = []
        self.prefill: list[list[PrefillCandidate]] = []
        self.cancelled: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.free_tokens = 0
        """Tokens a choice may give before it waits for the gate."""
        self.refuse_with: EkidenError | None = None
        self.output: list[int] | None = None
        self.changed = asyncio.Condition()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._calls: set[Any] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    async def start(self) -> None:
        await self.server.start([])

    async def stop(self) -> None:
        """As a killed process does: streams break, nothing is said."""
        for task in self._tasks.values():
            task.cancel()
        await self.server.stop(0)

    async def until(self, condition: Any, timeout_s: float = 5.0) -> None:
        """Wait for something that requests or cancellations bring about."""
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(condition)

    def record(self, name: str = "d-1", epoch: int = 1, **changes: Any) -> ReplicaRecord:
        fields: dict[str, Any] = {
            "id": name,
            "role": "decode",
            "model": "tiny",
            "address": self.address,
            "epoch": epoch,
            "version": "0",
            "block_size": 16,
            "granule": 16,
            "max_model_len": MAX_MODEL_LEN,
            "vocab_size": self.tokenizer.vocab_size,
            "tokenizer_fingerprint": self.tokenizer.fingerprint,
            **changes,
        }
        return ReplicaRecord(**fields)

    async def register(self, redis_url: str, **changes: Any) -> Registration:
        registration = Registration(redis_url, self.record(**changes))
        await registration.start()
        return registration

    async def Serve(self, requests: Any, _context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        events: asyncio.Queue[pb.ServeEvent] = asyncio.Queue()
        reader = asyncio.ensure_future(self._read(requests, events))
        try:
            while True:
                yield await events.get()
        finally:
            reader.cancel()

    async def _read(
        self, requests: AsyncIterator[pb.ServeRequest], events: asyncio.Queue[pb.ServeEvent]
    ) -> None:
        async for message in requests:
            if message.HasField("cancel"):
                name = message.cancel.request_id
                self.cancelled.append(name)
                self._tasks.pop(name).cancel()
            else:
                request = request_from_pb(message.submit.request)
                self.requests.append(request)
                self.prefill.append([candidate_from_pb(c) for c in message.submit.prefill])
                task = asyncio.ensure_future(self._answer(request, events))
                self._tasks[request.request_id] = task
            async with self.changed:
                self.changed.notify_all()

    async def _answer(self, request: Request, events: asyncio.Queue[pb.ServeEvent]) -> None:
        try:
            await self._play(request, events)
        except Exception as error:  # a bug of the fake must not look like a slow replica
            failure = error_to_pb(request.request_id, EkidenError(f"fake: {error!r}"))
            await events.put(pb.ServeEvent(errors=[failure]))

    async def _play(self, request: Request, events: asyncio.Queue[pb.ServeEvent]) -> None:
        if self.refuse_with is not None:
            error = error_to_pb(request.request_id, self.refuse_with)
            await events.put(pb.ServeEvent(errors=[error]))
            return
        choices = [self._choice(request, index) for index in range(request.sampling.n)]
        longest = max(len(choice) for choice in choices)
        for step in range(longest):
            if step >= self.free_tokens:
                await self.gate.wait()
            deltas = [choice[step] for choice in choices if step < len(choice)]
            await events.put(pb.ServeEvent(deltas=[delta_to_pb(delta) for delta in deltas]))
        completion = account(request, sum(len(d.tokens) for choice in choices for d in choice))
        await events.put(pb.ServeEvent(completions=[completion_to_pb(completion)]))

    def _choice(self, request: Request, index: int) -> list[Delta]:
        """All deltas of one choice, ``group`` tokens each."""
        tokens, finish, reason = self._tokens(request, index)
        deltas: list[Delta] = []
        for start in range(0, len(tokens), self.group):
            part = tokens[start : start + self.group]
            last = start + self.group >= len(tokens)
            deltas.append(
                Delta(
                    request_id=request.request_id,
                    choice=index,
                    tokens=tuple(part),
                    logprobs=_logprobs(part, request.sampling.logprobs),
                    finish=finish if last else None,
                    stop_reason=reason if last else None,
                )
            )
        return deltas

    def _tokens(
        self, request: Request, index: int
    ) -> tuple[list[int], FinishReason, str | int | None]:
        sampling, prompt = request.sampling, self.output or request.prompt
        text = OutputText(self.tokenizer, sampling.stop, min_tokens=sampling.min_tokens)
        tokens: list[int] = []
        while True:
            token = prompt[(len(tokens) + index) % len(prompt)]
            tokens.append(token)
            if len(tokens) > sampling.min_tokens:
                if token in self.tokenizer.eos_ids and not sampling.ignore_eos:
                    return tokens, FinishReason.STOP, None
                if token in sampling.stop_token_ids:
                    return tokens, FinishReason.STOP, token
            if match := text.push(token):
                return tokens, FinishReason.STOP, match.stop
            if len(tokens) == sampling.max_tokens:
                match = text.finish()
                stopped = FinishReason.STOP if match else FinishReason.LENGTH
                return tokens, stopped, match.stop if match else None


def account(request: Request, completion_tokens: int) -> Completion:
    """Figures that a test can recognise."""
    prompt = len(request.prompt)
    return Completion(
        request_id=request.request_id,
        prompt_tokens=prompt,
        completion_tokens=completion_tokens,
        sources=TokenSources(
            decode_cache=min(prompt, 1),
            prefill_cache=max(min(prompt, 3) - 1, 0),
            prefill_computed=max(prompt - 3, 0),
            reason="made up",
        ),
        times=TimeSplit(
            queue_s=0.01, prefill_s=0.02, transfer_s=0.03, first_decode_s=0.04, decode_s=0.05
        ),
        transfer=TransferStats(
            bytes=1234, seconds=0.5, wire="fake", fetched_tokens=2, fetched_bytes=56
        ),
        fallbacks=(Fallback(kind="local_prefill", reason="made up too"),),
        prefill_replica="p-1",
        decode_replica="d-1",
    )


def _logprobs(tokens: list[int], k: int | None) -> tuple[TokenLogprobs, ...]:
    if k is None:
        return ()
    return tuple(
        TokenLogprobs(token, -0.5, tuple((token + i, -0.5 - i) for i in range(k)))
        for token in tokens
    )
