"""Every way to lay a model out over the devices at hand, and what each one does under load."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from ekiden.core.errors import SetupError
from ekiden.planner.calibration import Calibration
from ekiden.planner.devices import Devices
from ekiden.planner.geometry import Geometry
from ekiden.planner.hardware import Gpu
from ekiden.planner.latency import Latency
from ekiden.planner.layout import Layout, cuts_prompts
from ekiden.planner.limits import Limits
from ekiden.planner.memory import Replica, show
from ekiden.planner.precision import WeightFormat, weight_format
from ekiden.planner.profiles import Profile
from ekiden.planner.steps import Stepper
from ekiden.planner.workload import Objectives, Workload

AGGREGATED, DISAGGREGATED = "aggregated", "disaggregated"
MOST_STAGES = 8
"""Beyond it a pipeline is not considered: the bubble, and stages of a few layers."""
MOST_GROUPS = 16
"""Of CP: as many as have been published for inference (arXiv:2411.01783)."""


USUAL_SEQUENCES, MORE_SEQUENCES, FEWER_SEQUENCES = 256, (512, 1024), (128, 64)
"""In one step, where nobody says how many: the first, or those where KV has more or less room."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a plan follows from."""

    geometry: Geometry
    devices: Devices
    work: Workload
    objectives: Objectives
    calibration: Calibration
    profile: Profile
    own: WeightFormat
    """The format in which the model is published, or that was asked for."""
    formats: tuple[WeightFormat, ...] = ()
    """Smaller ones that may be proposed."""
    kv_dtype: str = "auto"
    limits: Limits = Limits()
    sequences: int = 1
    """Of the longest kind that a deployment must hold at once."""
    spare: int = 0
    """Replicas of each pool that may be lost with the objectives still met."""
    pinned: Layout | None = None
    """The only layout of a replica to look at; None: every one."""
    stored_bytes: int | None = None
    """Of the checkpoint's tensors, by their headers; None: none is at hand."""
    price: float | None = None
    """Of a GPU for an hour; None: not known."""

    @property
    def every_format(self) -> tuple[WeightFormat, ...]:
        """The model's own first."""
        return (self.own, *self.formats)

    def stepper(self, layout: Layout, form: WeightFormat) -> Stepper:
        """Of one replica, with as many sequences as KV has room for where no limit was stated:
        each of them takes buffers for sampling, which KV then lacks.

        Raises SetupError later, when its memory is asked for.
        """
        if self.limits.max_num_seqs is not None:
            return self._stepper(layout, form, self.limits)
        found = self._stepper(layout, form, _with(self.limits, USUAL_SEQUENCES))
        try:
            held = self._held(found)
        except SetupError:
            return found
        steps = MORE_SEQUENCES if held > USUAL_SEQUENCES else FEWER_SEQUENCES
        for sequences in steps:
            other = self._stepper(layout, form, _with(self.limits, sequences))
            if min(sequences, self._held(other)) <= min(held, _sequences(found)):
                break
            found, held = other, self._held(other)
        return found

    def _held(self, stepper: Stepper) -> float:
        """Sequences of the workload for which a DP group has KV."""
        return stepper.tokens / stepper.memory.dp / self.work.context

    def _stepper(self, layout: Layout, form: WeightFormat, limits: Limits) -> Stepper:
        replica = Replica(
            geometry=self.geometry,
            card=self.devices.card,
            layout=layout,
            weights=form,
            kv_dtype=self.kv_dtype,
            limits=limits,
            profile=self.profile,
        )
        return Stepper(replica, self.devices, self.calibration)


def _with(limits: Limits, sequences: int) -> Limits:
    """The limits with that many sequences, or as many as there are tokens in a step."""
    return msgspec.structs.replace(limits, max_num_seqs=min(sequences, limits.chunk or sequences))


def _sequences(stepper: Stepper) -> int:
    return stepper.replica.resolved.max_num_seqs


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One deployment, computed."""

    kind: str
    form: WeightFormat
    layouts: tuple[Layout, ...]
    """Of a replica; two for two pools: prefill's and decode's."""
    replicas: tuple[int, ...]
    """Of each pool; 0 where not one fits."""
    latency: Latency = Latency()
    rate: float = 0.0
    """Requests a second: asked for, or the most within the objectives."""
    missed: tuple[tuple[str, float], ...] = ()
    """Objectives that are not met, and how many times over they are."""
    refused: str = ""
    """Why it cannot be at all; empty where it can."""

    @property
    def gpus(self) -> int:
        return sum(n * one.gpus for n, one in zip(self.replicas, self.layouts, strict=True))

    @property
    def failure_domain(self) -> int:
        """GPUs that are lost with one of them."""
        return max(one.gpus for one in self.layouts)

    @property
    def works(self) -> bool:
        return not (self.refused or self.missed or self.latency.limit)

    @property
    def worst(self) -> float:
        """How many times over the objective is that is missed most."""
        return max((times for _, times in self.missed), default=1.0 if self.works else float("inf"))

    @property
    def rate_per_gpu(self) -> float:
        return self.rate / self.gpus if self.gpus else 0.0

    @property
    def name(self) -> str:
        """As ``2 x TP4`` or ``1 x TP2 prefill + 3 x TP4 decode``, with the format of weights; the
        layout alone where not one replica fits."""
        if self.refused:
            return f"{self.layouts[0]}, {self.form.name}"
        pools = [f"{n} x {one}" for n, one in zip(self.replicas, self.layouts, strict=True)]
        if self.kind == DISAGGREGATED:
            pools = [f"{pool} {role}" for pool, role in zip(pools, _ROLES, strict=True)]
        return f"{' + '.join(pools)}, {self.form.name}"


_ROLES = ("prefill", "decode")


def offered(names: Iterable[str], own: WeightFormat, gpu: Gpu) -> tuple[WeightFormat, ...]:
    """Formats that may be proposed: smaller than the model's own, and none that the GPU has no
    units for: engines hold FP8 as 16 bits there.

    Raises:
        SetupError: a name that is no format.
    """
    found = dict.fromkeys(weight_format(name) for name in names)
    return tuple(form for form in found if form.bits < own.bits and _has(gpu, form))


def _has(gpu: Gpu, form: WeightFormat) -> bool:
    if form.name.startswith("fp8"):
        return bool(gpu.fp8_tflops)
    return form.name != "bf16" or gpu.has_bf16


MOST_LAYOUTS, SMALL_WHOLE = 90, 32
"""Beyond the first only powers of two and divisors of what is small are looked at, so that a plan
takes two seconds and no more: on hosts of 72 GPUs, or where 60 hosts may be cut in many ways."""


def layouts(geometry: Geometry, devices: Devices) -> Iterator[Layout]:
    """Those worth a look, fewest GPUs first: TP up to twice a host, stages, and for models with
    experts EP within TP or with attention-DP. Sizes are powers of two, and what divides the GPUs
    of a host, the hosts, or what TP leaves."""
    found = _layouts(geometry, devices, _sizes)
    if len(found) > MOST_LAYOUTS:
        found = _layouts(geometry, devices, _few_sizes)
    yield from sorted(found, key=lambda x: (x.gpus, x.pp, x.dp, x.tp, x.ep))


def _layouts(geometry: Geometry, devices: Devices, sizes: Callable[..., list[int]]) -> set[Layout]:
    hosts, per_host = devices.hosts, devices.per_host
    found = {
        Layout(tp=tp, pp=pp)
        for tp in sizes(2 * per_host, 2 * per_host)
        for pp in sizes(MOST_STAGES, per_host, hosts)
        if tp <= geometry.heads and pp <= len(geometry.layers)
    }
    if geometry.experts:
        for tp in sizes(min(per_host, geometry.heads), per_host):
            for dp in sizes(devices.gpus // tp, devices.gpus // tp):
                if 1 < tp * dp <= geometry.experts:
                    found.add(Layout(tp=tp, dp=dp, ep=tp * dp))
    return {one for one in found if one.gpus <= devices.gpus}


def prompt_layouts(geometry: Geometry, devices: Devices) -> Iterator[Layout]:
    """Those of a prefill pool that cuts a prompt over CP groups, each of TP within a host, and
    leaves GPUs for a decode pool; fewest GPUs first."""
    if not cuts_prompts(geometry):
        return
    per_host = devices.per_host
    found = [
        Layout(tp=tp, cp=cp)
        for tp in _few_sizes(min(per_host, geometry.heads), per_host)
        for cp in _few_sizes(MOST_GROUPS, per_host // tp, devices.hosts)
        if cp > 1 and tp * cp < devices.gpus
    ]
    yield from sorted(found, key=lambda one: (one.gpus, one.tp))


def _sizes(most: int, *wholes: int) -> list[int]:
    """Powers of two, and what divides one of ``wholes``, up to ``most``."""
    powers = {1 << power for power in range(most.bit_length())}
    divisors = {size for size in range(1, most + 1) for whole in wholes if whole % size == 0}
    return sorted(size for size in powers | divisors if size <= most)


def _few_sizes(most: int, *wholes: int) -> list[int]:
    return _sizes(most, *(whole for whole in wholes if whole <= SMALL_WHOLE))


def places(devices: Devices, layout: Layout) -> int:
    """Replicas for which there is room: within a host where they can, else on whole hosts."""
    if layout.gpus <= devices.per_host:
        return devices.per_host // layout.gpus * devices.hosts
    return devices.hosts // -(-layout.gpus // devices.per_host)


LEAST_KV = 0.05
"""Of what an engine may take of a card. What has less serves a handful at a time, and a figure of
the sum that is a few percent off would leave nothing."""


def why_not(stepper: Stepper, sequences: int) -> str:
    """Why a replica does not fit; empty where it holds ``sequences`` of max_model_len, of which a
    DP group has its part."""
    try:
        found = stepper.memory
    except SetupError as error:
        return error.message
    need = sequences * found.limits.max_model_len
    rank = found.ranks[found.tightest]
    weights = f"{show(rank.weights)} of weights a GPU"
    if stepper.tokens >= need:
        if rank.kv >= LEAST_KV * rank.usable:
            return ""
        return (
            f"{weights} leave {show(rank.kv)} of {show(rank.usable)} for KV: {stepper.tokens} "
            f"tokens, and less than {LEAST_KV:.0%} of a card is no room to serve from"
        )
    if rank.kv <= 0:
        return f"{weights} and what else it takes pass its {show(rank.usable)} by {show(-rank.kv)}"
    return (
        f"{weights} leave {show(rank.kv)} of {show(rank.usable)} for KV: {stepper.tokens} tokens, "
        f"where {need} are needed"
    )
