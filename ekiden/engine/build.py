"""An engine for a model's directory: what its configuration and its files say, put together."""

from __future__ import annotations

from ekiden.core.clock import Clock, MonotonicClock
from ekiden.core.config import EngineConfig
from ekiden.engine.engine import Engine
from ekiden.engine.executor import Executor
from ekiden.models.config import ModelConfig
from ekiden.text.factory import text_factory


def build_engine(
    config: EngineConfig,
    executor: Executor,
    model: ModelConfig,
    *,
    fingerprint: str = "",
    clock: Clock | None = None,
) -> Engine:
    """The engine over ``executor``, whose ranks hold ``model``.

    ``fingerprint`` is the model's (``ekiden.models.fingerprint``); it matters only where block
    hashes or cached blocks meet those of another replica. ``clock``: the system's if None.
    """
    return Engine(
        config,
        executor,
        eos_token_ids=model.eos_token_ids,
        vocab_size=model.vocab_size,
        max_model_len=model.resolve_max_model_len(config),
        model_fingerprint=fingerprint,
        text_factory=text_factory(config.model_dir),
        clock=clock or MonotonicClock(),
    )
