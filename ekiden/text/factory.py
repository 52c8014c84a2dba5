"""What the engine is given so that it can see text: one call makes the text of a new choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ekiden.core.errors import BadRequest, SetupError
from ekiden.text.output import OutputText
from ekiden.text.tokenizer import Tokenizer


def text_factory(directory: Path) -> Callable[[Sequence[str], int], OutputText]:
    """``(stop strings, min_tokens) -> OutputText`` over the directory's tokenizer.

    A directory without a usable tokenizer still serves token ids; only stop strings, which need
    text, are refused with BadRequest then.
    """
    try:
        tokenizer = Tokenizer.load(directory)
    except SetupError as error:
        return _refuse(error.message)
    return lambda stops, min_tokens: OutputText(tokenizer, stops, min_tokens=min_tokens)


def _refuse(why: str) -> Callable[[Sequence[str], int], OutputText]:
    def refuse(_stops: Sequence[str], _min_tokens: int) -> OutputText:
        raise BadRequest(f"stop strings cannot be served: {why}", field="stop")

    return refuse
