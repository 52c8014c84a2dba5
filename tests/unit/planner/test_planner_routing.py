"""Where tokens go whose experts are dealt over hosts and ranks, and how long that takes (R18)."""

from itertools import combinations, product

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from ekiden.core.errors import SetupError
from ekiden.planner.calibration import calibration
from ekiden.planner.catalogue import by_name, entries
from ekiden.planner.devices import Devices, Links, devices
from ekiden.planner.geometry import from_config
from ekiden.planner.hardware import gpu
from ekiden.planner.precision import weight_format
from ekiden.planner.routing import Routing, routing
from ekiden.planner.small import dispatch_bytes

VLLM = calibration("vllm")
TOP8 = Routing(top_k=8)
NODE_LIMITED = Routing(top_k=8, groups=8, top_groups=4)
"""DeepSeek-V3's."""


def links(on: Devices) -> Links:
    return Links(devices=on, calibration=VLLM)


def hosts(count: int, per_host: int = 8) -> Devices:
    return devices(gpu("H100"), per_host=per_host, hosts=count, network_gbps=50)


def counted(one: Routing, places: int) -> float:
    """The same as ``reached`` by going through every choice of groups and of experts."""
    slots = range(places * one.groups)
    size = len(slots) // one.groups
    found, ways = 0, 0
    for groups in combinations(range(one.groups), one.top_groups):
        allowed = [slot for slot in slots if slot // size in groups]
        for experts in product(allowed, repeat=one.top_k):
            found += len({slot * places // len(slots) for slot in experts})
            ways += 1
    return found / ways


@pytest.mark.parametrize("places", [1, 2, 4])
@pytest.mark.parametrize(
    "one",
    [
        Routing(top_k=1),
        Routing(top_k=3),
        Routing(top_k=2, groups=2, top_groups=1),
        Routing(top_k=3, groups=4, top_groups=2),
    ],
)
def test_places_reached_are_those_of_every_choice_counted(one: Routing, places: int):
    assert one.reached(places) == pytest.approx(counted(one, places))


def test_one_place_is_reached_once_and_one_expert_reaches_one_place():
    assert TOP8.reached(1) == NODE_LIMITED.reached(1) == 1
    assert Routing(top_k=1).reached(64) == pytest.approx(1)


def test_a_limit_to_groups_bounds_the_hosts():
    assert NODE_LIMITED.reached(8) < 4 < TOP8.reached(8)
    assert NODE_LIMITED.reached(3) == TOP8.reached(3), "which divides no groups"


@given(st.integers(1, 16), st.integers(1, 512))
def test_no_more_places_are_reached_than_experts_are_taken(k: int, places: int):
    assert 1 - 1e-9 <= Routing(top_k=k).reached(places) <= min(k, places) + 1e-9


def test_the_limit_is_read_from_the_config():
    assert routing(by_name("DeepSeek-V3")) == NODE_LIMITED
    assert routing(by_name("Mixtral-8x7B")) == Routing(top_k=2)
    assert routing(by_name("Llama-3.1-8B")).reached(8) == pytest.approx(1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"topk_group": 9}, "topk_group 9 is more than the 8 of n_group: choose 1 to 8"),
        ({"n_group": 7}, "256 experts do not divide into the 7 groups of n_group"),
        ({"n_group": 0}, "n_group is 0: choose a whole number from 1"),
    ],
)
def test_groups_that_cannot_be_are_refused(change: dict, says: str):
    config = next(one.config for one in entries() if one.name == "DeepSeek-V3")
    with pytest.raises(SetupError, match=says):
        from_config({**config, **change})


def test_within_a_host_a_token_goes_once_to_each_rank():
    found = links(hosts(1))
    rate = 450e9 * VLLM.nvlink_share
    latency = VLLM.exchange_s + VLLM.nvlink_s + 8 * VLLM.nvlink_rank_s
    expected = latency + 7 / 8 * TOP8.reached(8) * 1e6 / rate
    assert found.all_to_all(8, 1e6, TOP8) == pytest.approx(expected)
    assert found.all_to_all(1, 1e6, TOP8) == 0


def test_one_expert_a_token_is_one_copy():
    found = links(hosts(1))
    moved = found.all_to_all(8, 1e9, Routing(top_k=1)) - found.all_to_all(8, 0, Routing(top_k=1))
    assert moved == pytest.approx(7 / 8 * 1e9 / (450e9 * VLLM.nvlink_share))


def test_a_token_crosses_the_network_once_for_each_host():
    found = links(hosts(4))
    network = 50e9 * VLLM.network_share
    expected = 3 * (1 - (3 / 4) ** 8) * 1e9 / network
    moved = found.all_to_all(32, 1e9, TOP8) - found.all_to_all(32, 0, TOP8)
    assert moved == pytest.approx(expected)
    assert moved < 0.5 * 8 * 3 / 4 * 1e9 / network, "a copy for each expert"


def test_a_host_of_one_gpu_passes_nothing_on():
    found = links(hosts(8, per_host=1))
    latency = VLLM.exchange_s + VLLM.network_s
    expected = latency + 7 / 8 * TOP8.reached(8) * 1e6 / found.network
    assert found.all_to_all(8, 1e6, TOP8) == pytest.approx(expected)


def test_tokens_are_sent_in_8_bits_only_to_experts_that_multiply_so():
    new, old = gpu("H100"), gpu("A6000")
    assert dispatch_bytes(new, weight_format("fp8-block")) == 1 + 4 / 128
    assert dispatch_bytes(old, weight_format("fp8-block")) == 2
    assert dispatch_bytes(new, weight_format("bf16")) == dispatch_bytes(new, weight_format("awq"))
    assert dispatch_bytes(new, weight_format("awq")) == 2


LEGACY = (200, 4096, ((8, 153, 158), (16, 43, 43), (32, 58, 57), (64, 51, 50)))
NEWER = (450, 8192, ((16, 90, 81), (32, 61, 61)))
"""NVLink in GB/s, tokens of 7,168 that take 8 experts on at most 4 hosts, and by ranks: GB/s of
dispatch in 8 bits and of combine in 16, with 400 Gbit/s a GPU between hosts. DeepEP's
docs/legacy.md (H800), and its README (version 2, Hopper, whose NVLink must have moved 255 GB/s for
the first row). Both count bytes for the token's own host, or within one host its own rank, too."""


@pytest.mark.parametrize("table", [LEGACY, NEWER])
@pytest.mark.parametrize("combine", [False, True])
def test_exchanges_come_near_published_ones(table: tuple, combine: bool):
    link, tokens, rows = table
    width = 2.0 if combine else dispatch_bytes(gpu("H100"), weight_format("fp8"))
    card = msgspec.structs.replace(gpu("H100"), link_gbps=link)
    for ranks, *gbps in rows:
        count, size = ranks // 8, tokens * 7168 * width
        limited = Routing(top_k=8, groups=count, top_groups=min(count, 4))
        measured = size * limited.reached(count if count > 1 else 8) / (gbps[combine] * 1e9)
        on = msgspec.structs.replace(hosts(count), gpu=card)
        found = links(on).all_to_all(ranks, size, limited)
        assert found == pytest.approx(measured, rel=0.2), ranks


FEW_TOKENS = (
    *((8, 77, 114), (16, 118, 195), (32, 155, 273), (64, 173, 314), (128, 192, 369)),
    (256, 194, 360),
)
"""Microseconds of dispatch and combine of 128 tokens by ranks, in the same table's kernels for
decode, which are chosen for latency."""


@pytest.mark.parametrize(("ranks", "dispatch", "combine"), FEW_TOKENS)
def test_exchanges_of_few_tokens_come_near_published_ones(ranks, dispatch, combine):
    card = msgspec.structs.replace(gpu("H100"), link_gbps=200)
    found = links(msgspec.structs.replace(hosts(ranks // 8), gpu=card))
    numbers = 128 * 7168
    there = found.all_to_all(ranks, numbers * (1 + 4 / 128), TOP8)
    back = found.all_to_all(ranks, numbers * 2, TOP8)
    assert there * 1e6 == pytest.approx(dispatch, rel=0.25)
    assert back * 1e6 == pytest.approx(combine, rel=0.3)
