"""``ekiden top`` on a terminal: each look in place of the one before, and never more than fits."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import signal
import struct
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from ekiden.core.types import ReplicaStats
from ekiden.registry.record import ReplicaRecord
from ekiden.registry.registration import Registration

REPLICAS, WIDTH = 30, 70
HEARS_CTRL_C = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from ekiden.cli.__main__ import main; raise SystemExit(main())"
)
"""As a terminal starts it: what a shell starts in the background ignores SIGINT."""
HOME, LINE, REST = "\033[H", "\033[K", "\033[J"
RECORD = ReplicaRecord(
    id="", role="decode", model="m", address="127.0.0.1:1", epoch=1, version="0", block_size=16,
    granule=16, max_model_len=100, stats=ReplicaStats(running=1, kv_blocks_total=10),
)  # fmt: skip


@asynccontextmanager
async def registered(url: str) -> AsyncIterator[None]:
    records = [msgspec.structs.replace(RECORD, id=f"d-{number:02d}") for number in range(REPLICAS)]
    lives = [Registration(url, record) for record in records]
    for life in lives:
        await life.start()
    try:
        yield
    finally:
        for life in lives:
            await life.close()


class Screen:
    """What a terminal of some lines gets to see."""

    def __init__(self, lines: int) -> None:
        self._master, self.terminal = pty.openpty()
        self._read = ""
        self._news = asyncio.Event()
        self.resize(lines)
        asyncio.get_running_loop().add_reader(self._master, self._more)

    def resize(self, lines: int, columns: int = WIDTH) -> None:
        size = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)

    def _more(self) -> None:
        self._read += os.read(self._master, 65536).decode(errors="replace")
        self._news.set()

    async def until(self, words: str) -> list[str]:
        """The lines of the last whole look once it has ``words``."""
        while True:
            looks = self._read.split(HOME)[1:]
            whole = [look for look in looks if look.endswith(REST)]
            if whole and words in whole[-1]:
                return whole[-1].removesuffix(REST).split("\r\n")
            self._news.clear()
            await self._news.wait()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._master)
        os.close(self._master)
        os.close(self.terminal)


@asynccontextmanager
async def top(url: str, screen: Screen) -> AsyncIterator[asyncio.subprocess.Process]:
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HEARS_CTRL_C, "top", "--redis", url, "--interval", "0.2"),
        *("--url", "http://127.0.0.1:1"),
        env=env,  # they would say how large a terminal is without asking it
        stdout=screen.terminal,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        screen.close()


async def test_a_look_fits_the_terminal_grows_with_it_and_ends_at_ctrl_c(redis_url: str) -> None:
    screen = Screen(lines=12)
    async with asyncio.timeout(60), registered(redis_url), top(redis_url, screen) as process:
        low = await screen.until("more lines: --once prints them all")
        assert len(low) <= 12
        assert all(len(line.removesuffix(LINE)) <= WIDTH for line in low)
        assert sum(" d-" in line for line in low) < REPLICAS
        screen.resize(60)
        high = await screen.until("d-29")
        assert sum(" d-" in line for line in high) == REPLICAS
        assert not any("more lines" in line for line in high)
        screen.resize(4, columns=20)
        tiny = await screen.until("more lines")
        assert all(len(line.removesuffix(LINE)) <= 20 for line in tiny)
        process.send_signal(signal.SIGINT)
        _, told = await process.communicate()
        assert process.returncode in (0, 130)
        assert b"Traceback" not in told
