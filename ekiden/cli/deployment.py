"""What ``ekiden up`` starts: the command lines of its services and how each shows it is ready."""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from ekiden.core.errors import SetupError
from ekiden.models.checkpoint import Checkpoint
from ekiden.models.config import ModelConfig
from ekiden.models.layout import layer_split
from ekiden.parallel.split import head_split
from ekiden.service.supervisor import ChildSpec

_KILL_MARGIN_S = 5.0
"""A service may use its whole drain grace, and then needs a moment to close."""

_HTTP_TIMEOUT_S = 2.0


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas of one role, all split alike."""

    role: str
    size: int
    tp: int
    pp: int

    def __str__(self) -> str:
        stages = f" PP{self.pp}" if self.pp > 1 else ""
        return f"{self.size} {self.role} TP{self.tp}{stages}"


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """A whole deployment on one machine. ``options`` are passed to every worker as they are."""

    model_dir: Path
    model_name: str
    pools: tuple[Pool, ...]
    host: str
    port: int
    drain_grace_s: float
    options: tuple[str, ...] = ()
    decode_options: tuple[str, ...] = ()

    def workers(self, run_dir: Path, redis_url: str) -> list[ChildSpec]:
        return [
            self._worker(pool, f"{pool.role}-{index}", run_dir, redis_url)
            for pool in self.pools
            for index in range(pool.size)
        ]

    def _worker(self, pool: Pool, name: str, run_dir: Path, redis_url: str) -> ChildSpec:
        split = ("-tp", str(pool.tp), "-pp", str(pool.pp))
        options = self.options + (self.decode_options if pool.role == "decode" else ())
        argv = (*self._serve(pool.role, run_dir / f"{name}.ready", redis_url), *split, *options)
        return ChildSpec(
            name=name,
            argv=(*argv, "--replica-id", name),
            ready=_file_written(run_dir / f"{name}.ready"),
            grace_s=self.drain_grace_s + _KILL_MARGIN_S,
            note=f"TP{pool.tp} PP{pool.pp}" if pool.pp > 1 else f"TP{pool.tp}",
        )

    def gateway(self, run_dir: Path, redis_url: str) -> ChildSpec:
        """Ready once it can route: its own ``/ready`` says that replicas have been found."""
        written = run_dir / "gateway.ready"
        address = ("--host", self.host, "--port", str(self.port))
        return ChildSpec(
            name="gateway",
            argv=(*self._serve("gateway", written, redis_url), *address),
            ready=lambda: gateway_ready(written),
            grace_s=self.drain_grace_s + _KILL_MARGIN_S,
        )

    def _serve(self, role: str, ready_file: Path, redis_url: str) -> tuple[str, ...]:
        return (
            *(sys.executable, "-P", "-m", "ekiden.cli", "serve", role),
            *("--model", str(self.model_dir), "--served-model-name", self.model_name),
            *("--redis", redis_url, "--ready-file", str(ready_file)),
            *("--drain-grace", str(self.drain_grace_s)),
        )


def _file_written(path: Path) -> Callable[[], Awaitable[bool]]:
    async def written() -> bool:
        return path.exists()

    return written


def gateway_url(ready_file: Path) -> str:
    """The URL to dial, from the ready file of a gateway: a wildcard host is reached by loopback."""
    host, _, port = str(json.loads(ready_file.read_text())["address"]).rpartition(":")
    return f"http://{'127.0.0.1' if host in ('', '0.0.0.0', '[::]') else host}:{port}"


async def gateway_ready(ready_file: Path) -> bool:
    import httpx

    if not ready_file.exists():
        return False
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=_HTTP_TIMEOUT_S) as client:
            return (await client.get(f"{gateway_url(ready_file)}/ready")).is_success
    except httpx.HTTPError:
        return False


def check_model(plan: Deployment) -> None:
    """Look at the model's files and at every pool's split before anything is started.

    Raises:
        SetupError: a file or a split cannot work; of a split, the option of its pool is named.
    """
    model = ModelConfig.from_dir(plan.model_dir)
    Checkpoint.open(plan.model_dir)
    for pool in (pool for pool in plan.pools if pool.size):
        try:
            head_split(model.num_heads, model.num_kv_heads, pool.tp)
            layer_split(model, pool.pp, prefill_only=pool.role == "prefill")
        except SetupError as error:
            said = error.message.replace("--tensor-parallel-size", f"--{pool.role}-tp")
            said = said.replace("--pipeline-parallel-size", f"--{pool.role}-pp")
            raise SetupError(said) from None
