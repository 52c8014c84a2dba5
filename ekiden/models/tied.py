"""A tied model's head is its embedding. A file that holds a head as well must hold a copy."""

from __future__ import annotations

from ekiden.core.errors import SetupError
from ekiden.models.checkpoint import Checkpoint, TensorInfo

_WINDOW = 4 << 20


def check_tied_head(checkpoint: Checkpoint, embedding: str, head: str) -> None:
    """See that ``head``, where the files of a tied model have one, says what ``embedding`` says.

    Whoever wrote two different ones did not mean them to be tied, and answers would be wrong.

    Raises:
        SetupError: they differ.
    """
    table, copy = checkpoint.tensors.get(embedding), checkpoint.tensors.get(head)
    if table is None or copy is None or _equal(table, copy):
        return
    raise SetupError(
        f"{checkpoint.path / 'config.json'} says tie_word_embeddings, but {head} in "
        f"{copy.file.name} is not a copy of {embedding}: set tie_word_embeddings to false to use "
        f"it, or remove it"
    )


def _equal(one: TensorInfo, other: TensorInfo) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    left = one.stop - one.start
    with one.file.open("rb") as mine, other.file.open("rb") as theirs:
        mine.seek(one.start)
        theirs.seek(other.start)
        while left and (window := mine.read(min(left, _WINDOW))) == theirs.read(len(window)):
            left -= len(window)
    return not left
