"""Requests as they were recorded: when each came, how long it was, what it began with.

A line of the file is one request: ``timestamp`` in ms, ``input_length`` and ``output_length`` in
tokens, and ``hash_ids``, one for each 512 tokens of the prompt. Equal ids stand for equal tokens at
equal places. The format is that of the traces which Mooncake published (Qin et al., FAST '25).
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import msgspec

from ekiden.bench.workload import Ask, Piece
from ekiden.core.errors import SetupError

BLOCK = 512
"""Tokens that one id of a trace stands for."""


class _Line(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


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
    def _lines(self) -> tuple[_Line, ...]:
        """Raises SetupError when the file holds no request that is short enough."""
        if lines := _fitting(self.path, self.max_len):
            return lines
        least = min(line.input_length + line.output_length for line in _read(self.path))
        raise SetupError(
            f"--max-model-len {self.max_len} leaves no request of {self.path}: the shortest has "
            f"{least} tokens"
        )

    def _pieces(self, number: int, line: _Line) -> list[Piece]:
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
def _fitting(path: str, max_len: int) -> tuple[_Line, ...]:
    return tuple(
        line
        for line in _read(path)
        if not max_len or line.input_length + line.output_length <= max_len
    )


@lru_cache(4)
def _read(path: str) -> tuple[_Line, ...]:
    """Every request of the file, in order of arrival.

    Raises:
        SetupError: it cannot be read, is empty, or a line is none of a trace; names the line.
    """
    try:
        rows = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise SetupError(f"--trace {path} cannot be read: {error.strerror}") from None
    lines = [_line(path, number, row) for number, row in enumerate(rows, 1) if row.strip()]
    if not lines:
        raise SetupError(f"--trace {path} holds no request")
    return tuple(sorted(lines, key=lambda line: line.timestamp))


def _line(path: str, number: int, row: bytes) -> _Line:
    try:
        line = msgspec.json.decode(row, type=_Line)
    except msgspec.DecodeError as error:
        raise SetupError(
            f"--trace {path} line {number} is no request ({error}): each line is a JSON object "
            "of timestamp (ms), input_length, output_length and hash_ids"
        ) from None
    if line.input_length < 1 or line.output_length < 1:
        raise SetupError(
            f"--trace {path} line {number} asks for {line.output_length} tokens after "
            f"{line.input_length}: both must be 1 or more"
        )
    return line
