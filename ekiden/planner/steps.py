"""How long the steps of a replica take, stage by stage."""

from __future__ import annotations

import math
from collections import Counter
from functools import cached_property

import msgspec

from ekiden.planner.batch import Batch, Split
from ekiden.planner.calibration import Calibration
from ekiden.planner.devices import Devices, Links
from ekiden.planner.memory import Memory, Replica, memory
from ekiden.planner.messages import Messages
from ekiden.planner.stage import StageTimes
from ekiden.planner.work import stage_works


class Stepper:
    """Times of the steps of one replica on given devices."""

    def __init__(self, replica: Replica, devices: Devices, calibration: Calibration) -> None:
        self.replica = replica
        self.devices = devices
        self.told = calibration
        self.works = stage_works(replica)
        self.messages = Messages(replica, devices, calibration)
        self._times = StageTimes(replica, devices, calibration, self.messages)
        kinds = Counter(self.works).items()
        self._paces = [(self._times.pace(work), count) for work, count in kinds]
        self._prompts: dict[tuple[float, float], Split] = {}
        self._decoding: tuple[Batch, list[tuple[Split, int]]] = (Batch(), [])

    @property
    def links(self) -> Links:
        """Between its devices."""
        return self.messages.links

    @cached_property
    def memory(self) -> Memory:
        """The sums of the replica's ranks."""
        return memory(self.replica)

    @cached_property
    def tokens(self) -> int:
        """Of KV, for which the replica has room."""
        return self.memory.tokens

    @cached_property
    def chunk(self) -> int:
        """Tokens of prompts in one step: with CP each group computes as many as a rank may."""
        return self.replica.resolved.chunk * self.replica.layout.cp

    def decode(self, sequences: float, context: float) -> Split:
        """One token for each of ``sequences`` of the replica, ``context`` tokens long.

        With stages, as many micro-batches are under way as there are stages: a token takes the
        sum of all stages, or that many times the slowest, whichever is longer.
        """
        layout = self.replica.layout
        share = sequences / layout.dp / layout.pp
        return self._pipelined(Batch(decode=share, context=context), layout.pp)

    def mixed(self, batch: Batch) -> Split:
        """One step of ``batch`` a DP group, through every stage."""
        return self._pipelined(batch, 1)

    def slowest(self, batch: Batch) -> float:
        """Seconds of a step's slowest stage: so long after it the next step may follow."""
        return _slowest(self._stages(batch))

    def dispatch(self, batch: Batch) -> float:
        """Seconds of a step that a mean rank is in dispatch and combine of experts, its wait for
        the busiest one included. Of a batch that is ``routed``."""
        routed = batch.routed
        if routed is None:
            return 0.0
        return sum(
            count * self._times.dispatch(pace, batch, routed)
            for pace, count in self._paces
            if pace.work.sparse_layers
        )

    def prompt(self, tokens: float, before: float = 0.0) -> Split:
        """From a prompt's first chunk to its first token; ``before``: tokens that were cached.

        Chunks follow one another through the stages.
        """
        if (tokens, before) not in self._prompts:
            self._prompts[tokens, before] = self._prompt(tokens, before)
        return self._prompts[tokens, before]

    def _prompt(self, tokens: float, before: float) -> Split:
        chunks = max(1, math.ceil(tokens / self.chunk))
        one = Batch(prefill=tokens / chunks, seen=before + tokens / 2)
        stages = self._stages(one)
        slowest = max((stage for stage, _ in stages), key=lambda stage: stage.total)
        return _through(stages) + self._hops(one) + slowest.times(chunks - 1)

    def added(self, tokens: float, before: float, sequences: float, context: float) -> float:
        """Seconds by which a prompt delays the ``sequences`` that its DP group decodes meanwhile.

        Its chunks join steps that run anyway: weights are read once for both.
        """
        chunks = max(1, math.ceil(tokens / self.chunk))
        share = sequences / self.replica.layout.pp
        alone = Batch(decode=share, context=context)
        both = msgspec.structs.replace(alone, prefill=tokens / chunks, seen=before + tokens / 2)
        pairs = zip(self._stages(both), self._stages(alone), strict=True)
        return chunks * max(one.total - other.total for (one, _), (other, _) in pairs)

    def busy(self, tokens: float, before: float = 0.0) -> float:
        """Seconds of the slowest stage for a prompt where nothing is decoded: short prompts share
        a step, long ones take several."""
        chunk = self.chunk
        full = self._stages(Batch(prefill=chunk, seen=before + tokens / 2))
        return tokens / chunk * _slowest(full)

    def _stages(self, batch: Batch) -> list[tuple[Split, int]]:
        """Stages that differ, with how many of each there are. The last batch without prompts is
        kept, since each prompt that may join it is held against it."""
        if not batch.prefill and self._decoding[0] == batch:
            return self._decoding[1]
        found = [(self._times.split(pace, batch), count) for pace, count in self._paces]
        if not batch.prefill:
            self._decoding = (batch, found)
        return found

    def _pipelined(self, batch: Batch, micro: int) -> Split:
        stages = self._stages(batch)
        through = _through(stages) + self._hops(batch)
        if self.replica.layout.pp == 1:
            return through
        return through + Split(idle=max(0.0, micro * _slowest(stages) - through.total))

    def _hops(self, batch: Batch) -> Split:
        return Split(communication=self.messages.hops(self._times.own(batch)))


def _through(stages: list[tuple[Split, int]]) -> Split:
    """One after the other."""
    first, count = stages[0]
    found = first.times(count)
    for stage, count in stages[1:]:
        found += stage.times(count)
    return found


def _slowest(stages: list[tuple[Split, int]]) -> float:
    return max(stage.total for stage, _ in stages)
