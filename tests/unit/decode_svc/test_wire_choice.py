"""Which of the wires that were measured is taken, and how that is told."""

from __future__ import annotations

import pytest

from decode_svc.wires import Measured, fastest


@pytest.mark.parametrize(
    ("rates", "taken"),
    [
        ({"shm": 8e9, "ucx": 2e9, "tcp": 2.1e9}, "shm"),
        ({"shm": 2e9, "ucx": 2.1e9}, "shm"),  # not clearly faster: a short measurement is not exact
        ({"shm": 2e9, "ucx": 2.3e9}, "ucx"),
        ({"ucx": 1e9, "tcp": 2e9, "nixl": 2.1e9}, "tcp"),
        ({"shm": 0.0, "ucx": 0.0}, "shm"),  # there was no room to measure: the better by nature
    ],
)
def test_the_fastest_is_taken_and_the_earlier_where_they_are_alike(
    rates: dict[str, float], taken: str
) -> None:
    assert fastest([Measured(wire, rate) for wire, rate in rates.items()]).wire == taken


@pytest.mark.parametrize(
    ("measured", "told"),
    [
        (Measured("shm", 7.934e9), "shm 7.93 GB/s"),
        (Measured("tcp", 1.25e6), "tcp 1.2 MB/s"),
        (Measured("ucx"), "ucx (not measured)"),
    ],
)
def test_a_rate_is_told_in_the_unit_that_shows_it(measured: Measured, told: str) -> None:
    assert str(measured) == told
