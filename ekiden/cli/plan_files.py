"""Files of a plan: the page, the data, a shell script of services, an overlay for ``compose/``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ekiden.core.errors import SetupError

if TYPE_CHECKING:
    from ekiden.planner.decision import Decision

OVERLAY, SERVICES = "compose.plan.yaml", "services.sh"
_OVERLAY = """\
# Written by `ekiden plan`: {name}. From the root of a checkout:
#
#   EKIDEN_MODEL={model} EKIDEN_TORCH=cu128 \\
#     docker compose -f compose/compose.yaml -f {file} up -d --build
#
# Every replica has cards of its own, so each is a service; `--scale` would share them out twice.
# EKIDEN_TORCH is the CUDA build that the driver of the host takes.

services:
"""
_WORKER = """\
  {service}:{extends}
    command: >-
      serve {role} --model ${{EKIDEN_MODEL:?the model of the plan}} --host 0.0.0.0 --port 7000
      --drain-grace 30 --kv-shm-dir /run/kv
      {options}
    deploy:
      resources:
        reservations:
          devices: [{{ driver: nvidia, device_ids: [{gpus}], capabilities: [gpu] }}]
"""
_EXTENDS = """
    extends: {{ file: compose.yaml, service: {role} }}"""
_SCRIPT = """\
#!/bin/sh
# Written by `ekiden plan`: {name}. REDIS_URL names a Redis that all of them reach.
set -eu
: "${{REDIS_URL:?set it to redis://HOST:6379/0}}"
trap 'kill 0' INT TERM

{lines}
wait
"""


def write(directory: Path, texts: Mapping[str, str]) -> None:
    """Write each text under its name.

    Raises:
        SetupError: the folder or a file cannot be written.
    """
    path = directory
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            path = directory / name
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SetupError(f"{path} cannot be written: {error.strerror}") from None


def deployment(decision: Decision, model: str, directory: Path) -> dict[str, str]:
    """What deploys a plan that the engine serves, by file name.

    An overlay is for one host, which is what ``compose/`` is for.
    """
    from ekiden.planner.flags import commands

    one_host = decision.asked.devices.hosts == 1
    found = {OVERLAY: overlay(decision, model, directory / OVERLAY)} if one_host else {}
    for number, said in enumerate(commands(decision, model), 1):
        lines = "\n".join(f"{line} &" for line in said)
        script = _SCRIPT.format(name=decision.chosen.name, lines=lines)
        found[SERVICES if one_host else f"host{number}-{SERVICES}"] = script
    return found


def overlay(decision: Decision, model: str, file: Path) -> str:
    """For ``docker compose -f compose/compose.yaml -f FILE``."""
    from ekiden.planner.flags import ROLES, pools, workers

    parts = [_OVERLAY.format(name=decision.chosen.name, model=model, file=file)]
    parts += [f"  {role}: {{ scale: 0 }}\n" for role in ROLES if role not in pools(decision.chosen)]
    for one in workers(decision):
        first = one.number == 1
        parts.append(
            _WORKER.format(
                service=one.role if first else f"{one.role}-{one.number}",
                extends="" if first else _EXTENDS.format(role=one.role),
                role=one.role,
                options=" ".join(one.options),
                gpus=", ".join(f'"{index}"' for index in one.gpus),
            )
        )
    return "".join(parts)
