"""Run one replica as a network service until it is told to stop.

    bind port -> load model -> serve gRPC -> register -> (SIGTERM) drain -> withdraw -> close

Exit codes: 0 after a drain, 1 when the replica broke, 2 when it could not be set up.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import uvloop

from ekiden import __version__
from ekiden.core.config import ServiceConfig
from ekiden.core.errors import EkidenError, SetupError
from ekiden.core.logging import setup_logging
from ekiden.core.ready_file import write_ready_file
from ekiden.core.types import ReplicaStats
from ekiden.registry.record import DRAINING, READY, UNWELL, ReplicaRecord
from ekiden.registry.registration import Registration
from ekiden.rpc.server import RpcServer, advertised_address
from ekiden.service.replica import Replica

logger = logging.getLogger(__name__)

HEALTH_INTERVAL_S = 1.0
"""How often the ranks' pulse is read. A stopped rank shows within its own limit plus this."""


class Service(Protocol):
    """A role: what ``prefill_svc`` and ``decode_svc`` implement."""

    services: Sequence[str]
    """Full names of its gRPC services."""

    def register(self, server: RpcServer) -> None:
        """Add the servicers; called before the server starts."""

    async def drain(self, grace_s: float) -> None:
        """Take no new work and return when nothing is held any more, or after ``grace_s``."""

    async def close(self) -> None: ...


ServiceFactory = Callable[[Replica, Callable[[BaseException], None]], Service]
"""(replica, on_fatal) -> the running service of one role; called on the event loop."""


class Stop:
    """Why and when the service ends; the first reason wins."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.failure: BaseException | None = None

    def ask(self) -> None:
        self._event.set()

    def fail(self, error: BaseException) -> None:
        if not self._event.is_set():
            self.failure = error
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()


def run_service(config: ServiceConfig, factory: ServiceFactory) -> int:
    """Serve until SIGTERM or SIGINT. Returns the process's exit code."""
    setup_logging(config.replica_id or config.role)
    try:
        return uvloop.run(_serve(config, factory))
    except SetupError as error:
        print(f"ekiden: {error.message}", file=sys.stderr)
        return 2


async def _serve(config: ServiceConfig, factory: ServiceFactory) -> int:
    stop = Stop()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.ask)
    server = RpcServer(config.host, config.port, secret=config.secret)
    address = advertised_address(config.host, server.port, config.advertise, config.redis_url)
    config = msgspec.structs.replace(config, advertise=address)
    loading = asyncio.ensure_future(Replica.start(config, _log_progress()))
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
    replica = await loading
    try:
        if not stopped.done():
            await _run(replica, factory, server, address, stop)
    finally:
        stopped.cancel()
        await asyncio.to_thread(replica.executor.close)
    return _report(stop)


async def _run(
    replica: Replica, factory: ServiceFactory, server: RpcServer, address: str, stop: Stop
) -> None:
    config = replica.config
    service = factory(replica, stop.fail)
    service.register(server)
    await server.start(service.services)
    registration = _registration(replica, address)
    watchdog = asyncio.ensure_future(_watch(replica, server, registration))
    try:
        if registration is not None:
            await registration.start()
        _announce(config, replica, address)
        await stop.wait()
        watchdog.cancel()  # from here on the replica is draining, well or not
        logger.info("draining: no new work, up to %.0f s for what is held", config.drain_grace_s)
        if registration is not None:
            await registration.set_status(DRAINING)
        await server.set_serving(False)
        if stop.failure is None:
            await service.drain(config.drain_grace_s)
    finally:
        watchdog.cancel()
        if registration is not None:
            await registration.close()
        await server.stop(1.0)
        await service.close()


def _registration(replica: Replica, address: str) -> Registration | None:
    config, identity = replica.config, replica.identity
    if not config.redis_url:
        return None
    record = ReplicaRecord(
        id=identity.replica_id,
        role=identity.role,
        model=config.engine.model_name,
        address=address,
        epoch=identity.epoch,
        version=__version__,
        block_size=config.engine.block_size,
        granule=config.engine.granule,
        tp=config.engine.tensor_parallel_size,
        pp=config.engine.pipeline_parallel_size,
        max_num_seqs=config.engine.max_num_seqs,
        max_model_len=replica.max_model_len,
        model_fingerprint=identity.model_fingerprint,
        tokenizer_fingerprint=identity.tokenizer_fingerprint,
        vocab_size=replica.model.vocab_size,
        stats=ReplicaStats(),
    )
    return Registration(config.redis_url, record, replica.stats)


async def _watch(replica: Replica, server: RpcServer, registration: Registration | None) -> None:
    """Health follows the ranks' pulse: probes and gateways hear of a rank that is wedged."""
    well = True
    while True:
        await asyncio.sleep(HEALTH_INTERVAL_S)
        trouble = replica.executor.healthy()
        if (trouble is None) != well:
            well = trouble is None
            logger.log(logging.INFO if well else logging.ERROR, "health: %s", trouble or "well")
            await server.set_serving(well)
            if registration is not None:
                await registration.set_status(READY if well else UNWELL)


def _announce(config: ServiceConfig, replica: Replica, address: str) -> None:
    logger.info("%s serves on %s", replica.identity.replica_id, address)
    identity = replica.identity
    ready = {"address": address, "replica_id": identity.replica_id, "epoch": identity.epoch}
    write_ready_file(config.ready_file, ready)


def _log_progress() -> Callable[[str, int, int], None]:
    """A line at each tenth of the load, for logs; a terminal's bar is the supervisor's job."""
    last: dict[str, int] = {}

    def report(what: str, done: int, total: int) -> None:
        tenth = 10 * done // total if total else 10
        if last.get(what) != tenth:
            last[what] = tenth
            logger.info("%s: %d%%", what, 10 * tenth)

    return report


def _report(stop: Stop) -> int:
    if stop.failure is None:
        return 0
    message = stop.failure.message if isinstance(stop.failure, EkidenError) else None
    logger.critical("stopped: %s", message or repr(stop.failure), exc_info=message is None)
    return 1
