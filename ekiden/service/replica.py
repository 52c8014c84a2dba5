"""One replica from the inside: its ranks, its engine, what it says of itself.

Start-up, in order: bind the port (a busy one is told at once), read the model's config, foretell
the memory and refuse what does not fit, spawn the ranks (they load the weights), open the sessions,
run the engine on the thread that hears the ranks.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ekiden import __version__
from ekiden.core.clock import Clock, MonotonicClock
from ekiden.core.config import EngineConfig, ServiceConfig
from ekiden.core.hashes import SCHEME
from ekiden.core.ids import new_epoch, new_replica_id
from ekiden.core.types import BlockBooks, KvWire, ReplicaStats
from ekiden.engine.admission import admit
from ekiden.engine.build import build_engine
from ekiden.engine.executor import HostingExecutor
from ekiden.engine.process_executor import ProcessExecutor
from ekiden.models.config import ModelConfig
from ekiden.models.fingerprint import model_fingerprint, tokenizer_fingerprint
from kv_transfer.description import (
    AUTO_WIRES,
    MAPPED_WIRES,
    WIRE_VERSION,
    ReplicaDescription,
)
from kv_transfer.messages import decode_from_peer, encode
from kv_transfer.options import PortOptions
from kv_transfer.reshard import MESSAGE_BYTES

logger = logging.getLogger(__name__)

PORT = "kv_transfer.port:open_port"
"""The KV port that rank processes load; the engine only carries the name."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who this replica is, for one life."""

    replica_id: str
    role: str
    epoch: int
    model_fingerprint: str
    tokenizer_fingerprint: str

    @classmethod
    def draw(cls, config: ServiceConfig) -> Identity:
        """A new life of a replica; reads the checkpoint's headers for its fingerprint."""
        directory = config.engine.model_dir
        return cls(
            replica_id=config.replica_id or new_replica_id(config.role),
            role=config.role,
            epoch=new_epoch(),
            model_fingerprint=model_fingerprint(directory, config.engine.quantization),
            tokenizer_fingerprint=tokenizer_fingerprint(directory),
        )


class Replica:
    """The parts of one running replica; owned by the service, closed once."""

    def __init__(
        self,
        config: ServiceConfig,
        identity: Identity,
        model: ModelConfig,
        executor: HostingExecutor,
        clock: Clock,
    ) -> None:
        self.config = config
        self.identity = identity
        self.model = model
        self.executor = executor
        self.clock = clock
        self.max_model_len = model.resolve_max_model_len(config.engine)
        self.wires: Callable[[], tuple[KvWire, ...]] = tuple
        """What KV takes to here, if the role knows: told with the load."""
        self.engine = build_engine(
            config.engine, executor, model, fingerprint=identity.model_fingerprint, clock=clock
        )

    @classmethod
    async def start(
        cls, config: ServiceConfig, progress: Callable[[str, int, int], None] | None = None
    ) -> Replica:
        """Load the model over the replica's ranks.

        Raises:
            SetupError: the model, its files or the split cannot work; one sentence says why.
        """
        engine = _shareable(config, config.engine.check())
        model = ModelConfig.from_dir(engine.model_dir)
        identity = await asyncio.to_thread(Identity.draw, config)
        executor = await asyncio.to_thread(_spawn, config, engine, model, identity, progress)
        logger.info(
            "%s: %d KV blocks of %d tokens, tp=%d pp=%d",
            identity.replica_id,
            executor.num_blocks,
            engine.block_size,
            engine.tensor_parallel_size,
            engine.pipeline_parallel_size,
        )
        return cls(config, identity, model, executor, MonotonicClock())

    def describe(self) -> ReplicaDescription:
        """What this replica tells a peer at the first meeting."""
        return ReplicaDescription(
            replica_id=self.identity.replica_id,
            role=self.identity.role,
            epoch=self.identity.epoch,
            version=__version__,
            wire_version=WIRE_VERSION,
            model=self.config.engine.model_name,
            model_fingerprint=self.identity.model_fingerprint,
            tokenizer_fingerprint=self.identity.tokenizer_fingerprint,
            granule=self.config.engine.granule,
            hash_scheme=SCHEME,
            dtype=self.model.resolve_dtype(self.config.engine),
            kv=self.executor.layout,
            wires=_common_wires(self.executor.endpoints),
            endpoints=self.executor.endpoints,
            max_model_len=self.max_model_len,
            vocab_size=self.model.vocab_size,
        )

    def books(self, sessions: int) -> BlockBooks:
        """The block pool's books with the hand-off sessions counted in. Engine's thread only."""
        return msgspec.structs.replace(self.engine.books(), sessions=sessions)

    def stats(self) -> ReplicaStats:
        """The load of this moment; a few numbers behind at worst."""
        return msgspec.structs.replace(self.engine.stats(), wires=self.wires())


def port_options(config: ServiceConfig) -> PortOptions:
    """What the ranks' KV ports are told. ``config.advertise`` is the address that peers dial."""
    auto = config.kv_transport == "auto"
    return PortOptions(
        transports=AUTO_WIRES if auto else tuple(config.kv_transport.split(",")),
        all_needed=not auto,
        host=config.host,
        advertise=config.advertise.rpartition(":")[0].strip("[]"),
        shm_folder=config.kv_shm_dir,
        max_bytes_per_s=config.kv_rate_limit,
    )


def _shareable(config: ServiceConfig, engine: EngineConfig) -> EngineConfig:
    """Prefill's cache is what peers read; decode's stays private, on pages of the best size."""
    mapped = not MAPPED_WIRES.isdisjoint(port_options(config).transports)
    return msgspec.structs.replace(engine, shared_kv=mapped and config.role == "prefill")


def _common_wires(endpoints: Sequence[bytes]) -> tuple[str, ...]:
    """The wires that every rank has, in the order of the first."""
    ranks = [decode_from_peer(endpoint, dict[str, bytes], "a rank") for endpoint in endpoints]
    return tuple(wire for wire in ranks[0] if all(wire in rank for rank in ranks))


def _spawn(
    config: ServiceConfig,
    engine: EngineConfig,
    model: ModelConfig,
    identity: Identity,
    progress: Callable[[str, int, int], None] | None,
) -> ProcessExecutor:
    port = port_options(config)
    with admit(model, engine, identity.replica_id, staging=port.slots * MESSAGE_BYTES):
        return ProcessExecutor(
            engine,
            model,
            port=PORT,
            port_options=encode(port),
            epoch=identity.epoch,
            name=identity.replica_id,
            progress=progress,
        )


def resident_bytes() -> int:
    """Resident memory of this process, ranks not included; peak where the current is unknown."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
