"""What is drawn of a plan agrees with what is said of it."""

import pytest
from plans import plan

from ekiden.planner.curves import OVER, drawn, frontier, kv_lines, memory_bars
from ekiden.planner.options import DISAGGREGATED


@pytest.fixture(scope="module")
def decision():
    return plan("Llama-3.1-70B", "H100", 8, work="rag")


def test_the_chosen_deployment_reaches_the_objective_last(decision):
    goal = decision.asked.objectives.ttft_p95 * 1e3
    lines = frontier(decision)
    assert next(iter(lines)) == decision.chosen.name
    for points in lines.values():
        times = [time for _, time in points]
        assert times == pytest.approx(sorted(times), rel=0.01)
        assert times[-1] < OVER * goal


def test_every_bar_is_what_may_be_used_of_a_card(decision):
    rank = decision.asked.stepper(decision.chosen.layouts[0], decision.chosen.form).memory.ranks[0]
    for parts in memory_bars(decision).values():
        assert sum(parts.values()) == pytest.approx(rank.usable / (1 << 30))


def test_kv_fills_up_where_the_lines_cross(decision):
    lines = kv_lines(decision)
    mean = next(points for name, points in lines.items() if name.startswith("mean"))
    room = lines["room"][0][1]
    crossing = room / (mean[1][1] / mean[1][0])
    assert crossing == pytest.approx(decision.chosen.latency.most, rel=0.01)


def test_the_best_of_two_pools_is_drawn_beside_a_single_one(decision):
    assert decision.chosen in drawn(decision)
    assert any(one.kind == DISAGGREGATED for one in (*drawn(decision), *decision.lost))
