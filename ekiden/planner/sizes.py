"""The fields of a ``config.json`` as sizes that a model can have.

What is read here is multiplied, and made into layers: a slip of the pen must not take a machine's
memory, so every size has bounds, a few times beyond those of any model.
"""

from __future__ import annotations

import json

from ekiden.core.errors import SetupError
from ekiden.models.fields import Fields

_LAYERS, _HEADS, _WIDTH, _EXPERTS = 512, 4096, 1 << 20, 4096
_POSITIONS = 1 << 28
MOST = {
    "num_hidden_layers": _LAYERS,
    "first_k_dense_replace": _LAYERS,
    "vocab_size": 1 << 24,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "linear_num_key_heads": _HEADS,
    "linear_num_value_heads": _HEADS,
    "num_experts": _EXPERTS,
    "num_local_experts": _EXPERTS,
    "n_routed_experts": _EXPERTS,
    "n_shared_experts": _EXPERTS,
    "num_experts_per_tok": _EXPERTS,
    "max_position_embeddings": _POSITIONS,
    "sliding_window": _POSITIONS,
    "attention_chunk_size": _POSITIONS,
}
"""Of a field by name; all others are widths."""
MOST_STRETCH = 4096
"""Times by which RoPE scaling may stretch the positions."""


class Sizes(Fields):
    """Fields whose whole numbers are bounded, and whose kinds are checked."""

    def positive(self, name: str, default: int | None = None) -> int:
        """A whole number from 1 to the most that ``name`` may be; null or missing: ``default``.

        Raises:
            SetupError: it is none; names the file, the field, its value and the range.
        """
        value = self.get(name)
        return self._whole(name, default if value is None else value, least=1)

    def optional(self, name: str, default: int = 0) -> int:
        """The same, or 0; null or missing: ``default``."""
        value = self.get(name)
        return self._whole(name, default if value is None else value, least=0)

    def _whole(self, name: str, value: object, *, least: int) -> int:
        most = MOST.get(name, _WIDTH)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise SetupError(
                f"{self.file}: {name} is {shown(value)}: choose a whole number from {least} to "
                f"{most:,}"
            )
        return value

    def flag(self, name: str) -> bool:
        """True or false; null or missing is false. Raises SetupError: it is neither."""
        value = self.get(name)
        if not isinstance(value, bool | None):
            raise SetupError(f"{self.file}: {name} is {shown(value)}: choose true or false")
        return bool(value)

    def part(self, name: str) -> float:
        """A share above 0 and up to 1; null or missing is 1. Raises SetupError: it is none."""
        value = self.get(name)
        return self._number(name, 1.0 if value is None else value, most=1)

    def _number(self, name: str, value: object, *, most: float) -> float:
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else 0
        if not 0 < number <= most:
            raise SetupError(
                f"{self.file}: {name} is {shown(value)}: choose a number above 0 and up to {most:,}"
            )
        return float(number)

    def stretch(self, scaling: dict[str, object]) -> float:
        """``factor`` of RoPE scaling; 1 where it has none. Raises SetupError: it is no factor."""
        value = scaling.get("factor")
        return self._number("factor", 1.0 if value is None else value, most=MOST_STRETCH)


def shown(value: object, most: int = 40) -> str:
    """A value as it stands in the file, cut where it is long."""
    text = json.dumps(value)
    return text if len(text) <= most else f"{text[:most]}..."
