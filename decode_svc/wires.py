"""Which wire KV takes from a prefill replica: the fastest of those that both have, measured.

A moment in which the machine is busy decides nothing: what took long is measured once more, and so
is everything where the outcome is not the one to expect.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ekiden.core.errors import ReplicaFailed
from ekiden.rpc import prefill_pb2_grpc
from kv_transfer.compat import common_wires
from kv_transfer.description import MAPPED_WIRES, ReplicaDescription
from kv_transfer.session import Arrived

from .probe import Prober

if TYPE_CHECKING:
    from .core import DecodeCore

logger = logging.getLogger(__name__)

PROBE_BYTES = (64 << 10, 1 << 20, 8 << 20, 32 << 20)
"""One after the other: the first makes the connections, the last is the largest."""
LONG_ENOUGH_S = 0.02
"""A measurement that took so long is not followed by a larger one."""
ENOUGH_BYTES = 1 << 20
"""Fewer, that came in less time, do not show how fast a wire is."""
CLEARLY_FASTER = 1.1
"""What a wire must be faster by to be taken before one that is better by nature."""


class Measured(msgspec.Struct, frozen=True):
    """A wire and what it did; ``bytes_per_s`` is 0 if there was no room to measure."""

    wire: str
    bytes_per_s: float = 0.0
    sure: bool = True
    """False: there was little room, and it may be much faster."""

    def __str__(self) -> str:
        if not self.bytes_per_s:
            return f"{self.wire} (not measured)"
        if not self.sure:
            return f"{self.wire} (no room to measure)"
        if self.bytes_per_s < 1e8:
            return f"{self.wire} {self.bytes_per_s / 1e6:.1f} MB/s"
        return f"{self.wire} {self.bytes_per_s / 1e9:.2f} GB/s"


class NoWire(ReplicaFailed):
    """The other replica answers, but KV does not come from it."""


class Choice(NamedTuple):
    """``take``: for KV that comes; ``lend``: for what goes back, None if nothing can."""

    take: Measured
    lend: Measured | None


class WireChooser:
    """Chooses on behalf of one decode replica."""

    def __init__(self, core: DecodeCore, prober: Prober | None = None) -> None:
        self._core = core
        self._prober = prober or Prober(core)

    async def choose(self, peer: ReplicaDescription, stub: prefill_pb2_grpc.PrefillStub) -> Choice:
        """The wire to take from ``peer``; says which, and why, in the log.

        Raises:
            SetupError: the two have none in common.
            NoWire: none of those that they have works.
        """
        works: dict[str, Measured] = {}
        failures: dict[str, str] = {}
        wires = common_wires(peer, self._core.me)
        await self._try(peer, stub, wires, works, failures)
        if works and fastest(list(works.values())).wire != wires[0]:
            await self._try(peer, stub, list(works), works, failures)
        if not works:
            said = "; ".join(f"{wire}: {why}" for wire, why in failures.items())
            raise NoWire(f"no KV wire to {peer.replica_id} works: {said}")
        best = fastest(list(works.values()))
        _tell(peer.replica_id, best, list(works.values()), failures)
        # A mapped wire has one direction: decode's pool is not shared.
        other_way = [found for found in works.values() if found.wire not in MAPPED_WIRES]
        return Choice(best, fastest(other_way) if other_way else None)

    async def _try(
        self,
        peer: ReplicaDescription,
        stub: prefill_pb2_grpc.PrefillStub,
        wires: Sequence[str],
        works: dict[str, Measured],
        failures: dict[str, str],
    ) -> None:
        """Measure each of ``wires`` and keep the best that it has shown, or why it failed."""
        for wire in wires:
            try:
                probe = partial(self._prober.probe, peer, stub, wire)
                rate, sure = await measure(probe, peer.kv.token_bytes())
            except ReplicaFailed as failure:
                works.pop(wire, None)
                failures[wire] = failure.message
            else:
                known = works.get(wire, Measured(wire, sure=False))
                works[wire] = Measured(wire, max(rate, known.bytes_per_s), sure or known.sure)


async def measure(
    probe: Callable[[int], Awaitable[Arrived]], token_bytes: int
) -> tuple[float, bool]:
    """Bytes a second of one wire, 0 if there was no room to measure, and whether they are what it
    can: a pool that has worked for a while is full of what it may need again, and what one block
    shows is how long a message takes.

    ``probe``: has so many tokens, each of ``token_bytes``, come over it. Raises what it raises.
    """
    best, sure = 0.0, False
    for size in PROBE_BYTES:
        tokens = max(size // token_bytes, 1)
        found = await probe(tokens)
        if found.seconds > LONG_ENOUGH_S:
            # It made connections, or others had the processors: once more.
            found = max(found, await probe(tokens), key=_rate)
        if not found.seconds:
            break
        best = max(best, _rate(found))
        sure = sure or found.seconds > LONG_ENOUGH_S or found.bytes >= ENOUGH_BYTES
        if found.seconds > LONG_ENOUGH_S:
            break
    return best, sure


def _rate(found: Arrived) -> float:
    return found.bytes / found.seconds if found.seconds else 0.0


def _tell(replica_id: str, best: Measured, works: list[Measured], failures: dict[str, str]) -> None:
    others = [found for found in works if found != best]
    also = f"; also works: {', '.join(map(str, others))}" if others else ""
    logger.info("KV from %s takes %s%s", replica_id, best, also)
    if failures:
        level = logging.INFO if best.wire in MAPPED_WIRES else logging.WARNING
        said = "; ".join(f"{wire}: {why}" for wire, why in failures.items())
        logger.log(level, "KV wires from %s that do not work: %s", replica_id, said)
    passed_over = works[: works.index(best)]
    if slow := [found for found in passed_over if found.wire in MAPPED_WIRES]:
        logger.warning(
            "KV from %s: one host, yet %s is not the fastest, twice measured: the host is short of "
            "processors or of memory bandwidth; restart decode to measure again",
            replica_id,
            slow[0],
        )


def fastest(works: list[Measured]) -> Measured:
    """The fastest; one that comes earlier, and is better by nature, is only passed over for a clear
    gain, since a measurement of milliseconds is not exact, and never for want of room."""
    best = works[0]
    for other in works[1:]:
        sure = best.sure and other.sure and best.bytes_per_s
        if sure and other.bytes_per_s > best.bytes_per_s * CLEARLY_FASTER:
            best = other
    return best
