"""A progress bar on stderr: redrawn on a terminal, one line a phase in a log."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TextIO

_WIDTH = 30


def _megabytes(total: int) -> str:
    return f"{total / 1e6:.0f} MB"


class Bar:
    """Call it with (what, done, total); call ``close`` before other output.

    ``unit`` puts the total into words.
    """

    def __init__(
        self, out: TextIO | None = None, *, unit: Callable[[int], str] = _megabytes
    ) -> None:
        self._out = out or sys.stderr
        self._unit = unit
        self._tty = self._out.isatty()
        self._shown: tuple[str, int] = ("", -1)

    def __call__(self, what: str, done: int, total: int) -> None:
        percent = 100 * done // total if total else 100
        if (what, percent) == self._shown:
            return
        if what != self._shown[0]:
            self.close()
        self._shown = (what, percent)
        if self._tty:
            filled = "█" * (_WIDTH * percent // 100)
            self._out.write(f"\r{what:<8} {filled:░<{_WIDTH}} {percent:3d}% of {self._unit(total)}")
            self._out.flush()
        elif percent == 100:
            self._out.write(f"{what}: {self._unit(total)} done\n")

    def close(self) -> None:
        if self._tty and self._shown[0]:
            self._out.write("\n")
        self._shown = ("", -1)
