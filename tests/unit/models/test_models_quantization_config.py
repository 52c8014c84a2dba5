"""``quantization_config`` is read as tools write it, and what is not read is refused by name."""

from pathlib import Path
from typing import Any

import pytest

from ekiden.core.errors import SetupError
from ekiden.models.quantization_config import QuantizationConfig, parse_quantization

FILE = Path("/models/m/config.json")
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
    "ignore": ["lm_head"],
    "quantization_status": "compressed",
}


def compressed(packing: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": WEIGHTS | weights}
    return PACKED | {"format": packing, "config_groups": {"group_0": group}}


def config(**fields: Any) -> QuantizationConfig:
    return QuantizationConfig(**fields)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (GPTQ, config(method="gptq", packing="gptq", bits=4, group_size=128, zero_offset=1)),
        (
            GPTQ | {"bits": 8, "group_size": -1, "desc_act": True, "checkpoint_format": "gptq_v2"},
            config(method="gptq", packing="gptq", bits=8, sorted_inputs=True),
        ),
        (
            GPTQ | {"damp_percent": 0.1, "true_sequential": True, "meta": {"quantizer": ["x"]}},
            config(method="gptq", packing="gptq", bits=4, group_size=128, zero_offset=1),
        ),
        (AWQ, config(method="awq", packing="awq", bits=4, group_size=64)),
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "version": "GEMM"},
            config(method="awq", packing="awq", bits=4, group_size=128),
        ),
        (FP8, config(method="fp8", packing="fp8")),
        (
            FP8 | {"weight_block_size": [128, 128]},
            config(method="fp8", packing="fp8", block=(128, 128), scale_name="weight_scale_inv"),
        ),
        (
            PACKED,
            config(method="compressed-tensors", packing="words", bits=4, group_size=128),
        ),
        (
            compressed("pack-quantized", strategy="channel", group_size=None, symmetric=False),
            config(method="compressed-tensors", packing="words", bits=4, symmetric=False),
        ),
        (
            compressed("pack-quantized", actorder="group"),
            config(
                method="compressed-tensors",
                packing="words",
                bits=4,
                group_size=128,
                sorted_inputs=True,
            ),
        ),
        (
            compressed("float-quantized", type="float", num_bits=8, strategy="channel"),
            config(method="compressed-tensors", packing="fp8"),
        ),
        (
            compressed(
                "float-quantized",
                type="float",
                num_bits=8,
                strategy="block",
                block_structure=[128, 64],
            ),
            config(method="compressed-tensors", packing="fp8", block=(128, 64)),
        ),
        (
            compressed("naive-quantized", num_bits=8, strategy="channel"),
            config(method="compressed-tensors", packing="bytes"),
        ),
    ],
)
def test_what_tools_write_is_read(values: dict[str, Any], expected: QuantizationConfig) -> None:
    assert parse_quantization(values, FILE) == expected


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' .* gptq, awq, compressed"),
        ({"bits": 4}, "quant_method None"),
        (GPTQ | {"bits": 3}, r"bits 3 is not supported: it may be 4, 8"),
        (GPTQ | {"bits": True}, "bits True"),
        (GPTQ | {"group_size": 0}, "group_size 0 .* -1, a multiple of 8 up to 128, a multiple of"),
        (GPTQ | {"group_size": 36}, "group_size 36"),
        (AWQ | {"group_size": 192}, "group_size 192"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' .* gptq, gptq_v2"),
        (GPTQ | {"dynamic": {"+:.*": {"bits": 8}}}, "dynamic .* may be nothing"),
        (GPTQ | {"desc_act": "yes"}, "desc_act 'yes'"),
        (AWQ | {"version": "gemv"}, "version 'gemv' .* gemm"),
        (AWQ | {"bits": 8}, "bits 8 .* may be 4"),
        (AWQ | {"zero_point": False}, "zero_point False"),
        (FP8 | {"fmt": "e5m2"}, "fmt 'e5m2' .* e4m3"),
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size \[128\] .* two whole numbers"),
        (PACKED | {"format": "marlin-24"}, "format 'marlin-24' .* pack-quantized"),
        (PACKED | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format"),
        (PACKED | {"config_groups": {}}, "config_groups .* one group"),
        (PACKED | {"config_groups": {"a": {}, "b": {}}}, "config_groups .* one group"),
        (PACKED | {"config_groups": {"a": {"weights": None}}}, "a.weights None .* an object"),
        (compressed("pack-quantized", num_bits=3), "group_0.weights.num_bits 3 .* 4, 8"),
        (compressed("pack-quantized", type="float"), "weights.type 'float'"),
        (compressed("float-quantized", type="float", strategy="token"), "strategy 'token'"),
        (
            compressed("int-quantized", num_bits=8, strategy="channel", symmetric=False),
            "symmetric False",
        ),
    ],
)
def test_what_is_not_read_is_refused_by_file_field_and_value(
    values: dict[str, Any], says: str
) -> None:
    with pytest.raises(SetupError, match=says) as caught:
        parse_quantization(values, FILE)
    assert str(caught.value).startswith(f"{FILE}: quantization_config.")


@pytest.mark.parametrize("values", [None, {}])
def test_a_checkpoint_of_floats_has_none(values: dict[str, Any] | None) -> None:
    assert parse_quantization(values, FILE) is None
