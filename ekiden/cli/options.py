"""Options that fill the configuration structs: one option, one field, one default.

The tables below drive three things: the parser, the struct, and the command lines with which
``ekiden up`` starts its children. Spellings are vLLM's where it has the option.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ekiden.cli.kv_options import wires
from ekiden.core import env
from ekiden.core.config import (
    KV_CACHE_DTYPES,
    QUANTIZATIONS,
    EngineConfig,
    SpeculativeConfig,
)
from kv_transfer.description import ALL_WIRES

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}
MAX_PORT = (1 << 16) - 1


def size(text: str) -> int:
    """Bytes: ``1073741824``, ``1GiB``, ``500M``. Raises ArgumentTypeError that shows the forms."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(K|M|G|Ki|Mi|Gi)?B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: try 1073741824, 1GiB or 500M")
    return int(float(match[1]) * _UNITS[(match[2] or "").upper()])


def port_number(text: str) -> int:
    """A TCP port, or 0. Larger numbers would be taken, cut to sixteen bits, by some servers."""
    if (value := at_least(0)(text)) > MAX_PORT:
        raise argparse.ArgumentTypeError(f"{value} is not a port: 0 to {MAX_PORT}")
    return value


def between(least: int, most: int) -> Callable[[str], int]:
    """The same with a bound above."""

    def parse(text: str) -> int:
        if (value := at_least(least)(text)) > most:
            raise argparse.ArgumentTypeError(f"{text:.20} is too large: at most {most:,}")
        return value

    return parse


def at_least(least: int) -> Callable[[str], int]:
    """A parser of whole numbers that refuses smaller ones by saying the least."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is too small: at least {least}")
        return value

    return parse


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 or more")
    return value


def speculative(text: str) -> SpeculativeConfig:
    """vLLM's JSON, or ``off``. Raises ArgumentTypeError that names the field."""
    if text == str(SpeculativeConfig()):
        return SpeculativeConfig()
    try:
        config = msgspec.json.decode(text, type=SpeculativeConfig)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        fields = ", ".join(SpeculativeConfig.__struct_fields__)
        raise argparse.ArgumentTypeError(
            f"{text!r}: {error}; give off, or a JSON object of {fields}"
        ) from None
    if not config.num_speculative_tokens:
        raise argparse.ArgumentTypeError(f"{text!r} lacks num_speculative_tokens, 1 or more")
    return config


def share(text: str) -> float:
    """A part of a whole: above 0, up to 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share: above 0 and up to 1, as 0.9")
    return value


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One option: its spellings, the field it fills, how its text is read."""

    flags: tuple[str, ...]
    field: str
    help: str
    parse: Callable[[str], Any] = str
    metavar: str = "N"
    choices: tuple[str, ...] | None = None


ENGINE_OPTIONS = (
    Option(
        flags=("-tp", "--tensor-parallel-size"),
        field="tensor_parallel_size",
        parse=at_least(1),
        help="ranks that split every layer; it need not divide the heads",
    ),
    Option(
        flags=("-pp", "--pipeline-parallel-size"),
        field="pipeline_parallel_size",
        parse=at_least(1),
        help="stages that split the layers",
    ),
    Option(
        flags=("--device",),
        field="device",
        metavar="DEVICE",
        choices=("cpu", "cuda"),
        help="cuda gives every rank a card of its own",
    ),
    Option(
        flags=("--kernels",),
        field="kernels",
        metavar="NAME",
        choices=("auto", "torch", "native", "triton"),
        help="what computes; auto: the fastest that runs here, which the log names",
    ),
    Option(
        flags=("--block-size",),
        field="block_size",
        parse=at_least(1),
        help="tokens in a KV block, a multiple of 16",
    ),
    Option(
        flags=("--dtype",),
        field="dtype",
        metavar="DTYPE",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="of weights, activations and KV; auto: what the model's config says",
    ),
    Option(
        flags=("-q", "--quantization"),
        field="quantization",
        metavar="METHOD",
        choices=QUANTIZATIONS,
        help="int8, int4 or fp8: quantise the weights while they are loaded; a checkpoint's own "
        "method: refuse any other; auto: take the checkpoint as it is",
    ),
    Option(
        flags=("--kv-cache-dtype",),
        field="kv_cache_dtype",
        metavar="DTYPE",
        choices=KV_CACHE_DTYPES,
        help="of the KV cache; int8 and fp8 (e4m3) keep a scale for each token and head; "
        "auto: that of --dtype",
    ),
    Option(
        flags=("--max-model-len",),
        field="max_model_len",
        parse=at_least(0),
        help="tokens of prompt and output together; 0: what the model's config says",
    ),
    Option(
        flags=("--num-gpu-blocks-override",),
        field="num_gpu_blocks_override",
        parse=at_least(0),
        help="KV blocks, on any device; 0: as many as there is memory for",
    ),
    Option(
        flags=("--kv-cache-memory", "--kv-cache-memory-bytes"),
        field="kv_cache_memory_bytes",
        parse=size,
        metavar="SIZE",
        help="KV of the whole replica, e.g. 1GiB, which is what 0 means on cpu; 0 on cuda: what "
        "--gpu-memory-utilization leaves",
    ),
    Option(
        flags=("--gpu-memory-utilization",),
        field="gpu_memory_utilization",
        parse=share,
        metavar="SHARE",
        help="of a CUDA card, for weights, activations and KV together",
    ),
    Option(
        flags=("--max-num-batched-tokens",),
        field="max_num_batched_tokens",
        parse=at_least(1),
        help="tokens of one step: prefill chunks and decode rows together",
    ),
    Option(
        flags=("--max-num-seqs",),
        field="max_num_seqs",
        parse=at_least(1),
        help="sequences in one step",
    ),
    Option(
        flags=("--speculative-config",),
        field="speculative_config",
        parse=speculative,
        metavar="JSON",
        help="propose tokens from what prompt and output said before and check them in one step; "
        'the output stays the same; e.g. \'{"num_speculative_tokens": 4, "prompt_lookup_max": 3}\'',
    ),
    Option(
        flags=("--threads-per-rank",),
        field="threads_per_rank",
        parse=at_least(0),
        help="CPU threads of a rank; 0: the machine's cores shared out",
    ),
)

SERVICE_OPTIONS = (
    Option(
        flags=("--kv-transport",),
        field="kv_transport",
        parse=wires,
        metavar="NAMES",
        help="wires that may carry KV between replicas: auto, or some of "
        f"{', '.join(ALL_WIRES)} with commas between; of those that both replicas have the "
        "fastest is taken, measured when they first meet",
    ),
    Option(
        flags=("--kv-rate-limit",),
        field="kv_rate_limit",
        parse=size,
        metavar="SIZE",
        help="KV that a rank moves in a second, such as 500M, one message of at most 4 MiB ahead; "
        "0: no limit",
    ),
    Option(
        flags=("--kv-shm-dir",),
        field="kv_shm_dir",
        metavar="DIR",
        help="folder that the containers of one host share, for the shm wire; processes outside of "
        "containers need none",
    ),
    Option(
        flags=("--drain-grace",),
        field="drain_grace_s",
        parse=seconds,
        metavar="SECONDS",
        help="how long SIGTERM waits for what is in flight",
    ),
)

LOCAL_PREFILL = Option(
    flags=("--local-prefill-tokens",),
    field="local_prefill_tokens",
    parse=at_least(0),
    help="decode prefills at most this many uncached tokens itself",
)


def default_of(config: type[msgspec.Struct], field: str) -> Any:
    """The struct's own default, so that no default is written twice."""
    return next(f.default for f in msgspec.structs.fields(config) if f.name == field)


def add_options(
    group: Any, options: Sequence[Option], config: type[msgspec.Struct], prefix: str = ""
) -> None:
    """Add the options to a parser or an argument group, with the defaults of ``config``."""
    for option in options:
        default = default_of(config, option.field)
        one_of = f"one of {', '.join(option.choices)}; " if option.choices else ""
        group.add_argument(
            *option.flags,
            dest=prefix + option.field,
            type=option.parse,
            choices=option.choices,
            default=default,
            metavar=option.metavar,
            help=f"{option.help} ({one_of}default: {'none' if default == '' else default})",
        )


SWITCHES = {
    "--no-enable-prefix-caching": "enable_prefix_caching",
    "--no-async-scheduling": "async_scheduling",
    "--core-sharing": "core_sharing",
}
"""Options without a value: ``--no-…`` turns a field of the engine off, others turn it on."""

_SWITCHES_SAY = {
    "enable_prefix_caching": "never reuse the KV of an equal prefix",
    "async_scheduling": "plan each step only when the one before it has ended",
    "core_sharing": "take more threads than those of a rank while other ranks of this host, which "
    "share cores too, leave theirs idle; for native kernels",
}


def add_switches(group: Any) -> None:
    for flag, field in SWITCHES.items():
        action = "store_false" if _turns_off(flag) else "store_true"
        group.add_argument(flag, dest=field, action=action, help=_SWITCHES_SAY[field])


def switched(args: argparse.Namespace) -> list[str]:
    """The switches that were given, as a command line again."""
    return [flag for flag, field in SWITCHES.items() if getattr(args, field) != _turns_off(flag)]


def _turns_off(flag: str) -> bool:
    return flag.startswith("--no-")


def add_redis(group: Any) -> None:
    group.add_argument(
        "--redis",
        metavar="URL",
        default="",
        help="Redis or Valkey where replicas find one another (default: REDIS_URL)",
    )


def redis_url(args: argparse.Namespace) -> str:
    return str(args.redis or env.redis_url())


def engine_config(args: argparse.Namespace, model_dir: Path, model_name: str) -> EngineConfig:
    """The checked engine configuration; raises SetupError for values that cannot go together."""
    names = (*(option.field for option in ENGINE_OPTIONS), *SWITCHES.values())
    fields = {name: getattr(args, name) for name in names}
    return EngineConfig(
        model_dir=model_dir,
        model_name=model_name,
        **fields,
    ).check()


def as_argv(options: Sequence[Option], args: argparse.Namespace) -> list[str]:
    """The options as a command line again, in their long spelling."""
    return [
        text for option in options for text in (option.flags[-1], str(getattr(args, option.field)))
    ]
