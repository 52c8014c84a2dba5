"""The memory of a GPU, term by term and to the byte: what is left is KV."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ekiden.core.errors import SetupError
from ekiden.planner.geometry import Geometry
from ekiden.planner.hardware import GIB, Gpu
from ekiden.planner.kv import RankKv, rank_kv
from ekiden.planner.layout import Layout, check_layout
from ekiden.planner.limits import Limits, Resolved, resolve
from ekiden.planner.peaks import Asked, Peak
from ekiden.planner.precision import WeightFormat, kv_format, weight_format
from ekiden.planner.profiles import PROFILES, Card, Profile
from ekiden.planner.weights import rank_weights

TERMS = ("weights", "activations", "sampler", "context", "communication", "graphs")
"""What a rank takes before KV, in the order in which it is shown."""


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """A model in a layout, on cards of one kind, under one engine."""

    geometry: Geometry
    card: Card
    layout: Layout = Layout()
    weights: WeightFormat = msgspec.field(default_factory=lambda: weight_format("bf16"))
    kv_dtype: str = "bf16"
    limits: Limits = Limits()
    profile: Profile = PROFILES["ekiden"]

    @property
    def resolved(self) -> Resolved:
        """Every limit as a number. Raises SetupError as ``limits.resolve``."""
        longest = self.limits.max_model_len or self.geometry.max_positions
        return resolve(self.limits, self.profile.defaults(self.card, longest))


class RankSum(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one rank. The terms and ``kv`` add up to ``usable``; a KV below zero is a lack."""

    total: int
    """Of the card, as CUDA shows it."""
    usable: int
    """The share of it that the engine may take."""
    weights: int
    activations: int
    sampler: int
    """What sampling adds where that, and not a whole chunk, is the worst moment; else 0."""
    context: int
    communication: int
    graphs: int
    shape: RankKv

    @property
    def kv(self) -> int:
        return self.usable - sum(size for _, size in self.terms())

    def terms(self) -> Iterator[tuple[str, int]]:
        """Name and bytes of everything but KV."""
        yield from ((name, getattr(self, name)) for name in TERMS)


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """The sums of a replica's ranks, stage after stage."""

    ranks: tuple[RankSum, ...]
    """Equal ones are one object."""
    limits: Resolved
    block_size: int
    dp: int
    cp: int = 1

    @property
    def tightest(self) -> int:
        """The rank whose KV holds least; where ranks have no KV at all, that which lacks most."""
        first = {id(rank): index for index, rank in reversed([*enumerate(self.ranks)])}
        return min((self._tokens(self.ranks[i]), self.ranks[i].kv, i) for i in first.values())[2]

    @property
    def tokens(self) -> int:
        """Tokens of KV of the replica for sequences of max_model_len: the tightest rank decides,
        each DP group has its own, and each CP group a part of every sequence."""
        return self.dp * self.cp * self._tokens(self.ranks[self.tightest])

    @property
    def pool_tokens(self) -> int:
        """The same as engines log it, as if every layer kept every token."""
        return (self.dp * self.cp) * min(
            max(0, rank.kv) // (token * self.block_size) * self.block_size if token else 0
            for rank, token in ((rank, rank.shape.token_bytes) for rank in self.ranks)
        )

    def _tokens(self, rank: RankSum) -> int:
        limits = self.limits
        length = -(-limits.max_model_len // self.cp)
        return rank.shape.tokens(rank.kv, length, chunk=limits.chunk, block=self.block_size)


def memory(replica: Replica) -> Memory:
    """The sum of every rank.

    Raises:
        SetupError: a layout, a limit or a dtype that cannot be; names it and the valid choices.
    """
    profile, layout, geometry = replica.profile, replica.layout, replica.geometry
    check_layout(geometry, layout, tp_divides=profile.tp_divides)
    if profile.one_gpu_only and layout.gpus > 1:
        raise SetupError(
            f"engine profile {profile.name} is of one GPU only, and {layout} was asked for: "
            f"{profile.one_gpu_only}"
        )
    balanced = profile.holding.balanced_stages
    weights = rank_weights(geometry, layout, replica.weights, profile.holding)
    shapes = rank_kv(
        geometry,
        layout,
        kv_format(replica.kv_dtype),
        scale_bytes=profile.kv_scale_bytes,
        balanced=balanced,
    )
    limits = replica.resolved
    peaks: dict[tuple[int, bool], Peak] = {}
    sums: dict[tuple[int, bool, int, int], RankSum] = {}
    ranks = []
    for index in range(layout.gpus):
        key = index % layout.tp, index // layout.stage_gpus == layout.pp - 1
        alike = (*key, weights[index], id(shapes[index]))
        if alike not in sums:
            if key not in peaks:
                peaks[key] = _peak(replica, limits, *key)
            sums[alike] = _sum(replica, limits, peaks[key], weights[index], shapes[index])
        ranks.append(sums[alike])
    return Memory(
        ranks=tuple(ranks),
        limits=limits,
        block_size=profile.block_size,
        dp=layout.dp,
        cp=layout.cp,
    )


def _peak(replica: Replica, limits: Resolved, tp_rank: int, last: bool) -> Peak:
    return replica.profile.peak(
        Asked(
            geometry=replica.geometry,
            layout=replica.layout,
            limits=limits,
            tp_rank=tp_rank,
            last=last,
            kv_dtype=kv_format(replica.kv_dtype),
        )
    )


def _sum(replica: Replica, limits: Resolved, peak: Peak, weights: int, shape: RankKv) -> RankSum:
    profile, layout = replica.profile, replica.layout
    total = replica.card.memory_bytes
    links = profile.communication if replica.card.nvlink else profile.communication_pcie
    return RankSum(
        total=total,
        usable=int(total * limits.utilization),
        weights=weights,
        activations=peak.activations,
        sampler=peak.sampler,
        context=profile.context,
        communication=(links if layout.gpus > 1 else 0) + _ring_bytes(shape, limits, layout.cp),
        graphs=profile.graphs,
        shape=shape,
    )


def _ring_bytes(shape: RankKv, limits: Resolved, cp: int) -> int:
    """What a rank computes with and what arrives meanwhile: one layer's KV of a part of the longest
    sequence, twice."""
    if cp == 1:
        return 0
    return 2 * -(-limits.max_model_len // cp) * max(kind.token_bytes for kind in shape.kinds)


def card_of(gpu: Gpu) -> Card:
    """A card of the table, as an engine finds it."""
    return Card(name=gpu.name, memory_bytes=gpu.memory_bytes, nvlink=gpu.has_nvlink)


def show(size: int) -> str:
    """Bytes as ``12.34 GiB``; a lack has its minus."""
    return f"{size / GIB:.2f} GiB"
