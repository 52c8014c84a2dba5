"""How long a step takes: a roofline for each kind of work, and the messages between ranks.

A roofline (Williams, Waterman, Patterson 2009) says that work takes the longer of its bytes over
the memory's rate and its operations over the processor's. Weights and attention have one each,
since kernels do one after the other; what does not overlap is added up.
"""

from __future__ import annotations

import math
from functools import cached_property

import msgspec

from ekiden.planner.calibration import Calibration
from ekiden.planner.devices import Devices, Links
from ekiden.planner.memory import Memory, Replica, memory
from ekiden.planner.peaks import ACTIVATION_BYTES
from ekiden.planner.precision import WeightFormat
from ekiden.planner.work import StageWork, stage_works

TERA = 1e12


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
        return math.fsum(msgspec.structs.astuple(self))

    @property
    def communication_share(self) -> float:
        return self.communication / self.total if self.total else 0.0

    def __add__(self, other: Split) -> Split:
        pairs = zip(self.__struct_fields__, _values(self), _values(other), strict=True)
        return Split(**{name: one + two for name, one, two in pairs})

    def times(self, factor: float) -> Split:
        return Split(
            **{
                name: value * factor
                for name, value in zip(self.__struct_fields__, _values(self), strict=True)
            }
        )


def _values(split: Split) -> tuple[float, ...]:
    return msgspec.structs.astuple(split)


class Stepper:
    """Times of the steps of one replica on given devices."""

    def __init__(self, replica: Replica, devices: Devices, calibration: Calibration) -> None:
        self.replica = replica
        self.devices = devices
        self.told = calibration
        self.links = Links(devices=devices, calibration=calibration)
        self.works = stage_works(replica)
        gpu, form = devices.gpu, replica.weights
        self._peak = gpu.bf16_tflops * TERA
        self._wide = gpu.bf16_tflops * TERA * calibration.compute_share
        self._small = self._wide
        if gpu.fp8_tflops and multiplies_small(form):
            self._small = gpu.fp8_tflops * TERA * calibration.small_share
        self._rate = gpu.bandwidth_gbps * 1e9
        self._prompts: dict[tuple[float, float], Split] = {}

    @cached_property
    def memory(self) -> Memory:
        """The sums of the replica's ranks."""
        return memory(self.replica)

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
        first = sum(stages[1:], stages[0]) + self._hops(one.tokens)
        return first + max(stages, key=lambda s: s.total).times(chunks - 1)

    def added(self, tokens: float, before: float, sequences: float, context: float) -> float:
        """Seconds by which a prompt delays the ``sequences`` that its DP group decodes meanwhile.

        Its chunks join steps that run anyway: weights are read once for both.
        """
        chunks = max(1, math.ceil(tokens / self.replica.resolved.chunk))
        share = sequences / self.replica.layout.pp
        alone = Batch(decode=share, context=context)
        both = msgspec.structs.replace(alone, prefill=tokens / chunks, seen=before + tokens / 2)
        pairs = zip(self._stages(both), self._stages(alone), strict=True)
        return chunks * max(one.total - other.total for one, other in pairs)

    def busy(self, tokens: float, before: float = 0.0) -> float:
        """Seconds of the slowest stage for a prompt where nothing is decoded: short prompts share
        a step, long ones take several."""
        chunk = self.replica.resolved.chunk
        full = self._stages(Batch(prefill=chunk, seen=before + tokens / 2))
        return tokens / chunk * max(stage.total for stage in full)

    def _stages(self, batch: Batch) -> list[Split]:
        return [self._stage(work, batch) for work in self.works]

    def _pipelined(self, batch: Batch, micro: int) -> Split:
        stages = self._stages(batch)
        through = sum(stages[1:], stages[0]) + self._hops(batch.tokens)
        period = micro * max(stage.total for stage in stages)
        return through + Split(idle=max(0.0, period - through.total))

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

    def _stage(self, work: StageWork, batch: Batch) -> Split:
        return Split(
            weights=self._weights(work, batch),
            attention=self._attention(work, batch),
            communication=self._communication(work, batch),
            overhead=self._overhead(work, batch),
        )

    def _weights(self, work: StageWork, batch: Batch) -> float:
        told, tokens = self.told, batch.tokens
        rows = batch.decode + (1 if batch.prefill else 0)
        bytes_s = self._rate * told.memory_share
        reading = (work.dense_bytes + work.head_bytes) / bytes_s
        products = tokens * (work.small_flops / self._small + work.wide_flops / self._wide)
        products += rows * work.head_flops / self._wide
        return max(reading, products) + self._experts(work, batch)

    def _experts(self, work: StageWork, batch: Batch) -> float:
        if not work.sparse_layers:
            return 0.0
        told = self.told
        tokens = batch.tokens * self.replica.layout.dp
        uneven = told.balance if self.replica.layout.ep > 1 else 1.0
        reading = work.expert_bytes * work.touched(tokens) / (self._rate * told.memory_share)
        products = tokens * work.expert_flops / self._small
        return max(reading, products / uneven) / told.expert_share

    def _attention(self, work: StageWork, batch: Batch) -> float:
        told = self.told
        found = 0.0
        if batch.decode:
            scores = sum(s.layers * s.decode * s.seen(batch.context) for s in work.scores)
            reading = work.kv.sequence_bytes(int(batch.context)) / (self._rate * told.kv_share)
            computing = scores / (self._peak * told.attention_share)
            found += batch.decode * max(reading, computing)
        if batch.prefill:
            scores = sum(s.layers * s.prefill * s.seen(batch.seen) for s in work.scores)
            found += batch.prefill * scores / (self._peak * told.attention_share)
        return found

    def _communication(self, work: StageWork, batch: Batch) -> float:
        """Two all-reduces a layer, or, where experts are dealt over DP groups, one and two
        all-to-alls."""
        layout, hidden = self.replica.layout, self.replica.geometry.hidden
        size = batch.tokens * hidden * ACTIVATION_BYTES
        dealt = work.sparse_layers if layout.dp > 1 and layout.ep > 1 else 0
        reduces = 2 * work.layers - dealt
        time = reduces * self.links.all_reduce(layout.tp, size)
        if dealt:
            top_k = max(1.0, work.touch * self.replica.geometry.experts)
            time += 2 * dealt * self.links.all_to_all(layout.ep, size * top_k / layout.tp)
        return time

    def _overhead(self, work: StageWork, batch: Batch) -> float:
        told = self.told
        layers = work.layers * told.layer_s + work.sparse_layers * told.expert_s
        return layers + told.step_s + batch.decode * told.sequence_s


def multiplies_small(form: WeightFormat) -> bool:
    """Whether activations are made as small as the weights: only such formats use 8-bit units."""
    return form.name.startswith(("fp8", "w8a8"))
