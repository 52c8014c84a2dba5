"""Thousands of requests through one hand-off pair, then: same answers, balanced books, flat memory.

    make soak                       5,000 requests, prefill TP2 x PP2 -> decode TP3
    make soak ARGS="--requests 500"

Exit code 1 on any wrong or failed answer, anything held at the end, or memory that grows
(``tests/chaos/soak_memory.py`` says what counts as flat). The curve: docs/charts/soak.svg.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "chaos")]

from ekiden.core.env import quiet_grpc_forks  # noqa: E402

quiet_grpc_forks()

import msgspec  # noqa: E402
from benchmarks import chart  # noqa: E402
from chaos_clients import Client, Truth  # noqa: E402
from chaos_net import Loopback  # noqa: E402
from chaos_world import HostedStack  # noqa: E402
from ports import free_port  # noqa: E402
from soak_load import REPLAYED, Load, ask_of  # noqa: E402
from soak_memory import Sample, growth, look, not_flat  # noqa: E402
from stack import Service, audit, ranks_of, save_tiny_model  # noqa: E402

from ekiden.cli.kv_options import wires  # noqa: E402
from ekiden.cli.options import at_least  # noqa: E402
from ekiden.plots.lines import lines  # noqa: E402

EPILOG = """examples:
  make soak                                             5,000 requests, 4 minutes on two cores
  make soak ARGS="--requests 500"                       half a minute
  make soak ARGS="--kv-transport tcp --requests 2000"   over another wire

exit codes: 0 no breach, 1 a breach, 2 an option that cannot be
"""

SMALL_POOL = ("--num-gpu-blocks-override", "400", "--max-model-len", "2048")
"""A few long sequences fill it: blocks are evicted, waited for and taken over all the time."""
PREFILL = ("-tp", "2", "-pp", "2", "--max-num-batched-tokens", "256", *SMALL_POOL)
DECODE = ("-tp", "3", "--local-prefill-tokens", "0", *SMALL_POOL)
CLIENT_LIMIT_S = 120.0
IDLE_WITHIN_S = 20.0
LOOKS = 50
AT_ONCE = 16

Answers = dict[int, dict[int, str]]
"""Texts by request and choice."""


class Found(msgspec.Struct, kw_only=True):
    """Everything a run says."""

    requests: int
    left: int
    repeated: int
    replayed: int
    seconds: float
    breaches: list[str]
    memory: dict[str, list[Sample]]


class Deployment:
    """The pair and its gateway, and the processes that they are."""

    def __init__(self, services: list[Service]) -> None:
        self.services = services
        self.processes: dict[str, int] = {}
        for service in services:
            self.processes[service.name] = service.child.process.pid
            ranks = ranks_of(service) if service.name != "gateway" else []
            for number, pid in enumerate(sorted(ranks)):
                self.processes[f"{service.name} rank {number}"] = pid

    def look(self, requests: int) -> dict[str, Sample]:
        return {name: look(pid, requests) for name, pid in self.processes.items()}

    async def held(self) -> list[str]:
        """What is still held once nobody asks any more."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + IDLE_WITHIN_S
        while True:
            books = {s.name: await audit(s) for s in self.services if s.name != "gateway"}
            held = [
                f"{name} still holds {book}".replace("\n", " ")
                for name, book in books.items()
                if book.held or book.requests or book.sessions
            ]
            if not held or loop.time() > deadline:
                return held
            await asyncio.sleep(0.1)


async def soak(args: argparse.Namespace, folder: Path) -> Found:
    model = folder / "model"
    save_tiny_model(model)
    net, wire = Loopback(()), ("--kv-transport", args.kv_transport)
    port = free_port()
    url = f"redis://{net.here}:{port}/0"
    async with HostedStack(folder / "run", model, url, net) as stack:
        await stack.start_redis(port)
        pair = await stack.start_all(
            ("prefill", "p-1", *PREFILL, *wire), ("decode", "d-1", *DECODE, *wire)
        )
        gateway = await stack.start("gateway", "gateway")
        deployment = Deployment([*pair, gateway])
        client = Client(f"http://{gateway.address}", limit_s=CLIENT_LIMIT_S)
        try:
            found, answers = await press(args, deployment, client)
        finally:
            await client.close()
    found.breaches += await known_right(folder, answers)
    return found


async def press(
    args: argparse.Namespace, deployment: Deployment, client: Client
) -> tuple[Found, Answers]:
    """Ask, replay, audit; also the answers to the first requests."""
    began, load = time.monotonic(), Load(client, AT_ONCE)
    memory: dict[str, list[Sample]] = {name: [] for name in deployment.processes}

    def report(done: int) -> None:
        for name, sample in deployment.look(done).items():
            memory[name].append(sample)
        print(
            f"soak: {done} of {args.requests} requests, {load.left} left, {len(load.wrong)} wrong, "
            f"{time.monotonic() - began:.0f} s",
            flush=True,
        )

    report(0)
    await load.run(args.requests, max(1, args.requests // LOOKS), report)
    replayed = await load.replay()
    breaches = [*load.wrong, *await deployment.held()]
    breaches += [said for name, samples in memory.items() for said in not_flat(name, samples)]
    if replayed < REPLAYED:
        breaches.append(f"only {replayed} of the first {REPLAYED} answers could be compared")
    found = Found(
        requests=args.requests,
        left=load.left,
        repeated=load.repeated - replayed,
        replayed=replayed,
        seconds=time.monotonic() - began,
        breaches=breaches,
        memory=memory,
    )
    return found, {number: load.answers[number] for number in range(REPLAYED)}


async def known_right(folder: Path, found: Answers) -> list[str]:
    """Compare the first answers with those of one process without a hand-off."""
    net, port = Loopback(()), free_port()
    url = f"redis://{net.here}:{port}/0"
    async with HostedStack(folder / "calm", folder / "model", url, net) as stack:
        await stack.start_redis(port)
        await stack.start("decode", "calm", "--max-model-len", "2048")
        gateway = await stack.start("gateway", "gateway")
        client = Client(f"http://{gateway.address}", limit_s=CLIENT_LIMIT_S)
        try:
            truth = Truth(client)
            texts = {number: await truth.texts(ask_of(number)) for number in sorted(found)}
        finally:
            await client.close()
    return [
        f"request {number}: one process gives another answer"
        for number, text in texts.items()
        if text != found[number]
    ]


def draw(found: Found, path: Path) -> None:
    """Resident memory of every process over the requests, in MiB."""
    series = {
        name: [(float(s.requests), s.resident / 2**20) for s in samples[:: max(1, LOOKS // 10)]]
        for name, samples in found.memory.items()
    }
    title = "Resident memory under load, prefill TP2 x PP2 -> decode TP3"
    chart.write(path, lines(title, "requests", "MiB", series, log=False))


def say(found: Found) -> dict[str, Any]:
    """A line for each process, and the verdict."""
    rows = {}
    for name, samples in found.memory.items():
        first, last = samples[len(samples) // 3], samples[-1]
        rise = growth(samples, "resident") / 2**20
        rows[name] = rise
        print(
            f"{name:<14} {first.resident / 2**20:8.1f} MiB at {first.requests}, "
            f"{last.resident / 2**20:8.1f} MiB at {last.requests}; fitted rise {rise:+.2f} MiB; "
            f"{last.pinned / 2**20:.0f} MiB pinned, {last.descriptors} descriptors, "
            f"{last.threads} threads"
        )
    for breach in found.breaches[:20]:
        print(f"BREACH: {breach}")
    print(
        f"soak: {found.requests} requests in {found.seconds / 60:.1f} minutes, {found.left} left, "
        f"{found.repeated} repeated and {found.replayed} of the first replayed with the same "
        f"answer; {len(found.breaches)} breaches"
    )
    return rows


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--requests", type=at_least(100), default=5000, metavar="N",
        help="before the first 50 are replayed (default: 5000)",
    )  # fmt: skip
    parser.add_argument(
        "--kv-transport", default="ucx", metavar="NAMES", type=wires,
        help="the wire, or several with commas between (default: ucx)",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=Path, default=ROOT / "build" / "soak.json", metavar="FILE",
        help="what was found, the samples of memory too (default: build/soak.json)",
    )  # fmt: skip
    parser.add_argument(
        "--chart", type=Path, default=ROOT / "docs" / "charts" / "soak.svg", metavar="FILE",
        help="the curve of memory (default: docs/charts/soak.svg)",
    )  # fmt: skip
    return parser


def main() -> int:
    args = parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="ekiden-soak-") as folder:
        found = asyncio.run(soak(args, Path(folder)))
    draw(found, args.chart)
    say(found)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    return 1 if found.breaches else 0


if __name__ == "__main__":
    sys.exit(main())
