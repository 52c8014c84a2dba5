"""Tables, CSV and the HTML page: they say what the result says, and can be read."""

import csv as stdlib_csv
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench_records import level_of, record, result_of
from hypothesis import given
from hypothesis import strategies as st

from ekiden.bench import csv, html
from ekiden.bench.result import ReplicaShare, Result, Service
from ekiden.bench.table import service_lines, table
from ekiden.measures.goodput import Slo
from ekiden.measures.spread import Spread
from ekiden.plots.axis import by_decades, from_zero, through

LEVELS = [
    level_of(
        [record(i, scheduled_s=1.0 + i, sent_s=1.0 + i, first_s=1.5 + i, ended_s=2.5 + i)
         for i in range(5)] + [record(9, error="timeout", detail="<too> long", first_s=None)],
        name=f"rate {rate}", value=rate, slo=Slo(ttft_ms=600),
    )
    for rate in (1.0, 2.0, 16.0)
]  # fmt: skip
RESULT = result_of(*LEVELS, model="a<b> & c")
VALUES = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=30)


def drawings(result: Result) -> list[ElementTree.Element]:
    found = re.findall(r"<svg.*?</svg>", html.page(result), re.DOTALL)
    return [ElementTree.fromstring(text) for text in found]


def test_the_table_has_a_row_a_level_and_every_failure_below():
    lines = table(RESULT).splitlines()
    assert [line.split("  ")[0] for line in lines[3:6]] == ["rate 1.0", "rate 2.0", "rate 16.0"]
    assert "500" in lines[3]
    assert "note: rate 1.0: 1 failed, timeout: <too> long" in lines


def test_what_our_services_told_stands_below_without_what_was_nothing():
    told = Service(
        prompt_sources={"decode_cache": 25, "prefill_computed": 75, "prefill_cache": 0},
        phases_ms={"queue": Spread(count=1, mean=8.0)},
        replicas=[
            ReplicaShare(role=role, replica=name, requests=1, tokens=1)
            for role, name in (("prefill", "p-0"), ("decode", "d-0"), ("decode", "d-1"))
        ],
        imbalance={"prefill": 1.0, "decode": 1.25},
        fallbacks={"local_prefill": 2},
        wires={"shm": 3_000_000},
        gauges={
            "KV in use": {"d-0": Spread(mean=0.25, max=0.5), "d-1": Spread()},
            "requests waiting": {"d-0": Spread()},
        },
    )
    assert list(service_lines(told)) == [
        "prompt tokens from decode cache 25%, prefill computed 75%",
        "mean ms of queue 8.00",
        "2 decode replicas, the busiest had 1.25 of the mean",
        "3.0 MB of KV over shm",
        "2 served another way: local_prefill",
        "KV in use (mean, most): d-0 0.25, 0.5",
    ]


def test_the_csv_has_a_line_a_level_with_named_figures(tmp_path: Path):
    path = tmp_path / "new" / "x.csv"
    csv.write(path, RESULT)
    with path.open() as file:
        rows = list(stdlib_csv.DictReader(file))
    assert [row["name"] for row in rows] == ["rate 1.0", "rate 2.0", "rate 16.0"]
    assert float(rows[0]["ttft_ms_p50"]) == pytest.approx(500)
    assert float(rows[0]["goodput_share"]) == pytest.approx(5 / 6)


def test_the_page_loads_nothing_and_escapes_what_servers_said():
    page = html.page(RESULT)
    assert "a&lt;b&gt; &amp; c" in page
    assert "a<b>" not in page
    assert "<too>" not in page
    assert not re.search(r"<(script|link|img)|(src|href)=|url\(|@import", page)


def test_the_page_draws_times_throughput_gaps_and_a_timeline_a_level():
    titles = [drawing.get("aria-label") for drawing in drawings(RESULT)]
    assert titles == [
        "TTFT against load",
        "TPOT against load",
        "Throughput against load",
        "Goodput against load",
        "Inter-token latency",
        *(f"Timeline, {level.name}" for level in LEVELS),
    ]


def test_a_single_level_has_no_lines_against_the_load():
    titles = [drawing.get("aria-label") or "" for drawing in drawings(result_of(LEVELS[0]))]
    assert titles == ["Inter-token latency", f"Timeline, {LEVELS[0].name}"]


def test_a_level_without_an_answer_is_still_reported():
    dead = level_of([record(error="connect", first_s=None, ended_s=1.2)])
    assert "1 failed, connect" in table(result_of(dead))
    assert [d.get("aria-label") for d in drawings(result_of(dead))] == ["Timeline, rate 1"]


def test_a_drawing_of_many_requests_stays_small():
    rows = [record(i, scheduled_s=float(i), sent_s=float(i), first_s=i + 1.0, ended_s=i + 2.0)
            for i in range(20_000)]  # fmt: skip
    (drawing,) = [
        d for d in drawings(result_of(level_of(rows))) if "Time" in d.get("aria-label", "")
    ]
    assert len(list(drawing.iter("{http://www.w3.org/2000/svg}circle"))) <= html.MAX_DOTS


def test_requests_in_flight_go_up_when_sent_and_down_when_ended():
    rows = [record(0, scheduled_s=0.0, sent_s=0.0, ended_s=4.0),
            record(1, scheduled_s=1.0, sent_s=2.0, ended_s=3.0)]  # fmt: skip
    assert html.in_flight(level_of(rows).samples) == [(0, 1), (2, 2), (3, 1), (4, 0)]


@given(values=VALUES)
def test_every_value_lies_on_its_axis_and_order_is_kept(values: list[float]):
    for axis in (from_zero(values, 0, 100), through(values, 0, 100),
                 by_decades(min(values), 2 * max(values), 0, 100)):  # fmt: skip
        places = [axis.at(value) for value in sorted(values)]
        assert places == sorted(places)
        assert places[0] >= 0
        assert places[-1] <= 100
        assert all(axis.low <= tick <= axis.high for tick in axis.ticks)


@given(values=VALUES)
def test_an_axis_from_zero_is_not_much_longer_than_its_values(values: list[float]):
    axis = from_zero(values, 0, 100)
    assert max(values) * (1 - 1e-6) <= axis.high <= 2.5 * max(values)


def test_counts_have_no_ticks_between_them():
    assert from_zero([3.0], 0, 100, whole=True).ticks == (0, 1, 2, 3, 4, 5)
