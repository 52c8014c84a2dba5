"""What replicas of one machine cost one another, by the constants of its calibration."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import stepper

from ekiden.core.errors import SetupError
from ekiden.planner import neighbours, serving
from ekiden.planner.batch import Batch
from ekiden.planner.calibration import calibration, check
from ekiden.planner.devices import devices
from ekiden.planner.hardware import gpu
from ekiden.planner.neighbours import beside, slowed
from ekiden.planner.steps import Stepper
from ekiden.planner.workload import workload

BRIEF = workload("chat", prompt=512, output=64, rate=None)
POOLS = (1, 1)
CROWDED = {"beside_decode": 1.4, "beside_prompts": 1.2}


def crowded(per_host: int = 2, **times: float) -> Stepper:
    """On a machine whose replicas slow one another down."""
    one = stepper("Llama-3.1-8B", "A6000", on=devices(gpu("A6000"), per_host=per_host))
    told = msgspec.structs.replace(one.told, **(times or CROWDED))
    return Stepper(one.replica, one.devices, told)


@given(times=st.floats(1, 8), tokens=st.integers(1, 4000), sequences=st.integers(1, 64))
def test_a_slowed_device_takes_so_many_times_as_long_for_everything(
    times: float, tokens: int, sequences: int
):
    one = crowded()
    batch = Batch(decode=sequences, context=900.0, prefill=tokens, seen=tokens / 2)
    assert slowed(one, times).mixed(batch).total == pytest.approx(times * one.mixed(batch).total)


def test_what_a_request_costs_beside_steps_is_not_slowed():
    assert slowed(crowded(), 2.0).told.request_s == crowded().told.request_s


def test_without_constants_nothing_changes_to_the_bit():
    one = crowded(beside_decode=1.0, beside_prompts=1.0)
    assert neighbours.disaggregated(one, one, BRIEF, 3.0, POOLS) == serving.disaggregated(
        one, one, BRIEF, 3.0, POOLS
    )
    assert neighbours.aggregated(one, BRIEF, 3.0, 2) == serving.aggregated(one, BRIEF, 3.0, 2)


@given(rate=st.floats(0.05, 6.0))
def test_two_pools_of_one_machine_slow_one_another_by_no_more_than_what_was_measured(rate: float):
    one = crowded()
    prefill, decode = beside(one, one, BRIEF, rate, POOLS)
    for slow, name in ((prefill, "beside_decode"), (decode, "beside_prompts")):
        times = one.devices.gpu.bf16_tflops / slow.devices.gpu.bf16_tflops
        assert 1 < times < CROWDED[name]


def test_who_has_more_to_do_slows_its_neighbour_more():
    quiet, busy = (
        neighbours.disaggregated(crowded(), crowded(), BRIEF, rate, POOLS) for rate in (0.1, 4.0)
    )
    plain = [serving.disaggregated(crowded(), crowded(), BRIEF, r, POOLS) for r in (0.1, 4.0)]
    assert quiet.prefill.total < 1.1 * plain[0].prefill.total
    assert busy.prefill.total > 1.3 * plain[1].prefill.total
    assert busy.tpot_p50 > plain[1].tpot_p50


def test_pools_on_machines_of_their_own_leave_one_another_alone():
    one = crowded(per_host=1)
    assert beside(one, one, BRIEF, 3.0, POOLS) == (one, one)


def test_one_replica_has_no_neighbour_and_two_that_do_both_have():
    one = crowded()
    assert beside(one, one, BRIEF, 3.0, (0, 1)) == (one, one)
    alone = serving.aggregated(one, BRIEF, 6.0, 2)
    assert neighbours.aggregated(one, BRIEF, 6.0, 2).tpot_p50 > alone.tpot_p50


def test_pools_that_can_only_keep_up_alone_are_told_that_they_cannot():
    one = crowded()
    most = 0.97 / one.busy(512)
    assert not serving.disaggregated(one, one, BRIEF, most, POOLS).limit
    assert "prefill" in neighbours.disaggregated(one, one, BRIEF, most, POOLS).limit


@pytest.mark.parametrize("value", [0.5, 11.0, float("nan")])
def test_a_neighbour_that_speeds_things_up_or_stops_them_is_refused(value: float):
    told = msgspec.structs.replace(calibration("vllm"), beside_decode=value)
    with pytest.raises(SetupError, match="beside_decode"):
        check(told)
