"""What replicas of one machine cost one another.

GPUs have processors and memory of their own. Replicas on the cores of one CPU share its memory, and
its other cores with gateway and services; ``ekiden bench calibrate --two-pools`` measures by how
much. A neighbour slows for the share of the time that it works.
"""

from __future__ import annotations

import math

import msgspec

from ekiden.planner import serving
from ekiden.planner.latency import Latency
from ekiden.planner.steps import Stepper
from ekiden.planner.workload import Workload

CIRCLES = 4
"""Slower replicas are busy for longer, and slow their neighbours more: followed so often."""
_RATES = ("bandwidth_gbps", "bf16_tflops", "fp8_tflops", "fp4_tflops")
_COSTS = ("layer_s", "step_s", "sequence_s", "expert_s")


def aggregated(stepper: Stepper, work: Workload, rate: float, replicas: int) -> Latency:
    """``serving.aggregated`` of replicas that may share a machine."""
    slow = alike(stepper, work, rate, replicas)
    return serving.aggregated(slow, work, rate, replicas)


def disaggregated(
    prefill: Stepper, decode: Stepper, work: Workload, rate: float, pools: tuple[int, int]
) -> Latency:
    """``serving.disaggregated`` of pools that may share a machine."""
    one, other = apart(prefill, decode, work, rate, pools)
    return serving.disaggregated(one, other, work, rate, pools)


def beside(
    prefill: Stepper, decode: Stepper, work: Workload, rate: float, pools: tuple[int, int]
) -> tuple[Stepper, Stepper]:
    """A replica of each pool; without replicas of prefill, two of those that do both."""
    if pools[0]:
        return apart(prefill, decode, work, rate, pools)
    return (alike(decode, work, rate, pools[1]),) * 2


def alike(stepper: Stepper, work: Workload, rate: float, replicas: int) -> Stepper:
    """One of ``replicas`` that do both, at the pace that it has beside the others of its host."""
    told, found = stepper.told, stepper
    layout = stepper.replica.layout
    if replicas < 2 or _is_alone(stepper) or 2 * layout.gpus > stepper.devices.per_host:
        return stepper
    for _ in range(CIRCLES):
        latency = serving.aggregated(found, work, rate, replicas)
        if latency.limit:
            break
        prompts = latency.prefill_load
        added = prompts * (told.beside_decode - 1) * _decoding(latency)
        added += (1 - prompts) * (told.beside_prompts - 1) * prompts
        found = slowed(stepper, 1 + added)
    return found


def apart(
    prefill: Stepper, decode: Stepper, work: Workload, rate: float, pools: tuple[int, int]
) -> tuple[Stepper, Stepper]:
    """A replica of each pool, at the pace that it has beside one of the other."""
    told, found = decode.told, (prefill, decode)
    gpus = pools[0] * prefill.replica.layout.gpus + pools[1] * decode.replica.layout.gpus
    if _is_alone(decode) or gpus > decode.devices.per_host:
        return found
    for _ in range(CIRCLES):
        latency = serving.disaggregated(*found, work, rate, pools)
        if latency.limit:
            break
        found = (
            slowed(prefill, 1 + (told.beside_decode - 1) * _decoding(latency)),
            slowed(decode, 1 + (told.beside_prompts - 1) * latency.prefill_load),
        )
    return found


def _is_alone(stepper: Stepper) -> bool:
    return stepper.told.beside_decode == stepper.told.beside_prompts == 1


def _decoding(latency: Latency) -> float:
    """Share of the time in which a replica has anything to decode, as many at once as Poisson's
    law has it."""
    return 1 - math.exp(-latency.running)


def slowed(stepper: Stepper, times: float) -> Stepper:
    """The same replica on a device that takes ``times`` as long for everything."""
    if times == 1:
        return stepper
    told, devices = stepper.told, stepper.devices
    rates = {name: rate / times for name in _RATES if (rate := getattr(devices.gpu, name))}
    costs = {name: getattr(told, name) * times for name in _COSTS}
    gpu = msgspec.structs.replace(devices.gpu, **rates)
    return Stepper(
        stepper.replica,
        msgspec.structs.replace(devices, gpu=gpu),
        msgspec.structs.replace(told, **costs),
    )
