"""Text of a given number of tokens, for a server whose tokenizer may only be asked by its usage.

Prompts are words that are one token each in nearly every vocabulary, or else digits. Two questions
show whether the server agrees: how its count grows with the words, and what it adds to them (the
chat template, a token that begins every text).
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import lru_cache

import msgspec

from ekiden.bench.workload import Piece

_COMMON = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government number
night point home water room mother area money story fact month lot right study book eye job word
business issue side kind head house service friend father power hour game line end member law
car city community name president team minute idea body information back parent face level
office door health person art war history party result change morning reason research girl
moment air teacher force education
"""
WORDS = _COMMON.split()
DIGITS = list("0123456789")
UNITS = {"words": (WORDS, " "), "digits": (DIGITS, "")}
_KEPT_PIECES = 64


class Wording(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are put into text: ``per_unit`` tokens a word or digit, ``added`` for a prompt."""

    units: str = "words"
    per_unit: float = 1.0
    added: int = 0
    exact: bool = False
    """The server's own count agreed."""
    how: str = "counted in words: the server does not tell how many tokens it read"

    def text(self, pieces: Iterable[Piece]) -> str:
        """A prompt; what the server adds is taken off its beginning."""
        words, joint = [], UNITS[self.units][1]
        over = float(self.added)
        for piece in pieces:
            tokens = max(0.0, piece.tokens - over)
            over = max(0.0, over - piece.tokens)
            if count := round(tokens / self.per_unit):
                words.append(_piece(self.units, piece.name, count))
        return joint.join(words) or UNITS[self.units][0][0]

    @property
    def least(self) -> int:
        """Tokens of the shortest prompt that can be made."""
        return self.added + 1


@lru_cache(_KEPT_PIECES)
def _piece(units: str, name: str, count: int) -> str:
    """Equal names begin alike, whatever their count."""
    choices, joint = UNITS[units]
    return joint.join(random.Random(name).choices(choices, k=count))
