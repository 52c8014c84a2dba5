"""R31: what formats make small, what stays wide, and what engines hold beside a checkpoint."""

import msgspec
import pytest

from ekiden.planner.catalogue import by_name
from ekiden.planner.layout import Layout
from ekiden.planner.matrices import Matrix
from ekiden.planner.precision import FORMATS, weight_format
from ekiden.planner.weights import Holding, rank_weights

SQUARE = Matrix(name="up_proj", part="mlp", rows=1280, cols=2560)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("fp32", 32),
        ("bf16", 16),
        ("fp8", 8 + 32 / 2560),
        ("fp8_block", 8 + 32 / 128**2),
        ("int8", 8 + 32 / 2560),
        ("w8a8", 8 + 32 / 2560),
        ("int4", 4.25),
        ("int4-g128", 4 + 20 / 128),
        ("gptq", 4 + 20 / 128),
        ("w4a16", 4.125),
        ("nvfp4", 4.5),
        ("fp4", 4.5),
        ("mxfp4", 4.25),
    ],
)
def test_bits_of_a_number_with_its_scales(name: str, bits: float):
    assert weight_format(name).bytes_of(SQUARE) * 8 / SQUARE.elements == pytest.approx(bits)


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("part", ["embedding", "head", "router", "norm", "bias", "tower"])
def test_r31_these_parts_stay_wide_in_every_format(name: str, part: str):
    matrix, form = msgspec.structs.replace(SQUARE, part=part), FORMATS[name]
    assert form.bytes_of(matrix) == matrix.elements * form.wide


def test_mxfp4_moe_keeps_attention_and_fp8_mlp_only_the_ends():
    assert not FORMATS["mxfp4-moe"].is_small(msgspec.structs.replace(SQUARE, part="attention"))
    model = by_name("Llama-2-7B")
    small, wide = (rank_weights(model, Layout(), FORMATS[n])[0] for n in ("fp8-mlp-only", "bf16"))
    mlp = 3 * 4096 * 11008 - 4 * (2 * 11008 + 4096)  # One byte less a number, but for the scales.
    assert wide - small == (32 - 2) * mlp


def held(model: str, **more) -> int:
    (weights,) = rank_weights(by_name(model), Layout(), FORMATS["bf16"], Holding(**more))
    return weights - rank_weights(by_name(model), Layout(), FORMATS["bf16"])[0]


def test_what_engines_hold_beside_the_checkpoint():
    assert held("Llama-3.1-8B", rope_table=True) == 131_072 * 128 * 2
    assert held("DeepSeek-V3", absorbs_latent=True) == 61 * 128 * 512 * (128 + 128) * 2
    assert held("Llama-3.1-8B", absorbs_latent=True) == 0
    assert held("Llama-2-7B", vocab_multiple=64) == 0
    assert held("Llama-2-7B", vocab_multiple=3000) == 2 * 1000 * 4096 * 2


def test_kernels_pad_the_inputs_of_mxfp4_only():
    wide = msgspec.structs.replace(SQUARE, part="expert", cols=2880)
    form = FORMATS["mxfp4"]
    assert form.padded(256).bytes_of(wide) * 2880 == form.bytes_of(wide) * 3072
    assert held("gpt-oss-20b", mx_inputs_multiple=256) == 0


def test_a_vision_tower_is_held_and_cut_like_the_rest():
    model = by_name("Gemma-3-4B")
    bare = msgspec.structs.replace(model, tower_parameters=0)
    for tp in (1, 2):
        with_tower, without = (
            sum(rank_weights(m, Layout(tp=tp), FORMATS["bf16"])) for m in (model, bare)
        )
        assert with_tower - without == 2 * model.tower_parameters


def test_the_first_ranks_of_an_uneven_split_hold_more():
    weights = rank_weights(by_name("Llama-3.1-8B"), Layout(tp=3), FORMATS["bf16"])
    assert weights[0] >= weights[1] > weights[2]
