"""What is asked: how long prompts and answers are, and which prompts begin alike.

A prompt is a row of pieces. A piece is a name and a length in tokens; equal names give equal text,
so a prefix is shared by sharing its pieces. A request's number alone decides what it is: it does
not matter which process sends it, or when.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import msgspec

from ekiden.core.errors import SetupError


class Shape(NamedTuple):
    """Tokens of a prompt and of its answer."""

    prompt: int
    output: int


NAMED: dict[str, tuple[Shape, ...]] = {
    "short-short": (Shape(256, 128),),
    "short-long": (Shape(256, 1024),),
    "long-short": (Shape(8192, 128),),
    "long-long": (Shape(8192, 1024),),
}
NAMED["mixed"] = tuple(shape for (shape,) in NAMED.values())


class Piece(NamedTuple):
    """A part of a prompt."""

    name: str
    tokens: int


class Ask(NamedTuple):
    """One request: ``pieces`` make the prompt, ``output`` tokens are asked for."""

    number: int
    pieces: tuple[Piece, ...]
    output: int

    @property
    def prompt(self) -> int:
        return sum(piece.tokens for piece in self.pieces)


class Drawn(msgspec.Struct, frozen=True, kw_only=True, tag="drawn"):
    """Requests without end, drawn from ``seed``.

    Of several shapes each request takes one at random. The first ``shared_prefix`` tokens of a
    prompt are those of one of ``prefixes`` beginnings. Another ``salt`` gives other texts of the
    same lengths, which no cache knows.
    """

    shapes: tuple[Shape, ...]
    shared_prefix: int = 0
    prefixes: int = 1
    seed: int = 0
    salt: str = ""

    def __post_init__(self) -> None:
        shortest = min(shape.prompt for shape in self.shapes)
        if self.shared_prefix >= shortest:
            raise SetupError(
                f"shared_prefix_tokens {self.shared_prefix} leaves nothing of a prompt of "
                f"{shortest} tokens: at most {shortest - 1}"
            )

    def ask(self, number: int) -> Ask:
        chance = random.Random(f"{self.seed}/ask/{number}")
        shape = chance.choice(self.shapes)
        own = Piece(f"{self.salt}/{self.seed}/own/{number}", shape.prompt - self.shared_prefix)
        if not self.shared_prefix:
            return Ask(number, (own,), shape.output)
        which = chance.randrange(self.prefixes)
        prefix = Piece(f"{self.salt}/{self.seed}/prefix/{which}", self.shared_prefix)
        return Ask(number, (prefix, own), shape.output)

    @property
    def size(self) -> int:
        """Requests there are: more than anybody sends."""
        return 1 << 62

    def shortest_prompt(self) -> int:
        return min(shape.prompt for shape in self.shapes)
