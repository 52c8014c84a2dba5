"""Geometry out of a config: every parameter counted, against papers and transformers."""

import pytest

from ekiden.core.errors import SetupError
from ekiden.planner.catalogue import by_name, entries, geometry, plain
from ekiden.planner.geometry import from_config
from ekiden.planner.kv import rank_kv
from ekiden.planner.layout import Layout
from ekiden.planner.precision import published

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}


def test_r24_llama_70b():
    model = by_name("Llama-3.1-70B")
    attention = model.layers[0].attention
    assert (len(model.layers), model.heads, attention.kv_heads) == (80, 64, 8)
    assert attention.head_dim == 128
    assert model.parameters == 70_553_706_496


@pytest.mark.parametrize(("tp", "expected"), [(1, 327_680), (8, 40_960), (16, 40_960)])
def test_r24_and_r10_kv_of_a_token_stops_dividing_at_the_kv_heads(tp: int, expected: int):
    ranks = rank_kv(by_name("Llama-3.1-70B"), Layout(tp=tp))
    assert {rank.token_bytes for rank in ranks} == {expected}


def test_r10_latent_kv_never_divides():
    model = by_name("DeepSeek-V3")
    assert {rank.token_bytes for rank in rank_kv(model, Layout(tp=16))} == {61 * (512 + 64) * 2}


def test_r28_deepseek_v3():
    model = by_name("DeepSeek-V3")
    assert model.parameters == 671_026_419_200
    assert round(model.active_parameters / 1e9, 1) == 37.6


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Llama-3.1-8B", 8_030_261_248),
        ("Qwen2.5-7B", 7_615_616_512),
        ("Qwen2.5-14B", 14_770_033_664),
        ("Qwen2.5-32B", 32_763_876_352),
        ("Mixtral-8x7B", 46_702_792_704),
        ("SmolLM2-135M", 134_515_008),
    ],
)
def test_parameters_are_those_published(name: str, parameters: int):
    assert by_name(name).parameters == parameters


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_parameters_are_those_that_transformers_makes(entry):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    fields = dict(entry.config)
    kind = fields.pop("model_type")
    if kind.startswith("deepseek"):
        fields.setdefault("q_lora_rank", None)
    kind = {"kimi_k2": "deepseek_v3"}.get(kind, kind)
    config = transformers.AutoConfig.for_model(kind, **fields)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    buffers = [b for name, b in model.named_buffers() if name.endswith("correction_bias")]
    count = sum(t.numel() for t in (*model.parameters(), *buffers))
    assert by_name(entry.name).parameters == count


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_every_name_of_the_table_leads_to_its_own_shape(entry):
    for name in (entry.name, entry.source, *entry.aliases):
        assert by_name(name).name == entry.name
        assert by_name(f"owner/{name}-Instruct".upper()).name == entry.name


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(SetupError, match=r"'Llama-3\.1-80B'.*Llama-3\.1-8"):
        by_name("Llama-3.1-80B")
    assert plain("meta-llama/Llama_3.1 70B-Instruct-FP8") == "llama-3.1-70b"


def test_a_directory_is_read_by_its_config(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128, '
        '"num_hidden_layers": 1, "intermediate_size": 96, "max_position_embeddings": 256}'
    )
    assert geometry(str(tmp_path)).parameters == 128 * 64 * 2 + 4 * 64 * 64 + 3 * 64 * 96 + 3 * 64


def test_a_text_config_is_taken_and_towers_are_named():
    outer = {"model_type": "llava", "text_config": LLAMA, "vision_config": {"hidden_size": 8}}
    model = from_config(outer)
    assert model.parameters == from_config(LLAMA).parameters
    assert model.extra_towers == ("vision_config",)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "rwkv"}, "model_type 'rwkv'.*choose one of.*llama"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        (
            {"num_attention_heads": None},
            "num_attention_heads is null: choose a whole number from 1",
        ),
        ({"num_attention_heads": 5}, "hidden_size 64 is not a multiple of num_attention_heads 5"),
        ({"num_key_value_heads": 3}, "4 is not a multiple of num_key_value_heads 3"),
        ({"layer_types": ["full_attention"]}, "layer_types must name 2 layers"),
        ({"rope_scaling": 7}, "rope_scaling is 7: choose an object"),
    ],
)
def test_a_broken_config_is_refused_by_field(change: dict, says: str):
    with pytest.raises(SetupError, match=says):
        from_config({**LLAMA, **change})


def test_windows_by_family():
    windows = {
        name: [layer.attention.window for layer in by_name(name).layers[:6]]
        for name in ("Gemma-2-9B", "Gemma-3-27B", "gpt-oss-20b", "Llama-4-Scout", "Qwen2.5-7B")
    }
    assert windows == {
        "Gemma-2-9B": [4096, 0, 4096, 0, 4096, 0],
        "Gemma-3-27B": [1024] * 5 + [0],
        "gpt-oss-20b": [128, 0, 128, 0, 128, 0],
        "Llama-4-Scout": [8192, 8192, 8192, 0, 8192, 8192],
        "Qwen2.5-7B": [0] * 6,
    }


def test_rope_scaling_stretches_what_a_config_promises():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert from_config({**LLAMA, "rope_scaling": yarn}).max_positions == 1024
    llama3 = {"rope_type": "llama3", "factor": 8.0}
    assert from_config({**LLAMA, "rope_scaling": llama3}).max_positions == 256


def _group(kind: str, bits: int, **more: object) -> dict[str, object]:
    weights = {"type": kind, "num_bits": bits, **more}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights}},
    }


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "awq"}, "awq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8-block"),
        (_group("int", 4), "w4a16"),
        (_group("int", 8), "int8"),
        (_group("float", 8), "fp8"),
        (_group("float", 8, strategy="block"), "fp8-block"),
        (_group("float", 4), "nvfp4"),
    ],
)
def test_a_quantised_config_is_told_by_its_bits_as_well(config: dict[str, object], name: str):
    shape = from_config({**LLAMA, "quantization_config": config})
    assert published(shape.quant_method, shape.dtype, shape.model_type).name == name


@pytest.mark.parametrize("config", [{"quant_method": "gptq", "bits": 3}, _group("int", 6)])
def test_bits_without_a_format_are_refused(config: dict[str, object]):
    shape = from_config({**LLAMA, "quantization_config": config})
    with pytest.raises(SetupError, match=r"of [36] bits.*is not known: choose one of"):
        published(shape.quant_method, shape.dtype, shape.model_type)


def test_more_experts_for_a_token_than_there_are_is_refused():
    sparse = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 9}
    with pytest.raises(SetupError, match="num_experts_per_tok 9 is more than the 8"):
        from_config({**LLAMA, **sparse})
