"""The link between pools: what is sent takes its turn."""

from __future__ import annotations


class Wire:
    """A replica's end, one way at a time: bytes go in the order in which they were given."""

    def __init__(self) -> None:
        self.free_at = 0.0
        self.busy_s = 0.0


def send(sender: Wire, receiver: Wire, seconds: float, now: float) -> float:
    """When what takes ``seconds`` has arrived, both ends being busy with what came before."""
    begin = max(now, sender.free_at, receiver.free_at)
    for end in (sender, receiver):
        end.free_at = begin + seconds
        end.busy_s += seconds
    return begin + seconds
