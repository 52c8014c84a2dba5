"""The replicas of a verification: real services in processes of their own, on free ports."""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from ekiden.core.config import EngineConfig
from ekiden.core.types import PrefillCandidate
from ekiden.models.config import ModelConfig
from ekiden.models.layout import kv_layout
from ekiden.service.supervisor import Child, ChildDied, ChildSpec, Supervisor

from .cell import Peer
from .layouts import Layout
from .shape import Shape

START_TIMEOUT_S = 600.0
"""Several start at once, perhaps on few cores."""
GRACE_S = 5.0

SETUP_EXIT_CODE = 2
"""With which a service says that what was asked for cannot work."""


class Refused(Exception):
    """A replica does not start with this layout; the message is its own sentence."""


def serve_argv(
    engine: EngineConfig, role: str, name: str, ready: Path, transport: str
) -> tuple[str, ...]:
    """The command line that starts this replica."""
    common = (
        *(sys.executable, "-P", "-m", "ekiden.cli", "serve", role),
        *("--model", str(engine.model_dir), "--served-model-name", engine.model_name),
        *("--quantization", engine.quantization, "--kv-cache-dtype", engine.kv_cache_dtype),
        *("--dtype", engine.dtype, "--max-model-len", str(engine.max_model_len)),
        *("-tp", str(engine.tensor_parallel_size), "-pp", str(engine.pipeline_parallel_size)),
        *("--block-size", str(engine.block_size)),
        *("--num-gpu-blocks-override", str(engine.num_gpu_blocks_override)),
        *("--max-num-batched-tokens", str(engine.max_num_batched_tokens)),
        # Both replicas work at once: more threads than cores would wait for each other.
        *("--threads-per-rank", "1"),
        *("--kv-transport", transport, "--replica-id", name, "--enable-kv-debug"),
        *("--ready-file", str(ready), "--drain-grace", str(GRACE_S)),
    )
    return (*common, "--local-prefill-tokens", "0") if role == "decode" else common


async def start_replica(
    supervisor: Supervisor, shape: Shape, role: str, layout: Layout, transport: str
) -> Peer:
    """Start one replica and wait until it serves.

    Raises:
        Refused: the layout cannot work with this model.
        NotReady, ChildDied: it did not come up.
    """
    name = f"{role}-{layout}".replace("/", "-b").replace(":", "-")
    engine = shape.of(layout, role)
    ready = supervisor.run_dir / f"{name}.ready"
    spec = ChildSpec(
        name=name,
        argv=serve_argv(engine, role, name, ready, transport),
        ready=_exists(ready),
        grace_s=GRACE_S * 2,
    )
    children = await supervisor.start([spec])
    try:
        await supervisor.wait_ready(children, START_TIMEOUT_S, lambda _: None)
    except ChildDied as death:
        if death.child.process.returncode == SETUP_EXIT_CODE:
            raise Refused(_last_line(death.child)) from death
        raise
    return _peer(engine, json.loads(ready.read_text()))


def _peer(engine: EngineConfig, ready: dict[str, str | int]) -> Peer:
    return Peer(
        candidate=PrefillCandidate(
            replica_id=str(ready["replica_id"]),
            address=str(ready["address"]),
            epoch=int(ready["epoch"]),
        ),
        layout=kv_layout(ModelConfig.from_dir(engine.model_dir), engine),
        model=engine.model_name,
    )


def _last_line(child: Child) -> str:
    return child.tail(1).removeprefix("ekiden: ").strip()


def _exists(path: Path) -> Callable[[], Awaitable[bool]]:
    async def exists() -> bool:
        return path.exists()

    return exists
