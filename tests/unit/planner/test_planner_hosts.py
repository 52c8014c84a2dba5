"""Whether two pools go into the hosts that there are."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ekiden.planner.devices import devices
from ekiden.planner.hardware import gpu
from ekiden.planner.hosts import has_room


def machines(per_host: int, hosts: int):
    return devices(gpu("H100"), per_host=per_host, hosts=hosts)


@pytest.mark.parametrize(
    ("per_host", "hosts", "pools", "room"),
    [
        (8, 1, ((4, 1), (4, 1)), True),
        (8, 1, ((4, 2), (1, 1)), False),
        (6, 2, ((4, 2), (2, 2)), True),
        (6, 2, ((4, 3),), False),
        (6, 2, ((4, 1), (2, 4)), True),
        (8, 3, ((16, 1), (8, 1)), True),
        (8, 3, ((16, 1), (16, 1)), False),
        (8, 2, ((12, 1), (1, 1)), False),
    ],
)
def test_replicas_stay_within_hosts(per_host, hosts, pools, room):
    assert has_room(machines(per_host, hosts), *pools) is room


@given(
    per_host=st.integers(1, 6),
    hosts=st.integers(1, 3),
    pools=st.tuples(*[st.tuples(st.integers(1, 6), st.integers(0, 5))] * 2),
)
def test_room_is_found_where_replicas_placed_one_by_one_find_it(per_host, hosts, pools):
    pools = tuple((min(size, per_host), count) for size, count in pools)
    free, placed = [per_host] * hosts, True
    for size, count in sorted(pools, reverse=True):
        for _ in range(count):
            host = next((i for i, left in enumerate(free) if left >= size), None)
            placed = placed and host is not None
            if host is not None:
                free[host] -= size
    assert has_room(machines(per_host, hosts), *pools) is placed


def test_the_order_of_the_pools_does_not_matter():
    for one, other in product(((4, 2), (2, 3), (3, 1)), repeat=2):
        found = machines(6, 2)
        assert has_room(found, one, other) is has_room(found, other, one)
