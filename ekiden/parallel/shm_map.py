"""Where everything lies in the shared memory of one mesh. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

LINE = 64
"""A cache line: counters that different ranks write do not share one."""

REASON = 512
"""Bytes of a rank's reason for giving up."""


@dataclass(frozen=True, kw_only=True)
class ShmMap:
    """Offsets and sizes in bytes. ``slot_bytes`` is of collectives, ``message_bytes`` of links."""

    tp: int
    pp: int
    slot_bytes: int
    message_bytes: int
    depth: int

    @property
    def failures(self) -> int:
        return 0

    @property
    def reasons(self) -> int:
        return self.tp * self.pp * LINE

    @property
    def _groups(self) -> int:
        return self.reasons + self.tp * self.pp * REASON

    @property
    def _group_bytes(self) -> int:
        return self.tp * LINE + 2 * self.tp * self.slot_bytes

    @property
    def _links(self) -> int:
        return self._groups + self.pp * self._group_bytes

    @property
    def _link_header(self) -> int:
        return 2 * LINE + -(-8 * self.depth // LINE) * LINE

    @property
    def _link_bytes(self) -> int:
        return self._link_header + self.depth * self.message_bytes

    @property
    def total(self) -> int:
        return self._links + self.tp * (self.pp - 1) * self._link_bytes

    def counters(self, pp_rank: int) -> int:
        return self._groups + pp_rank * self._group_bytes

    def slot(self, pp_rank: int, parity: int, tp_rank: int) -> int:
        slots = self.counters(pp_rank) + self.tp * LINE
        return slots + (parity * self.tp + tp_rank) * self.slot_bytes

    def link(self, tp_rank: int, link: int) -> int:
        return self._links + (link * self.tp + tp_rank) * self._link_bytes

    def link_slot(self, tp_rank: int, link: int, index: int) -> int:
        return self.link(tp_rank, link) + self._link_header + index * self.message_bytes
