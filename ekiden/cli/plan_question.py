"""The question that the options of ``ekiden plan`` ask."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ekiden.cli.plan_options import PERCENTILES

if TYPE_CHECKING:
    from ekiden.planner.calibration import Calibration
    from ekiden.planner.layout import Layout
    from ekiden.planner.limits import Limits
    from ekiden.planner.options import Asked
    from ekiden.planner.workload import Objectives, Workload

_LENGTH_STEP = 1024


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

    fields = {name.replace("-", "_"): None for name in PERCENTILES}
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
