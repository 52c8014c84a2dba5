"""Times of steps and messages: what they are made of, and how they grow (R8-R15, R18, R36)."""

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given
from plans import stepper

from ekiden.core.errors import SetupError
from ekiden.planner import neighbours
from ekiden.planner.batch import Batch, Split
from ekiden.planner.calibration import Calibration, calibration, calibrations, read_calibration
from ekiden.planner.closed import closed_loop
from ekiden.planner.devices import Links, devices
from ekiden.planner.hardware import gpu
from ekiden.planner.layout import Layout
from ekiden.planner.routing import Routing, routing
from ekiden.planner.work import stage_works
from ekiden.planner.workload import workload

VLLM = calibration("vllm")
H100 = msgspec.to_builtins(gpu("H100"))
TOP2 = Routing(top_k=2)


def links(card: str, per_host: int = 8, hosts: int = 1, interconnect: str = "auto") -> Links:
    found = devices(gpu(card), per_host=per_host, hosts=hosts, interconnect=interconnect)
    return Links(devices=found, calibration=VLLM)


def test_r8_two_all_reduces_a_layer():
    one = stepper("Llama-3.1-70B", "H100", Layout(tp=8))
    alone = one.links.all_reduce(8, 8192 * 2)
    assert one.decode(1, 200).communication == pytest.approx(160 * alone)


def test_r9_decode_pays_latency_and_prefill_bandwidth():
    found = links("H100")
    latency = found.all_reduce(8, 0)
    assert found.all_reduce(8, 8192 * 2) < 1.05 * latency
    assert found.all_reduce(8, 8192 * 8192 * 2) > 50 * latency


@pytest.mark.parametrize(
    ("card", "ranks", "size", "microseconds"),
    [
        ("H100", 2, 8192, 4.38),
        ("H100", 8, 16_384, 5.31),
        ("H100", 8, 8_388_608, 50.7),
        ("l40s", 4, 8192, 12.98),
        ("l40s", 2, 134_217_728, 6719.6),
        ("rtx_pro_6000_server", 8, 8192, 26.67),
    ],
)
def test_all_reduces_come_near_published_ones(card, ranks, size, microseconds):
    told = links(card).all_reduce(ranks, size) * 1e6
    assert microseconds / 1.5 < told < microseconds * 1.5


@given(st.sampled_from(["H100", "l40s", "A6000"]), st.integers(2, 8), st.integers(0, 1 << 28))
def test_more_bytes_never_take_less_time(card, ranks, size):
    found = links(card)
    assert found.all_reduce(ranks, size) <= found.all_reduce(ranks, size + 4096)
    assert found.all_to_all(ranks, size, TOP2) <= found.all_to_all(ranks, size + 4096, TOP2)
    assert found.all_reduce(1, size) == 0


def test_r11_tp_pays_on_nvlink_and_not_on_pcie():
    quick = [stepper("Llama-3.1-8B", "H100", Layout(tp=tp)).decode(1, 200).total for tp in (1, 8)]
    assert 2 < quick[0] / quick[1] < 3, "7.4 to 2.7 ms in the articles"
    prompts = [stepper("Llama-3.1-8B", "A6000", Layout(tp=t)).prompt(2048).total for t in (2, 8)]
    assert prompts[1] > prompts[0], "over PCIe more ranks make a prompt slower"


def test_r11_eight_cards_for_one_request_serve_less_each():
    one, eight = (stepper("Llama-3.1-8B", "H100", Layout(tp=tp)) for tp in (1, 8))
    assert 64 / eight.decode(64, 300).total / 8 < 0.5 * 64 / one.decode(64, 300).total


def test_peers_behind_a_switch_do_not_share_the_host():
    shared, peers = (links("rtx_pro_6000_server", interconnect=x) for x in ("pcie", "pcie-p2p"))
    assert peers.all_reduce(8, 1 << 27) * 1e6 == pytest.approx(9757, rel=0.1), "as published"
    assert shared.all_reduce(8, 1 << 27) > 2 * peers.all_reduce(8, 1 << 27)


def test_four_bits_multiply_in_their_own_units_where_there_are_any():
    old, new = (stepper("Llama-3.1-8B", card, weights="nvfp4") for card in ("H100", "B200"))
    assert new.prompt(4096).weights < 0.25 * old.prompt(4096).weights


def test_a_bridge_joins_a_pair_and_no_more():
    card = devices(gpu("A6000"), per_host=4, interconnect="nvlink")
    assert card.has_nvlink(2)
    assert not card.has_nvlink(4)
    assert devices(gpu("A6000"), per_host=4).interconnect == "pcie"


def test_r13_stages_do_not_make_one_request_faster():
    one, four = (stepper("Llama-3.1-8B", "H100", Layout(pp=pp)) for pp in (1, 4))
    assert four.decode(1, 200).total > one.decode(1, 200).total
    assert four.prompt(200).total > one.prompt(200).total


def test_r13_stages_make_many_chunks_faster():
    one, four = (stepper("Llama-3.1-8B", "H100", Layout(pp=pp)) for pp in (1, 4))
    assert four.prompt(16 * 2048).total < 0.5 * one.prompt(16 * 2048).total


def test_r14_the_bubble_of_an_uneven_pipeline_is_shown():
    even = stepper("Llama-3.1-8B", "H100", Layout(pp=2)).decode(64, 300)
    uneven = stepper("Llama-3.1-8B", "H100", Layout(pp=3)).decode(64, 300)
    assert uneven.idle > even.idle
    assert uneven.total >= 3 * max(
        stage.total
        for stage, _ in stepper("Llama-3.1-8B", "H100", Layout(pp=3))._stages(
            Batch(decode=64 / 3, context=300)
        )
    ) * (1 - 1e-9)


def test_r15_what_crosses_hosts_is_cheaper_for_stages_than_for_tp():
    on = devices(gpu("H100"), per_host=8, hosts=2)
    inside = stepper("Llama-3.1-405B", "H100", Layout(tp=8, pp=2), on=on)
    across = stepper("Llama-3.1-405B", "H100", Layout(tp=16), on=on)
    assert inside.prompt(2048).communication < 0.6 * across.prompt(2048).communication
    assert inside.decode(8, 200).communication < 0.2 * across.decode(8, 200).communication


def test_r18_touched_experts():
    work = stage_works(stepper("Mixtral-8x7B", "H200").replica)[0]
    assert work.touched(1) == pytest.approx(2 / 8)
    assert work.touched(8) == pytest.approx(1 - 0.75**8)
    few, many = (stepper("Mixtral-8x7B", "H200").decode(n, 200).weights for n in (1, 64))
    assert many > 3 * few, "one token reads a quarter of the experts"


def test_r18_two_all_to_alls_a_layer_where_experts_are_dealt_over_groups():
    dealt = stepper("DeepSeek-V3", "H200", Layout(dp=8, ep=8), weights="fp8-block")
    limited, numbers = routing(dealt.replica.geometry), 8 * 7168
    there = dealt.links.all_to_all(8, numbers * (1 + 4 / 128), limited)
    back = dealt.links.all_to_all(8, numbers * 2, limited)
    assert dealt.decode(64, 200).communication == pytest.approx(58 * (there + back))


def test_reading_weights_bounds_a_small_batch():
    one = stepper("Llama-3.1-8B", "H100")
    weights = one.works[0].dense_bytes + one.works[0].head_bytes
    assert one.decode(1, 100).weights == pytest.approx(weights / (3350e9 * VLLM.memory_share))
    assert one.decode(8, 100).weights == one.decode(1, 100).weights
    assert one.decode(1024, 100).weights > 1.2 * one.decode(1, 100).weights


def test_latent_attention_multiplies_its_vector_in_decode_and_whole_keys_in_prefill():
    work = stage_works(stepper("DeepSeek-V3", "H200", Layout(tp=8), weights="fp8-block").replica)[0]
    (scores,) = work.scores
    assert scores.decode == 2 * 16 * (512 + 64 + 512)
    assert scores.prefill == 2 * 16 * (128 + 64 + 128)


def test_latent_attention_of_all_heads_is_bound_by_its_operations():
    one = stepper("DeepSeek-V3", "H200", Layout(dp=8, ep=8), weights="fp8-block")
    (scores,) = one.works[0].scores
    rate = 989e12 * VLLM.attention_share
    told = 61 * scores.decode * 4096 * 8 / rate
    assert one.decode(64, 4096).attention == pytest.approx(told)


def test_a_window_bounds_what_attention_reads():
    whole, windowed = (stepper(m, "H100") for m in ("Mistral-7B-v0.2", "Mistral-7B-v0.1"))
    assert windowed.decode(8, 8192).attention < 0.6 * whole.decode(8, 8192).attention


def test_eight_bits_multiply_faster_only_where_the_gpu_can():
    wide, small = (stepper("Llama-3.1-8B", "H100", weights=w) for w in ("bf16", "fp8"))
    assert small.prompt(4096).weights < 0.8 * wide.prompt(4096).weights
    old = [
        stepper("Llama-3.1-8B", "A6000", weights=w).prompt(4096).weights for w in ("bf16", "fp8")
    ]
    assert old[1] == pytest.approx(old[0], rel=0.01)


@given(
    st.sampled_from([Layout(), Layout(tp=4), Layout(pp=2), Layout(tp=2, pp=2)]),
    st.integers(1, 256),
    st.integers(16, 8192),
)
def test_a_larger_batch_or_context_never_takes_less(layout, sequences, context):
    one = stepper("Llama-3.1-8B", "H100", layout)
    time = one.decode(sequences, context).total
    assert time <= one.decode(sequences + 1, context).total * (1 + 1e-9)
    assert time <= one.decode(sequences, context + 16).total * (1 + 1e-9)
    assert one.added(1024, 0, sequences, context) >= 0


def test_the_parts_of_a_step_add_up():
    split = stepper("Llama-3.1-8B", "H100", Layout(tp=2, pp=2)).decode(32, 500)
    parts = msgspec.structs.asdict(split)
    assert split.total == pytest.approx(sum(parts.values()))
    assert (split + Split(idle=1.0)).idle == split.idle + 1
    assert split.times(2).total == pytest.approx(2 * split.total)


def test_a_prompt_beside_a_batch_costs_less_than_alone():
    one = stepper("Llama-3.1-8B", "A6000")
    assert one.added(200, 0, 64, 300) < one.prompt(200).total


def test_a_closed_loop_with_room_for_all_runs_them_all():
    one = stepper("Llama-3.1-8B", "H100")
    loop = closed_loop(one, prompt=1024, output=256, clients=32)
    assert 28 < loop.running < 32
    assert loop.tpot > one.decode(loop.running, 1024 + 128).total, "prompts delay tokens"


def test_a_closed_loop_without_room_waits_for_a_whole_request():
    one = stepper("Llama-3.1-70B", "H100", Layout(tp=2))
    loop = closed_loop(one, prompt=4096, output=512, clients=64)
    assert loop.running <= loop.most < 64
    assert loop.ttft > 512 * loop.tpot


def test_shipped_calibrations_are_of_one_struct_and_possible():
    assert set(calibrations()) == {"vllm", "trtllm", "sglang"}
    with pytest.raises(SetupError, match="choose one of vllm, trtllm, sglang"):
        calibration("tgi")


def test_a_calibration_is_read_from_json(tmp_path):
    file = tmp_path / "mine.json"
    mine = msgspec.structs.replace(VLLM, name="mine", device=gpu("H100"), median_error=0.02)
    file.write_bytes(msgspec.json.encode(mine))
    assert read_calibration(file) == mine


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_share": 1.5}, "memory_share 1.5 is not a share"),
        ({"layer_s": -1.0}, "layer_s -1 is not seconds"),
        ({"nonsense": 1}, "unknown field"),
        ({"device": {**H100, "bandwidth_gbps": -1.0}}, "bandwidth_gbps -1 of its device is none"),
        ({"device": {**H100, "memory_gib": 0.0}}, "memory_gib 0 of its device is none"),
        ({"device": {**H100, "bf16_tflops": 1e-300}}, "bf16_tflops 1e-300 of its device is none"),
        ({"kv_share": None}, "a JSON object of name, source, memory_share"),
    ],
)
def test_a_calibration_that_cannot_be_is_refused(tmp_path, change, message):
    file = tmp_path / "bad.json"
    fields = {**msgspec.to_builtins(VLLM), **change}
    file.write_bytes(msgspec.json.encode({k: v for k, v in fields.items() if v is not None}))
    with pytest.raises(SetupError, match=message):
        read_calibration(file)
    with pytest.raises(SetupError, match="cannot be read"):
        read_calibration(tmp_path / "none.json")


def test_every_constant_matters():
    """A constant that no figure depends on would be one that nobody could calibrate."""
    one = stepper("DeepSeek-V3", "H200", Layout(tp=4, dp=2, ep=8), weights="fp8-block")
    two = stepper("Llama-3.1-8B", "l40s", Layout(tp=2, pp=2))
    wide = stepper(
        "Llama-3.1-8B", "H100", Layout(tp=2), on=devices(gpu("H100"), per_host=1, hosts=2)
    )
    peers = devices(gpu("l40s"), per_host=2, interconnect="pcie-p2p")
    near = stepper("Llama-3.1-8B", "l40s", Layout(tp=2), on=peers)
    single = stepper("Llama-3.1-8B", "l40s")

    def figures(told: Calibration) -> list[float]:
        found = []
        for base in (one, two, wide, near):
            again = type(base)(base.replica, base.devices, told)
            loop = closed_loop(again, prompt=2048, output=128, clients=16)
            found += [again.decode(8, 500).total, again.prompt(2048).total, loop.ttft, loop.tpot]
        crowd = type(single)(single.replica, single.devices, told)
        shared = neighbours.disaggregated(crowd, crowd, workload("chat", rate=None), 8.0, (1, 1))
        return [*found, shared.ttft_p50, shared.tpot_p50]

    usual = figures(VLLM)
    for name, value in msgspec.structs.asdict(VLLM).items():
        if isinstance(value, float) and name != "median_error":
            assert figures(msgspec.structs.replace(VLLM, **{name: value * 0.5})) != usual, name
