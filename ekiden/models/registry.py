"""Model type to class, one line a model; the module is imported on use.

Importing this file does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from ekiden.core.config import EngineConfig
    from ekiden.layers.backends.choose import Threads
    from ekiden.layers.batch import ForwardBatch
    from ekiden.layers.ops import Ops
    from ekiden.models.config import ModelConfig
    from ekiden.models.weights import Progress
    from ekiden.parallel.mesh import Mesh

MODELS = {
    "gemma2": "ekiden.models.gemma",
    "gemma3_text": "ekiden.models.gemma",
    "llama": "ekiden.models.llama",
    "mistral": "ekiden.models.llama",
    "olmo2": "ekiden.models.olmo2",
    "phi3": "ekiden.models.phi3",
    "qwen2": "ekiden.models.llama",
    "qwen3": "ekiden.models.llama",
}
"""A module has ``load_layer``, a ``stage.LoadLayer``."""


class Model(Protocol):
    """One rank's part of a model, ready to run."""

    def forward(self, batch: ForwardBatch, cache: torch.Tensor) -> torch.Tensor | None:
        """One step; float32 logits [R, V] on TP rank 0 of the last stage, None elsewhere.

        ``cache`` is this rank's own, ``[blocks, kv_heads, layers, 2, block_size, head_dim]``;
        the step's keys and values are written into it. R are the rows of the batch whose
        logits are wanted, V is the whole vocabulary; where R is 0, None comes back.

        Raises:
            ReplicaFailed: another rank of the mesh did not come in time, or gave up.
        """


def load_model(
    model: ModelConfig,
    config: EngineConfig,
    mesh: Mesh,
    device: torch.device | str,
    progress: Progress | None = None,
    ops: Ops | None = None,
    threads: Threads | None = None,
) -> Model:
    """Read this rank's slices of the checkpoint in ``config.model_dir``.

    ``ops`` are the kernels to make ready for, those of ``config.kernels`` on ``threads`` if None.
    On the device ``meta`` nothing is read, and the model has the shapes of its weights without
    their numbers.
    ``progress(done, total)`` is called after every tensor, in bytes of what the stage needs.

    Raises:
        SetupError: a file or tensor is missing, broken or left over, or has another shape.
    """
    import torch

    from ekiden.cache.tensors import TORCH_DTYPES
    from ekiden.layers.backends.choose import choose_ops
    from ekiden.layers.site import Site
    from ekiden.models.checkpoint import Checkpoint
    from ekiden.models.forms import choose_form
    from ekiden.models.stage import EMBEDDING, HEAD, build_stage, wanted_tensors
    from ekiden.models.tied import check_tied_head
    from ekiden.models.weights import SafetensorsSource

    target, dtype = torch.device(device), TORCH_DTYPES[model.resolve_dtype(config)]
    checkpoint = Checkpoint.open(config.model_dir)
    if model.tie_word_embeddings and mesh.is_sampler and target.type != "meta":
        check_tied_head(checkpoint, EMBEDDING, HEAD)
    source = SafetensorsSource(
        checkpoint,
        wanted=wanted_tensors(model, config, mesh),
        dtype=dtype,
        device=target,
        progress=progress,
        form=choose_form(model.quantization, config.quantization),
    )
    chosen = ops or choose_ops(config.kernels, target, dtype, threads)
    site = Site(source=source, tp=mesh.tp, ops=chosen, device=target)
    load_layer = import_module(MODELS[model.model_type]).load_layer
    loaded = build_stage(model, config, mesh, site, dtype, load_layer)
    source.finish()
    return loaded
