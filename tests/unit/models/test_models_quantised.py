"""Quantised checkpoints answer as the float model that they stand for; floats quantised on loading
compute with the same numbers whatever the split."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ekiden.core.config import EngineConfig
from ekiden.core.errors import SetupError
from ekiden.layers.quantised import GROUP_SIZES, dequantise, group_size, quantise, quantise_e4m3
from ekiden.layers.weights import DenseWeight, GroupedWeight
from ekiden.models.checkpoint import Checkpoint
from ekiden.models.config import ModelConfig
from ekiden.models.fingerprint import model_fingerprint
from ekiden.models.forms import choose_form
from ekiden.models.registry import load_model
from ekiden.models.weights import SafetensorsSource
from ekiden.parallel.local import local_meshes
from tests.unit.models.quantised_files import FORMATS, gptq, make_quantised
from tests.unit.models.tiny import Replica, make_checkpoint, worst_error

TOLERANCE = 1e-4
UNEVEN = 104
"""An MLP's width of which 3 ranks hold 35, 35 and 34: no whole words, no whole panels."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def opened(
    path: Path, method: str = "auto", dtype: torch.dtype = torch.float32
) -> SafetensorsSource:
    return SafetensorsSource(
        Checkpoint.open(path),
        wanted=lambda name: True,
        dtype=dtype,
        device=torch.device("cpu"),
        form=choose_form(ModelConfig.from_dir(path).quantization, method),
    )


@pytest.mark.parametrize("kind", FORMATS)
def test_a_quantised_checkpoint_answers_as_its_float_model(tmp_path: Path, kind: str) -> None:
    reference = make_quantised(tmp_path, FORMATS[kind])
    assert worst_error(Replica(tmp_path, kernels="torch"), reference) < TOLERANCE
    assert worst_error(Replica(tmp_path, tp=2, pp=2, kernels="torch"), reference) < TOLERANCE


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if not FORMATS[kind].grouped])
def test_ranks_need_not_begin_at_a_word(tmp_path: Path, kind: str) -> None:
    reference = make_quantised(tmp_path, FORMATS[kind], intermediate_size=UNEVEN)
    assert worst_error(Replica(tmp_path, tp=3, kernels="torch"), reference) < TOLERANCE


@pytest.mark.parametrize("kind", FORMATS)
def test_the_fastest_kernels_hold_every_kind(tmp_path: Path, kind: str) -> None:
    """Three ranks of 35 inputs where there are no groups: no number that kernels are made for.

    They round activations to 15 bits beside whole numbers.
    """
    grouped = FORMATS[kind].grouped
    reference = make_quantised(
        tmp_path, FORMATS[kind], intermediate_size=128 if grouped else UNEVEN
    )
    replica = Replica(tmp_path, tp=2 if grouped else 3)
    assert worst_error(replica, reference) < 100 * TOLERANCE


def test_the_mlp_is_dealt_in_whole_groups(tmp_path: Path) -> None:
    """160 over 2 ranks: 96 and 64, not 80 and 80."""
    reference = make_quantised(tmp_path, FORMATS["awq"], intermediate_size=160)
    assert worst_error(Replica(tmp_path, tp=2, kernels="torch"), reference) < TOLERANCE


@pytest.mark.parametrize("kind", ["gptq4", "awq", "packed4"])
def test_a_group_that_ranks_would_share_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    """Three heads of 8 on the second rank."""
    make_quantised(tmp_path, FORMATS[kind], hidden_size=96, num_attention_heads=12)
    says = r"o_proj has a scale for every 32 inputs, and this rank's inputs 24 to 47 .*tensor-par"
    with pytest.raises(SetupError, match=says):
        Replica(tmp_path, tp=3)


def test_matrices_that_the_tool_left_alone_stay_floats(tmp_path: Path) -> None:
    make_quantised(tmp_path, gptq(4))
    source = opened(tmp_path)
    mlp = source.linear("model.layers.0.mlp.up_proj", (128, 64))
    head = source.head("lm_head", (101, 64), rows=(0, 101))
    assert isinstance(mlp, GroupedWeight)
    assert isinstance(head, DenseWeight)
    assert head.scale is None


def test_a_bias_that_is_not_zero_is_not_dropped(tmp_path: Path) -> None:
    make_quantised(tmp_path, gptq(4))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.bias"][3] = 0.5
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(SetupError, match=r"layers\.1\.mlp\.up_proj\.bias, which this model has no"):
        Replica(tmp_path)


def test_groups_of_uneven_size_are_refused(tmp_path: Path) -> None:
    make_quantised(tmp_path, gptq(4, order=True))
    tensors = load_file(tmp_path / "model.safetensors")
    groups = tensors["model.layers.0.mlp.up_proj.g_idx"]
    groups[groups == 1] = 0
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(SetupError, match=r"up_proj\.g_idx does not put 32 inputs into each of 2"):
        Replica(tmp_path)


@pytest.mark.parametrize("method", ["int8", "int4", "fp8"])
def test_a_split_model_is_quantised_as_the_whole_one(tmp_path: Path, method: str) -> None:
    """Head dims and widths that cut groups in two, or have none at all."""
    reference = make_checkpoint(tmp_path, "llama3", intermediate_size=256)
    whole = opened(tmp_path, method)
    with torch.no_grad():
        for name, linear in reference.named_modules():
            if not isinstance(linear, torch.nn.Linear):
                continue
            outs, ins = linear.weight.shape
            if name == "lm_head":
                linear.weight.copy_(dequantise(whole.head(name, (outs, ins), rows=(0, outs))))
            else:
                linear.weight.copy_(dequantise(whole.linear(name, (outs, ins))))
    for tp, pp in ((1, 1), (2, 1), (4, 2)):
        replica = Replica(tmp_path, tp=tp, pp=pp, kernels="torch", quantization=method)
        assert worst_error(replica, reference) < TOLERANCE


@pytest.mark.parametrize(("method", "bound"), [("int8", 0.007), ("int4", 0.1), ("fp8", 0.03)])
def test_a_quantised_matrix_is_near_the_one_it_was_made_of(method: str, bound: float) -> None:
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(0))
    if method == "fp8":
        back = dequantise(quantise_e4m3(weight))
    else:
        back = dequantise(quantise(weight, 8 if method == "int8" else 4, 128))
    assert (back - weight).norm() / weight.norm() < bound


def test_a_tied_head_is_held_in_8_bits_and_its_embedding_in_floats(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "smollm2")
    model = ModelConfig.from_dir(tmp_path)
    config = EngineConfig(model_dir=tmp_path, model_name="m", quantization="int4", kernels="torch")
    (mesh,) = local_meshes(1, 1, timeout_s=20.0)
    loaded = load_model(model, config, mesh, "cpu")
    table = loaded.embedding.weight
    expected = dequantise(quantise(table, 8, group_size(table.shape[1])))
    assert torch.equal(loaded.head.part.values, expected)
    assert not torch.equal(table, expected)


def test_the_largest_group_that_divides_is_taken() -> None:
    assert [group_size(n) for n in (1536, 576, 96, 50)] == [*GROUP_SIZES, 50]


@pytest.mark.parametrize(
    ("stored", "wanted", "says"),
    [
        ("gptq4", "int4", "quantised already, by gptq: choose auto or gptq"),
        ("awq", "gptq", "quantised already, by awq"),
        (None, "awq", "has no quantization_config"),
    ],
)
def test_an_option_against_the_checkpoint_is_refused(
    tmp_path: Path, stored: str | None, wanted: str, says: str
) -> None:
    if stored:
        make_quantised(tmp_path, FORMATS[stored])
    else:
        make_checkpoint(tmp_path, "llama3")
    with pytest.raises(SetupError, match=says):
        Replica(tmp_path, quantization=wanted)


def test_the_method_by_its_own_name_is_the_checkpoint_as_it_is(tmp_path: Path) -> None:
    reference = make_quantised(tmp_path, FORMATS["fp8"])
    replica = Replica(tmp_path, quantization="fp8", kernels="torch")
    assert worst_error(replica, reference) < TOLERANCE


def test_a_model_quantised_on_loading_has_another_fingerprint(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "floats", "llama3")
    plain = model_fingerprint(tmp_path / "floats")
    assert model_fingerprint(tmp_path / "floats", "int8") == f"{plain}+int8"
    make_quantised(tmp_path / "stored", FORMATS["fp8"])
    stored = tmp_path / "stored"
    assert model_fingerprint(stored) == model_fingerprint(stored, "fp8")


@pytest.mark.parametrize("kind", ["gptq4", "gptq4-sorted", "awq", "packed4-zeros", "fp8-blocks"])
def test_a_quantised_model_is_weighed_without_reading_it(tmp_path: Path, kind: str) -> None:
    """On ``meta`` the layers get the shapes that they will hold."""
    make_quantised(tmp_path, FORMATS[kind])
    model = ModelConfig.from_dir(tmp_path)
    config = EngineConfig(model_dir=tmp_path, model_name="m", kernels="torch")
    for mesh in local_meshes(2, 1, timeout_s=20.0):
        weighed, loaded = (
            load_model(model, config, mesh, device).layers[0] for device in ("meta", "cpu")
        )
        for pick in (lambda layer: layer.attention.qkv, lambda layer: layer.mlp.down):
            light, real = pick(weighed).linear.values, pick(loaded).linear.values
            assert (light.shape, light.dtype) == (real.shape, real.dtype)


def test_bytes_of_a_config_that_is_cut_short_do_not_pass_as_floats(tmp_path: Path) -> None:
    """A checkpoint whose config.json lost its quantization_config names what it cannot read."""
    make_quantised(tmp_path, FORMATS["fp8"])
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SetupError, match="stored as F8_E4M3"):
        Replica(tmp_path)
