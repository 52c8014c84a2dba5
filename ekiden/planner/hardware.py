"""GPUs by name: the shipped table (``gpus.toml``)."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

import msgspec

from ekiden.core.errors import SetupError
from ekiden.planner.names import nearest

GIB = 1 << 30
CPU_NAME = "cpu-"
"""How the name of a host's cores begins."""
BF16_CAPABILITY = 8.0
"""From which on a GPU of NVIDIA's has units for bf16 (CUDA C++ Programming Guide, features
by compute capability)."""
HIDDEN_SHARE = 0.015
"""Of a card's nominal memory that CUDA does not show, where nobody has measured it: 1.0-1.8% on the
80, 40 and 24 GB cards of the table."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of GPU. GB/s are 10**9 bytes; memory is in GiB."""

    name: str
    memory_gib: float
    """Nominal."""
    bandwidth_gbps: float
    """Of its memory."""
    bf16_tflops: float
    """Dense, as are those of fp8 and fp4; of fp16 where there is no bf16."""
    link_gbps: float
    """To another GPU of the host, each way: NVLink, or PCIe where there is none."""
    pcie_gbps: float
    tdp_w: float
    source: str
    visible_gib: float | None = None
    """What CUDA shows; None: not measured."""
    fp8_tflops: float | None = None
    """None: it has no such units; the same for fp4."""
    fp4_tflops: float | None = None
    compute_capability: float | None = None
    """As NVIDIA lists it; None: of another maker."""
    network_gbps: float | None = None
    """To another host, for one GPU, each way; None: not known."""
    gpus_per_host: int = 8
    """Most that a host usually has."""
    nvlink_group: int = 8
    """Most GPUs that NVLink joins; 2 where it is a bridge between a pair."""
    recalled: tuple[str, ...] = ()
    """Fields that were not checked against a data sheet."""
    aliases: tuple[str, ...] = ()

    @property
    def is_cpu(self) -> bool:
        """Whether it is the cores of a host, as ``ekiden bench calibrate`` names them."""
        return self.name.startswith(CPU_NAME)

    @property
    def memory_bytes(self) -> int:
        """What an engine finds on the card: visible, or nominal less what is usually hidden."""
        return int((self.visible_gib or self.memory_gib * (1 - HIDDEN_SHARE)) * GIB)

    @property
    def has_nvlink(self) -> bool:
        return self.link_gbps > self.pcie_gbps

    @property
    def has_bf16(self) -> bool:
        """Whether it multiplies bf16; engines emulate that on older cards, or refuse."""
        return self.compute_capability is None or self.compute_capability >= BF16_CAPABILITY


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    gpu: tuple[Gpu, ...]


@cache
def gpus() -> tuple[Gpu, ...]:
    """The whole table, in its order."""
    with (Path(__file__).parent / "gpus.toml").open("rb") as file:
        return msgspec.convert(tomllib.load(file), _Table).gpu


@cache
def _by_name() -> dict[str, Gpu]:
    return {_plain(name): gpu for gpu in gpus() for name in (gpu.name, *gpu.aliases)}


def _plain(name: str) -> str:
    return re.sub(r"^(nvidia|geforce|amd)|[^a-z0-9]", "", re.sub(r"[^a-z0-9]", "", name.lower()))


def gpu(name: str) -> Gpu:
    """The GPU called ``name``; case, spaces, dashes and the maker's name do not matter.

    Raises:
        SetupError: no such GPU; the message has the nearest names.
    """
    names = _by_name()
    if (found := names.get(_plain(name))) is not None:
        return found
    near = nearest(_plain(name), {key: known.name for key, known in names.items()})
    raise SetupError(f"GPU {name!r} is not in the planner's table: nearest are {near}")
