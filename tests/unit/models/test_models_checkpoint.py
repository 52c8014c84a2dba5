"""Checkpoints that are whole load; everything else is refused by file and tensor, in time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ekiden.core.config import EngineConfig
from ekiden.core.errors import SetupError
from ekiden.layers.batch import Span
from ekiden.models.checkpoint import Checkpoint
from ekiden.models.config import ModelConfig
from ekiden.models.fingerprint import model_fingerprint, tokenizer_fingerprint
from ekiden.models.registry import load_model
from ekiden.parallel.local import local_meshes
from ekiden.parallel.mesh import Mesh
from tests.unit.models.tiny import Replica, make_checkpoint

LAYER0_Q = "model.layers.0.self_attn.q_proj.weight"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pristine")
    make_checkpoint(path, "llama3")
    return path


@pytest.fixture
def single(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "single"))


@pytest.fixture
def sharded(single: Path) -> Path:
    tensors = load_file(single / "model.safetensors")
    (single / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for i in range(3):
        file = f"model-{i + 1:05}-of-00003.safetensors"
        save_file({name: tensors[name] for name in names[i::3]}, single / file)
        weight_map.update(dict.fromkeys(names[i::3], file))
    (single / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return single


def load(path: Path, mesh: Mesh | None = None) -> None:
    config = EngineConfig(model_dir=path, model_name="tiny")
    load_model(ModelConfig.from_dir(path), config, mesh or Mesh(), "cpu")


def rewrite(path: Path, **changes: torch.Tensor | None) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, file)


def test_shards_give_what_one_file_gives(single: Path, pristine: Path, sharded: Path) -> None:
    spans = [Span([5, 6, 7], 0, [0], 1)]
    assert torch.equal(Replica(sharded).step(spans), Replica(pristine).step(spans))


def test_a_missing_shard_is_named(sharded: Path) -> None:
    """F128."""
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(SetupError, match=r"1 do not exist: model-00002-of-00003\.safetensors"):
        load(sharded)


@pytest.mark.parametrize("cut", [1, 1024])
def test_a_shard_cut_short_is_refused(sharded: Path, cut: int) -> None:
    """F130: never mapped as zeros."""
    file = sharded / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(SetupError, match=r"model-00002-of-00003.* was cut short or overwritten"):
        load(sharded)


@pytest.mark.parametrize("left", [0, 5, 100])
def test_a_shard_cut_inside_its_header_is_refused(single: Path, left: int) -> None:
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(SetupError, match=r"model\.safetensors is cut short"):
        load(single)


def test_a_file_that_grew_is_refused(single: Path) -> None:
    with (single / "model.safetensors").open("ab") as file:
        file.write(b"tail")
    with pytest.raises(SetupError, match="its header says"):
        load(single)


def test_bytes_that_are_not_safetensors_are_refused(single: Path) -> None:
    (single / "model.safetensors").write_bytes((20).to_bytes(8, "little") + b"not json at all!!!!!")
    with pytest.raises(SetupError, match="broken safetensors header"):
        load(single)


def test_an_index_at_odds_with_its_shard_names_both(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    file = index["weight_map"][LAYER0_Q]
    other = next(name for name in set(index["weight_map"].values()) if name != file)
    index["weight_map"][LAYER0_Q] = other
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(SetupError, match=f"{other} does not hold {LAYER0_Q}"):
        load(sharded)


def test_an_index_cannot_lead_out_of_its_directory(sharded: Path) -> None:
    (sharded / INDEX).write_text('{"weight_map": {"a": "../elsewhere.safetensors"}}')
    with pytest.raises(SetupError, match="not a file of its own directory"):
        load(sharded)


def test_a_stale_shard_that_the_index_does_not_name_changes_nothing(sharded: Path) -> None:
    before = model_fingerprint(sharded)
    save_file({LAYER0_Q: torch.zeros(64, 64)}, sharded / "model-00001-of-00002.safetensors")
    load(sharded)
    assert model_fingerprint(sharded) == before


def test_a_stale_single_file_beside_an_index_is_refused(sharded: Path, pristine: Path) -> None:
    shutil.copy(pristine / "model.safetensors", sharded)
    with pytest.raises(SetupError, match="only one of them can be right"):
        load(sharded)


def test_shards_without_their_index_are_refused(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    with pytest.raises(SetupError, match=r"index\.json does not exist, and model-00001"):
        load(sharded)


def test_pickled_weights_are_not_read(single: Path) -> None:
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    with pytest.raises(SetupError, match="pickled weights are not read"):
        load(single)


def test_a_missing_tensor_is_named(single: Path) -> None:
    rewrite(single, **{LAYER0_Q: None})
    with pytest.raises(SetupError, match=f"holds no tensor {LAYER0_Q}"):
        load(single)


def test_a_tensor_of_another_shape_is_named_with_both(single: Path) -> None:
    rewrite(single, **{LAYER0_Q: torch.zeros(64, 32)})
    with pytest.raises(SetupError, match=rf"{LAYER0_Q} has shape \[64, 32\].*\[64, 64\]"):
        load(single)


def test_a_tensor_that_is_not_floating_point_is_refused(single: Path) -> None:
    rewrite(single, **{LAYER0_Q: torch.zeros(64, 64, dtype=torch.int8)})
    with pytest.raises(SetupError, match=f"{LAYER0_Q} is stored as I8"):
        load(single)


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.mlp.up_proj.weight", "score.weight"],
)
def test_weights_that_the_model_has_no_place_for_are_refused(single: Path, name: str) -> None:
    """A bias that config.json forgot would silently change every token."""
    rewrite(single, **{name: torch.zeros(64)})
    with pytest.raises(SetupError, match=f"holds {name}, which this model has no place for"):
        load(single)


def test_stored_rotary_frequencies_are_left_alone(single: Path) -> None:
    rewrite(single, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})
    load(single)


def test_a_copy_of_the_embedding_as_a_tied_models_head_is_left_alone(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen2")
    spans = [Span([5, 6, 7], 0, [0], 1)]
    before = Replica(tmp_path, pp=2).step(spans)
    whole = Replica(tmp_path, kernels="torch").ranks[0]
    head, embedding = whole.head, whole.embedding  # type: ignore[attr-defined]
    assert head.part.values is embedding.weight
    stored = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(tmp_path, **{"lm_head.weight": stored.clone()})
    assert torch.equal(Replica(tmp_path, pp=2).step(spans), before)


@pytest.mark.parametrize("cut", ["another value", "another type", "another shape"])
def test_a_head_of_its_own_in_a_tied_model_is_refused(tmp_path: Path, cut: str) -> None:
    """Which of the two was meant cannot be known, and the wrong one gives wrong tokens."""
    make_checkpoint(tmp_path, "qwen2")
    head = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].clone()
    if cut == "another value":
        head[-1, -1] += 1
    rewrite(tmp_path, **{"lm_head.weight": {
        "another type": head.to(torch.float16), "another shape": head[:-1].contiguous(),
    }.get(cut, head)})  # fmt: skip
    with pytest.raises(SetupError, match=r"tie_word_embeddings, but lm_head.weight in model.safe"):
        Replica(tmp_path)


def test_progress_ends_at_the_bytes_of_the_stage(single: Path) -> None:
    config = EngineConfig(model_dir=single, model_name="tiny", pipeline_parallel_size=2)
    model = ModelConfig.from_dir(single)
    totals = []
    for mesh in local_meshes(1, 2):
        seen: list[tuple[int, int]] = []
        load_model(model, config, mesh, "cpu", lambda *at, seen=seen: seen.append(at))
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)
        assert seen[-1][0] == seen[-1][1]
        totals.append(seen[-1][1])
    assert sum(totals) == sum(t.nbytes for t in load_file(single / "model.safetensors").values())


def test_fingerprints_tell_weights_of_one_shape_apart_but_not_ways_to_shard(
    pristine: Path, sharded: Path, tmp_path: Path
) -> None:
    one = model_fingerprint(pristine)
    assert model_fingerprint(sharded) == one
    make_checkpoint(tmp_path / "other", "llama3", seed=1)
    assert model_fingerprint(tmp_path / "other") != one


def test_a_fingerprint_sees_one_changed_tensor_and_a_changed_config(single: Path) -> None:
    before = model_fingerprint(single)
    tensor = load_file(single / "model.safetensors")[LAYER0_Q]
    rewrite(single, **{LAYER0_Q: tensor * 1.01})
    changed = model_fingerprint(single)
    assert changed != before
    config = json.loads((single / "config.json").read_text())
    config["transformers_version"] = "9.9"
    (single / "config.json").write_text(json.dumps(config))
    assert model_fingerprint(single) == changed
    config["rms_norm_eps"] = 1e-3
    (single / "config.json").write_text(json.dumps(config))
    assert model_fingerprint(single) != changed


def test_tokenizers_have_fingerprints_of_their_own(tmp_path: Path) -> None:
    assert tokenizer_fingerprint(tmp_path) == "none"
    (tmp_path / "tokenizer.json").write_text("{}")
    first = tokenizer_fingerprint(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{ }")
    assert len({first, tokenizer_fingerprint(tmp_path), "none"}) == 3


def test_each_rank_reads_its_own_slices_only(single: Path) -> None:
    config = EngineConfig(
        model_dir=single, model_name="tiny", tensor_parallel_size=3, kernels="torch"
    )
    model = ModelConfig.from_dir(single)
    ranks = [load_model(model, config, mesh, "cpu") for mesh in local_meshes(3, 1)]
    layers = [rank.layers[0] for rank in ranks]  # type: ignore[attr-defined]
    full = load_file(single / "model.safetensors")
    gate_up = full["model.layers.0.mlp.gate_proj.weight"].chunk(3)
    assert [layer.mlp.gate_up.linear.values.shape[0] for layer in layers] == [
        2 * len(part) for part in gate_up
    ]
    down = torch.cat([layer.mlp.down.linear.values for layer in layers], dim=1)
    assert torch.equal(down, full["model.layers.0.mlp.down_proj.weight"])
    heads = torch.cat([rank.head.part.values for rank in ranks])  # type: ignore[attr-defined]
    assert torch.equal(heads, full["lm_head.weight"])
    assert all(
        layer.mlp.down.linear.values.untyped_storage().nbytes()
        == layer.mlp.down.linear.values.nbytes
        for layer in layers
    )


def test_the_header_table_covers_the_whole_file(pristine: Path) -> None:
    tensors = Checkpoint.open(pristine).tensors
    stored = load_file(pristine / "model.safetensors")
    assert {name: info.shape for name, info in tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in stored.items()
    }
    data = (pristine / "model.safetensors").read_bytes()
    info = tensors[LAYER0_Q]
    assert data[info.start : info.stop] == stored[LAYER0_Q].numpy().tobytes()
