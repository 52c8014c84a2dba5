"""Which kernels a rank computes with, decided once when it starts."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from ekiden.core.errors import SetupError
from ekiden.layers.backends.native.build import NativeUnavailable
from ekiden.layers.backends.torch_ops import TorchOps
from ekiden.layers.ops import Ops

logger = logging.getLogger(__name__)


LEAST_CAPABILITY = (8, 0)
"""CUDA devices from here on have the bfloat16 products that the Triton kernels need."""


@dataclass(frozen=True, kw_only=True)
class Threads:
    """How many threads of the CPU a rank computes with."""

    share: int = 1
    """Always its own."""
    most: int = 0
    """With those that other ranks of this host leave idle, which native kernels use; up to
    ``share``: it borrows none."""


def choose_ops(
    kernels: str, device: torch.device, dtype: torch.dtype, threads: Threads | None = None
) -> Ops:
    """``--kernels``: torch, native, triton, or ``auto`` for the fastest on ``device``.

    ``threads`` are one if None.

    Raises:
        SetupError: kernels that this device, or this machine, cannot run.
    """
    if kernels not in ("auto", "torch", "native", "triton"):
        raise SetupError(f"--kernels {kernels} is unknown: choose auto, torch, native or triton")
    if kernels == "triton" or (kernels == "auto" and device.type == "cuda"):
        lacking = _triton_lacks(device)
        if not lacking:
            return _triton(device, dtype)
        if kernels == "triton":
            raise SetupError(f"--kernels triton cannot run on {device}: {lacking}")
        logger.warning("kernels of %s are plain torch's, not triton: %s", device, lacking)
    if wants_native(kernels, device.type):
        try:
            return _native(device, dtype, threads or Threads())
        except NativeUnavailable as error:
            if kernels == "native":
                raise SetupError(f"--kernels native cannot run: {error}") from error
            logger.warning("kernels of %s are plain torch's, not native: %s", device, error)
    logger.info("kernels of %s in %s: torch", device, dtype)
    return TorchOps()


def wants_native(kernels: str, device: str) -> bool:
    """Whether the native kernels are tried on a device of this type."""
    return kernels == "native" or (kernels == "auto" and device == "cpu")


def _triton_lacks(device: torch.device) -> str:
    """Why the Triton kernels cannot run on ``device``; empty where they can."""
    if find_spec("triton") is None:
        return "triton is not installed (pip install 'ekiden[cuda]')"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < LEAST_CAPABILITY:
            return "compute capability {}.{} is below {}.{}".format(*capability, *LEAST_CAPABILITY)
        return ""
    from triton import knobs

    return "" if knobs.runtime.interpret else "they need --device cuda"


def _triton(device: torch.device, dtype: torch.dtype) -> Ops:
    from ekiden.layers.backends.triton.ops import TritonOps

    logger.info("kernels of %s in %s: triton", device, dtype)
    return TritonOps(device)


def _native(device: torch.device, dtype: torch.dtype, threads: Threads) -> Ops:
    if device.type != "cpu":
        raise NativeUnavailable(f"they need --device cpu, not {device}")
    from ekiden.layers.backends.native.cores import take_seat
    from ekiden.layers.backends.native.ops import NativeOps

    seat = take_seat(threads.share) if threads.most > threads.share else None
    ops = NativeOps(dtype, threads.most if seat else threads.share, seat)
    # What is left to torch is small, and each use of its team leaves threads that spin for
    # milliseconds on the cores that these kernels want.
    torch.set_num_threads(1)
    borrowed = f", up to {threads.most} while other ranks are idle" if seat else ""
    logger.info("kernels of %s in %s: native, %d threads%s", device, dtype, threads.share, borrowed)
    return ops
