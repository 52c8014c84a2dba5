"""A model's shape out of its ``config.json`` alone, and every parameter counted. No torch.

The planner knows more families than this engine serves: it must be able to say what a model would
take before anybody can run it. What differs between families is a row of ``families.FAMILIES``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ekiden.core.errors import SetupError
from ekiden.models.fields import read_json
from ekiden.planner.families import resolve_family
from ekiden.planner.matrices import VOCAB, Matrix, column, whole
from ekiden.planner.parts import Layer, Moe
from ekiden.planner.precision import quantised_as
from ekiden.planner.reading import layers_of
from ekiden.planner.sizes import Sizes, shown

EMBEDDING, HEAD = "embedding", "head"


class Geometry(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer: everything that decides what it takes of memory."""

    name: str
    model_type: str
    hidden: int
    vocab: int
    tied: bool
    """The head is the embedding."""
    layers: tuple[Layer, ...]
    max_positions: int
    """Longest sequence in tokens that the config promises."""
    learned_positions: int = 0
    """Rows of a table of position vectors (OPT); 0: positions are rotations."""
    final_norms: int = 1
    dtype: str = "bfloat16"
    quant_method: str = ""
    """Of the config's ``quantization_config``, by ``quantised_as``; empty for floats."""
    extra_towers: tuple[str, ...] = ()
    """Parts of the config that are not counted, such as ``vision_config``."""
    tower_parameters: int = 0
    """Of a vision tower and its projector, which stay floats; not among ``parameters``."""

    @property
    def kinds(self) -> tuple[Layer, ...]:
        """Layers that differ, each once."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def heads(self) -> int:
        """Query heads of the layer that has most: TP cannot go beyond."""
        return max(layer.attention.heads for layer in self.layers)

    @property
    def is_moe(self) -> bool:
        return any(isinstance(layer.mlp, Moe) for layer in self.layers)

    @property
    def is_hybrid(self) -> bool:
        """Layers differ in what they keep of a sequence."""
        return len({(type(x.attention), x.attention.window) for x in self.layers}) > 1

    @property
    def rotary_dim(self) -> int:
        return max(layer.attention.rotary_dim for layer in self.layers)

    @property
    def experts(self) -> int:
        """Routed experts of a MoE layer; 0 in a dense model."""
        return max((x.mlp.experts for x in self.layers if isinstance(x.mlp, Moe)), default=0)

    def ends(self) -> list[Matrix]:
        """What is outside of the layers: embedding, positions, final norm, a head of its own."""
        found = column("embed_tokens", EMBEDDING, self.vocab, self.hidden, VOCAB)
        if self.learned_positions:
            found.append(whole("positions", "norm", self.learned_positions, self.hidden))
        found += [whole(f"final_norm{i}", "norm", self.hidden) for i in range(self.final_norms)]
        if not self.tied:
            found += column("lm_head", HEAD, self.vocab, self.hidden, VOCAB)
        return found

    def matrices(self) -> Iterator[tuple[Matrix, int]]:
        """Every kind of matrix with how often the model has it."""
        for layer, count in Counter(self.layers).items():
            yield from ((matrix, count) for matrix in layer.matrices(self.hidden))
        yield from ((matrix, 1) for matrix in self.ends())

    @property
    def parameters(self) -> int:
        """Of the whole model, tied ones once."""
        return sum(matrix.elements * count for matrix, count in self.matrices())

    @property
    def active_parameters(self) -> int:
        """What one token meets: of routed experts only the ``top_k`` that it is sent to."""
        idle = 0
        for layer in self.layers:
            if isinstance(layer.mlp, Moe):
                experts = sum(m.elements for m in layer.mlp.expert_matrices(self.hidden))
                idle += experts * (layer.mlp.experts - layer.mlp.top_k) // layer.mlp.experts
        return self.parameters - idle


def from_config(config: dict[str, Any], name: str = "config.json") -> Geometry:
    """The geometry of a parsed ``config.json``; ``name`` is for the errors, and the model's.

    A model of several towers is taken by its ``text_config``.

    Raises:
        SetupError: a family that is not known, or a field that is missing or wrong; names the
            field, its value and the choices.
    """
    text = config.get("text_config")
    values = {**config, **text} if isinstance(text, dict) else config
    towers = tuple(sorted(k for k in config if k.endswith("_config") and k in _TOWERS))
    try:
        return _build(Sizes(values, Path(name)), name, towers)
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise SetupError(f"{name} has a field of the wrong kind: {error}") from error


def from_path(path: Path) -> Geometry:
    """The geometry of a ``config.json``, or of a directory that holds one.

    Raises:
        SetupError: as ``from_config``, or no such file.
    """
    file = path / "config.json" if path.is_dir() else path
    return from_config(read_json(file), str(file))


_TOWERS = ("vision_config", "audio_config", "speech_config", "image_config")


def _build(fields: Sizes, name: str, towers: tuple[str, ...]) -> Geometry:
    family = resolve_family(fields)
    fields = Sizes(fields.values, fields.file, family.defaults)
    hidden, heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    if not family.latent and not fields.optional("head_dim") and hidden % heads:
        raise SetupError(
            f"{fields.file}: hidden_size {hidden} is not a multiple of num_attention_heads "
            f"{heads}, and head_dim is not given: one of the three is wrong"
        )
    quantization = fields.get("quantization_config") or {}
    positions = fields.positive("max_position_embeddings")
    return Geometry(
        name=name,
        model_type=fields.get("model_type"),
        hidden=hidden,
        vocab=fields.positive("vocab_size"),
        tied=fields.flag("tie_word_embeddings"),
        layers=layers_of(family, fields),
        max_positions=_reach(fields, positions),
        learned_positions=positions + family.position_offset if family.position_offset else 0,
        final_norms=family.final_norms,
        dtype=str(fields.get("dtype") or fields.get("torch_dtype") or "bfloat16"),
        quant_method=quantised_as(quantization),
        extra_towers=towers,
    )


def _reach(fields: Sizes, positions: int) -> int:
    """YaRN and linear scaling stretch what a config states; Llama 3's scaling states the end."""
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise SetupError(
            f"{fields.file}: rope_scaling is {shown(scaling)}: choose an object with rope_type and "
            "factor, or null"
        )
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind == "linear":
        return int(positions * fields.stretch(scaling))
    if kind == "yarn":
        original = scaling.get("original_max_position_embeddings") or positions
        return max(positions, int(original * fields.stretch(scaling)))
    return positions
