"""One tiny model for all end-to-end tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from stack import save_tiny_model


class TinyModel(msgspec.Struct):
    """A checkpoint and the model that ``transformers`` makes of it."""

    directory: Path
    reference: Any

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """What transformers generates greedily in fp32."""
        import torch

        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(count):
                logits = self.reference(torch.tensor([tokens])).logits[0, -1]
                tokens.append(int(logits.argmax()))
        return tokens[len(prompt) :]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    directory = tmp_path_factory.mktemp("tiny-model")
    return TinyModel(directory=directory, reference=save_tiny_model(directory))
