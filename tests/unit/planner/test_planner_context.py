"""Context parallelism: what it divides, what it passes round, and where it wins (R21, R37)."""

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given
from plans import option, plan, question, stepper

from ekiden.core.errors import SetupError
from ekiden.planner.batch import Batch
from ekiden.planner.catalogue import by_name
from ekiden.planner.decision import Decision, decide
from ekiden.planner.devices import devices
from ekiden.planner.evaluate import prompt_servers
from ekiden.planner.fit import fits
from ekiden.planner.flags import blocked
from ekiden.planner.hardware import gpu
from ekiden.planner.layout import Layout, check_layout
from ekiden.planner.options import DISAGGREGATED, prompt_layouts
from ekiden.planner.ring import Ring
from ekiden.planner.serving import disaggregated, moved
from ekiden.planner.why import why
from ekiden.planner.work import Scores
from ekiden.planner.workload import Objectives, Requests, Workload

QUICK = 1e30
"""Operations or bytes a second that take no time."""
SCORES = Scores(
    layers=1, window=0, prefill=1.0, decode=1.0, kv_bytes=10, query_bytes=40, partial_bytes=50
)


def ring(groups: int = 4, rate: float = 1.0, score_rate: float = QUICK, latency: float = 0.0):
    return Ring(groups=groups, latency=latency, rate=rate, score_rate=score_rate)


def test_a_whole_prompt_passes_its_keys_and_values():
    assert ring().waits(SCORES, tokens=400, seen=200) == 3 * 100 * 10


def test_a_chunk_behind_a_long_context_passes_queries_and_gets_results_back():
    assert ring().waits(SCORES, tokens=400, seen=100_000) == 3 * 100 * (40 + 50)


def test_each_hop_has_its_latency_and_results_one_more():
    late, later = (ring(latency=7.0).waits(SCORES, 400, seen) for seen in (200, 100_000))
    assert late == 3 * (100 * 10 + 7)
    assert later == 3 * (100 * 90 + 7 + 7)


def test_what_arrives_during_the_scores_of_another_part_is_not_waited_for():
    computing = 100 * 200 / 4  # Own tokens by what they see, of one part in four, at one a second.
    found = ring(score_rate=1.0, rate=0.1).waits(SCORES, 400, 200)
    assert found == pytest.approx(3 * (100 * 10 / 0.1 - computing))
    assert ring(score_rate=1.0).waits(SCORES, 400, 200) == 0


def test_a_window_bounds_what_is_passed():
    windowed = msgspec.structs.replace(SCORES, window=100, query_bytes=10_000)
    assert ring().waits(windowed, 400, 100_000) == 3 * (400 + 100) / 4 * 10


@given(st.integers(2, 16), st.floats(1, 1e5), st.floats(0, 1e6))
def test_more_tokens_are_never_waited_for_less(groups, tokens, before):
    one = ring(groups)
    assert one.waits(SCORES, tokens, before) <= one.waits(SCORES, tokens * 2, before) * (1 + 1e-9)
    assert one.waits(SCORES, tokens, before) <= one.waits(SCORES, tokens, before * 2) * (1 + 1e-9)


def test_r21_products_and_scores_of_a_prompt_divide_by_cp():
    one, four = (stepper("Llama-3.1-8B", "H100", Layout(cp=cp), chunk=65_536) for cp in (1, 4))
    batch = Batch(prefill=65_536, seen=32_768)
    whole, part = one.mixed(batch), four.mixed(batch)
    assert part.weights == pytest.approx(whole.weights / 4, rel=1e-3)
    assert part.attention == pytest.approx(whole.attention / 4)
    assert part.overhead == whole.overhead
    assert whole.communication == 0 < part.communication


def test_a_step_takes_as_many_chunks_as_there_are_groups():
    one, four = (stepper("Llama-3.1-8B", "H100", Layout(cp=cp), chunk=2048) for cp in (1, 4))
    assert (one.chunk, four.chunk) == (2048, 8192)
    assert four.prompt(8192).overhead == one.prompt(2048).overhead


def test_all_reduces_of_tp_see_the_tokens_of_a_group():
    both = stepper("Llama-3.1-8B", "H100", Layout(tp=2, cp=2), chunk=8192)
    alone = stepper("Llama-3.1-8B", "H100", Layout(tp=2), chunk=8192)
    batch = Batch(prefill=8192, seen=4096)
    pace = gpu("H100").bf16_tflops * 1e12 * both.told.attention_share
    passed = sum(both.messages.passed(work, 8192, 4096, pace) for work in both.works)
    assert passed > 0
    reduced = 64 * alone.links.all_reduce(2, 4096 * 4096 * 2)
    assert both.mixed(batch).communication == pytest.approx(reduced + passed)


def test_weights_are_in_every_group_and_kv_is_shared_out():
    one, two = (stepper("Llama-3.1-8B", "H100", Layout(tp=2, cp=cp)).memory for cp in (1, 2))
    assert len(two.ranks) == 4
    assert {rank.weights for rank in two.ranks} == {rank.weights for rank in one.ranks}
    assert two.tokens == pytest.approx(2 * one.tokens, rel=0.01)
    assert two.pool_tokens == pytest.approx(2 * one.pool_tokens, rel=0.01)
    token = one.ranks[0].shape.kinds[0].token_bytes
    kept, counted = 9216 // 2, two.ranks[0].communication - one.ranks[0].communication
    assert counted == 2 * kept * token, "a layer's KV of one part, and of the one that arrives"


@pytest.mark.parametrize(
    ("model", "layout", "says"),
    [
        ("Llama-3.1-8B", Layout(cp=0), "cp 0 is not a number of GPUs: choose 1 or more"),
        ("Mixtral-8x7B", Layout(cp=2, dp=2), "CP 2 does not go with DP 2.*choose 1 of either"),
        ("Qwen3-Next-80B-A3B", Layout(cp=2), "linear attention hand a state.*choose 1"),
    ],
)
def test_what_cannot_be_cut_is_refused(model: str, layout: Layout, says: str):
    with pytest.raises(SetupError, match=says):
        check_layout(by_name(model), layout)


def test_layouts_of_prefill_leave_gpus_for_decode_and_stay_within_hosts_by_tp():
    machines = devices(gpu("H100"), per_host=4, hosts=3)
    found = list(prompt_layouts(by_name("Llama-3.1-8B"), machines))
    assert Layout(tp=4, cp=2) in found
    assert Layout(cp=3) in found, "one group a host"
    assert all(one.cp > 1 and one.tp <= 4 and one.gpus < 12 for one in found)
    assert not list(prompt_layouts(by_name("Qwen3-Next-80B-A3B"), machines))


PUBLISHED = {1: 42.010, 2: 21.042, 4: 10.950, 16: 3.8}
"""Seconds to the first token of 128K tokens by groups of TP8: Llama 3 405B on hosts of eight H100s
with 400 Gbit/s a GPU, arXiv:2411.01783."""


@pytest.mark.parametrize("cp", [2, 4, 16])
def test_r21_what_cp_gains_is_what_was_published(cp: int):
    on = devices(gpu("H100"), per_host=8, hosts=16, network_gbps=50)
    one, cut = (
        stepper(
            "Llama-3.1-405B", "H100", Layout(tp=8, cp=n), weights="fp8", on=on, chunk=8192,
            length=131_072,
        ).prompt(131_072).total
        for n in (1, cp)
    )  # fmt: skip
    assert cut / one == pytest.approx(PUBLISHED[cp] / PUBLISHED[1], rel=0.3)


def test_r21_beyond_a_host_cp_gains_where_all_reduces_lose():
    on = devices(gpu("H100"), per_host=8, hosts=2, network_gbps=50)
    fields = {"weights": "fp8", "on": on, "chunk": 8192, "length": 131_072}
    wide, cut = (
        stepper("Llama-3.1-405B", "H100", layout, **fields).prompt(131_072)
        for layout in (Layout(tp=16), Layout(tp=8, cp=2))
    )
    assert cut.total < 0.8 * wide.total
    assert cut.communication < 0.5 * wide.communication


PCIE = "rtx_pro_6000_server"
"""A card with room for several long contexts, and without NVLink."""


def long_prompts(card: str, per_host: int, ttft: float, **more) -> Decision:
    model = more.pop("model", "Llama-3.1-8B")
    asked = question(model, card, per_host, length=131_072, smaller=(), **more)
    kinds = (Requests(prompt=120_000, output=200),)
    work = Workload(name="long", kinds=kinds, rate=0.05 if card == PCIE else 0.02)
    wanted = Objectives(ttft_p95=ttft, tpot_p95=0.1)
    return decide(msgspec.structs.replace(asked, work=work, objectives=wanted))


def said(decision: Decision) -> str:
    return " ".join(why(decision))


def without_cp(monkeypatch, *args, **more) -> Decision:
    monkeypatch.setattr("ekiden.planner.decision.prompt_servers", lambda asked, form: [])
    return long_prompts(*args, **more)


@pytest.mark.parametrize(
    ("asked", "more"),
    [((PCIE, 8, 9.7), {}), (("H100", 8, 5.0), {"model": "Llama-3.1-70B", "hosts": 4})],
)
def test_r37_cp_wins_over_pcie_and_across_hosts_where_it_keeps_ttft_on_fewer_gpus(
    monkeypatch, asked, more
):
    chosen = long_prompts(*asked, **more).chosen
    assert chosen.works
    assert chosen.kind == DISAGGREGATED
    assert [layout.cp > 1 for layout in chosen.layouts] == [True, False], "decode does without"
    other = without_cp(monkeypatch, *asked, **more).chosen
    assert not other.works or other.gpus > chosen.gpus


def test_r37_what_cp_brings_is_said_in_seconds_with_and_without():
    decision = long_prompts(PCIE, 8, 12.0)
    assert "computed in chunks of 4096. Context parallelism cuts each over 2 groups" in said(
        decision
    )
    one, cut = (decision.asked.stepper(Layout(cp=cp), decision.chosen.form) for cp in (1, 2))
    times = [f"{step.prompt(120_000).total:.2f} s" for step in (cut, one)]
    assert f"CP2 takes {times[0]} for one" in said(decision)
    assert f"where TP1 would take {times[1]}" in said(decision)
    assert "does not serve context parallelism" in blocked(
        decision.asked, decision.chosen, {"llama"}
    )


def test_r37_where_tp_is_quicker_cp_loses_and_is_told_by_how_much():
    decision = long_prompts("H100", 8, 2.0)
    assert decision.chosen.layouts == (Layout(tp=8),)
    assert "would not be quicker: 2.16 s on CP4 (4 GPUs), 0% of it communication" in said(decision)


def test_cp_that_cannot_be_says_why():
    assert "has no room here beside a replica" in said(long_prompts("H100", 1, 100.0))
    linear = long_prompts("H100", 8, 100.0, model="Qwen3-Next-80B-A3B")
    assert "does not go with linear attention" in said(linear)


@pytest.mark.parametrize("rate", [None, 20.0])
def test_r37_chat_does_without_cp(rate):
    decision = plan("Llama-3.1-8B", "A6000", 8, rate=rate, smaller=())
    every = (decision.chosen, *decision.lost)
    assert all(layout.cp == 1 for one in every for layout in one.layouts)
    assert "ontext parallelism" not in said(decision)
    assert option(decision, Layout()).works


def test_a_replica_with_cp_computes_prompts_only():
    asked = question("Llama-3.1-8B", "H100", 8)
    found = prompt_servers(asked, asked.own)
    assert {one.stepper.replica.layout.cp for one in found} == {2, 4}
    assert all(one.prompts > 0 == one.tokens == one.ceiling for one in found)


def test_a_sequence_fits_where_its_part_does():
    fields = {"chunk": 2048, "length": 131_072}
    one, two = (stepper("Llama-3.1-70B", "H100", Layout(tp=2, cp=n), **fields) for n in (1, 6))
    assert not fits(one.replica)
    assert fits(two.replica)


def test_what_the_last_step_leaves_to_be_sent_is_a_chunk_of_every_group():
    decode = stepper("Llama-3.1-8B", "H100")
    work = Workload(name="w", kinds=(Requests(prompt=16_384, output=1),))
    late = [
        moved(stepper("Llama-3.1-8B", "H100", Layout(cp=cp), chunk=1024), decode, work, 1.0, (1, 1))
        for cp in (1, 2, 4)
    ]
    times = [seconds for seconds, _ in late]
    assert times[1:] == pytest.approx([2 * times[0], 4 * times[0]])


def test_cp_is_tried_where_only_it_keeps_ttft_though_others_serve_more():
    decision = long_prompts("H100", 8, 3.0)
    most = msgspec.structs.replace(decision.asked.work, rate=None)
    found = decide(msgspec.structs.replace(decision.asked, work=most))
    two = next(o for o in (found.chosen, *found.lost) if o.kind == DISAGGREGATED)
    assert two.works
    assert two.layouts[0].cp > 1


def test_stages_compute_the_prompts_of_two_pools_where_they_save_gpus(monkeypatch):
    chosen = without_cp(monkeypatch, PCIE, 8, 12.0).chosen
    assert chosen.layouts == (Layout(pp=2), Layout())
    assert chosen.gpus == 5


def test_decode_has_room_for_prompts_while_they_are_computed():
    decision = long_prompts("A6000", 8, 40.0)
    two = next(one for one in decision.lost if one.kind == DISAGGREGATED)
    assert two.works
    assert two.replicas == (2, 2)
    prefill, decode = (decision.asked.stepper(layout, two.form) for layout in two.layouts)
    assert decode.tokens < 2 * 120_200, "of two requests on one card the second waits"
    fewer = disaggregated(prefill, decode, decision.asked.work, 0.02, (2, 1))
    assert fewer.ttft_p95 > 40.0
    assert fewer.tpot_p95 < 0.1, "once it has room it waits for nobody"
