"""Laws of shares and sums, over random shapes and layouts."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ekiden.planner.catalogue import by_name
from ekiden.planner.geometry import Geometry, from_config
from ekiden.planner.hardware import gpu
from ekiden.planner.kv import rank_kv
from ekiden.planner.layout import Layout
from ekiden.planner.limits import Limits
from ekiden.planner.memory import Replica, card_of, memory
from ekiden.planner.precision import FORMATS
from ekiden.planner.profiles import profile
from ekiden.planner.weights import rank_weights


@st.composite
def models(draw: st.DrawFn) -> Geometry:
    kv_heads = draw(st.integers(1, 6))
    config = {
        "model_type": draw(st.sampled_from(["llama", "qwen2", "mixtral"])),
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * draw(st.integers(1, 4)),
        "head_dim": 16,
        "hidden_size": 64,
        "intermediate_size": draw(st.integers(8, 200)),
        "num_hidden_layers": draw(st.integers(1, 6)),
        "vocab_size": draw(st.integers(50, 400)),
        "max_position_embeddings": 512,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    }
    return from_config(config)


def shared_by_all(model: Geometry) -> int:
    """Bytes in bf16 of what every TP rank has whole."""
    return 2 * sum(m.elements * n for m, n in model.matrices() if m.cut == "whole")


@given(model=models(), data=st.data())
def test_shares_over_ranks_sum_to_the_whole(model: Geometry, data):
    tp = data.draw(st.integers(1, model.layers[0].attention.kv_heads))
    ranks = rank_weights(model, Layout(tp=tp), FORMATS["bf16"])
    assert sum(ranks) == 2 * model.parameters + (tp - 1) * shared_by_all(model)
    kv = rank_kv(model, Layout(tp=tp))
    assert sum(rank.token_bytes for rank in kv) == rank_kv(model, Layout())[0].token_bytes


@given(model=models(), data=st.data())
def test_stages_sum_to_the_whole(model: Geometry, data):
    pp = data.draw(st.integers(1, len(model.layers)))
    assert sum(rank_weights(model, Layout(pp=pp), FORMATS["bf16"])) == 2 * model.parameters
    kv = rank_kv(model, Layout(pp=pp))
    assert sum(rank.token_bytes for rank in kv) == rank_kv(model, Layout())[0].token_bytes


@given(model=models(), form=st.sampled_from(sorted(FORMATS)), data=st.data())
def test_more_tp_never_needs_more_of_a_rank(model: Geometry, form: str, data):
    most = model.heads
    few, many = sorted(data.draw(st.integers(1, most)) for _ in range(2))
    weights = [max(rank_weights(model, Layout(tp=n), FORMATS[form])) for n in (few, many)]
    assert weights[1] <= weights[0]
    kv = [max(r.token_bytes for r in rank_kv(model, Layout(tp=n))) for n in (few, many)]
    assert kv[1] <= kv[0]


@given(ep=st.sampled_from([1, 2, 4, 8]))
def test_experts_over_ranks_sum_to_the_whole(ep: int):
    model = by_name("Mixtral-8x7B")
    ranks = rank_weights(model, Layout(tp=8, ep=ep), FORMATS["bf16"])
    assert sum(ranks) == 2 * model.parameters + 7 * shared_by_all(model)


@given(ep=st.sampled_from([4, 8, 16]))
def test_attention_dp_replicates_attention_and_deals_experts(ep: int):
    model = by_name("Qwen3-30B-A3B")
    one = rank_weights(model, Layout(), FORMATS["bf16"])[0]
    ranks = rank_weights(model, Layout(dp=ep, ep=ep), FORMATS["bf16"])
    experts = 2 * sum(m.elements * n for m, n in model.matrices() if m.part == "expert")
    assert set(ranks) == {one - experts + experts // ep}


@given(name=st.sampled_from(["Qwen3-8B", "gpt-oss-20b", "Qwen3.5-27B"]), data=st.data())
def test_tokens_and_limits_go_one_way(name: str, data):
    length = data.draw(st.integers(1, 60_000))
    sequences = sorted(data.draw(st.integers(1, 512)) for _ in range(2))
    shares = sorted(data.draw(st.floats(0.1, 1.0)) for _ in range(2))
    asked = Replica(
        geometry=by_name(name),
        card=card_of(gpu("h100_sxm")),
        limits=Limits(max_model_len=length),
        profile=profile("vllm"),
    )

    def tokens(**limits: float) -> int:
        changed = msgspec.structs.replace(asked.limits, **limits)
        return memory(msgspec.structs.replace(asked, limits=changed)).tokens

    assert tokens(max_num_seqs=sequences[1]) <= tokens(max_num_seqs=sequences[0])
    assert tokens(utilization=shares[0]) <= tokens(utilization=shares[1])
    shape = rank_kv(asked.geometry, Layout())[0]
    assert shape.sequence_bytes(length) <= shape.sequence_bytes(length + 1)


def test_a_tied_head_lies_on_both_ends_of_a_pipeline():
    model = by_name("SmolLM2-135M")
    ranks = rank_weights(model, Layout(pp=3), FORMATS["bf16"])
    assert sum(ranks) == 2 * (model.parameters + model.vocab * model.hidden)
