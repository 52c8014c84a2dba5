"""The audit reads real gRPC and a real registry, and its exit code follows the books."""

from collections.abc import AsyncIterator, Callable

import grpc
import pytest

from ekiden.cli import audit
from ekiden.cli.main import build_parser
from ekiden.registry.record import ReplicaRecord
from ekiden.registry.registration import Registration
from ekiden.rpc import replica_pb2 as pb
from ekiden.rpc import replica_pb2_grpc

IDLE = {"total": 10, "free": 6, "cached": 4}
Serve = Callable[..., object]


class Replica(replica_pb2_grpc.ReplicaServicer):
    """Answers with the next of its books, the last one for ever."""

    def __init__(self, name: str, books: list[dict[str, int]]) -> None:
        self.name, self.books = name, books

    async def Audit(self, request: pb.AuditRequest, context: object) -> pb.AuditReply:
        books = self.books.pop(0) if len(self.books) > 1 else self.books[0]
        return pb.AuditReply(replica_id=self.name, role="decode", **books)


@pytest.fixture
async def serve() -> AsyncIterator[Callable]:
    servers = []

    async def begin(*books: dict[str, int], name: str = "decode-0") -> str:
        server = grpc.aio.server()
        replica_pb2_grpc.add_ReplicaServicer_to_server(Replica(name, list(books)), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield begin
    for server in servers:
        await server.stop(None)


async def audited(*options: str, url: str = "") -> tuple[int, str]:
    args = build_parser().parse_args(["audit", *options])
    rows = await audit.audit_until(args, url)
    return audit.exit_code(rows, args.idle), audit.table(rows)


async def test_idle_books_pass(serve):
    address = await serve(IDLE)
    code, table = await audited("--replica", address, "--idle")
    assert code == 0
    row = " ".join(table.splitlines()[1].split())
    assert row == f"decode-0 decode {address} 10 6 4 0 0 0 idle"


@pytest.mark.parametrize("held", [{"held": 1, "free": 5}, {"requests": 1}, {"sessions": 1}])
async def test_what_is_held_passes_only_without_idle(serve, held: dict[str, int]):
    address = await serve({**IDLE, **held})
    assert (await audited("--replica", address))[0] == 0
    code, table = await audited("--replica", address, "--idle")
    assert code == 1
    assert table.endswith("in use")


async def test_what_is_in_use_says_in_which_states(serve):
    states = {"moving": 2, "about to prefill": 1}
    _, table = await audited("--replica", await serve({**IDLE, "sessions": 2, "states": states}))
    assert table.endswith("in use: 1 about to prefill, 2 moving")


async def test_books_that_do_not_balance_never_pass(serve):
    code, table = await audited("--replica", await serve({**IDLE, "free": 5}))
    assert code == 1
    assert table.endswith("DOES NOT BALANCE")


async def test_waiting_looks_again_until_it_passes(serve):
    address = await serve({**IDLE, "requests": 1}, {**IDLE, "requests": 1}, IDLE)
    assert (await audited("--replica", address, "--idle", "--wait", "10"))[0] == 0


async def test_a_replica_that_does_not_answer_fails_beside_one_that_does(serve):
    address = await serve(IDLE)
    code, table = await audited("--replica", address, "--replica", "127.0.0.1:1")
    assert code == 1
    assert "no answer: UNAVAILABLE" in table
    assert "idle" in table


async def test_every_registered_replica_is_asked(serve, redis_url: str):
    registrations = []
    for name in ("decode-0", "decode-1"):
        record = ReplicaRecord(
            id=name,
            role="decode",
            model="m",
            address=await serve(IDLE, name=name),
            epoch=1,
            version="0",
            block_size=16,
            granule=16,
            max_model_len=64,
        )
        registrations.append(Registration(redis_url, record))
        await registrations[-1].start()
    try:
        code, table = await audited(url=redis_url)
    finally:
        for registration in registrations:
            await registration.close()
    assert code == 0
    assert [line.split()[0] for line in table.splitlines()[1:]] == ["decode-0", "decode-1"]


async def test_an_empty_registry_does_not_pass(redis_url: str):
    assert await audited(url=redis_url) == (1, "no replica is registered")
