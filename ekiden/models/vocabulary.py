"""How many token ids a tokenizer knows. No torch.

Checkpoints pad their vocabulary to a round number. The padded ids mean nothing, so the model
must never emit one, and the tokenizer is what tells them apart.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ekiden.core.errors import SetupError


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[msgspec.Raw] = []
    """A map from piece to id (BPE, WordPiece) or a list in order of ids (Unigram)."""


class _AddedToken(msgspec.Struct):
    id: int


class _TokenizerFile(msgspec.Struct):
    model: _Vocabulary
    added_tokens: list[_AddedToken] | None = None


def known_tokens(path: Path) -> int:
    """One more than the largest token id of ``tokenizer.json``; 0 where there is no such file.

    Raises:
        SetupError: the file is there and is not a tokenizer.
    """
    file = path / "tokenizer.json"
    try:
        tokenizer = msgspec.json.decode(file.read_bytes(), type=_TokenizerFile)
    except FileNotFoundError:
        return 0
    except (OSError, msgspec.DecodeError) as error:
        raise SetupError(f"{file} cannot be read: {error}") from None
    vocab = tokenizer.model.vocab
    last = max(vocab.values(), default=-1) if isinstance(vocab, dict) else len(vocab) - 1
    return max([last, *(token.id for token in tokenizer.added_tokens or ())]) + 1
