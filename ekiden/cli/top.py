"""``ekiden top``: pools, replicas and requests of a deployment, live."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any

from ekiden.cli.chat import DEFAULT_URL
from ekiden.cli.command import add_command
from ekiden.cli.options import add_redis, redis_url, seconds
from ekiden.core.clock import MonotonicClock
from ekiden.core.errors import SetupError

if TYPE_CHECKING:
    import httpx

    from ekiden.cli.top_view import View
    from ekiden.doctor.scrape import Scrape
    from ekiden.registry.watcher import Watcher

SCRAPE_S = 2.0
LEAST_S = 0.2
_HOME, _REST, _LINE = "\033[H", "\033[J", "\033[K"

_EXAMPLES = """examples:
  ekiden top --redis redis://127.0.0.1:6379/0
  ekiden top --redis redis://10.0.0.5:6379/0 --url http://gateway:8000 --interval 5
  ekiden top --once                              one look, for scripts; REDIS_URL names the Redis

KV: blocks that requests hold; cached: blocks kept for later prompts; step: a decode step;
comm: share of a step in collectives and stage links; idle: of each pipeline stage.
"""


def add_parser(commands: Any) -> None:
    parser = add_command(commands, "top", "watch pools, replicas and requests", _EXAMPLES)
    add_redis(parser)
    parser.add_argument(
        "--url", default=DEFAULT_URL, help=f"of the gateway, for requests (default: {DEFAULT_URL})"
    )
    parser.add_argument(
        "--interval", type=seconds, default=1.0, metavar="SECONDS",
        help=f"between two looks, {LEAST_S:g} or more (default: 1)",
    )  # fmt: skip
    parser.add_argument("--once", action="store_true", help="look twice, print once, end")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    url = redis_url(args)
    if not url:
        raise SetupError("no deployment to look at: give --redis URL or set REDIS_URL")
    if args.interval < LEAST_S:
        raise SetupError(f"--interval {args.interval:g} is too short: at least {LEAST_S:g} s")
    asyncio.run(Top(url, args.url.rstrip("/"), args.interval).run(once=args.once))
    return 0


class Top:
    """Looks at one deployment until it is interrupted."""

    def __init__(self, redis: str, gateway: str, interval_s: float) -> None:
        self._redis, self._gateway = redis, gateway
        self._interval_s = interval_s
        self._before: Scrape | None = None
        self._clock = MonotonicClock()

    async def run(self, *, once: bool) -> None:
        """Raises SetupError: there is no Redis."""
        import httpx

        from ekiden.registry.watcher import Watcher

        watcher = Watcher(self._redis)
        await watcher.start(require=True)
        try:
            async with httpx.AsyncClient(timeout=SCRAPE_S, trust_env=False) as http:
                await self._look(http, watcher)  # rates need two readings
                while True:
                    await asyncio.sleep(self._interval_s)
                    show(self._title(), await self._look(http, watcher), live=not once)
                    if once:
                        return
        finally:
            await watcher.close()

    def _title(self) -> str:
        return f"ekiden top   {time.strftime('%H:%M:%S')}   every {self._interval_s:g} s\n"

    async def _look(self, http: httpx.AsyncClient, watcher: Watcher) -> View:
        from ekiden.cli.top_view import View
        from ekiden.doctor.scrape import Interval, Scrape, scrape

        looked = await scrape(http, self._gateway, self._clock)
        found = looked if isinstance(looked, Scrape) else None
        trouble = "" if found else f"{self._gateway} tells nothing ({looked}): give --url"
        before, self._before = self._before, found
        return View(
            replicas=watcher.replicas(),
            stale_s=watcher.stale_for_s,
            gateway=Interval(before=before, after=found) if before and found else None,
            trouble=trouble or "its first reading is there, the next makes rates of it",
        )


def show(title: str, view: View, *, live: bool) -> None:
    """On a terminal in place of what was there; else below it."""
    from ekiden.cli.top_view import screen

    columns, lines = shutil.get_terminal_size() if sys.stdout.isatty() else (1000, 0)
    text = f"{title}\n{screen(view, columns)}\n"
    if live and sys.stdout.isatty():
        text = _HOME + _cut(text, columns, lines).replace("\n", f"{_LINE}\n") + _REST
    print(text, end="" if live else "\n", flush=True)


def _cut(text: str, columns: int, lines: int) -> str:
    """No more than a terminal of that size shows: what scrolls cannot be drawn over."""
    found = text.splitlines()
    if len(found) >= lines:
        kept = max(1, lines - 2)
        found[kept:] = [f"... {len(found) - kept} more lines: --once prints them all"]
    return "\n".join(line[:columns] for line in found) + "\n"
