"""Sizes of a config.json that no model has are refused before anything is made of them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ekiden.cli.main import main
from ekiden.core.errors import SetupError
from ekiden.planner.geometry import from_config
from ekiden.planner.sizes import MOST

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK = {
    **LLAMA,
    "model_type": "deepseek_v3",
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_shared_experts": 1,
}
WRONG = [-1, 10**9, 10**400, 2.5, 32.0, "32", True, [], {}, float("nan"), float("inf")]
FIELDS = [name for name in LLAMA if name not in ("model_type", "max_position_embeddings")]


@pytest.mark.parametrize("value", [*WRONG, 0, None], ids=str)
@pytest.mark.parametrize("name", FIELDS)
def test_a_size_that_is_none_is_refused_with_its_range(name: str, value: object):
    with pytest.raises(SetupError, match=f"{name} is .*: choose a whole number from 1 to [0-9,]+"):
        from_config({**LLAMA, name: value})


@pytest.mark.parametrize("value", WRONG, ids=str)
@pytest.mark.parametrize(
    ("config", "name"),
    [
        (LLAMA, "num_key_value_heads"),
        (LLAMA, "head_dim"),
        ({**LLAMA, "model_type": "mistral"}, "sliding_window"),
        (MIXTRAL, "num_local_experts"),
        (MIXTRAL, "num_experts_per_tok"),
        (DEEPSEEK, "q_lora_rank"),
        (DEEPSEEK, "kv_lora_rank"),
        (DEEPSEEK, "n_routed_experts"),
        (DEEPSEEK, "n_shared_experts"),
        (DEEPSEEK, "first_k_dense_replace"),
        (DEEPSEEK, "moe_intermediate_size"),
    ],
)
def test_so_are_those_of_other_families(config: dict, name: str, value: object):
    with pytest.raises(SetupError, match=f"{name} is .*: choose a whole number from [01] to"):
        from_config({**config, name: value})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tie_word_embeddings": "false"}, 'tie_word_embeddings is "false": choose true or false'),
        ({"attention_bias": 1}, "attention_bias is 1: choose true or false"),
        ({"partial_rotary_factor": 2}, "partial_rotary_factor is 2: choose a number above 0 and"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor is -1: choose a number"),
        ({"rope_scaling": {"type": "yarn", "factor": 1e9}}, "factor is 1000000000.0: choose"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"vocab_size": "a" * 999}, r'vocab_size is "a{39}\.\.\.: choose'),
    ],
)
def test_other_fields_name_what_they_may_be(change: dict, says: str):
    with pytest.raises(SetupError, match=says):
        from_config({**LLAMA, **change})


@given(
    st.dictionaries(
        st.sampled_from([*DEEPSEEK, *MOST, "rope_scaling", "layer_types", "head_dim"]),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text("09az")
        | st.lists(st.none()),
    )
)
def test_no_config_does_worse_than_a_refusal(change: dict):
    for config in (LLAMA, MIXTRAL, DEEPSEEK):
        try:
            found = from_config({**config, **change})
        except SetupError:
            continue
        assert found.parameters > 0


def test_a_slip_of_the_pen_is_told_by_the_command(capsys, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, "num_hidden_layers": 10**9}))
    assert main(["plan", str(file), "--gpu", "H100"]) == 2
    assert "num_hidden_layers is 1000000000: choose" in capsys.readouterr().err
