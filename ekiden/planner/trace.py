"""Requests as they were recorded, and a trace as a workload: requests of similar lengths are one
kind.

A line of the file is one request: ``timestamp`` in ms, ``input_length`` and ``output_length`` in
tokens, and ``hash_ids``, one for each 512 tokens of the prompt. Equal ids stand for equal tokens at
equal places. The format is that of the traces which Mooncake published (Qin et al., FAST '25).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from ekiden.core.errors import SetupError
from ekiden.planner.workload import Requests, Workload, check_rate

KINDS = 16
"""Into which a trace is cut: equal numbers of requests, by the length of their prompts."""
BLOCK = 512
"""Tokens of a prompt that one of ``hash_ids`` stands for."""
CACHED_BLOCKS = (128, 512, 2048, 8192, 32768)
"""Of KV kept for reuse, for which it is counted what they would find: 65 thousand to 17 million
tokens. A deployment has what lies between."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a trace, a JSON object a line."""

    timestamp: float
    """Milliseconds from the start."""
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    """One for each block of the prompt; equal ids are equal prefixes."""


def read_trace(file: Path) -> list[Line]:
    """Every request of the file, in order of arrival.

    Raises:
        SetupError: it cannot be read, is empty, or a line is no request; names its number.
    """
    try:
        rows = file.read_bytes().splitlines()
    except OSError as error:
        raise SetupError(f"--trace {file} cannot be read: {error.strerror}") from None
    lines = [_line(file, number, row) for number, row in enumerate(rows, 1) if row.strip()]
    if not lines:
        raise SetupError(f"--trace {file} holds no request")
    return sorted(lines, key=lambda line: line.timestamp)


def _line(file: Path, number: int, row: bytes) -> Line:
    try:
        line = msgspec.json.decode(row, type=Line)
    except msgspec.DecodeError as error:
        raise SetupError(
            f"--trace {file} line {number} is no request ({error}): each line is a JSON object "
            "of timestamp (ms), input_length, output_length and, where prompts share a beginning, "
            "hash_ids"
        ) from None
    if line.input_length < 1 or line.output_length < 1:
        raise SetupError(
            f"--trace {file} line {number} asks for {line.output_length} tokens after "
            f"{line.input_length}: both must be 1 or more"
        )
    return line


def from_trace(file: Path, rate: float | None = None) -> Workload:
    """Its kinds, its prefix sharing, and its own rate unless another one is given.

    Raises:
        SetupError: as ``read_trace``.
    """
    lines = read_trace(file)
    curve = sharing(lines)
    seconds = (max(x.timestamp for x in lines) - min(x.timestamp for x in lines)) / 1e3
    own = (len(lines) - 1) / seconds if seconds > 0 else None
    asked = rate or own
    return Workload(
        name=f"trace {file.name}",
        kinds=_kinds(lines),
        rate=None if asked is None else check_rate(asked),
        prefix_share=curve[-1][1],
        sharing=curve,
        extreme=max(line.input_length + line.output_length for line in lines),
    )


def _kinds(lines: list[Line]) -> tuple[Requests, ...]:
    ordered = sorted(lines, key=lambda line: line.input_length)
    count = min(KINDS, len(ordered))
    parts = [
        ordered[i * len(ordered) // count : (i + 1) * len(ordered) // count] for i in range(count)
    ]
    return tuple(
        Requests(
            prompt=max(1, round(sum(x.input_length for x in part) / len(part))),
            output=max(1, round(sum(x.output_length for x in part) / len(part))),
            share=len(part) / len(ordered),
        )
        for part in parts
    )


def sharing(lines: Sequence[Line]) -> tuple[tuple[int, float], ...]:
    """(tokens of cache, share of prompt tokens that it finds), from no cache on."""
    return (0, 0.0), *((blocks * BLOCK, shared(lines, blocks)) for blocks in CACHED_BLOCKS)


def shared(lines: Iterable[Line], blocks: int) -> float:
    """Share of prompt tokens that a cache of ``blocks`` would find, where the least recently used
    leave first."""
    kept: OrderedDict[int, None] = OrderedDict()
    found = total = 0
    for line in lines:
        total += line.input_length
        hits = 0
        for block in line.hash_ids:
            if block not in kept:
                break
            hits += 1
        found += min(hits * BLOCK, line.input_length - 1)
        for block in line.hash_ids:
            if block in kept:
                kept.move_to_end(block)
            else:
                kept[block] = None
        while len(kept) > blocks:
            kept.popitem(last=False)
    return found / total
