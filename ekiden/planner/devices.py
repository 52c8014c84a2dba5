"""The machines at hand: GPUs of one kind in hosts, and the time that messages between them take."""

from __future__ import annotations

import msgspec

from ekiden.core.errors import SetupError
from ekiden.planner.calibration import Calibration
from ekiden.planner.hardware import Gpu
from ekiden.planner.memory import card_of
from ekiden.planner.profiles import Card
from ekiden.planner.routing import Routing

NVLINK, PCIE, PEERS = "nvlink", "pcie", "pcie-p2p"
INTERCONNECTS = ("auto", NVLINK, PCIE, PEERS)
"""``pcie-p2p``: GPUs read one another's memory through a switch; ``pcie``: over the host, which all
of them share."""
MOST_PER_HOST, MOST_GPUS = 72, 4096
"""For which plans are made: beyond, one takes seconds, and only its counts would change."""
GIGA = 1e9


class Devices(msgspec.Struct, frozen=True, kw_only=True):
    """``hosts`` machines of ``per_host`` GPUs each."""

    gpu: Gpu
    per_host: int = 1
    hosts: int = 1
    interconnect: str = NVLINK
    """Within a host: one of ``INTERCONNECTS`` but ``auto``."""
    network_gbps: float = 12.5
    """Between hosts, for one GPU, each way: GB/s."""

    @property
    def gpus(self) -> int:
        return self.per_host * self.hosts

    @property
    def card(self) -> Card:
        card = card_of(self.gpu)
        return msgspec.structs.replace(card, nvlink=self.interconnect == NVLINK)

    def has_nvlink(self, ranks: int) -> bool:
        """Whether so many GPUs of a host reach one another without PCIe."""
        return self.interconnect == NVLINK and ranks <= self.gpu.nvlink_group

    def link_of(self, ranks: int) -> str:
        """In words, what joins ``ranks`` GPUs."""
        if ranks > self.per_host:
            return f"network at {self.network_gbps:g} GB/s a GPU"
        if self.has_nvlink(ranks):
            return f"NVLink at {self.gpu.link_gbps:g} GB/s"
        peers = "peer to peer" if self.interconnect == PEERS else f"shared by {ranks}"
        return f"PCIe at {self.gpu.pcie_gbps:g} GB/s, {peers}"


def devices(
    gpu: Gpu,
    *,
    per_host: int,
    hosts: int = 1,
    interconnect: str = "auto",
    network_gbps: float | None = None,
) -> Devices:
    """What was asked for, checked. ``auto``: NVLink where the GPU has it for more than a pair.

    Raises:
        SetupError: a number of GPUs or hosts below one, or a link that the GPU has not.
    """
    for name, value, most in (
        ("gpus per host", per_host, MOST_PER_HOST),
        ("hosts", hosts, MOST_GPUS // max(1, per_host)),
    ):
        if value < 1:
            raise SetupError(
                f"{name} {value} leaves nothing to plan for: choose 1 or more (a {gpu.name} host "
                f"usually has {gpu.gpus_per_host})"
            )
        if value > most:
            raise SetupError(
                f"{name} {value} is more than plans are made for: choose 1 to {most} ("
                f"{MOST_PER_HOST} in a host, {MOST_GPUS:,} in all)"
            )
    if interconnect not in INTERCONNECTS:
        raise SetupError(
            f"interconnect {interconnect!r} is not known: choose one of {', '.join(INTERCONNECTS)}"
        )
    if interconnect == NVLINK and not gpu.has_nvlink:
        raise SetupError(f"interconnect nvlink: {gpu.name} has no NVLink: choose pcie")
    bridged = gpu.nvlink_group > 2
    chosen = interconnect
    if interconnect == "auto":
        chosen = NVLINK if gpu.has_nvlink and bridged else PCIE
    network = network_gbps or gpu.network_gbps or USUAL_NETWORK_GBPS
    return Devices(
        gpu=gpu, per_host=per_host, hosts=hosts, interconnect=chosen, network_gbps=network
    )


USUAL_NETWORK_GBPS = 12.5
"""100 Gbit/s for a GPU, where nobody has said which network there is."""


class Links(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of each kind of message, by a calibration."""

    devices: Devices
    calibration: Calibration

    def all_reduce(self, ranks: int, size: float) -> float:
        """Of ``size`` bytes over ``ranks``: latency, and 2(n-1)/n of the bytes over the link.

        Beyond a host, first within each, then between the hosts.
        """
        if ranks <= 1:
            return 0.0
        inside = min(ranks, self.devices.per_host)
        time = self._inside(inside, size)
        if ranks > inside:
            groups = -(-ranks // inside)
            moved = 2 * (groups - 1) / groups * size / inside
            time += 2 * (groups - 1) * self.calibration.network_s + moved / self.network
        return time

    def _inside(self, ranks: int, size: float) -> float:
        if ranks <= 1:
            return 0.0
        latency, rate = self._local(ranks)
        return latency + 2 * (ranks - 1) / ranks * size / rate

    def _local(self, ranks: int) -> tuple[float, float]:
        """Latency of a collective within a host, and bytes/s of a rank."""
        told, gpu = self.calibration, self.devices.gpu
        if self.devices.has_nvlink(ranks):
            latency = told.nvlink_s + told.nvlink_rank_s * ranks
            return latency, gpu.link_gbps * GIGA * told.nvlink_share
        rate = gpu.pcie_gbps * GIGA
        if self.devices.interconnect == PEERS:
            return told.pcie_rank_s * ranks, rate * told.pcie_peer_share
        return told.pcie_rank_s * ranks, rate * told.pcie_share / ranks

    def all_to_all(self, ranks: int, size: float, routing: Routing) -> float:
        """Each rank sends ``size`` bytes of tokens to the ranks that have their experts, or gets
        as many sums of their results back.

        A token crosses the network once for each host that has one of its experts, and is passed
        on inside once to each rank that has (DeepSeek-V3, arXiv:2412.19437 section 3.2). Both go on
        at once, so the slower link decides.
        """
        if ranks <= 1:
            return 0.0
        inside = min(ranks, self.devices.per_host)
        hosts = -(-ranks // inside)
        latency, rate = self._local(inside) if inside > 1 else (0.0, float("inf"))
        latency += self.calibration.exchange_s
        passed = routing.reached(ranks) * (inside - 1) / inside * size
        if hosts == 1:
            return latency + passed / rate
        outward = routing.reached(hosts) * (hosts - 1) / hosts * size
        latency += self.calibration.network_s
        return latency + max(passed / rate, outward / self.network)

    def ring(self, ranks: int) -> tuple[float, float]:
        """Latency of a message to the next group of a ring, and bytes/s of a rank, where all
        ``ranks`` of the groups send at once; the slowest hop sets the pace."""
        _, rate = self._local(min(ranks, self.devices.per_host))
        if ranks > self.devices.per_host:
            return self.calibration.network_s, min(rate, self.network)
        return self._local(2)[0], rate

    def hop(self, size: float, *, crosses_hosts: bool) -> float:
        """One message from a stage to the next."""
        if crosses_hosts:
            return self.calibration.network_s + size / self.network
        latency, rate = self._local(2)
        return latency + size / rate

    @property
    def network(self) -> float:
        """Bytes/s of one GPU to another host."""
        return self.devices.network_gbps * GIGA * self.calibration.network_share

    def between(self, *, crosses_hosts: bool) -> float:
        """Bytes/s of one GPU to one of another replica."""
        return self.network if crosses_hosts else self._local(2)[1]
