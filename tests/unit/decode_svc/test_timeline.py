"""The phases of a request always add up to its whole time, whichever marks were made."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_svc.timeline import Timeline
from ekiden.core.clock import ManualClock

MARKS = ("prefill_started", "first_token", "kv_ready", "tokens")


@given(st.lists(st.tuples(st.sampled_from(MARKS), st.floats(0, 100)), max_size=12))
def test_the_phases_add_up_and_none_is_negative(marks: list[tuple[str, float]]) -> None:
    clock = ManualClock(5.0)
    timeline = Timeline(clock)
    for name, wait in marks:
        clock.advance(wait)
        getattr(timeline, name)()
    clock.advance(1.0)
    split = timeline.split()
    assert split.total_s == pytest.approx(clock.now() - 5.0)
    parts = (
        split.queue_s,
        split.prefill_s,
        split.transfer_s,
        split.first_decode_s,
        split.decode_s,
    )
    assert all(part >= 0 for part in parts)


def _walk(steps: list[tuple[str, float]]) -> Timeline:
    clock = ManualClock()
    timeline = Timeline(clock)
    for name, wait in steps:
        clock.advance(wait)
        mark: Callable[[], None] = getattr(timeline, name)
        mark()
    return timeline


def test_a_disaggregated_request_is_cut_at_its_marks() -> None:
    timeline = _walk(
        [
            ("prefill_started", 1.0),
            ("first_token", 2.0),
            ("kv_ready", 4.0),
            ("tokens", 8.0),
            ("tokens", 16.0),
        ]
    )
    split = timeline.split()
    assert (split.queue_s, split.prefill_s, split.transfer_s) == (1.0, 2.0, 4.0)
    assert (split.first_decode_s, split.decode_s) == (8.0, 16.0)
    assert timeline.ttft_s == 3.0


def test_a_local_request_has_no_transfer() -> None:
    split = _walk([("prefill_started", 1.0), ("first_token", 2.0), ("tokens", 4.0)]).split()
    assert (split.transfer_s, split.first_decode_s) == (0.0, 4.0)


def test_a_retried_prefill_counts_from_its_last_start() -> None:
    split = _walk(
        [("prefill_started", 1.0), ("prefill_started", 5.0), ("first_token", 1.0)]
    ).split()
    assert (split.queue_s, split.prefill_s) == (6.0, 1.0)
