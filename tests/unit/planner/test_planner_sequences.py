"""KV of a sequence, and the two moments at which a step takes most."""

from ekiden.planner.catalogue import by_name
from ekiden.planner.hardware import gpu
from ekiden.planner.kv import rank_kv
from ekiden.planner.layout import Layout
from ekiden.planner.limits import Resolved
from ekiden.planner.memory import Replica, card_of, memory
from ekiden.planner.peaks import Asked, Peak, chunk_or_sampler

GPT_OSS_ROW = 2 * 8 * 64 * 2
"""Bytes of a token in one layer of gpt-oss: key and value of 8 heads of 64, in bf16."""


def peak(model: str, chunk: int, sequences: int, layout: Layout, *, last: bool = True) -> Peak:
    limits = Resolved(max_model_len=4096, max_num_seqs=sequences, chunk=chunk, utilization=0.9)
    asked = Asked(geometry=by_name(model), layout=layout, limits=limits, last=last)
    return chunk_or_sampler(asked, sampler_bytes=38.25)


def test_a_window_keeps_itself_and_the_chunk_and_never_more_than_the_sequence():
    (shape,) = rank_kv(by_name("gpt-oss-20b"), Layout())
    full = 12 * 10_000 * GPT_OSS_ROW
    assert shape.sequence_bytes(10_000) == full + 12 * 128 * GPT_OSS_ROW
    assert shape.sequence_bytes(10_000, 1000) == full + 12 * 1128 * GPT_OSS_ROW
    assert shape.sequence_bytes(100, 1000) == 24 * 100 * GPT_OSS_ROW


def test_linear_layers_keep_a_state_and_nothing_a_token():
    (shape,) = rank_kv(by_name("Qwen3.5-27B"), Layout())
    assert shape.token_bytes == 16 * 2 * 4 * 256 * 2
    state = 48 * 128 * 128 * 4 + 3 * 2 * (2 * 16 * 128 + 48 * 128)
    assert shape.sequence_bytes(1000) == 1000 * shape.token_bytes + 48 * state


def test_a_wide_chunk_is_the_mlps_and_a_large_batch_the_samplers():
    chunk = peak("Llama-3.1-8B", 20_000, 8, Layout(tp=2))
    assert chunk == Peak(activations=20_000 * 2 * (3 * 7168 + 2 * 4096), sampler=0)
    batch = peak("Llama-3.1-8B", 16, 256, Layout(tp=2))
    assert batch.sampler == int(256 * 128_256 * 38.25)
    assert batch.activations == 16 * 2 * 4096


def test_only_the_last_stage_samples():
    assert peak("Llama-3.1-8B", 16, 256, Layout(pp=2), last=False).sampler == 0


def test_every_token_of_a_moe_chunk_is_computed_by_each_expert_it_is_sent_to():
    found = peak("Mixtral-8x7B", 8192, 1, Layout())
    assert found.activations == 8192 * 2 * (2 * 3 * 14_336 + 2 * 4096)


def test_dp_groups_each_have_their_own_tokens():
    asked = Replica(geometry=by_name("Qwen3-30B-A3B"), card=card_of(gpu("H200")))
    one = memory(asked)
    four = memory(Replica(geometry=asked.geometry, card=asked.card, layout=Layout(dp=4, ep=1)))
    assert four.tokens == 4 * one.tokens
    assert four.pool_tokens == 4 * one.pool_tokens
