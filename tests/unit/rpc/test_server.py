"""The server refuses strangers, tells of a busy port, and advertises what peers can dial."""

from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ekiden.core.errors import SetupError
from ekiden.rpc import replica_pb2, replica_pb2_grpc
from ekiden.rpc.channel import auth_metadata, open_channel
from ekiden.rpc.server import RpcServer, advertised_address

SERVICE = "ekiden.rpc.Replica"


class _Auditor(replica_pb2_grpc.ReplicaServicer):
    async def Audit(self, request, context):
        return replica_pb2.AuditReply(total=7)


@pytest.fixture
async def guarded() -> AsyncIterator[RpcServer]:
    server = RpcServer("127.0.0.1", 0, secret="s3cret")
    replica_pb2_grpc.add_ReplicaServicer_to_server(_Auditor(), server.raw)
    await server.start([SERVICE])
    yield server
    await server.stop(0)


async def _audit(port: int, secret: str) -> int:
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = replica_pb2_grpc.ReplicaStub(channel)
        reply = await stub.Audit(replica_pb2.AuditRequest(), metadata=auth_metadata(secret))
        return reply.total


async def test_a_caller_with_the_secret_is_served(guarded: RpcServer) -> None:
    assert await _audit(guarded.port, "s3cret") == 7


@pytest.mark.parametrize("secret", ["", "wrong", "s3cret2"])
async def test_a_caller_without_the_secret_is_refused(guarded: RpcServer, secret: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _audit(guarded.port, secret)
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert "EKIDEN_SECRET" in str(caught.value.details())


async def test_probes_need_no_secret_and_see_a_drain(guarded: RpcServer) -> None:
    async with open_channel(f"127.0.0.1:{guarded.port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        assert (await check(request)).status == health_pb2.HealthCheckResponse.SERVING
        await guarded.set_serving(False)
        assert (await check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_port_in_use_is_told_before_anything_starts(guarded: RpcServer) -> None:
    with pytest.raises(SetupError, match=f"127.0.0.1:{guarded.port}"):
        RpcServer("127.0.0.1", guarded.port)


def test_a_wildcard_host_is_never_advertised() -> None:
    assert advertised_address("0.0.0.0", 9, "", "redis://127.0.0.1:6379") == "127.0.0.1:9"
    with pytest.raises(SetupError, match="--advertise"):
        advertised_address("0.0.0.0", 9, "", "")


def test_an_explicit_address_wins_and_takes_the_drawn_port() -> None:
    assert advertised_address("0.0.0.0", 9, "decode-1", "") == "decode-1:9"
    assert advertised_address("0.0.0.0", 9, "decode-1:0", "") == "decode-1:9"
    assert advertised_address("0.0.0.0", 9, "decode-1:8", "") == "decode-1:8"
    assert advertised_address("127.0.0.1", 9, "", "") == "127.0.0.1:9"
