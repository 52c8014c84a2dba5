"""``ekiden bench calibrate``: the planner's constants, of this machine."""

from __future__ import annotations

import argparse
import secrets
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ekiden.cli.bar import Bar
from ekiden.cli.chat import DEFAULT_URL
from ekiden.cli.command import add_command
from ekiden.cli.options import at_least, seconds
from ekiden.core import env

if TYPE_CHECKING:
    from ekiden.bench.config import BenchConfig
    from ekiden.planner.calibration import Calibration
    from ekiden.planner.fitting import Fitted
    from ekiden.planner.hardware import Gpu
    from ekiden.planner.memory import Replica

_EXAMPLES = """examples:
  ekiden bench calibrate DIR -o here.json                on a CPU: its rates are measured as well
  ekiden bench calibrate DIR -o h100.json --gpu H100     on a GPU: shares of its data sheet
  ekiden bench calibrate DIR --two-pools --calibration here.json    what two pools cost each other

Start one replica that does both first (`ekiden up DIR --prefill 0`), of one GPU or of the cores
that a replica will have (--cores), with nothing beside it. `ekiden plan DIR --calibration
here.json` then plans for this machine. What the points say nothing about, such as links, stays as
in --calibration. For --two-pools start one prefill and one decode replica instead, which hand over
every prompt (`ekiden up DIR --local-prefill-tokens 0`); only what they cost each other is added.
"""


def add_calibrate(verbs: Any) -> None:
    verb = add_command(verbs, "calibrate", "fit the planner to this machine", _EXAMPLES)
    add = verb.add_argument
    add("model", metavar="MODEL", help="what the server serves: a config.json, its directory, or a "
        "name of the planner's table")  # fmt: skip
    add("--base-url", default=DEFAULT_URL, metavar="URL",
        help=f"of one replica with its gateway (default: {DEFAULT_URL})")  # fmt: skip
    add("-o", "--output", type=Path, default=Path("calibration.json"), metavar="FILE",
        help="the constants, as `ekiden plan --calibration` reads them "
        "(default: calibration.json)")  # fmt: skip
    add("--two-pools", action="store_true",
        help="measure by how much a prefill and a decode replica of one CPU slow one another down, "
        "and add that to --calibration FILE")  # fmt: skip
    add("--gpu", default="", metavar="NAME", help="of the replica (default: this host's CPU)")
    add("--cores", type=at_least(0), default=0, metavar="N",
        help="that the replica has, where it runs on a CPU (default: 0, all)")  # fmt: skip
    add("--weights", default="auto", metavar="FORMAT",
        help="as the server holds them (default: auto, as the model is published)")  # fmt: skip
    add("--kv-cache-dtype", default="auto", metavar="DTYPE", help="of its KV (default: auto)")
    add("--max-num-batched-tokens", type=at_least(1), default=2048, metavar="N",
        help="of the server (default: 2048)")  # fmt: skip
    add("--longest", type=at_least(64), default=2100, metavar="N",
        help="tokens of a prompt and its answer (default: 2100)")  # fmt: skip
    add("--most", type=at_least(1), default=16, metavar="N",
        help="sequences at a time (default: 16)")  # fmt: skip
    add("--calibration", default="vllm", metavar="NAME|FILE",
        help="what is believed before anything is measured (default: vllm)")  # fmt: skip
    add("--timeout", type=seconds, default=600.0, metavar="SECONDS",
        help="of a request (default: 600)")  # fmt: skip
    verb.set_defaults(run=_calibrate)


def _calibrate(args: argparse.Namespace) -> int:
    return _two_pools(args) if args.two_pools else _one_replica(args)


def _two_pools(args: argparse.Namespace) -> int:
    import asyncio

    import msgspec

    from ekiden.bench.beside import measure
    from ekiden.cli.plan_question import told_by
    from ekiden.core.errors import SetupError
    from ekiden.planner.calibration import check

    believed = told_by(args.calibration)
    if believed.device is None:
        raise SetupError(
            f"--two-pools adds to a calibration of this machine, and {args.calibration!r} is none: "
            "measure one replica first (`ekiden bench calibrate DIR -o here.json`), then choose "
            "--calibration here.json"
        )
    bar = Bar(unit=lambda total: f"{total} rounds")
    try:
        prompt, token = asyncio.run(measure(_config(args), bar))
    finally:
        bar.close()
    named = msgspec.structs.replace(
        believed,
        name=args.output.stem,
        beside_decode=round(prompt.times, 3),
        beside_prompts=round(token.times, 3),
    )
    _write(args.output, check(named))
    for one, neighbour in ((prompt, "decode"), (token, "prefill")):
        print(
            f"{one.alone!s:<32} {_ms(one.alone.seconds)}, {_ms(one.busy.seconds)} beside a busy "
            f"{neighbour}: {one.times:.2f} times"
        )
    print(f"written: {args.output}")
    return 0


def _write(file: Path, told: Calibration) -> None:
    import msgspec

    file.write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=2))


def _one_replica(args: argparse.Namespace) -> int:
    import asyncio

    import msgspec

    from ekiden.bench.calibrate import looks, measure
    from ekiden.cli.plan_question import told_by
    from ekiden.planner.fitting import fit, start

    believed = told_by(args.calibration)
    device = _device(args)
    replica = _replica(args, device)
    bar = Bar(unit=lambda total: f"{total} points")
    wanted = list(looks(min(args.longest, replica.geometry.max_positions), args.most))
    try:
        points = asyncio.run(measure(_config(args), wanted, bar, lambda point: None))
    finally:
        bar.close()
    longest = max(points, key=lambda point: (point.what == "ttft", point.tokens))
    begun = start(device, longest, replica, believed)
    model = Path(args.model).resolve().name
    source = f"fitted to {len(points)} points of {model} on one replica"
    named = msgspec.structs.replace(begun, name=args.output.stem, source=source)
    found = fit(points, replica, named)
    _write(args.output, found.calibration)
    print(table(found))
    print(f"written: {args.output}")
    return 0


def _device(args: argparse.Namespace) -> Gpu:
    from ekiden.bench.host import this_host
    from ekiden.planner.hardware import gpu

    return gpu(args.gpu) if args.gpu else this_host(args.cores)


def _replica(args: argparse.Namespace, device: Gpu) -> Replica:
    """What the server is, for the planner."""
    from ekiden.planner.catalogue import geometry
    from ekiden.planner.dtypes import own_format
    from ekiden.planner.limits import Limits
    from ekiden.planner.memory import Replica, card_of
    from ekiden.planner.precision import kv_format

    shape = geometry(args.model)
    kv_format(args.kv_cache_dtype)
    return Replica(
        geometry=shape,
        card=card_of(device),
        weights=own_format(args.weights, shape, device),
        kv_dtype=args.kv_cache_dtype,
        limits=Limits(chunk=args.max_num_batched_tokens),
    )


def _config(args: argparse.Namespace) -> BenchConfig:
    from ekiden.bench.config import BenchConfig
    from ekiden.bench.workload import Drawn, Shape

    return BenchConfig(
        url=args.base_url,
        api_key=env.api_key(),
        workload=Drawn(shapes=(Shape(1, 1),)),  # each point has its own
        workload_name=secrets.token_hex(4),
        loads=(),
        timeout_s=args.timeout,
    )


def table(found: Fitted) -> str:
    """A line a point, and what the constants are worth."""
    lines = [f"{'':<32} {'measured':>11} {'fitted':>11} {'error':>7} {'unseen':>7}"]
    rows = zip(
        found.points,
        found.foretold,
        found.errors(found.foretold),
        found.errors(found.unseen),
        strict=True,
    )
    for point, told, error, unseen in rows:
        lines.append(f"{point!s:<32} {_ms(point.seconds)} {_ms(told)} {error:>7.1%} {unseen:>7.1%}")
    seen, blind = found.errors(found.foretold), found.errors(found.unseen)
    lines.append(
        f"median error {statistics.median(seen):.1%}; on points that the fit had not seen "
        f"{statistics.median(blind):.1%} (largest {max(blind):.1%})"
    )
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:>8.1f} ms"
