"""Break a deployment of real processes in every state of a hand-off, and audit what is left.

    make chaos                      all seeds; the table on the screen, build/chaos.json
    make chaos ARGS="--quick"       two minutes
    make chaos ARGS="--kv-transport tcp --seeds 1"

Exit code 1 on any breach: a wrong text, a request without an honest end, anything leaked, a process
that needed a restart though nobody killed it. Each seed is a lane with a deployment of its own, in
a network namespace of its own where the machine allows that; the lanes run at once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "chaos")]

from ekiden.cli.kv_options import wires  # noqa: E402
from ekiden.core.env import quiet_grpc_forks  # noqa: E402

quiet_grpc_forks()

import msgspec  # noqa: E402
from chaos_lane import Lane, run_lane  # noqa: E402
from chaos_net import private_argv, why_not  # noqa: E402
from chaos_plan import SEEDS  # noqa: E402
from chaos_report import Report, markdown, save, screen, table  # noqa: E402
from chaos_round import Row  # noqa: E402

EPILOG = """examples:
  make chaos                                            all seeds, 20 to 25 minutes on two cores
  make chaos ARGS="--quick"                             one seed, a tenth of the faults: 2 minutes
  make chaos ARGS="--kv-transport tcp --seeds 1"        one seed: about 10 minutes
  make chaos ARGS="--markdown table.md --logs logs/"    keep the table and the services' logs

exit codes: 0 no breach, 1 a breach or no fault at all, 2 an option that cannot be
"""

PAGE = """# What became of each fault

{verdict}. [chaos.md](chaos.md) says what the words mean. Seconds are from the fault to the last of
twenty right answers after it; where a replica was started anew, they are mostly its start.

{table}
"""

NO_HOSTS = {"tcp": "a tcp port is dialled where its replica is advertised, which is the relay"}
"""Wires that need all replicas and relays on one address, and why."""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="one seed, a tenth of the faults")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[], help=f"default: 1 to {SEEDS}; quick: 1"
    )
    parser.add_argument(
        "--kv-transport",
        default="ucx",
        metavar="NAMES",
        type=wires,
        help="the wire, or several with commas between (default: ucx)",
    )
    parser.add_argument(
        "--lanes", type=int, default=SEEDS, metavar="N", help=f"seeds at once (default: {SEEDS})"
    )
    parser.add_argument(
        "--no-hosts", action="store_true", help="all on loopback: no link is cut or slowed"
    )
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "chaos.json", metavar="FILE",
                        help="every fault and its outcome (default: build/chaos.json)")  # fmt: skip
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there too")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the services' logs")
    parser.add_argument("--lane", type=Path, help=argparse.SUPPRESS)
    return parser


def main() -> int:
    args = parser().parse_args()
    if args.lane is not None:
        return lane(args.lane)
    skipped = "--no-hosts was given" if args.no_hosts else NO_HOSTS.get(args.kv_transport, "")
    skipped = skipped or why_not()
    if skipped:
        print(f"chaos: no link is cut, slowed or throttled: {skipped}", flush=True)
    seeds = args.seeds or ([1] if args.quick else list(range(1, SEEDS + 1)))
    began = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="ekiden-chaos-") as folder:
        rows, trouble = run_lanes(args, seeds, Path(folder), hosts=not skipped)
    report = Report(
        kv_transport=args.kv_transport,
        seeds=seeds,
        seconds=time.monotonic() - began,
        skipped=skipped,
        rows=rows,
        trouble=trouble,
    )
    save(report, args.json)
    lines = table(report)
    print(screen(lines))
    for breach in report.breaches:
        print(f"BREACH: {breach}")
    print(f"chaos: {report.verdict()}\nwritten: {args.json}")
    if args.markdown:
        args.markdown.write_text(PAGE.format(verdict=report.verdict(), table=markdown(lines)))
    return 1 if report.breaches or not report.injected else 0


def run_lanes(
    args: argparse.Namespace, seeds: list[int], folder: Path, *, hosts: bool
) -> tuple[list[Row], list[str]]:
    """Every seed in a process of its own, ``args.lanes`` of them at once. Ctrl-C ends them all;
    what they have found by then is kept."""
    from stack import save_tiny_model

    model = folder / "model"
    save_tiny_model(model)
    waiting, running, ended = list(seeds), {}, []
    trouble: list[str] = []
    try:
        while waiting or running:
            while waiting and len(running) < args.lanes:
                seed = waiting.pop(0)
                running[seed] = start_lane(args, seed, folder, hosts=hosts)
            for seed in [seed for seed, process in running.items() if process.poll() is not None]:
                ended.append((seed, running.pop(seed)))
            time.sleep(0.2)
    except KeyboardInterrupt:
        trouble.append("stopped before the end")
    finally:
        for process in running.values():
            process.send_signal(signal.SIGTERM)
        for process in running.values():
            process.wait()
    rows: list[Row] = []
    ended += running.items()
    for seed, process in sorted(ended, key=lambda item: item[0]):
        found = folder / f"{seed}.rows"
        rows += msgspec.json.decode(found.read_bytes(), type=list[Row]) if found.exists() else []
        if process.returncode and seed not in running:
            trouble.append(f"seed {seed}: its lane ended with exit code {process.returncode}")
    return rows, trouble


def start_lane(
    args: argparse.Namespace, seed: int, folder: Path, *, hosts: bool
) -> subprocess.Popen[bytes]:
    order = Lane(
        seed=seed,
        model_dir=str(folder / "model"),
        hosts=hosts,
        kv_transport=args.kv_transport,
        quick=args.quick,
        logs=str(args.logs.resolve() / str(seed)) if args.logs else "",
    )
    file = folder / f"{seed}.lane"
    file.write_bytes(msgspec.json.encode(order))
    argv = [sys.executable, str(Path(__file__).resolve()), "--lane", str(file)]
    # Ctrl-C is for the parent alone, which ends the lanes in order.
    return subprocess.Popen(private_argv(argv) if hosts else argv, start_new_session=True)


def lane(file: Path) -> int:
    """In the lane's own process: run it, and leave what it found beside its order."""
    order = msgspec.json.decode(file.read_bytes(), type=Lane)
    rows: list[Row] = []
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    try:
        asyncio.run(run_lane(order, rows))
    finally:
        file.with_suffix(".rows").write_bytes(msgspec.json.encode(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
