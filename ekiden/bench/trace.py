"""A recorded trace replayed: when each request comes, how long it is, what it begins with."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import msgspec

from ekiden.bench.workload import Ask, Piece
from ekiden.core.errors import SetupError
from ekiden.planner.trace import BLOCK, Line, read_trace


class Traced(msgspec.Struct, frozen=True, kw_only=True, tag="traced"):
    """The requests of a file whose prompt and answer together have ``max_len`` tokens or fewer.

    ``max_len`` 0 takes all of them.
    """

    path: str
    max_len: int = 0
    seed: int = 0
    salt: str = ""

    def ask(self, number: int) -> Ask:
        line = self._lines[number]
        return Ask(number, tuple(self._pieces(number, line)), line.output_length)

    @property
    def moments(self) -> list[float]:
        """Seconds from the first request to each."""
        first = self._lines[0].timestamp
        return [(line.timestamp - first) / 1000 for line in self._lines]

    @property
    def size(self) -> int:
        return len(self._lines)

    @property
    def left_out(self) -> int:
        """Requests of the file that are longer than ``max_len``."""
        return len(_read(self.path)) - len(self._lines)

    def shortest_prompt(self) -> int:
        return min(line.input_length for line in self._lines)

    @property
    def _lines(self) -> tuple[Line, ...]:
        """Raises SetupError when the file holds no request that is short enough."""
        if lines := _fitting(self.path, self.max_len):
            return lines
        least = min(line.input_length + line.output_length for line in _read(self.path))
        raise SetupError(
            f"--max-model-len {self.max_len} leaves no request of {self.path}: the shortest has "
            f"{least} tokens"
        )

    def _pieces(self, number: int, line: Line) -> list[Piece]:
        """Blocks by their ids; what no id covers is the request's own."""
        pieces, left = [], line.input_length
        for name in line.hash_ids:
            if left > 0:
                pieces.append(Piece(f"{self.salt}/{self.seed}/block/{name}", min(BLOCK, left)))
                left -= BLOCK
        if left > 0:
            pieces.append(Piece(f"{self.salt}/{self.seed}/own/{number}", left))
        return pieces


@lru_cache(4)
def _fitting(path: str, max_len: int) -> tuple[Line, ...]:
    return tuple(
        line
        for line in _read(path)
        if not max_len or line.input_length + line.output_length <= max_len
    )


@lru_cache(4)
def _read(path: str) -> tuple[Line, ...]:
    """Raises SetupError as ``read_trace``."""
    return tuple(read_trace(Path(path)))
