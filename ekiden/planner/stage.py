"""How long one pipeline stage takes for its part of a step: a roofline for each kind of work.

A roofline (Williams, Waterman, Patterson 2009) says that work takes the longer of its bytes over
the memory's rate and its operations over the processor's. Weights and attention have one each,
since kernels do one after the other; what does not overlap is added up.
"""

from __future__ import annotations

import msgspec

from ekiden.planner.batch import Batch, Split
from ekiden.planner.calibration import Calibration
from ekiden.planner.devices import Devices
from ekiden.planner.memory import Replica
from ekiden.planner.messages import Messages
from ekiden.planner.routed import Routed
from ekiden.planner.small import small_tflops
from ekiden.planner.work import StageWork

GIGA, TERA = 1e9, 1e12


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


class StageTimes:
    """Of the stages of one replica on given devices."""

    def __init__(
        self, replica: Replica, devices: Devices, calibration: Calibration, messages: Messages
    ) -> None:
        self._replica, self._layout = replica, replica.layout
        self._gpu, self._told = devices.gpu, calibration
        self._messages = messages
        self._kv_rate = devices.gpu.bandwidth_gbps * GIGA * calibration.kv_share
        self._score_rate = devices.gpu.bf16_tflops * TERA * calibration.attention_share

    def pace(self, work: StageWork) -> Pace:
        told, gpu = self._told, self._gpu
        rate = gpu.bandwidth_gbps * GIGA * told.memory_share
        wide = small = gpu.bf16_tflops * TERA * told.compute_share
        if peak := small_tflops(gpu, self._replica.weights):
            small = peak * TERA * told.small_share
        uneven = told.balance if self._layout.ep > 1 else 1.0
        opening = self._messages.step(work, 0.0)
        return Pace(
            work=work,
            reading=(work.dense_bytes + work.head_bytes) / rate,
            token=work.small_flops / small + work.wide_flops / wide,
            row=work.head_flops / wide,
            expert_reading=work.expert_bytes / rate / told.expert_share,
            expert_token=work.expert_flops / small / uneven / told.expert_share,
            overhead=work.layers * told.layer_s + work.sparse_layers * told.expert_s + told.step_s,
            opening=opening,
            message=(self._messages.step(work, MANY) - opening) / MANY,
        )

    def own(self, batch: Batch) -> float:
        """Tokens of a step that one rank computes: CP groups share those of prompts."""
        return batch.decode + batch.prefill / self._layout.cp

    def split(self, pace: Pace, batch: Batch) -> Split:
        """Of one step."""
        return Split(
            weights=self._weights(pace, batch),
            attention=self._attention(pace, batch),
            communication=self._communication(pace, batch),
            overhead=pace.overhead + batch.decode * self._told.sequence_s,
        )

    def dispatch(self, pace: Pace, batch: Batch, routed: Routed) -> float:
        """Seconds of a step that a mean rank is in dispatch and combine of experts: the messages,
        and the wait there for the rank with the most to do."""
        busiest, mean = self._experts(pace, batch, routed)
        sent = self._messages.dispatched(pace.work, self.own(batch) * routed.busiest)
        return sent + busiest - mean

    def _weights(self, pace: Pace, batch: Batch) -> float:
        rows = batch.decode + (1 if batch.prefill else 0)
        own = self.own(batch)
        found = max(pace.reading, own * pace.token + rows * pace.row)
        if not pace.work.sparse_layers:
            return found
        if batch.routed is not None:
            return found + self._experts(pace, batch, batch.routed)[0]
        tokens = own * self._layout.dp
        touched = pace.work.touched(tokens)
        return found + max(pace.expert_reading * touched, tokens * pace.expert_token)

    def _experts(self, pace: Pace, batch: Batch, routed: Routed) -> tuple[float, float]:
        """Seconds in experts of the rank with the most to do, and of a mean one."""
        tokens = self.own(batch) * self._layout.dp
        even = pace.expert_token * self._told.balance
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
            found += batch.prefill / self._layout.cp * scores / self._score_rate
        return found

    def _communication(self, pace: Pace, batch: Batch) -> float:
        """Messages, and with CP what groups pass round."""
        own = self.own(batch)
        time = pace.opening + own * pace.message
        if batch.routed is not None:
            most = own * batch.routed.busiest
            time += self._messages.dispatched(pace.work, most)
            time -= self._messages.dispatched(pace.work, own)
        if self._layout.cp == 1:
            return time
        return time + self._messages.passed(pace.work, batch.prefill, batch.seen, self._score_rate)
