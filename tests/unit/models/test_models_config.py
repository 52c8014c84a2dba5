"""config.json in every form that checkpoints have, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ekiden.core.config import EngineConfig
from ekiden.core.errors import SetupError
from ekiden.models.config import ModelConfig
from ekiden.models.layout import imbalance, kv_layout

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": 7,
}


def read(path: Path, **changes: Any) -> ModelConfig:
    fields = {name: value for name, value in {**LLAMA, **changes}.items() if value != "absent"}
    (path / "config.json").write_text(json.dumps(fields))
    return ModelConfig.from_dir(path)


def engine(path: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model_dir=path, model_name="m", **options)


def test_the_old_and_the_new_form_of_rope_say_the_same(tmp_path: Path) -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    old = read(tmp_path, rope_scaling={"rope_type": "llama3", **scaling})
    older = read(tmp_path, rope_scaling={"type": "llama3", **scaling})
    new = read(
        tmp_path,
        rope_theta="absent",
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **scaling},
    )
    assert old.rope == older.rope == new.rope
    assert (new.rope.theta, new.rope.kind, new.rope.original_max_position) == (5e5, "llama3", 512)
    assert new.max_position_embeddings == 2048


def test_an_override_of_rope_wins_over_the_old_field_and_moves_the_limit(tmp_path: Path) -> None:
    """F133: neither the theta nor the length of the original file survives the override."""
    model = read(
        tmp_path,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
        },
    )
    assert model.rope.theta == 1e6
    assert model.max_position_embeddings == 8192


@pytest.mark.parametrize("stated", [2048, 8192])
def test_yarn_reaches_factor_times_the_original_length(tmp_path: Path, stated: int) -> None:
    """F132: whether the file states the length before or after the stretch."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    model = read(tmp_path, max_position_embeddings=stated, rope_scaling=yarn)
    assert model.max_position_embeddings == 8192


def test_max_model_len_beyond_the_models_positions_is_refused_with_both(tmp_path: Path) -> None:
    model = read(tmp_path)
    assert model.resolve_max_model_len(engine(tmp_path)) == 2048
    assert model.resolve_max_model_len(engine(tmp_path, max_model_len=100)) == 100
    with pytest.raises(SetupError, match=r"--max-model-len 2049 .* 2048 positions"):
        model.resolve_max_model_len(engine(tmp_path, max_model_len=2049))


def test_head_dim_is_read_where_it_is_given(tmp_path: Path) -> None:
    """F138: hidden 64 over 8 heads is 8, and the file may say 16; null and 0 say nothing."""
    assert read(tmp_path, head_dim=16).head_dim == 16
    assert read(tmp_path, head_dim=None).head_dim == 8
    assert read(tmp_path, head_dim=0).head_dim == 8
    assert read(tmp_path, model_type="qwen3").head_dim == 128
    with pytest.raises(SetupError, match="head_dim is -4"):
        read(tmp_path, head_dim=-4)


def test_what_differs_between_families(tmp_path: Path) -> None:
    def flags(**changes: Any) -> tuple[bool, bool, bool, str]:
        m = read(tmp_path, **changes)
        return m.qkv_bias, m.o_bias, m.mlp_bias, m.qk_norm

    assert flags() == (False, False, False, "")
    assert flags(attention_bias=True, mlp_bias=True) == (True, True, True, "")
    assert flags(model_type="mistral") == (False, False, False, "")
    assert flags(model_type="qwen2") == (True, False, False, "")
    assert flags(model_type="qwen3") == (False, False, False, "head")


def test_windows_follow_each_familys_rules(tmp_path: Path) -> None:
    """F143: a window is active only where the family says so, layer by layer."""

    def windows(**changes: Any) -> tuple[int, ...]:
        return read(tmp_path, **changes).windows

    qwen = {"model_type": "qwen2", "sliding_window": 64}
    assert windows(sliding_window=64) == (0, 0, 0, 0)
    assert windows(model_type="mistral", sliding_window=64) == (64, 64, 64, 64)
    assert windows(model_type="mistral", sliding_window=None) == (0, 0, 0, 0)
    assert windows(model_type="mistral") == (4096,) * 4
    assert windows(**qwen, max_window_layers=2) == (0, 0, 0, 0)
    assert windows(**qwen, use_sliding_window=True, max_window_layers=2) == (0, 0, 64, 64)
    assert windows(**qwen, use_sliding_window=True, max_window_layers=4) == (0, 0, 0, 0)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert windows(**qwen, use_sliding_window=True, layer_types=kinds) == (64, 0, 64, 0)
    assert windows(model_type="gemma2", sliding_window=64) == (64, 0, 64, 0)
    assert windows(model_type="gemma2") == (4096, 0, 4096, 0)
    gemma3 = {"model_type": "gemma3_text", "sliding_window": 8}
    assert windows(**gemma3, num_hidden_layers=7) == (8, 8, 8, 8, 8, 0, 8)
    assert windows(**gemma3, layer_types=kinds) == (8, 0, 8, 0)
    assert windows(model_type="phi3", sliding_window=64) == (64,) * 4
    assert windows(model_type="phi3") == windows(model_type="olmo2") == (0,) * 4


def test_the_end_tokens_are_those_of_generation_config(tmp_path: Path) -> None:
    assert read(tmp_path).eos_token_ids == (7,)
    assert read(tmp_path, eos_token_id=None).eos_token_ids == ()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 0]}')
    assert read(tmp_path).eos_token_ids == (3, 0)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0}')
    assert read(tmp_path).eos_token_ids == (0,)


def test_dtype_auto_takes_the_checkpoints(tmp_path: Path) -> None:
    model = read(tmp_path)
    assert kv_layout(model, engine(tmp_path)).dtype == "bfloat16"
    assert kv_layout(model, engine(tmp_path, dtype="float32")).dtype == "float32"
    assert read(tmp_path, dtype="float16").dtype == "float16"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"model_type": "gpt2"},
            "'gpt2' is not supported: choose one of gemma2, gemma3_text, llama",
        ),
        ({"model_type": "absent"}, "model_type None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quant_method None .* may be gptq, awq"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"type": "yarn"}}, "yarn RoPE scaling needs factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8}}, "needs low_freq_factor"),
        ({"rope_scaling": {"type": "su"}}, "longrope RoPE scaling needs short_factor, a list"),
        ({"model_type": "gemma2", "hidden_activation": "gelu"}, "only gelu_pytorch_tanh is"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "bidirectional"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"num_hidden_layers": "absent"}, "num_hidden_layers is None"),
        ({"vocab_size": "4"}, "vocab_size is '4': it must be a whole number"),
        ({"torch_dtype": "int8"}, "dtype 'int8' is not supported: choose float32"),
        ({"eos_token_id": [1, "2"]}, r"eos_token_id is \[1, '2'\]: it must be token ids"),
        ({"rms_norm_eps": "small"}, "a field of the wrong kind: .* 'small'"),
        ({"rope_parameters": 5}, "a field of the wrong kind: 'int' object"),
        ({"rope_theta": [1]}, "a field of the wrong kind: .* not 'list'"),
        ({"model_type": ["llama"]}, "a field of the wrong kind: unhashable"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(SetupError, match=says) as caught:
        read(tmp_path, **changes)
    assert "config.json" in caught.value.message


def test_a_directory_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"config\.json does not exist"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SetupError, match=r"config\.json cannot be read"):
        ModelConfig.from_dir(tmp_path)


def test_the_layout_deals_heads_and_layers_and_refuses_what_cannot_work(tmp_path: Path) -> None:
    model = read(tmp_path)
    layout = kv_layout(model, engine(tmp_path, tensor_parallel_size=3, pipeline_parallel_size=3))
    assert [(r.pp_rank, r.tp_rank) for r in layout.ranks] == [
        (p, t) for p in range(3) for t in range(3)
    ]
    assert [(r.head_start, r.head_stop) for r in layout.ranks[:3]] == [(0, 1), (0, 1), (1, 2)]
    assert [(r.layer_start, r.layer_stop) for r in layout.ranks[::3]] == [(0, 1), (1, 3), (3, 4)]
    with pytest.raises(SetupError, match=r"--tensor-parallel-size 9 .* choose 1 to 8"):
        kv_layout(model, engine(tmp_path, tensor_parallel_size=9))
    with pytest.raises(SetupError, match=r"--pipeline-parallel-size 5 .* choose 1 to 4"):
        kv_layout(model, engine(tmp_path, pipeline_parallel_size=5))


def test_an_uneven_split_says_what_it_costs(tmp_path: Path) -> None:
    """F141: 8 heads over 3 ranks leave the busiest with 4, half again the mean."""
    model = read(tmp_path)
    assert imbalance(model, engine(tmp_path, tensor_parallel_size=2)) == 0.0
    assert imbalance(model, engine(tmp_path, tensor_parallel_size=3)) == pytest.approx(0.5)


def test_configuration_never_imports_torch() -> None:
    modules = "config layout fingerprint checkpoint registry"
    code = "; ".join(f"import ekiden.models.{name}" for name in modules.split())
    code += "; import sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_gemmas_two_rotations_in_the_old_and_the_new_form(tmp_path: Path) -> None:
    old = read(
        tmp_path,
        model_type="gemma3_text",
        rope_theta=5e5,
        rope_local_base_freq=300.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    new = read(
        tmp_path,
        model_type="gemma3_text",
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    )
    assert (old.rope, old.local_rope) == (new.rope, new.local_rope)
    assert old.local_rope is not None
    assert (old.rope.factor, old.rope.theta, old.local_rope.theta) == (8.0, 5e5, 300.0)
    assert read(tmp_path, model_type="gemma2").local_rope is None


def test_long_and_short_frequencies_are_two_kinds_of_kv(tmp_path: Path) -> None:
    """One replica that serves the original length and one that serves more must not meet."""
    scaling = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    model = read(
        tmp_path,
        model_type="phi3",
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        rope_scaling=scaling,
    )

    def kind(max_model_len: int) -> str:
        config = EngineConfig(model_dir=tmp_path, model_name="m", max_model_len=max_model_len)
        return kv_layout(model, config).kind

    assert kind(64) == "attention"
    assert kind(65) == kind(0) == "attention, long RoPE"
