"""What the planner says of this engine is what the engine says of itself."""

from pathlib import Path

import msgspec
import pytest

from ekiden.core.config import EngineConfig
from ekiden.engine.activations import activation_bytes
from ekiden.engine.memory import CUDA_OVERHEAD
from ekiden.models.config import ModelConfig
from ekiden.models.layout import kv_layout
from ekiden.planner.geometry import from_path
from ekiden.planner.kv import rank_kv
from ekiden.planner.layout import Layout, stages
from ekiden.planner.limits import Limits, Resolved
from ekiden.planner.memory import Replica, memory
from ekiden.planner.peaks import Asked, ours
from ekiden.planner.precision import FORMATS
from ekiden.planner.profiles import PROFILES, Card
from ekiden.planner.weights import rank_weights, stored
from ekiden.verify.tiny import write_tiny_model

OURS = PROFILES["ekiden"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def config_of(model_dir: Path, tp: int, pp: int, **more) -> EngineConfig:
    return EngineConfig(
        model_dir=model_dir,
        model_name="tiny",
        dtype="bfloat16",
        device="cuda",
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        **more,
    )


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize(("sequences", "chunk"), [(64, 64), (4, 512)])
def test_peaks_and_kv_are_the_engines(model_dir, tp, pp, kv_dtype, sequences, chunk):
    limits = {"max_num_seqs": sequences, "max_num_batched_tokens": chunk}
    config = config_of(model_dir, tp, pp, kv_cache_dtype=kv_dtype, **limits)
    model, geometry = ModelConfig.from_dir(model_dir), from_path(model_dir)
    layout = kv_layout(model, config)
    dtype = "bf16" if kv_dtype == "auto" else kv_dtype
    kv = rank_kv(geometry, Layout(tp=tp, pp=pp), dtype, scale_bytes=OURS.kv_scale_bytes)
    bounds = stages(geometry, pp, balanced=True)
    for rank, place in enumerate(layout.ranks):
        assert bounds[place.pp_rank] == (place.layer_start, place.layer_stop)
        assert kv[rank].token_bytes * layout.block_size == layout.block_bytes(rank)
        peak = ours(
            Asked(
                geometry=geometry,
                layout=Layout(tp=tp, pp=pp),
                limits=Resolved(
                    max_model_len=model.max_position_embeddings,
                    max_num_seqs=sequences,
                    chunk=chunk,
                    utilization=0.9,
                ),
                tp_rank=place.tp_rank,
                last=place.pp_rank == pp - 1,
                kv_dtype=dtype,
            )
        )
        expected = activation_bytes(model, config, layout, rank)
        assert peak.activations + peak.sampler == expected


def test_defaults_are_the_engines():
    fields = {field.name: field.default for field in msgspec.structs.fields(EngineConfig)}
    defaults = OURS.defaults(Card(name="any", memory_bytes=1 << 34), 100)
    assert defaults.max_num_seqs == fields["max_num_seqs"]
    assert defaults.chunk == fields["max_num_batched_tokens"]
    assert defaults.utilization == fields["gpu_memory_utilization"]
    assert OURS.context == CUDA_OVERHEAD
    assert OURS.block_size == fields["block_size"]


def test_weights_are_the_bytes_of_the_checkpoint(model_dir):
    geometry, held = from_path(model_dir), stored(model_dir)
    width = held.bytes // held.elements
    form = FORMATS["fp32" if width == 4 else "bf16"]
    assert held.elements == geometry.parameters
    assert held.differs(rank_weights(geometry, Layout(), form)[0]) == 0
    assert held.differs(2 * held.bytes) == 1.0


def test_a_whole_replica_of_ours_is_summed(model_dir):
    asked = Replica(
        geometry=from_path(model_dir),
        card=Card(name="small", memory_bytes=4 << 30),
        limits=Limits(max_num_seqs=4),
    )
    (rank,) = memory(asked).ranks
    assert rank.context == CUDA_OVERHEAD
    assert 0 < rank.kv < rank.usable
