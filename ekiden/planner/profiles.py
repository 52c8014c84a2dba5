"""Engines, as far as their memory goes: one explicit profile each, never fitted to a single row.

What a figure is made of stands beside it. Ours foretells its memory by formula; those of vLLM come
from what its start-up logs print (``torch peak memory increase``, ``non-torch``), many at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from ekiden.planner.hardware import GIB
from ekiden.planner.limits import Resolved
from ekiden.planner.names import unknown
from ekiden.planner.peaks import Asked, Peak, chunk_or_sampler, ours
from ekiden.planner.precision import SCALE_BYTES
from ekiden.planner.weights import Holding

MIB = 1 << 20


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """The card that an engine finds, for defaults that depend on it."""

    name: str
    memory_bytes: int
    nvlink: bool = True
    """Whether cards of a host have a faster way to one another than PCIe."""


Defaults = Callable[[Card, int], Resolved]
"""Of a card and the longest sequence."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """How one engine (of some versions) takes memory of a card."""

    name: str
    what: str
    defaults: Defaults
    peak: Callable[[Asked], Peak]
    holding: Holding
    context: int
    """Bytes of a rank that no tensor has: CUDA context, kernels, cuBLAS, as far as the engine
    counts them against its share of the card."""
    communication: int
    """The same of a rank that has peers over NVLink: NCCL's buffers, those of NVLS and of an
    engine's own all-reduce."""
    communication_pcie: int
    """The same over PCIe: NCCL's alone, since the other two want NVLink (vLLM switches its own
    all-reduce off there)."""
    tp_divides: bool
    """Query heads must divide by TP."""
    block_size: int = 16
    kv_scale_bytes: int = 0
    """Behind each key and value in a cache of single bytes."""
    small_kv: str = "fp8"
    """The cache of 8 bits that it has on any card."""
    graphs: int = 0
    """Bytes of captured graphs that count against the share."""
    one_gpu_only: str = ""
    """Why nothing is said of several GPUs; empty: they are."""


_BIG_CARD = 70 * GIB
"""From this size on, and not on an A100, vLLM takes its larger defaults."""


def _vllm_v1(card: Card, longest: int) -> Resolved:
    big = card.memory_bytes >= _BIG_CARD and "a100" not in card.name.lower()
    return Resolved(
        max_model_len=longest,
        max_num_seqs=1024 if big else 256,
        chunk=8192 if big else 2048,
        utilization=0.9,
    )


_CHUNKED_FROM = 32_768


def _vllm_v0(card: Card, longest: int) -> Resolved:
    """A prompt is one step, unless so long that chunked prefill switches itself on (0.5.4)."""
    chunk = max(longest, 2048) if longest <= _CHUNKED_FROM else 2048
    return Resolved(max_model_len=longest, max_num_seqs=256, chunk=chunk, utilization=0.9)


def _vllm_whole(card: Card, longest: int) -> Resolved:
    """Before 0.5.4 every prompt was one step."""
    return Resolved(
        max_model_len=longest, max_num_seqs=256, chunk=max(longest, 2560), utilization=0.9
    )


def _ekiden(card: Card, longest: int) -> Resolved:
    """As ``ekiden.core.config.EngineConfig``."""
    return Resolved(max_model_len=longest, max_num_seqs=64, chunk=512, utilization=0.9)


SORTED_LOGIT = 38.25
"""Bytes of a logit at the peak of a sampler that sorts: 16-bit and float32 logits, sorted values
and their int64 places, a mask, probabilities, their sum, noise. vLLM's logs give 38.2-38.4."""
UNSORTED_LOGIT = SORTED_LOGIT - 8 - 1
"""Without the sort's places and mask: kernels that search a threshold (vLLM pull request 33538)."""
_VLLM_HOLDING = Holding(
    vocab_multiple=64,
    mx_inputs_multiple=256,
    rope_table=True,
    absorbs_latent=True,
    balanced_stages=False,
)
_VLLM = Profile(
    name="vllm",
    what="vLLM's V1 engine, 0.8 to 0.15",
    defaults=_vllm_v1,
    peak=partial(chunk_or_sampler, sampler_bytes=SORTED_LOGIT),
    holding=_VLLM_HOLDING,
    context=100 * MIB,
    communication=400 * MIB,
    communication_pcie=100 * MIB,
    tp_divides=True,
)
_OLD = msgspec.structs.replace(
    _VLLM,
    name="vllm-v0",
    what="vLLM's V0 engine, 0.5.4 to 0.8",
    defaults=_vllm_v0,
    context=300 * MIB,
    communication=200 * MIB,
    holding=msgspec.structs.replace(_VLLM_HOLDING, absorbs_latent=False),
)
PROFILES = {
    profile.name: profile
    for profile in (
        Profile(
            name="ekiden",
            what="this engine, on CUDA",
            defaults=_ekiden,
            peak=ours,
            holding=Holding(),
            context=700 * MIB,
            communication=0,
            communication_pcie=0,
            tp_divides=False,
            kv_scale_bytes=SCALE_BYTES,
            small_kv="int8",
        ),
        _VLLM,
        msgspec.structs.replace(
            _VLLM,
            name="vllm-0.16",
            what="vLLM from 0.16 on, whose sampler does not sort",
            peak=partial(chunk_or_sampler, sampler_bytes=UNSORTED_LOGIT),
        ),
        _OLD,
        msgspec.structs.replace(
            _OLD,
            name="vllm-0.3",
            what="vLLM before 0.5.4: no chunked prefill",
            defaults=_vllm_whole,
        ),
        msgspec.structs.replace(
            _OLD,
            name="vllm-0.2",
            what="vLLM of 2023, which counted all that was gone from the card",
            defaults=_vllm_whole,
            context=500 * MIB,
            one_gpu_only="with several GPUs its profiler counted what NCCL and the allocator kept, "
            "which no arithmetic gives",
        ),
    )
}


def profile(name: str) -> Profile:
    """The profile called ``name``.

    Raises:
        SetupError: there is none; the message has those that there are.
    """
    if name in PROFILES:
        return PROFILES[name]
    raise unknown("engine profile", name, PROFILES)
