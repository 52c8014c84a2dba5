"""A GGUF file becomes the very model it was made from, or is refused by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import CHATML, CONFIG, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from ekiden.core.errors import SetupError
from ekiden.models.gguf_config import _llama3_factors
from ekiden.models.gguf_import import import_gguf, to_bf16, unpermute


def llama(tied: bool = False, **changes: Any):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    torch.set_num_threads(1)
    config = LlamaConfig(**{**CONFIG, **changes}, tie_word_embeddings=tied)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # what bf16 holds exactly
            parameter.normal_(0, 0.3).copy_(parameter.bfloat16().float())
    return model


def weights_of(model) -> dict[str, np.ndarray]:
    tied = model.config.tie_word_embeddings
    return {
        name: value.numpy()
        for name, value in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }


def written(tmp_path: Path, model, **how: Any) -> Path:
    out = tmp_path / "out"
    import_gguf(write_gguf(tmp_path / "m.gguf", CONFIG, weights_of(model), **how), out)
    return out


@pytest.mark.parametrize("tied", [False, True])
def test_the_imported_model_computes_the_same_logits(tmp_path: Path, tied: bool):
    from transformers import AutoModelForCausalLM

    model = llama(tied)
    out = written(tmp_path, model)
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    prompt_BT = torch.tensor([[3, 50, 9, 200, 77, 5, 11]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(prompt_BT).logits, model(prompt_BT).logits)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is tied


def test_weights_are_bf16_under_hugging_face_names(tmp_path: Path):
    model = llama()
    tensors = load_file(written(tmp_path, model) / "model.safetensors")
    assert tensors.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert tensors[name].dtype == torch.bfloat16
        assert torch.equal(tensors[name].float(), value), name


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16"])
def test_quantised_tensors_are_dequantised(tmp_path: Path, kind: str):
    import gguf

    config = {**CONFIG, "hidden_size": 64, "num_attention_heads": 8}
    model = llama(hidden_size=64, num_attention_heads=8)
    weights = weights_of(model)
    plain = weights.pop("model.layers.1.mlp.up_proj.weight")
    number = gguf.GGMLQuantizationType[kind]
    packed = gguf.quants.quantize(plain, number)
    expected = gguf.quants.dequantize(packed, number)
    path = tmp_path / "m.gguf"
    writer_add = {"blk.1.ffn_up.weight": (packed, number)}
    write_gguf(path, config, weights, packed=writer_add)
    import_gguf(path, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(found, torch.from_numpy(expected.copy()).bfloat16())


def test_llama3_frequency_factors_become_rope_scaling(tmp_path: Path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    factors = _llama3_factors(scaling, 500000.0, CONFIG["head_dim"])
    extra = {"rope_freqs.weight": factors.astype(np.float32)}
    out = written(tmp_path, llama(), extra=extra, fields={"llama.rope.freq_base": 500000.0})
    assert json.loads((out / "config.json").read_text())["rope_scaling"] == scaling
    odd = {"rope_freqs.weight": np.array([1, 2, 3, 5], dtype=np.float32)}
    with pytest.raises(SetupError, match="not those of Llama 3"):
        written(tmp_path, llama(), extra=odd)


def test_llama3_factors_are_those_of_transformers():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(head_dim=64, rope_parameters={**scaling, "rope_theta": 500000.0})
    inverse, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1 / 500000.0 ** (np.arange(0, 64, 2) / 64)
    factors = _llama3_factors(scaling, 500000.0, 64)
    np.testing.assert_allclose(plain / inverse.numpy(), factors, rtol=1e-5)


def test_ends_of_text_and_turn_are_all_kept(tmp_path: Path):
    out = written(tmp_path, llama(), fields={"tokenizer.ggml.eot_token_id": 0})
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 0, "eos_token_id": [1, 0]}


def test_the_chat_template_goes_along(tmp_path: Path):
    out = written(tmp_path, llama())
    config = json.loads((out / "tokenizer_config.json").read_text())
    assert config["chat_template"] == CHATML
    assert config["eos_token"] == "<|im_end|>"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"fields": {"llama.block_count": None}}, "llama.block_count"),
        ({"fields": {"llama.expert_count": 8}}, "experts"),
        ({"fields": {"llama.rope.dimension_count": 4}}, "dimension_count 4"),
        ({"fields": {"llama.rope.scaling.type": "yarn"}}, "'yarn' is not supported"),
        ({"fields": {"tokenizer.ggml.pre": "martian"}}, "'martian' is unknown"),
        ({"fields": {"tokenizer.ggml.model": "llama"}}, "--tokenizer DIR"),
        ({"extra": {"blk.0.attn_q.bias": np.zeros(48, np.float32)}}, "blk.0.attn_q.bias"),
        ({"skip": "model.layers.1.mlp.up_proj.weight"}, "lacks 1 tensors"),
    ],
)
def test_what_cannot_be_said_in_hugging_face_words_is_refused(
    tmp_path: Path, how: dict[str, Any], words: str
):
    with pytest.raises(SetupError, match=words):
        written(tmp_path, llama(), **how)


@pytest.mark.parametrize("content", [b"", b"not a gguf file at all, but long enough to be one"])
def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(SetupError, match="not a whole GGUF file"):
        import_gguf(path, tmp_path / "out")


def test_a_truncated_file_is_refused(tmp_path: Path):
    path = write_gguf(tmp_path / "m.gguf", CONFIG, weights_of(llama()))
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(SetupError, match="not a whole GGUF file"):
        import_gguf(path, tmp_path / "out")


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 8))
def test_unpermute_undoes_the_permutation(heads: int, half: int):
    from gguf_files import permute

    weight = np.arange(heads * 2 * half * 3, dtype=np.float32).reshape(-1, 3)
    np.testing.assert_array_equal(unpermute(permute(weight, heads), heads), weight)


finite = st.integers(0, 0x7F00) | st.integers(0x8000, 0xFF00)
halfway = st.sampled_from([0x7FFF, 0x8000, 0x8001])


@settings(max_examples=200, deadline=None)
@given(finite, halfway | st.integers(0, 0xFFFF))
def test_bf16_rounds_as_torch_does(high: int, low: int):
    value = np.array([high << 16 | low], dtype=np.uint32).view(np.float32)
    expected = torch.from_numpy(value).bfloat16().view(torch.uint16).numpy()
    assert to_bf16(value) == expected
