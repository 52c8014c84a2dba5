"""A deployment that cannot fit is refused as a whole, with the sum, before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_llama import save_tiny_llama

from ekiden.cli.deployment import Pool
from ekiden.cli.room import check_room
from ekiden.core.config import EngineConfig
from ekiden.core.errors import SetupError
from ekiden.engine.admission import admit
from ekiden.engine.ledger import Ledger
from ekiden.models.config import ModelConfig

GIB = 1 << 30
POOLS = (Pool(role="prefill", size=2, tp=2, pp=1), Pool(role="decode", size=3, tp=1, pp=1))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(folder)
    return folder


def engine(path: Path, **fields: Any) -> EngineConfig:
    return EngineConfig(model_dir=path, model_name="", **fields)


def least_room(path: Path, *pools: Pool, **fields: Any) -> int:
    """The smallest room that is not refused, by halving."""
    low, high = 0, 1 << 40
    while low + 1 < high:
        middle = (low + high) // 2
        try:
            check_room(pools, engine(path, **fields), available=lambda room=middle: room)
            high = middle
        except SetupError:
            low = middle
    return high


def test_the_sum_is_over_every_replica_of_every_pool(path: Path) -> None:
    prefill, decode = POOLS
    one = {p.role: least_room(path, Pool(role=p.role, size=1, tp=p.tp, pp=1)) for p in POOLS}
    assert least_room(path, prefill, decode) == 2 * one["prefill"] + 3 * one["decode"]
    with pytest.raises(SetupError) as caught:
        check_room(POOLS, engine(path), available=lambda: GIB)
    said = caught.value.message
    assert "prefill 2 x " in said
    assert "decode 3 x " in said
    assert "1.00 GiB are available" in said
    assert "has 1.00 GiB of KV" in said


def test_it_never_refuses_what_a_replica_alone_would_admit(path: Path, tmp_path: Path) -> None:
    """And is close: what it lets pass by mistake, the replica itself refuses."""
    for fields in ({}, {"dtype": "bfloat16"}, {"quantization": "int8", "dtype": "bfloat16"}):
        room = least_room(path, Pool(role="decode", size=1, tp=1, pp=1), **fields)
        config, model = engine(path, **fields), ModelConfig.from_dir(path)
        ledger = Ledger(tmp_path)
        with pytest.raises(SetupError, match="does not fit"):
            admit(model, config, "r", available=lambda room=room: room - 1, ledger=ledger)
        exact = room + (8 << 20)  # of which most is spare memory, which only the replica counts
        with admit(model, config, "r", available=lambda room=exact: room, ledger=ledger):
            pass


def test_other_devices_and_systems_that_do_not_tell_are_let_pass(path: Path) -> None:
    check_room(POOLS, engine(path, device="cuda"), available=lambda: 0)
    check_room(POOLS, engine(path), available=lambda: None)


def test_ekiden_up_refuses_at_once_and_starts_nothing(path: Path, tmp_path: Path) -> None:
    argv = ["up", str(path), "--port", "0", "--kv-cache-memory", "900GiB"]
    run = subprocess.run(
        [sys.executable, "-m", "ekiden.cli", *argv, "--run-dir", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 2
    assert run.stderr.startswith("ekiden: these replicas do not fit on this host together: prefill")
    assert len(run.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_the_check_does_not_load_torch() -> None:
    code = "import sys, ekiden.cli.room; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
