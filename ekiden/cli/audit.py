"""``ekiden audit``: the block books of every registered replica, read over gRPC.

Books must balance always (free + cached + held = total); on idle nothing may be held.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ekiden.cli.command import add_command
from ekiden.cli.options import add_redis, redis_url, seconds
from ekiden.core import env
from ekiden.core.errors import SetupError
from ekiden.core.types import BlockBooks
from ekiden.measures.columns import aligned

if TYPE_CHECKING:
    from ekiden.rpc.replica_pb2 import AuditReply

CALL_TIMEOUT_S = 5.0
_RETRY_S = 0.2
_COLUMNS = (
    *("replica", "role", "address", "total", "free", "cached"),
    *("held", "requests", "sessions", "verdict"),
)

_EXAMPLES = """examples:
  ekiden audit --redis redis://127.0.0.1:6379/0
  ekiden audit --replica 10.0.0.7:7000 --idle --wait 5    exit 1 unless idle within 5 s
"""


class Audited(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's books, or why there are none."""

    replica: str = "?"
    role: str = "?"
    address: str
    books: BlockBooks | None = None
    states: tuple[tuple[str, int], ...] = ()
    """How many hand-off sessions and requests are in each state."""
    trouble: str = ""

    def verdict(self) -> str:
        if self.books is None:
            return self.trouble
        if not self.books.balanced:
            return "DOES NOT BALANCE"
        if self.books.idle:
            return "idle"
        return ": ".join(filter(None, ("in use", ", ".join(f"{n} {s}" for s, n in self.states))))

    def passes(self, idle: bool) -> bool:
        if self.books is None:
            return False
        return self.books.idle if idle else self.books.balanced


def add_parser(commands: Any) -> None:
    parser = add_command(commands, "audit", "print the block books of every replica", _EXAMPLES)
    add_redis(parser)
    parser.add_argument(
        "--replica",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="ask this one, without Redis; may be repeated",
    )
    parser.add_argument("--idle", action="store_true", help="exit 1 unless nothing is held")
    parser.add_argument(
        "--wait", type=seconds, default=0.0, metavar="SECONDS", help="look again for this long"
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    url = redis_url(args)
    if not args.replica and not url:
        raise SetupError("no replica to ask: give --redis URL, REDIS_URL or --replica HOST:PORT")
    rows = asyncio.run(audit_until(args, url))
    print(table(rows))
    return exit_code(rows, args.idle)


def exit_code(rows: Sequence[Audited], idle: bool) -> int:
    """0 if there is a replica and all pass."""
    return 0 if rows and all(row.passes(idle) for row in rows) else 1


async def audit_until(args: argparse.Namespace, url: str) -> list[Audited]:
    """The books of all replicas; looks again for ``--wait`` seconds while they do not pass."""
    until = time.monotonic() + args.wait
    while True:
        addresses = args.replica or await _registered(url)
        rows = await audit_all(addresses)
        if exit_code(rows, args.idle) == 0 or time.monotonic() > until:
            return rows
        await asyncio.sleep(_RETRY_S)


async def _registered(url: str) -> list[str]:
    from ekiden.registry.watcher import Watcher

    watcher = Watcher(url)
    try:
        await watcher.start(require=True)
        return [record.address for record in watcher.replicas()]
    finally:
        await watcher.close()


async def audit_all(addresses: Sequence[str]) -> list[Audited]:
    """Ask all at once; one that does not answer in ``CALL_TIMEOUT_S`` is a row that says so."""
    return list(await asyncio.gather(*(_audit(address) for address in addresses)))


async def _audit(address: str) -> Audited:
    import grpc

    from ekiden.rpc.channel import auth_metadata, open_channel
    from ekiden.rpc.replica_pb2 import AuditRequest
    from ekiden.rpc.replica_pb2_grpc import ReplicaStub

    async with open_channel(address) as channel:
        try:
            call = ReplicaStub(channel).Audit(
                AuditRequest(), timeout=CALL_TIMEOUT_S, metadata=auth_metadata(env.secret())
            )
            return _row(address, await call)
        except grpc.aio.AioRpcError as error:
            return Audited(address=address, trouble=f"no answer: {error.code().name}")


def _row(address: str, reply: AuditReply) -> Audited:
    books = BlockBooks(
        total=reply.total,
        free=reply.free,
        cached=reply.cached,
        held=reply.held,
        requests=reply.requests,
        sessions=reply.sessions,
    )
    return Audited(
        replica=reply.replica_id,
        role=reply.role,
        address=address,
        books=books,
        states=tuple(sorted(reply.states.items())),
    )


def table(rows: Sequence[Audited]) -> str:
    """One line a replica under a line of titles."""
    if not rows:
        return "no replica is registered"
    return "\n".join(aligned([_COLUMNS, *(_cells(row) for row in rows)]))


def _cells(row: Audited) -> tuple[str, ...]:
    books = row.books
    figures = (
        ("-",) * 6
        if books is None
        else (books.total, books.free, books.cached, books.held, books.requests, books.sessions)
    )
    return (row.replica, row.role, row.address, *map(str, figures), row.verdict())
