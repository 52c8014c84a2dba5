"""``ekiden doctor --preflight``: a line for each thing that must be right before serving."""

from __future__ import annotations

import argparse
import asyncio
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ekiden import __version__
from ekiden.cli.bar import Bar
from ekiden.cli.options import engine_config, redis_url
from ekiden.cli.output import as_json

if TYPE_CHECKING:
    from ekiden.core.config import EngineConfig
    from ekiden.doctor.preflight import registry
    from ekiden.doctor.preflight.check import Check, Preflight
    from ekiden.registry.record import ReplicaRecord

_STEPS = 4
_MARKS = {"ok": "ok", "warning": "warning", "failure": "FAILURE", "not looked at": "-"}
_WIDTH, _NAME, _MARK = 98, 12, 9


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What Redis and the replicas told."""

    redis: registry.Answer | str
    records: Sequence[ReplicaRecord]
    trouble: Mapping[str, str]
    """By address: why a replica did not answer."""


def run(args: argparse.Namespace) -> int:
    """0; 1 where something will not work."""
    from ekiden.doctor.preflight.check import Preflight

    bar = Bar(unit=lambda total: f"{total} parts")
    try:
        checks = list(_checks(args, bar))
    finally:
        bar.close()
    found = Preflight(version=__version__, checks=checks)
    print(as_json(found) if args.json else page(found))
    return 1 if found.failed else 0


def _checks(args: argparse.Namespace, bar: Bar) -> Iterator[Check]:
    """This machine first, then what is around it."""
    from ekiden.doctor.preflight import devices, golden

    model = _model(args.model)
    bar("looking", 1, _STEPS)
    config = engine_config(args, model or Path(), args.model)
    ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    yield from devices.devices(config.device, ranks, devices.ask())
    bar("looking", 2, _STEPS)
    yield from _host(config, ranks, model)
    seen = asyncio.run(_seen(redis_url(args)))
    bar("looking", 3, _STEPS)
    yield from _network(args, seen.records)
    yield from _others(args, config, model, seen)
    yield golden.hashes()
    bar("looking", _STEPS, _STEPS)


def _model(name: str) -> Path | None:
    from ekiden.cli.models import resolve

    return resolve(name) if name else None


def _host(config: EngineConfig, ranks: int, model: Path | None) -> Iterator[Check]:
    from ekiden.core.cores import usable_cores
    from ekiden.doctor.preflight import host
    from ekiden.doctor.preflight.check import unseen
    from ekiden.engine.host_memory import available_bytes

    yield from host.packages()
    if config.device == "cpu":
        yield host.cores(ranks, config.threads_per_rank, usable_cores(), os.getloadavg()[0])
    yield host.shared_memory(config.device, ranks)
    if model is None:
        yield unseen("memory", "no model", "give MODEL")
    elif config.device == "cpu":
        yield host.memory(_need(config), available_bytes())
    else:
        yield unseen("memory", "a card's is foretold when a replica starts", "`ekiden plan`")


def _need(config: EngineConfig) -> int:
    from ekiden.cli.deployment import Pool
    from ekiden.cli.room import replica_bytes

    pool = Pool(
        role="decode",
        size=1,
        tp=config.tensor_parallel_size,
        pp=config.pipeline_parallel_size,
    )
    return replica_bytes(pool, config)


async def _seen(url: str) -> Seen:
    """Everything that has to be waited for; a Redis that is away is told, and nothing raised."""
    from ekiden.cli.audit import audit_all
    from ekiden.doctor.preflight import registry

    answer = await registry.ask(url) if url else ""
    if not url or isinstance(answer, str):
        return Seen(redis=answer, records=(), trouble={})
    records = await _registered(url)
    rows = await audit_all([record.address for record in records])
    return Seen(redis=answer, records=records, trouble={row.address: row.trouble for row in rows})


async def _registered(url: str) -> Sequence[ReplicaRecord]:
    from ekiden.registry.watcher import Watcher

    watcher = Watcher(url)
    try:
        await watcher.start(require=True)
        return watcher.replicas()
    finally:
        await watcher.close()


def _network(args: argparse.Namespace, records: Sequence[ReplicaRecord]) -> Iterator[Check]:
    from urllib.parse import urlsplit

    from ekiden.doctor.preflight import network
    from ekiden.doctor.watch import is_here

    url = redis_url(args)
    hosts = {record.address.rpartition(":")[0] for record in records}
    hosts |= {urlsplit(url).hostname or "127.0.0.1"} if url else set()
    alone = all(map(is_here, hosts))
    yield network.port(args.host, args.port)
    yield network.address(args.host, args.port, args.advertise, url, alone=alone)


def _others(
    args: argparse.Namespace, config: EngineConfig, model: Path | None, seen: Seen
) -> Iterator[Check]:
    from ekiden.cli.serve import name_of
    from ekiden.doctor.preflight import registry, replicas

    url = redis_url(args)
    yield from registry.checks(url, seen.redis)
    if not url or isinstance(seen.redis, str):
        return
    name = name_of(args.model, args.served_model_name) if args.model else ""
    yield replicas.reached(seen.records, seen.trouble)
    yield from replicas.alike(seen.records, name, _fingerprints(config, model))
    yield from replicas.wires(seen.records)


def _fingerprints(config: EngineConfig, model: Path | None) -> dict[str, str]:
    if model is None:
        return {}
    from ekiden.models.fingerprint import model_fingerprint, tokenizer_fingerprint

    return {
        "model_fingerprint": model_fingerprint(model, config.quantization),
        "tokenizer_fingerprint": tokenizer_fingerprint(model),
    }


def page(found: Preflight) -> str:
    """A line each, longer ones continued below."""
    return "\n".join(line for check in found.checks for line in _lines(check))


def _lines(check: Check) -> Iterator[str]:
    head = f"{_MARKS[check.verdict].ljust(_MARK)}{check.name.ljust(_NAME)} "
    yield _wrapped(head, check.seen)
    if check.remedy:
        yield _wrapped(" " * len(head) + "do: ", check.remedy)


def _wrapped(head: str, text: str) -> str:
    return textwrap.fill(
        text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
