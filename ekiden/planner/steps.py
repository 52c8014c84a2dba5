"""How long a step takes: a roofline for each kind of work, and the messages between ranks.

A roofline (Williams, Waterman, Patterson 2009) says that work takes the longer of its bytes over
the memory's rate and its operations over the processor's. Weights and attention have one each,
since kernels do one after the other; what does not overlap is added up.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import cached_property

import msgspec

from ekiden.planner.calibration import Calibration
from ekiden.planner.devices import Devices, Links
from ekiden.planner.hardware import Gpu
from ekiden.planner.memory import Memory, Replica, memory
from ekiden.planner.peaks import ACTIVATION_BYTES
from ekiden.planner.precision import WeightFormat
from ekiden.planner.routed import Routed
from ekiden.planner.work import StageWork, stage_works

GIGA, TERA = 1e9, 1e12


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What one DP group of a replica computes in a step; means over many steps may be fractions."""

    decode: float = 0.0
    """Sequences with a token each."""
    context: float = 0.0
    """Tokens that each of these sees."""
    prefill: float = 0.0
    """Tokens of prompts."""
    seen: float = 0.0
    """Tokens that each of these sees, on average."""
    routed: Routed | None = None
    """How its tokens fall on ranks with experts; None: as unevenly as the calibration says."""

    @property
    def tokens(self) -> float:
        return self.decode + self.prefill


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step, by what they go to."""

    weights: float = 0.0
    """Matrix products, or the reading of their weights, whichever takes longer."""
    attention: float = 0.0
    """Scores, or the reading of KV."""
    communication: float = 0.0
    overhead: float = 0.0
    idle: float = 0.0
    """Waiting for another stage: the bubble."""

    @property
    def total(self) -> float:
        return self.weights + self.attention + self.communication + self.overhead + self.idle

    @property
    def communication_share(self) -> float:
        return self.communication / self.total if self.total else 0.0

    def __add__(self, other: Split) -> Split:
        return Split(
            weights=self.weights + other.weights,
            attention=self.attention + other.attention,
            communication=self.communication + other.communication,
            overhead=self.overhead + other.overhead,
            idle=self.idle + other.idle,
        )

    def times(self, factor: float) -> Split:
        if factor == 1:
            return self
        return Split(
            weights=self.weights * factor,
            attention=self.attention * factor,
            communication=self.communication * factor,
            overhead=self.overhead * factor,
            idle=self.idle * factor,
        )


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a stage, for each unit of its work."""

    work: StageWork
    reading: float
    """Of its weights without routed experts, once a step."""
    token: float
    row: float
    """Of the head, for a row that is sampled."""
    expert_reading: float
    """Of all of its experts."""
    expert_token: float
    overhead: float


class Stepper:
    """Times of the steps of one replica on given devices."""

    def __init__(self, replica: Replica, devices: Devices, calibration: Calibration) -> None:
        self.replica = replica
        self.devices = devices
        self.told = calibration
        self.links = Links(devices=devices, calibration=calibration)
        self.works = stage_works(replica)
        self._kv_rate = devices.gpu.bandwidth_gbps * GIGA * calibration.kv_share
        self._score_rate = devices.gpu.bf16_tflops * TERA * calibration.attention_share
        self._paces = [(self._pace(work), count) for work, count in Counter(self.works).items()]
        self._top_k = max(1.0, self.works[-1].touch * replica.geometry.experts)
        self._prompts: dict[tuple[float, float], Split] = {}

    def _pace(self, work: StageWork) -> Pace:
        told, gpu = self.told, self.devices.gpu
        rate = gpu.bandwidth_gbps * GIGA * told.memory_share
        wide = small = gpu.bf16_tflops * TERA * told.compute_share
        if peak := small_tflops(gpu, self.replica.weights):
            small = peak * TERA * told.small_share
        uneven = told.balance if self.replica.layout.ep > 1 else 1.0
        return Pace(
            work=work,
            reading=(work.dense_bytes + work.head_bytes) / rate,
            token=work.small_flops / small + work.wide_flops / wide,
            row=work.head_flops / wide,
            expert_reading=work.expert_bytes / rate / told.expert_share,
            expert_token=work.expert_flops / small / uneven / told.expert_share,
            overhead=work.layers * told.layer_s + work.sparse_layers * told.expert_s + told.step_s,
        )

    @cached_property
    def memory(self) -> Memory:
        """The sums of the replica's ranks."""
        return memory(self.replica)

    @cached_property
    def tokens(self) -> int:
        """Of KV, for which the replica has room."""
        return self.memory.tokens

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
        """Seconds of a step that a mean rank is in dispatch and combine of experts: the messages,
        and the wait there for the rank with the most to do. Of a batch that is ``routed``."""
        found = 0.0
        for pace, count in self._paces:
            if pace.work.sparse_layers and batch.routed is not None:
                busiest, mean = self._routed(pace, batch, batch.routed)
                found += count * (self._dispatched(pace, batch) + busiest - mean)
        return found

    def prompt(self, tokens: float, before: float = 0.0) -> Split:
        """From a prompt's first chunk to its first token; ``before``: tokens that were cached.

        Chunks follow one another through the stages.
        """
        if (tokens, before) not in self._prompts:
            self._prompts[tokens, before] = self._prompt(tokens, before)
        return self._prompts[tokens, before]

    def _prompt(self, tokens: float, before: float) -> Split:
        chunks = max(1, math.ceil(tokens / self.replica.resolved.chunk))
        one = Batch(prefill=tokens / chunks, seen=before + tokens / 2)
        stages = self._stages(one)
        slowest = max((stage for stage, _ in stages), key=lambda stage: stage.total)
        return _through(stages) + self._hops(one.tokens) + slowest.times(chunks - 1)

    def added(self, tokens: float, before: float, sequences: float, context: float) -> float:
        """Seconds by which a prompt delays the ``sequences`` that its DP group decodes meanwhile.

        Its chunks join steps that run anyway: weights are read once for both.
        """
        chunks = max(1, math.ceil(tokens / self.replica.resolved.chunk))
        share = sequences / self.replica.layout.pp
        alone = Batch(decode=share, context=context)
        both = msgspec.structs.replace(alone, prefill=tokens / chunks, seen=before + tokens / 2)
        pairs = zip(self._stages(both), self._stages(alone), strict=True)
        return chunks * max(one.total - other.total for (one, _), (other, _) in pairs)

    def busy(self, tokens: float, before: float = 0.0) -> float:
        """Seconds of the slowest stage for a prompt where nothing is decoded: short prompts share
        a step, long ones take several."""
        chunk = self.replica.resolved.chunk
        full = self._stages(Batch(prefill=chunk, seen=before + tokens / 2))
        return tokens / chunk * _slowest(full)

    def _stages(self, batch: Batch) -> list[tuple[Split, int]]:
        """Stages that differ, with how many of each there are."""
        return [(self._stage(pace, batch), count) for pace, count in self._paces]

    def _pipelined(self, batch: Batch, micro: int) -> Split:
        stages = self._stages(batch)
        through = _through(stages) + self._hops(batch.tokens)
        if self.replica.layout.pp == 1:
            return through
        return through + Split(idle=max(0.0, micro * _slowest(stages) - through.total))

    def _hops(self, tokens: float) -> Split:
        pp, hosted = self.replica.layout.pp, self.replica.layout.tp * self.replica.layout.dp
        if pp == 1:
            return Split()
        size = tokens * self.replica.geometry.hidden * ACTIVATION_BYTES / self.replica.layout.tp
        inside = max(1, self.devices.per_host // hosted)
        crossing = sum(1 for stage in range(1, pp) if stage % inside == 0)
        time = crossing * self.links.hop(size, crosses_hosts=True)
        time += (pp - 1 - crossing) * self.links.hop(size, crosses_hosts=False)
        return Split(communication=time)

    def _stage(self, pace: Pace, batch: Batch) -> Split:
        return Split(
            weights=self._weights(pace, batch),
            attention=self._attention(pace, batch),
            communication=self._communication(pace, batch),
            overhead=pace.overhead + batch.decode * self.told.sequence_s,
        )

    def _weights(self, pace: Pace, batch: Batch) -> float:
        rows = batch.decode + (1 if batch.prefill else 0)
        found = max(pace.reading, batch.tokens * pace.token + rows * pace.row)
        if not pace.work.sparse_layers:
            return found
        if batch.routed is not None:
            return found + self._routed(pace, batch, batch.routed)[0]
        tokens = batch.tokens * self.replica.layout.dp
        touched = pace.work.touched(tokens)
        return found + max(pace.expert_reading * touched, tokens * pace.expert_token)

    def _routed(self, pace: Pace, batch: Batch, routed: Routed) -> tuple[float, float]:
        """Seconds in experts of the rank with the most to do, and of a mean one."""
        tokens = batch.tokens * self.replica.layout.dp
        even = pace.expert_token * self.told.balance
        return routed.seconds(pace.expert_reading, tokens * even)

    def _attention(self, pace: Pace, batch: Batch) -> float:
        work, found = pace.work, 0.0
        if batch.decode:
            scores = 0.0
            for one in work.scores:
                scores += one.layers * one.decode * one.seen(batch.context)
            reading = work.kv.sequence_bytes(int(batch.context)) / self._kv_rate
            found += batch.decode * max(reading, scores / self._score_rate)
        if batch.prefill:
            scores = 0.0
            for one in work.scores:
                scores += one.layers * one.prefill * one.seen(batch.seen)
            found += batch.prefill * scores / self._score_rate
        return found

    def _communication(self, pace: Pace, batch: Batch) -> float:
        """Two all-reduces a layer, or, where experts are dealt over DP groups, one and two
        all-to-alls."""
        work, size = pace.work, self._size(batch)
        dealt = work.sparse_layers if self._deals else 0
        time = (2 * work.layers - dealt) * self.links.all_reduce(self.replica.layout.tp, size)
        return time + self._dispatched(pace, batch)

    def _dispatched(self, pace: Pace, batch: Batch) -> float:
        """All-to-alls: those of the rank to which, and from which, most goes."""
        if not self._deals or not pace.work.sparse_layers:
            return 0.0
        layout = self.replica.layout
        sent = self._size(batch) * self._top_k / layout.tp
        if batch.routed is not None:
            sent *= batch.routed.busiest
        return 2 * pace.work.sparse_layers * self.links.all_to_all(layout.ep, sent)

    def _size(self, batch: Batch) -> float:
        """Bytes of the activations between two layers."""
        return batch.tokens * self.replica.geometry.hidden * ACTIVATION_BYTES

    @property
    def _deals(self) -> bool:
        """Whether experts are dealt over DP groups."""
        return self.replica.layout.dp > 1 and self.replica.layout.ep > 1


def _through(stages: list[tuple[Split, int]]) -> Split:
    """One after the other."""
    first, count = stages[0]
    found = first.times(count)
    for stage, count in stages[1:]:
        found += stage.times(count)
    return found


def _slowest(stages: list[tuple[Split, int]]) -> float:
    return max(stage.total for stage, _ in stages)


def multiplies_small(form: WeightFormat) -> bool:
    """Whether activations are made as small as the weights: only such formats use 8-bit units."""
    return form.name.startswith(("fp8", "w8a8"))


def small_tflops(gpu: Gpu, form: WeightFormat) -> float | None:
    """Peak of the units that multiply a format as small as it is; None: 16 bits do."""
    if form.name == "nvfp4":
        return gpu.fp4_tflops
    return gpu.fp8_tflops if multiplies_small(form) else None
