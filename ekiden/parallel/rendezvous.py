"""How ranks find each other: one process hosts the mesh, each rank opens its part of it.

with host_mesh(tp=2, pp=2, timeout_s=120.0) as host:
    ...spawn ranks, give each host.spec...
# in a rank
mesh = open_mesh(spec, rank)
"""

from __future__ import annotations

import logging
from types import TracebackType

import msgspec

from ekiden.core.errors import SetupError
from ekiden.parallel import segment
from ekiden.parallel.mesh import Mesh
from ekiden.parallel.shm_map import LINE, ShmMap

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "shm", "gloo", "nccl")
_SLOT_BYTES = 4 << 20
"""One rank's part of a collective; pages are taken when first used. A prefill step's sum should
fit in one piece: every piece is one more meeting of ranks that may not all be running.
"""
_MESSAGE_BYTES = 1 << 20


class MeshSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank needs to join; plain data, to be sent to it in any form."""

    backend: str
    """``alone`` (one rank), ``shm``, ``gloo`` or ``nccl``."""
    tp: int
    pp: int
    timeout_s: float
    """Deadline of every single wait for another rank."""
    depth: int = 0
    """Messages that a pipeline link holds."""
    message_bytes: int = 0
    segment: str = ""
    """shm: where the shared memory can be opened."""
    host: str = ""
    """gloo, nccl: where the store listens."""
    port: int = 0


class MeshHost:
    """Owns what the ranks share; keep it until they have ended. Leaves nothing behind."""

    def __init__(
        self, spec: MeshSpec, memory: segment.SegmentOwner | None = None, store: object = None
    ) -> None:
        self.spec = spec
        self._memory = memory
        self._store = store

    def close(self) -> None:
        """Idempotent. Attached ranks of a ``shm`` mesh can go on."""
        if self._memory is not None:
            self._memory.close()
        self._store = None

    def __enter__(self) -> MeshHost:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def host_mesh(
    tp: int,
    pp: int,
    *,
    timeout_s: float,
    backend: str = "auto",
    device: str = "cpu",
    message_bytes: int = _MESSAGE_BYTES,
    address: str = "127.0.0.1",
) -> MeshHost:
    """Make what ``tp * pp`` ranks need to meet.

    ``message_bytes`` should be what one step hands from stage to stage (tokens x hidden x
    width); larger messages go in pieces. ``address`` is where gloo and NCCL ranks reach this
    process.

    Raises:
        SetupError: an unknown backend, or one that this machine or device cannot have.
    """
    resolved = _resolve(backend, tp * pp, device)
    # Twice the stages: all may have a message on the way while all compute the next.
    spec = MeshSpec(
        backend=resolved,
        tp=tp,
        pp=pp,
        timeout_s=timeout_s,
        depth=2 * pp,
        message_bytes=-(-message_bytes // LINE) * LINE,
    )
    if resolved == "alone":
        return MeshHost(spec)
    if resolved == "shm":
        memory = segment.SegmentOwner(shm_map(spec).total)
        return MeshHost(msgspec.structs.replace(spec, segment=memory.path), memory=memory)
    return _host_store(spec, address)


def open_mesh(spec: MeshSpec, rank: int) -> Mesh:
    """Join as ``rank``. With gloo and NCCL it returns when every rank has joined.

    Raises:
        SetupError: the shared memory cannot be opened.
        ReplicaFailed: not every rank joined in time.
    """
    if not 0 <= rank < spec.tp * spec.pp:
        raise ValueError(f"rank {rank} is not in a mesh of {spec.tp} x {spec.pp}")
    if spec.backend == "alone":
        return Mesh()
    if spec.backend == "shm":
        return _open_shm(spec, rank)
    from ekiden.parallel.distributed import open_distributed

    return open_distributed(
        spec.backend,
        spec.tp,
        spec.pp,
        rank,
        host=spec.host,
        port=spec.port,
        timeout_s=spec.timeout_s,
        depth=spec.depth,
    )


def shm_map(spec: MeshSpec) -> ShmMap:
    return ShmMap(
        tp=spec.tp,
        pp=spec.pp,
        slot_bytes=_SLOT_BYTES,
        message_bytes=spec.message_bytes,
        depth=spec.depth,
    )


def _open_shm(spec: MeshSpec, rank: int) -> Mesh:
    from ekiden.parallel.communicator import Solo
    from ekiden.parallel.pipeline import SingleStage
    from ekiden.parallel.shm import Failures, ShmCommunicator, ShmPipeline
    from ekiden.parallel.waiting import Patience

    memory, layout = segment.Segment(spec.segment), shm_map(spec)
    pp_rank, tp_rank = divmod(rank, spec.tp)
    failures, patience = Failures(memory, layout, rank), Patience(spec.timeout_s)
    place = (memory, layout, tp_rank, pp_rank, failures, patience)
    return Mesh(
        tp=ShmCommunicator(*place) if spec.tp > 1 else Solo(),
        pp=ShmPipeline(*place) if spec.pp > 1 else SingleStage(),
    )


def _resolve(backend: str, ranks: int, device: str) -> str:
    if backend not in BACKENDS:
        raise SetupError(f"mesh backend {backend!r} is unknown: choose {', '.join(BACKENDS)}")
    on_gpu = device.startswith("cuda")
    if ranks == 1:
        return "alone"
    if backend == "auto" and on_gpu:
        return "nccl"
    if backend == "auto" and not segment.supported():
        logger.warning("shared memory between ranks needs Linux on x86-64: using gloo, slower")
        return "gloo"
    if backend == "shm" and (on_gpu or not segment.supported()):
        raise SetupError("mesh backend shm needs CPU ranks on Linux x86-64: choose auto")
    if backend == "nccl" and not on_gpu:
        raise SetupError("mesh backend nccl needs --device cuda: choose auto, shm or gloo")
    return "shm" if backend == "auto" else backend


def _host_store(spec: MeshSpec, address: str) -> MeshHost:
    import torch.distributed as dist

    store = dist.TCPStore(  # type: ignore[attr-defined]
        address, 0, is_master=True, wait_for_workers=False
    )
    return MeshHost(msgspec.structs.replace(spec, host=address, port=store.port), store=store)
