"""What a rank will hold is known to the byte, without a byte of weights being read."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ekiden.core.config import EngineConfig
from ekiden.core.errors import SetupError
from ekiden.models import mapped
from ekiden.models.config import ModelConfig
from ekiden.models.held import held_bytes, tensors_of
from ekiden.models.registry import load_model
from ekiden.parallel.local import local_meshes
from ekiden.parallel.mesh import Mesh
from tests.unit.models.tiny import FAMILIES, VOCAB, make_checkpoint


def foretold(path: Path, *, tp: int = 1, pp: int = 1, kernels: str = "torch") -> list[int]:
    config = replica(path, tp, pp, kernels=kernels)
    model = ModelConfig.from_dir(path)
    return [held_bytes(model, config, mesh) for mesh in local_meshes(tp, pp)]


def replica(
    path: Path, tp: int = 1, pp: int = 1, dtype: str = "auto", kernels: str = "torch"
) -> EngineConfig:
    return EngineConfig(
        model_dir=path,
        model_name="tiny",
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        dtype=dtype,
        kernels=kernels,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_holds_what_was_foretold_to_the_byte(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, family)
    model = ModelConfig.from_dir(tmp_path)
    for tp, pp in ((1, 1), (3, 1), (2, 2)):
        config = replica(tmp_path, tp, pp)
        ranks = [load_model(model, config, mesh, "cpu") for mesh in local_meshes(tp, pp)]
        held = [sum(tensor.nbytes for tensor in tensors_of(rank)) for rank in ranks]
        assert foretold(tmp_path, tp=tp, pp=pp) == held


def test_an_untied_model_on_one_rank_is_its_file_and_its_rope(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama3")
    stored = sum(t.nbytes for t in load_file(tmp_path / "model.safetensors").values())
    frequencies = 4 * 8 // 2
    assert foretold(tmp_path) == [stored + frequencies]


def test_a_tied_head_is_held_once_by_plain_torch(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "smollm2")
    stored = sum(t.nbytes for t in load_file(tmp_path / "model.safetensors").values())
    assert foretold(tmp_path) == [stored + 16]


def test_native_kernels_hold_what_was_foretold_and_a_tied_head_twice(tmp_path: Path) -> None:
    """To the byte where panels are full: they are 32 outputs wide."""
    full = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2}
    make_checkpoint(tmp_path, "smollm2", **full, intermediate_size=64, vocab_size=128)
    model, config = ModelConfig.from_dir(tmp_path), replica(tmp_path, kernels="native")
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].nbytes
    once, twice = foretold(tmp_path), foretold(tmp_path, kernels="native")
    assert twice[0] - once[0] == embedding
    held = sum(t.nbytes for t in tensors_of(load_model(model, config, Mesh(), "cpu")))
    assert held == twice[0]


def test_the_dtype_that_is_held_counts_not_the_stored_one(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama3")
    model, mesh = ModelConfig.from_dir(tmp_path), local_meshes(1, 1)[0]
    wide = held_bytes(model, replica(tmp_path), mesh)
    narrow = held_bytes(model, replica(tmp_path, dtype="bfloat16"), mesh)
    norms_and_rope = 5 * 64 * 4 + 16
    assert narrow - norms_and_rope == (wide - norms_and_rope) // 2


def test_nothing_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "llama3")

    def never(*_: object) -> Tensor:
        raise AssertionError("weights were read to weigh the model")

    monkeypatch.setattr(mapped, "_map", never)
    assert foretold(tmp_path)[0] > 0


def test_a_checkpoint_that_cannot_be_loaded_cannot_be_weighed_either(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama3")
    (tmp_path / "model.safetensors").write_bytes((0).to_bytes(8, "little"))
    with pytest.raises(SetupError):
        foretold(tmp_path)


def test_tensors_are_found_wherever_they_hang_and_counted_once() -> None:
    shared = torch.zeros(3)

    class Holder:
        __module__ = "ekiden.somewhere"

        def __init__(self) -> None:
            self.nested = {"a": [shared, (torch.zeros(2), shared)], "b": "text"}
            self.myself = self

    assert sorted(len(tensor) for tensor in tensors_of(Holder())) == [2, 3]


@pytest.mark.parametrize(("method", "bits"), [("int8", 8), ("int4", 4)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_quantised_weights_are_foretold_small(
    tmp_path: Path, method: str, bits: int, device: str
) -> None:
    """Of the layers' matrices so many bits, a scale for 64 inputs and no more; the head 8 bits."""
    make_checkpoint(tmp_path, "llama3", intermediate_size=128, head_dim=32)
    model = ModelConfig.from_dir(tmp_path)
    (mesh,) = local_meshes(1, 1)
    config = msgspec.structs.replace(replica(tmp_path, kernels="auto"), device=device)
    floats = held_bytes(model, config, mesh)
    small = held_bytes(model, msgspec.structs.replace(config, quantization=method), mesh)
    linears = model.num_layers * 64 * (2 * 256 + 2 * 64 + 3 * 128)
    saved = linears * (4 - bits / 8 - 6 / 64) + 64 * VOCAB * (4 - 1 - 6 / 64)
    assert floats - small == pytest.approx(saved, rel=0.03)
