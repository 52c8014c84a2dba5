"""Options of ``ekiden plan``, and the question that they ask."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ekiden.cli.options import at_least, share

if TYPE_CHECKING:
    from ekiden.planner.calibration import Calibration
    from ekiden.planner.layout import Layout
    from ekiden.planner.limits import Limits
    from ekiden.planner.options import Asked
    from ekiden.planner.workload import Objectives, Workload

MOST = 10**9
"""Of anything that is counted or measured: more is a slip of the pen."""
_PERCENTILES = tuple(f"{what}-p{q}" for what in ("ttft", "tpot") for q in (50, 95, 99))
_CHUNK = 2048
_LENGTH_STEP = 1024
_AS_MANY = "default: as many as the GPUs serve within the objectives"
_ONLY_TP = "look at this layout only, with --pipeline-parallel-size (default: at every one)"
_ONLY_PP = "look at this layout only"


def duration(text: str) -> float:
    """Seconds of ``500ms`` or ``1.5s``. Raises ArgumentTypeError that shows the forms."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s)", text.strip().lower())
    if match is None or not 0 < float(match[1]) <= MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: try 500ms or 1.5s")
    return float(match[1]) / (1000 if match[2] == "ms" else 1)


def positive(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= MOST:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number above 0 and up to {MOST:,}, as 2.5"
        )
    return value


def part(text: str) -> float:
    """A part of a whole: 0 and up to below 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share: 0 and up to below 1, as 0.3")
    return value


def count(least: int) -> Callable[[str], int]:
    """A parser of whole numbers from ``least`` to ``MOST``."""

    def parse(text: str) -> int:
        if (value := at_least(least)(text)) > MOST:
            raise argparse.ArgumentTypeError(f"{text:.20} is too large: at most {MOST:,}")
        return value

    return parse


def add_question(parser: argparse.ArgumentParser) -> None:
    """Everything that a plan follows from."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL",
        help="a config.json, the directory of a model, or a name such as Llama-3.1-8B",
    )  # fmt: skip
    add_devices(parser.add_argument_group("devices"))
    add_work(parser.add_argument_group("workload"))
    add_objectives(parser.add_argument_group("objectives"))
    add_engine(parser.add_argument_group("engine"))
    _add_choices(parser.add_argument_group("choices"))


def add_devices(group: Any) -> None:
    """The GPUs at hand."""
    group.add_argument("--gpu", metavar="NAME", default="", help="such as H100, A6000 or l40s")
    group.add_argument(
        "--gpus-per-host", type=int, metavar="N", default=1, help="GPUs of a host (default: 1)"
    )
    group.add_argument("--hosts", type=int, metavar="N", default=1, help="default: 1")
    group.add_argument(
        "--interconnect", metavar="LINK", default="auto",
        help="within a host: nvlink, pcie, or pcie-p2p where GPUs reach one another through a "
        "switch (default: auto, nvlink where the GPU has it for more than a pair, else pcie)",
    )  # fmt: skip
    group.add_argument(
        "--network-gbps", type=positive, metavar="GBPS", default=None,
        help="GB/s of one GPU to another host (default: as usual for the GPU)",
    )  # fmt: skip


def add_work(group: Any, *, rate: str = _AS_MANY) -> None:
    """What is asked of them; ``rate`` says what happens without one."""
    group.add_argument(
        "--workload", metavar="NAME", default="chat",
        help="chat (200 tokens of prompt/200 of output), rag (8192/200), writing (200/2000), mixed "
        "(a third of each), voice (1000/60), short-short (256/128), short-long (256/1024), "
        "long-short (8192/128), long-long (8192/1024) or bench-mixed (default: chat)",
    )  # fmt: skip
    lengths = count(1)
    group.add_argument("--prompt-tokens", type=lengths, metavar="N", help="instead of a workload's")
    group.add_argument("--output-tokens", type=lengths, metavar="N", help="instead of a workload's")
    group.add_argument(
        "--rate", type=positive, metavar="R",
        help=f"requests a second of the whole deployment ({rate})",
    )  # fmt: skip
    group.add_argument(
        "--prefix-share", type=part, metavar="SHARE",
        help="of a prompt, what is cached from earlier requests (default: 0, or the trace's)",
    )  # fmt: skip
    group.add_argument(
        "--trace", type=Path, metavar="FILE",
        help="instead of --workload: a JSON object a line with timestamp (ms), input_length, "
        "output_length and, for prefix sharing, hash_ids of 512 tokens each",
    )  # fmt: skip


def add_objectives(group: Any) -> None:
    """Limits at percentiles."""
    for name in _PERCENTILES:
        what, percentile = name.split("-p")
        group.add_argument(
            f"--{name}", type=duration, metavar="TIME",
            help=f"most that P{percentile} of {what.upper()} may be: 500ms or 1.5s",
        )  # fmt: skip


def add_engine(group: Any, *, tp: str = _ONLY_TP, pp: str = _ONLY_PP) -> None:
    """The layout and limits of a replica; ``tp`` and ``pp`` say what a layout is given for."""
    group.add_argument(
        "-tp", "--tensor-parallel-size", type=count(1), metavar="N", help=tp
    )  # fmt: skip
    group.add_argument(
        "-pp", "--pipeline-parallel-size", type=count(1), metavar="N", help=pp
    )  # fmt: skip
    group.add_argument(
        "--weights", metavar="FORMAT", default="auto",
        help="bf16, fp8, int8, int4, awq, ... (default: auto, as the model is published)",
    )  # fmt: skip
    group.add_argument(
        "--kv-cache-dtype", metavar="DTYPE", default="auto",
        help="of KV: bf16, fp8 or int8 (default: auto, bf16)",
    )  # fmt: skip
    group.add_argument(
        "--max-model-len", type=count(1), metavar="N",
        help="tokens of prompt and output together (default: the workload's longest, in thousands)",
    )  # fmt: skip
    group.add_argument(
        "--max-num-seqs", type=count(1), metavar="N",
        help="sequences in one step (default: of 64 to 1024 what KV has room for)",
    )  # fmt: skip
    group.add_argument(
        "--max-num-batched-tokens", type=count(1), metavar="N", default=_CHUNK,
        help=f"tokens of one step (default: {_CHUNK})",
    )  # fmt: skip
    group.add_argument(
        "--gpu-memory-utilization", type=share, metavar="SHARE",
        help="of a card, for weights, activations and KV together (default: the engine's, 0.9)",
    )  # fmt: skip
    group.add_argument(
        "--engine", metavar="NAME", default="ekiden",
        help="whose memory is summed up: ekiden, or vllm for comparison (default: ekiden)",
    )  # fmt: skip
    group.add_argument(
        "--calibration", metavar="NAME|FILE", default="vllm",
        help="constants of the latency model: vllm, trtllm or sglang, as published measurements "
        "have them, or a JSON file of your own machine (default: vllm)",
    )  # fmt: skip


def _add_choices(group: Any) -> None:
    """What only a decision asks for."""
    group.add_argument(
        "--smaller-weights", metavar="FORMATS", default="fp8,int8,int4",
        help="what may be proposed instead, the wider first, or none (default: fp8,int8,int4)",
    )  # fmt: skip
    group.add_argument(
        "--concurrency", type=count(1), metavar="N", default=1,
        help="requests of full length whose KV must have room at once (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--spare-replicas", type=count(0), metavar="N", default=0,
        help="replicas of each pool that may be lost with the objectives still met; with --rate "
        "(default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--gpu-price", type=positive, metavar="PRICE", help="of one GPU for an hour, in your money"
    )


def question(args: argparse.Namespace) -> Asked:
    """What was asked. Raises SetupError that names the field, its value and the choices."""
    from ekiden.core.errors import SetupError
    from ekiden.planner.catalogue import geometry
    from ekiden.planner.devices import devices
    from ekiden.planner.dtypes import own_format
    from ekiden.planner.hardware import gpu, gpus
    from ekiden.planner.options import Asked, offered
    from ekiden.planner.precision import kv_format
    from ekiden.planner.profiles import profile

    if not args.model:
        raise SetupError("no MODEL: give a config.json, a directory, or a name as Llama-3.1-8B")
    told = told_by(args.calibration)
    card = gpu(args.gpu) if args.gpu else told.device
    if card is None:
        raise SetupError(f"no --gpu: choose one of {', '.join(known.name for known in gpus())}")
    shape = geometry(args.model)
    work = workload_of(args)
    limits = _limits(args, work)
    names = [name for name in args.smaller_weights.split(",") if name not in ("", "none")]
    own = own_format(args.weights, shape, card)
    kv_format(args.kv_cache_dtype)
    return Asked(
        geometry=shape,
        devices=devices(
            card,
            per_host=args.gpus_per_host,
            hosts=args.hosts,
            interconnect=args.interconnect,
            network_gbps=args.network_gbps,
        ),
        work=work,
        objectives=_objectives(args, work),
        calibration=told,
        profile=profile(args.engine),
        own=own,
        formats=offered(names, own, card),
        kv_dtype=args.kv_cache_dtype,
        limits=limits,
        sequences=args.concurrency,
        spare=args.spare_replicas,
        pinned=_pinned(args),
        stored_bytes=_stored(Path(args.model)),
        price=args.gpu_price,
    )


def _stored(path: Path) -> int | None:
    """Bytes of the checkpoint that lies beside the config, where one does."""
    from ekiden.planner.weights import stored

    directory = path.parent if path.is_file() else path
    return stored(directory).bytes if any(directory.glob("*.safetensors")) else None


def _pinned(args: argparse.Namespace) -> Layout | None:
    from ekiden.planner.layout import Layout

    tp, pp = args.tensor_parallel_size, args.pipeline_parallel_size
    return Layout(tp=tp or 1, pp=pp or 1) if tp or pp else None


def told_by(name: str) -> Calibration:
    """A shipped calibration, or that of a JSON file. Raises SetupError: there is none."""
    from ekiden.planner.calibration import calibration, read_calibration

    file = Path(name)
    return read_calibration(file) if file.suffix == ".json" or file.exists() else calibration(name)


def workload_of(args: argparse.Namespace) -> Workload:
    """The trace's, a named one, or one of given lengths. Raises SetupError."""
    import msgspec

    from ekiden.planner.trace import from_trace
    from ekiden.planner.workload import workload

    if args.trace:
        found = from_trace(args.trace, args.rate)
        if args.prefix_share is None:
            return found
        return msgspec.structs.replace(found, prefix_share=args.prefix_share, sharing=())
    return workload(
        args.workload,
        prompt=args.prompt_tokens,
        output=args.output_tokens,
        rate=args.rate,
        prefix_share=args.prefix_share or 0.0,
    )


def _limits(args: argparse.Namespace, work: Workload) -> Limits:
    from ekiden.core.errors import SetupError
    from ekiden.planner.limits import Limits

    usual = -(-work.longest // _LENGTH_STEP) * _LENGTH_STEP
    if args.max_model_len is not None and args.max_model_len < work.longest:
        raise SetupError(
            f"--max-model-len {args.max_model_len} is less than the {work.longest} tokens of the "
            f"workload's longest request: choose {work.longest} or more, or shorter requests"
        )
    return Limits(
        max_model_len=args.max_model_len or usual,
        max_num_seqs=args.max_num_seqs,
        chunk=args.max_num_batched_tokens,
        utilization=args.gpu_memory_utilization,
    )


def _objectives(args: argparse.Namespace, work: Workload) -> Objectives:
    """Those that were stated; what is assumed of TTFT, or of TPOT, where none was."""
    from ekiden.core.errors import SetupError
    from ekiden.planner.workload import Objectives, assumed_objectives

    fields = {name.replace("-", "_"): None for name in _PERCENTILES}
    stated = {name: value for name in fields if (value := getattr(args, name)) is not None}
    if not work.decodes and (beyond := [name for name in stated if name.startswith("tpot")]):
        raise SetupError(
            f"--{beyond[0].replace('_', '-')}: answers of 1 token have no time between tokens: "
            "leave it out, or choose --output-tokens 2 or more"
        )
    usual = assumed_objectives(work)
    assumed = tuple(what for what in usual.assumed if not any(n.startswith(what) for n in stated))
    for what in assumed:
        stated[f"{what}_p95"] = getattr(usual, f"{what}_p95")
    return Objectives(**stated, assumed=assumed)
