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
from ekiden.planner.ring import Ring
from ekiden.planner.routed import Routed
from ekiden.planner.routing import routing
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
    opening: float
    """Of its messages, of no tokens."""
    message: float
    """The same, for each token of a rank."""


MANY = 1e6
"""Tokens at which the time of messages, linear beyond its latency, is taken."""


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
        self._routing = routing(replica.geometry)
        self._sent_bytes = dispatch_bytes(devices.gpu, replica.weights)
        self._paces = [(self._pace(work), count) for work, count in Counter(self.works).items()]
        self._prompts: dict[tuple[float, float], Split] = {}
        self._decoding: tuple[Batch, list[tuple[Split, int]]] = (Batch(), [])

    def _pace(self, work: StageWork) -> Pace:
        told, gpu = self.told, self.devices.gpu
        rate = gpu.bandwidth_gbps * GIGA * told.memory_share
        wide = small = gpu.bf16_tflops * TERA * told.compute_share
        if peak := small_tflops(gpu, self.replica.weights):
            small = peak * TERA * told.small_share
        uneven = told.balance if self.replica.layout.ep > 1 else 1.0
        opening = self._messages(work, 0.0)
        return Pace(
            work=work,
            reading=(work.dense_bytes + work.head_bytes) / rate,
            token=work.small_flops / small + work.wide_flops / wide,
            row=work.head_flops / wide,
            expert_reading=work.expert_bytes / rate / told.expert_share,
            expert_token=work.expert_flops / small / uneven / told.expert_share,
            overhead=work.layers * told.layer_s + work.sparse_layers * told.expert_s + told.step_s,
            opening=opening,
            message=(self._messages(work, MANY) - opening) / MANY,
        )

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
        """Seconds of a step that a mean rank is in dispatch and combine of experts: the messages,
        and the wait there for the rank with the most to do. Of a batch that is ``routed``."""
        found = 0.0
        for pace, count in self._paces:
            if pace.work.sparse_layers and batch.routed is not None:
                busiest, mean = self._routed(pace, batch, batch.routed)
                sent = self._dispatched(pace.work, self._own(batch) * batch.routed.busiest)
                found += count * (sent + busiest - mean)
        return found

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
        return _through(stages) + self._hops(self._own(one)) + slowest.times(chunks - 1)

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
        found = [(self._stage(pace, batch), count) for pace, count in self._paces]
        if not batch.prefill:
            self._decoding = (batch, found)
        return found

    def _pipelined(self, batch: Batch, micro: int) -> Split:
        stages = self._stages(batch)
        through = _through(stages) + self._hops(self._own(batch))
        if self.replica.layout.pp == 1:
            return through
        return through + Split(idle=max(0.0, micro * _slowest(stages) - through.total))

    def _hops(self, tokens: float) -> Split:
        pp, hosted = self.replica.layout.pp, self.replica.layout.stage_gpus
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
        own = self._own(batch)
        found = max(pace.reading, own * pace.token + rows * pace.row)
        if not pace.work.sparse_layers:
            return found
        if batch.routed is not None:
            return found + self._routed(pace, batch, batch.routed)[0]
        tokens = own * self.replica.layout.dp
        touched = pace.work.touched(tokens)
        return found + max(pace.expert_reading * touched, tokens * pace.expert_token)

    def _routed(self, pace: Pace, batch: Batch, routed: Routed) -> tuple[float, float]:
        """Seconds in experts of the rank with the most to do, and of a mean one."""
        tokens = self._own(batch) * self.replica.layout.dp
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
            found += batch.prefill / self.replica.layout.cp * scores / self._score_rate
        return found

    def _communication(self, pace: Pace, batch: Batch) -> float:
        """Messages, and with CP what groups pass round."""
        own = self._own(batch)
        time = pace.opening + own * pace.message
        if batch.routed is not None:
            most = own * batch.routed.busiest
            time += self._dispatched(pace.work, most) - self._dispatched(pace.work, own)
        if self.replica.layout.cp > 1 and batch.prefill:
            for one in pace.work.scores:
                time += one.layers * self._ring.waits(one, batch.prefill, batch.seen)
        return time

    def _messages(self, work: StageWork, tokens: float) -> float:
        """Two all-reduces a layer, or, where experts are dealt over DP groups, one and two
        all-to-alls, of ``tokens`` of a rank."""
        size = tokens * self.replica.geometry.hidden * ACTIVATION_BYTES
        reduced = self.links.all_reduce(self.replica.layout.tp, size)
        dealt = work.sparse_layers if self._deals else 0
        return (2 * work.layers - dealt) * reduced + self._dispatched(work, tokens)

    def _dispatched(self, work: StageWork, tokens: float) -> float:
        """Tokens to their experts, as these multiply them, and back in 16 bits."""
        if not self._deals or not work.sparse_layers:
            return 0.0
        layout = self.replica.layout
        numbers = tokens * self.replica.geometry.hidden / layout.tp
        time = self.links.all_to_all(layout.ep, numbers * self._sent_bytes, self._routing)
        time += self.links.all_to_all(layout.ep, numbers * ACTIVATION_BYTES, self._routing)
        return work.sparse_layers * time

    @property
    def _deals(self) -> bool:
        """Whether experts are dealt over DP groups."""
        return self.replica.layout.dp > 1 and self.replica.layout.ep > 1

    @cached_property
    def _ring(self) -> Ring:
        layout = self.replica.layout
        latency, rate = self.links.ring(layout.tp * layout.cp)
        return Ring(groups=layout.cp, latency=latency, rate=rate, score_rate=self._score_rate)

    def _own(self, batch: Batch) -> float:
        """Tokens of a step that one rank computes: CP groups share those of prompts."""
        return batch.decode + batch.prefill / self.replica.layout.cp


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


SCALED = 128
"""Numbers of a token that share a float32 scale when they are sent as 8 bits."""


def dispatch_bytes(gpu: Gpu, form: WeightFormat) -> float:
    """Of one number of a token on its way to experts: 8 bits and its part of a scale where these
    multiply in 8 bits, else 16."""
    if gpu.fp8_tflops and multiplies_small(form):
        return 1 + 4 / SCALED
    return ACTIVATION_BYTES
