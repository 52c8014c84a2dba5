"""One request on its way from a prefill to a decode replica of this process."""

from __future__ import annotations

import msgspec

from ekiden.core.types import Delta, Request
from ekiden.engine.engine import Reservation

from .compare import Bits
from .outcome import CellFailed
from .reference import Record, greedy


class Errand(msgspec.Struct, kw_only=True):
    """One request on its way."""

    name: str
    request: Request
    prefill_salt: str
    """Prefill may find a prompt of an earlier pair in its cache; decode must not."""
    record: Record
    after: str = ""
    """The errand that must have been adopted before this one sets out; empty: none."""
    shares: int = 0
    """So many tokens it has in common with that one."""
    first: list[Delta] = []
    reservation: Reservation | None = None
    receive: int = 0
    send: int = 0
    seal: bytes = b""
    source: Bits | None = None
    computed: bool = False
    sent: bool = False
    adopted: bool = False
    received: bool = False
    finished: bool = False

    @property
    def held(self) -> Reservation:
        """The blocks that decode has given it."""
        if self.reservation is None:
            raise CellFailed("failed", f"prompt {self.name} arrived before it had blocks")
        return self.reservation

    @property
    def kv(self) -> Bits:
        """What prefill computed, ``[num_layers, num_kv_heads, tokens, 2, row]``."""
        if self.source is None:
            raise CellFailed("failed", f"prompt {self.name} arrived before it was computed")
        return self.source

    @property
    def state(self) -> str:
        """Where it is, for a sentence."""
        if self.adopted:
            return "decoding"
        if self.computed:
            return "transferring"
        return "prefilling" if self.send else "waiting for its turn"

    @property
    def over(self) -> bool:
        return self.finished and self.received and self.sent


def make_errand(
    name: str,
    prompt: tuple[int, ...],
    *,
    model: str,
    max_tokens: int,
    salt: str,
    prefill_salt: str,
    after: str = "",
    shares: int = 0,
) -> Errand:
    """A greedy request. ``salt`` must be new to decode."""
    request = Request(
        request_id=f"{salt}/{name}",
        model=model,
        prompt=prompt,
        sampling=greedy(1, max_tokens),
        salt=salt,
    )
    return Errand(
        name=name,
        request=request,
        prefill_salt=prefill_salt,
        record=Record(prompt),
        after=after,
        shares=shares,
    )
