"""Options of ``ekiden plan``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ekiden.cli.options import between, share

MOST = 10**9
"""Of anything that is counted or measured: more is a slip of the pen."""
PERCENTILES = tuple(f"{what}-p{q}" for what in ("ttft", "tpot") for q in (50, 95, 99))
_CHUNK = 2048
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
    return between(least, MOST)


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
    for name in PERCENTILES:
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
