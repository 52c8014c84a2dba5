"""Files that other commands wrote, as situations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ekiden.core.results import read_result
from ekiden.doctor import benches, simulated
from ekiden.doctor.evidence import Situation

KINDS: Mapping[str, type[benches.Run | simulated.Simulation]] = {
    "ekiden.bench/1": benches.Run,
    "ekiden.sim/1": simulated.Simulation,
}
"""By the schema that a file names."""


def read(path: Path) -> list[Situation]:
    """One a level of a bench, or one a run of a simulation.

    Raises:
        SetupError: as ``read_result``.
    """
    found = read_result(path, KINDS, "`ekiden bench --json` or `ekiden sim --json`")
    if isinstance(found, benches.Run):
        return list(benches.situations(path.name, found))
    return list(simulated.situations(path.name, found))
