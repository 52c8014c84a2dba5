"""Messages between the ranks of a replica: all-reduces, tokens to experts, stages, CP groups."""

from __future__ import annotations

from functools import cached_property

from ekiden.planner.calibration import Calibration
from ekiden.planner.devices import Devices, Links
from ekiden.planner.memory import Replica
from ekiden.planner.peaks import ACTIVATION_BYTES
from ekiden.planner.ring import Ring
from ekiden.planner.routing import routing
from ekiden.planner.small import dispatch_bytes
from ekiden.planner.work import StageWork


class Messages:
    """Seconds of the messages of one replica on given devices."""

    def __init__(self, replica: Replica, devices: Devices, calibration: Calibration) -> None:
        self.links = Links(devices=devices, calibration=calibration)
        self._layout, self._hidden = replica.layout, replica.geometry.hidden
        self._per_host = devices.per_host
        self._routing = routing(replica.geometry)
        self._sent_bytes = dispatch_bytes(devices.gpu, replica.weights)

    def step(self, work: StageWork, tokens: float) -> float:
        """Two all-reduces a layer, or, where experts are dealt over DP groups, one and two
        all-to-alls, of ``tokens`` of a rank."""
        size = tokens * self._hidden * ACTIVATION_BYTES
        reduced = self.links.all_reduce(self._layout.tp, size)
        dealt = work.sparse_layers if self._deals else 0
        return (2 * work.layers - dealt) * reduced + self.dispatched(work, tokens)

    def dispatched(self, work: StageWork, tokens: float) -> float:
        """Tokens to their experts, as these multiply them, and back in 16 bits."""
        if not self._deals or not work.sparse_layers:
            return 0.0
        ep, numbers = self._layout.ep, tokens * self._hidden / self._layout.tp
        time = self.links.all_to_all(ep, numbers * self._sent_bytes, self._routing)
        time += self.links.all_to_all(ep, numbers * ACTIVATION_BYTES, self._routing)
        return work.sparse_layers * time

    @property
    def _deals(self) -> bool:
        """Whether experts are dealt over DP groups."""
        return self._layout.dp > 1 and self._layout.ep > 1

    def hops(self, tokens: float) -> float:
        """From the first stage to the last."""
        pp, hosted = self._layout.pp, self._layout.stage_gpus
        if pp == 1:
            return 0.0
        size = tokens * self._hidden * ACTIVATION_BYTES / self._layout.tp
        inside = max(1, self._per_host // hosted)
        crossing = sum(1 for stage in range(1, pp) if stage % inside == 0)
        time = crossing * self.links.hop(size, crosses_hosts=True)
        return time + (pp - 1 - crossing) * self.links.hop(size, crosses_hosts=False)

    def passed(self, work: StageWork, tokens: float, seen: float, score_rate: float) -> float:
        """What CP groups wait for one another's part of ``tokens`` of prompts, which see ``seen``
        others each; ``score_rate``: operations/s of attention."""
        if self._layout.cp == 1 or not tokens:
            return 0.0
        latency, rate = self._to_next_group
        ring = Ring(groups=self._layout.cp, latency=latency, rate=rate, score_rate=score_rate)
        return sum(one.layers * ring.waits(one, tokens, seen) for one in work.scores)

    @cached_property
    def _to_next_group(self) -> tuple[float, float]:
        return self.links.ring(self._layout.tp * self._layout.cp)
