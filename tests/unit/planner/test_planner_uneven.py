"""TP that divides no heads, and stages and ranks in other numbers than powers of two (R12)."""

import msgspec
import pytest
from plans import option, plan, question, stepper

from ekiden.parallel.split import head_split
from ekiden.planner.catalogue import by_name
from ekiden.planner.decision import decide
from ekiden.planner.devices import devices
from ekiden.planner.hardware import gpu
from ekiden.planner.layout import Layout
from ekiden.planner.options import layouts
from ekiden.planner.profiles import profile
from ekiden.planner.why import why
from ekiden.planner.work import busiest


def tried(model: str, per_host: int, hosts: int = 1) -> list[Layout]:
    return list(layouts(by_name(model), devices(gpu("H100"), per_host=per_host, hosts=hosts)))


@pytest.mark.parametrize(("per_host", "sizes"), [(5, {5}), (6, {3, 6}), (7, {7}), (12, {3, 6, 12})])
def test_r12_tp_of_what_divides_a_host_is_considered(per_host, sizes):
    assert sizes <= {one.tp for one in tried("Llama-3.1-8B", per_host)}


def test_three_hosts_are_three_stages():
    assert Layout(tp=8, pp=3) in tried("Llama-3.1-405B", 8, hosts=3)
    assert Layout(tp=2, pp=3) in tried("Llama-3.1-8B", 6)
    assert Layout(dp=24, ep=24) in tried("DeepSeek-V3", 8, hosts=3)


def test_powers_of_two_are_all_that_is_considered_where_hosts_are_such():
    sizes = {size for one in tried("DeepSeek-V3", 8, hosts=4) for size in (one.tp, one.pp, one.dp)}
    assert sizes == {1, 2, 4, 8, 16, 32}


@pytest.mark.parametrize("tp", range(1, 33))
def test_r12_the_busiest_rank_has_most_heads(tp: int):
    attention = by_name("Llama-3.1-8B").layers[0].attention
    shares = head_split(32, 8, tp)
    rank, heads = busiest(attention, tp)
    assert heads == shares[rank].num_q == max(share.num_q for share in shares)


def test_r12_the_busiest_rank_is_not_always_the_first():
    attention = by_name("Llama-3.1-8B").layers[0].attention
    assert busiest(attention, 12) == (8, 4), "four KV heads have two ranks each, four have one"
    eight, twelve = (stepper("Llama-3.1-8B", "H100", Layout(tp=tp)).works[0] for tp in (8, 12))
    assert twelve.scores[0].decode == eight.scores[0].decode, "four query heads on one rank"
    assert twelve.dense_bytes < eight.dense_bytes, "its MLP is cut in twelve all the same"


def test_r12_an_uneven_tp_takes_as_long_as_its_busiest_rank():
    attention = {
        tp: stepper("Llama-3.1-8B", "H100", Layout(tp=tp)).decode(64, 8192).attention
        for tp in (1, 3, 4)
    }
    assert attention[3] == pytest.approx(attention[1] * 3 / 8), "three of eight KV heads, not 2.67"
    assert attention[4] == pytest.approx(attention[1] * 2 / 8)


def test_r12_an_uneven_tp_that_is_chosen_says_what_it_costs():
    decision = plan("Llama-3.1-70B", "H100", 3, smaller=())
    assert decision.chosen.layouts == (Layout(tp=3),)
    said = " ".join(why(decision))
    assert "TP3 does not divide the 64 query heads in 8 groups evenly" in said
    assert "the busiest GPU has 24, 12% more than an even part" in said


def test_r12_engines_that_want_even_heads_refuse_it():
    asked = question("Llama-3.1-70B", "H100", 6, smaller=())
    decision = decide(msgspec.structs.replace(asked, profile=profile("vllm")))
    assert option(decision, Layout(tp=4)).works
    refused = option(decision, Layout(tp=3)).refused
    assert refused.startswith("TP 3 does not divide the 64 query heads")
    assert "choose 2 or 4" in refused


def test_r12_what_is_no_attention_is_that_of_its_own_busiest_rank():
    attention, mlp = (4 + 4 + 2) * 128 * 4096, 3 * 1195 * 4096
    found = stepper("Llama-3.1-8B", "H100", Layout(tp=12)).works[0].dense_bytes
    assert found == 32 * 2 * (attention + mlp + 2 * 4096), "14,336 over 12 ranks are 1,195 at most"
