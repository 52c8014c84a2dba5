"""What is served in place of a plan that the engine does not serve yet."""

import msgspec
import pytest
from plans import option, plan, question

from ekiden.models.registry import MODELS
from ekiden.planner.decision import decide
from ekiden.planner.flags import blocked
from ekiden.planner.instead import compared, instead, pin
from ekiden.planner.layout import Layout
from ekiden.planner.options import DISAGGREGATED
from ekiden.planner.report import deploy
from ekiden.planner.workload import Objectives


def two_hosts(**more):
    return plan("Llama-3.1-405B", "H100", 8, hosts=2, **more)


def test_a_replica_over_two_hosts_gives_way_to_the_best_that_stays_in_one():
    decision = two_hosts()
    assert blocked(decision.asked, decision.chosen, MODELS)
    found = instead(decision, MODELS)
    assert found is option(decision, Layout(tp=8), "fp8")
    assert pin(decision.asked, found) == "-tp 8 --weights fp8"
    times = found.rate / decision.chosen.rate
    said = compared(decision, found)
    assert f"{times:.3g} times the chosen, with smaller weights" in said
    assert "TTFT P95" in said
    assert "TPOT P95" in said


def test_the_pinned_question_is_answered_by_the_servable_plan():
    found = instead(two_hosts(), MODELS)
    pinned = two_hosts(pinned=found.layouts[0], weights=found.form.name)
    assert pinned.chosen == found
    assert not blocked(pinned.asked, pinned.chosen, MODELS)


def test_less_is_said_in_percent_of_the_chosen():
    decision = plan("DeepSeek-V3", "H200", 8, hosts=2, smaller=())
    served = {*MODELS, "deepseek_v3"}
    found = instead(decision, served)
    assert found.layouts == (Layout(tp=8),), "experts within TP are no option of ekiden's"
    assert found.rate < decision.chosen.rate
    share = 1 - found.rate / decision.chosen.rate
    assert f"{share:.0%} less than the chosen" in compared(decision, found)


def test_where_nothing_is_served_it_is_none():
    decision = two_hosts(smaller=())
    assert instead(decision, MODELS) is None
    assert deploy(decision, "m", MODELS)["servable"] is None
    assert instead(plan("Mixtral-8x7B", "H200", 1), MODELS) is None


def test_a_plan_that_is_served_needs_no_other():
    found = deploy(plan("Llama-3.1-8B", "H100", 1), "m", MODELS)
    assert (found["blocked"], found["servable"]) == ("", None)


def test_a_rate_that_is_too_much_is_compared_at_what_each_carries():
    decision = two_hosts(rate=1000.0)
    assert decision.short
    found = instead(decision, MODELS)
    assert found.works
    assert "times the chosen" in compared(decision, found)


def test_with_a_rate_the_gpus_are_compared():
    decision = plan("DeepSeek-V3", "H200", 8, hosts=2, smaller=(), rate=5.0)
    found = instead(decision, {*MODELS, "deepseek_v3"})
    assert f"on {found.gpus} GPUs" in compared(decision, found)
    assert f"the chosen takes {decision.chosen.gpus}" in compared(decision, found)


def test_what_is_served_but_misses_says_by_how_much():
    decision = two_hosts(smaller=("int4",), objectives=Objectives(tpot_p95=1e-3))
    found = instead(decision, MODELS)
    assert not found.works
    assert not blocked(decision.asked, found, MODELS)
    assert "over 1.0 ms" in compared(decision, found)


def test_no_option_pins_two_pools_of_different_layouts():
    asked = question("Llama-3.1-70B", "H100", 8, weights="fp8", work="rag", rate=3)
    two = next(one for one in decide(asked).lost if one.kind == DISAGGREGATED)
    assert pin(asked, two).startswith("-tp ") == (two.layouts[0] == two.layouts[1])
    unlike = msgspec.structs.replace(two, layouts=(Layout(tp=2), Layout(tp=4)))
    assert pin(asked, unlike) == ""


@pytest.mark.parametrize(("pp", "words"), [(1, "-tp 2"), (4, "-tp 2 -pp 4")])
def test_stages_are_pinned_with_their_own_option(pp: int, words: str):
    asked = question("Llama-3.1-8B", "A6000", 8)
    one = option(decide(asked), Layout(tp=2, pp=pp))
    assert pin(asked, one) == words
