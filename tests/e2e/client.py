"""A gRPC client of decode replicas, as small as it can be."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

from stack import MODEL, Service

from ekiden.core.types import Completion, Delta, PrefillCandidate, Request, SamplingParams
from ekiden.rpc import decode_pb2, decode_pb2_grpc
from ekiden.rpc.channel import open_channel
from ekiden.rpc.convert import (
    candidate_to_pb,
    completion_from_pb,
    delta_from_pb,
    request_to_pb,
)

_numbers = itertools.count()


class Answer:
    """What one request gave: tokens of each choice, logprobs, the account."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.completion: Completion

    def tokens(self, choice: int = 0) -> list[int]:
        return [t for d in self.deltas if d.choice == choice for t in d.tokens]

    def finish(self, choice: int = 0) -> Any:
        return [d.finish for d in self.deltas if d.choice == choice][-1]


def request(prompt: Sequence[int], *, salt: str = "", **sampling: Any) -> Request:
    """A request with an id of its own; greedy unless told otherwise."""
    values: dict[str, Any] = {"seed": 1, "max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
    return Request(
        request_id=f"e2e-{next(_numbers)}",
        model=MODEL,
        prompt=tuple(prompt),
        sampling=SamplingParams(**(values | sampling)),
        salt=salt,
    )


async def stream(
    decode: Service, asked: Request, *prefill: PrefillCandidate
) -> AsyncIterator[Delta | Completion]:
    """Deltas as they come, then the completion. Closing the iterator cancels the call."""
    async with open_channel(decode.address) as channel:
        call = decode_pb2_grpc.DecodeStub(channel).Generate(
            decode_pb2.GenerateRequest(
                request=request_to_pb(asked),
                prefill=[candidate_to_pb(candidate) for candidate in prefill],
                local_prefill=not prefill,
            )
        )
        try:
            async for event in call:
                if event.WhichOneof("kind") == "delta":
                    yield delta_from_pb(event.delta)
                else:
                    yield completion_from_pb(event.completion)
        finally:
            call.cancel()


async def generate(decode: Service, asked: Request, *prefill: PrefillCandidate) -> Answer:
    """The whole answer, within a minute."""
    answer = Answer()
    async with asyncio.timeout(60):
        async for item in stream(decode, asked, *prefill):
            if isinstance(item, Completion):
                answer.completion = item
            else:
                answer.deltas.append(item)
    return answer
