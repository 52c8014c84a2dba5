"""The constants of the latency model: what share of its data sheet a GPU reaches, and fixed costs.

None follows from a model or a layout. Those that ship were fitted to published measurements, many
at a time and never to one (docs/plan.md has the errors); a file of your own machine replaces them.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from ekiden.core.errors import SetupError
from ekiden.planner.hardware import Gpu
from ekiden.planner.names import unknown


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far hardware and engine are from the data sheet. Shares are of it; times in seconds."""

    name: str
    source: str
    """Where the figures come from."""
    memory_share: float
    """Of the memory bandwidth, while weights are read."""
    kv_share: float
    """Of the memory bandwidth, while attention reads KV."""
    compute_share: float
    """Of the dense 16-bit peak, in matrix products of a long prompt."""
    small_share: float
    """Of the dense 8-bit or 4-bit peak, in those of a format that multiplies so."""
    attention_share: float
    """Of the 16-bit peak, in the scores of attention."""
    layer_s: float
    """Of a layer whatever its batch: launches, norms, gaps between kernels."""
    step_s: float
    """Of a step: scheduling, sampling, input and output."""
    sequence_s: float
    """Of a step for each sequence in it."""
    request_s: float
    """Of a request before its prompt is computed: HTTP, tokenising, admission."""
    passes: float = 1.0
    """In a closed loop: times of one prompt for which a request waits, its own among them. Clients
    that were answered together ask together."""
    opening: float = 0.1
    """In a closed loop: share of the requests that belong to the burst with which it opens."""
    expert_share: float
    """Of ``memory_share`` and ``compute_share``, in the products of routed experts."""
    expert_s: float
    """Of a layer with routed experts: routing, sorting tokens by expert, joining."""
    nvlink_s: float = 3.9e-6
    """All-reduce over NVLink, of no bytes, of no ranks."""
    nvlink_rank_s: float = 0.2e-6
    """The same, for each rank."""
    nvlink_share: float = 0.75
    """Of the link's rate."""
    pcie_rank_s: float = 3.5e-6
    """All-reduce over PCIe, of no bytes, for each rank."""
    pcie_share: float = 0.96
    """Of one PCIe link's rate, which all ranks of a host share."""
    pcie_peer_share: float = 0.38
    """Of one PCIe link's rate, which each rank has for itself where there is peer-to-peer."""
    exchange_s: float = 40e-6
    """All-to-all between tokens and their experts, of no bytes, beside what links take: kernels
    count and sort tokens, and wait for the last rank."""
    network_s: float = 25e-6
    """A message between hosts, of no bytes."""
    network_share: float = 0.8
    """Of the network's rate for a GPU."""
    balance: float = 0.8
    """Mean load of the ranks that hold experts over the load of the busiest."""
    beside_decode: float = 1.0
    """Time of a prompt while another replica of its host decodes, over its time alone; 1 for GPUs,
    which share neither memory nor cores."""
    beside_prompts: float = 1.0
    """Time of a decode step while another replica of its host computes prompts, over its time
    alone."""
    median_error: float | None = None
    """Of TPOT on what it was fitted to; None: not measured."""
    device: Gpu | None = None
    """The device that was measured; None: those of the table."""


_SHARES = (
    *("memory_share", "kv_share", "compute_share", "small_share", "attention_share"),
    "expert_share",
    *("nvlink_share", "pcie_share", "pcie_peer_share", "network_share", "balance"),
)

_RATES = (
    *("memory_gib", "visible_gib", "bandwidth_gbps", "bf16_tflops", "fp8_tflops", "fp4_tflops"),
    *("link_gbps", "pcie_gbps", "network_gbps"),
)
_LEAST_RATE, _MOST_RATE = 1e-3, 1e6
"""Of a device, in GiB, GB/s or Tflop/s: from the smallest board to far beyond the largest."""


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    shared: dict[str, float]
    engine: tuple[dict[str, Any], ...]


@cache
def calibrations() -> dict[str, Calibration]:
    """Those that ship, by the engine that was measured."""
    with (Path(__file__).parent / "calibrations.toml").open("rb") as file:
        table = msgspec.convert(tomllib.load(file), _Table)
    found = [msgspec.convert({**table.shared, **one}, Calibration) for one in table.engine]
    return {one.name: check(one) for one in found}


def calibration(name: str) -> Calibration:
    """The shipped one of an engine.

    Raises:
        SetupError: there is none; the message has those that there are.
    """
    if name in calibrations():
        return calibrations()[name]
    raise unknown("calibration", name, calibrations())


def read_calibration(file: Path) -> Calibration:
    """The calibration in a JSON file.

    Raises:
        SetupError: it cannot be read, lacks a field, or a figure is impossible; names it.
    """
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Calibration)
    except OSError as error:
        raise SetupError(f"calibration {file} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        fields = ", ".join(Calibration.__struct_fields__)
        raise SetupError(
            f"calibration {file} is not one: {error}; it is a JSON object of {fields}"
        ) from None
    return check(found)


def check(found: Calibration) -> Calibration:
    """The same, or SetupError for a share or a time that cannot be."""
    for name, value in msgspec.structs.asdict(found).items():
        if name in _SHARES and not 0 < value <= 1:
            raise SetupError(f"calibration {name} {value:g} is not a share: above 0 and up to 1")
        if name.endswith("_s") and not 0 <= value < 10:
            raise SetupError(f"calibration {name} {value:g} is not seconds: choose 0 to 10")
        if name.startswith("beside_") and not 1 <= value <= 10:
            raise SetupError(f"calibration {name} {value:g} slows nothing down: choose 1 to 10")
    if found.device is not None:
        _check_device(found.device)
    return found


def _check_device(device: Gpu) -> None:
    for name in _RATES:
        value = getattr(device, name)
        if value is not None and not _LEAST_RATE <= value <= _MOST_RATE:
            raise SetupError(
                f"calibration: {name} {value:g} of its device is none that a device has: choose "
                f"{_LEAST_RATE:g} to {_MOST_RATE:,.0f}"
            )
