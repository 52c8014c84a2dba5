"""Whether replicas of two sizes go into the hosts that there are."""

from __future__ import annotations

from collections import Counter

from ekiden.planner.devices import Devices


def has_room(devices: Devices, *pools: tuple[int, int]) -> bool:
    """Whether ``pools``, each (GPUs of a replica, replicas), have room together when the larger
    ones are placed first. A replica stays within a host where it can, else it takes whole ones."""
    free = Counter({devices.per_host: devices.hosts})
    for size, replicas in sorted(pools, reverse=True):
        if size > devices.per_host:
            free[devices.per_host] -= replicas * -(-size // devices.per_host)
            if free[devices.per_host] < 0:
                return False
        elif _place(free, size, replicas):
            return False
    return True


def _place(free: Counter[int], size: int, replicas: int) -> int:
    """Take room of hosts, by the GPUs that they have left, the fullest first; the replicas for
    which there is none."""
    for left, hosts in sorted(free.items()):
        each = left // size
        for count in (each, replicas % each) if each else ():
            taken = min(hosts, replicas // count) if count else 0
            free[left] -= taken
            free[left - count * size] += taken
            hosts, replicas = hosts - taken, replicas - taken * count
    return replicas
