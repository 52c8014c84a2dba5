"""The deployment under attack, and an orchestrator that starts anew what has been killed.

Two prefill replicas (each behind a relay), two decode replicas, a gateway and a Redis; beside them,
out of reach, a calm deployment of one process that says what the right answers are.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import grpc
import msgspec
from chaos_clients import Client, Truth
from chaos_net import Loopback
from chaos_relay import Relay, Trap
from ports import free_port
from stack import Service, Stack, audit, ranks_of

from ekiden.cli.redis_server import answers_ping, find_server
from ekiden.registry.record import READY
from ekiden.registry.watcher import Watcher
from ekiden.rpc import replica_pb2
from ekiden.service.supervisor import ChildSpec

PREFILL, DECODE = ("p-1", "p-2"), ("d-1", "d-2")
REPLICAS = (*PREFILL, *DECODE)
EVERYBODY = ("redis", "gateway", *REPLICAS)
REQUEST_TIMEOUT_S = 30.0
CLIENT_LIMIT_S = 60.0
IDLE_WITHIN_S = 30.0
READY_WITHIN_S = 40.0
"""Once everything that was killed runs again."""
LOOK_S = 0.004
SEATS = 24
RATE_LIMIT = 1_500_000
COMMON = ("--max-model-len", "4096", "--num-gpu-blocks-override", "700")
OPTIONS = {
    "prefill": ("--max-num-batched-tokens", "128", *COMMON),
    "decode": ("--max-num-seqs", str(SEATS), "--local-prefill-tokens", "0", *COMMON),
}


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """What carries the KV: ``link`` is the one to cut and to slow, empty if it takes none."""

    name: str
    link: str = ""

    def options(self, folder: Path) -> tuple[str, ...]:
        """A wire without a link that can be slowed is slow always, or its states would not last."""
        options = ("--kv-transport", self.name)
        if self.name == "shm":
            options = (*options, "--kv-shm-dir", str(folder))
        return options if self.link else (*options, "--kv-rate-limit", str(RATE_LIMIT))


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """How the replicas are split, and which wire carries the KV."""

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    wire: Wire = Wire(name="ucx")

    def options(self, role: str, folder: Path) -> tuple[str, ...]:
        split = self.prefill if role == "prefill" else self.decode
        return (*OPTIONS[role], *split, *self.wire.options(folder))


class HostedStack(Stack):
    """A stack whose services run on the hosts of a network."""

    start_s = 300.0  # several deployments start at once, on whatever machine there is

    def __init__(self, run_dir: Path, model_dir: Path, redis_url: str, net: Loopback) -> None:
        super().__init__(run_dir, model_dir, redis_url)
        self._net = net

    def _spec(self, role: str, name: str, options: list[str]) -> ChildSpec:
        spec = super()._spec(role, name, [*options, "--host", self._net.address(name)])
        return msgspec.structs.replace(spec, argv=(*self._net.prefix(name), *spec.argv))

    async def start_redis(self, port: int) -> Service:
        """A Redis of the harness's own host, which keeps nothing on disk."""
        host = self._net.here
        binary, _ = find_server()
        spec = ChildSpec(
            name="redis",
            argv=(
                *(binary, "--port", str(port), "--bind", host, "--protected-mode", "no"),
                *("--save", "", "--appendonly", "no"),
            ),
            ready=lambda: answers_ping(host, port),
            grace_s=5.0,
        )
        (child,) = await self._supervisor.start([spec])
        await self._wait([child])
        return Service("redis", child, {"address": f"{host}:{port}"})


class World:
    """Use as ``async with World(...)``; everything it started ends with it."""

    def __init__(self, net: Loopback, model_dir: Path, shape: Shape) -> None:
        self.net, self._model_dir, self._shape = net, model_dir, shape
        self.wire = shape.wire
        self._exits = contextlib.AsyncExitStack()
        self.services: dict[str, Service] = {}
        self.traps: list[Trap] = []
        self.relays: dict[str, Relay] = {}
        self._replacing: dict[str, asyncio.Task[None]] = {}
        self._lost = ""
        """Why the orchestrator gave up; nothing more can be learnt then."""
        self.starts: Counter[str] = Counter()
        self.stopped: set[int] = set()
        self.client: Client
        self.truth: Truth

    async def __aenter__(self) -> World:
        try:
            await self._open()
        except BaseException:
            await self._exits.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cont_all()
        await self._exits.aclose()

    async def _open(self) -> None:
        run = Path(self._exits.enter_context(tempfile.TemporaryDirectory(prefix="ekiden-chaos-")))
        self.run_dir = run
        self._exits.callback(self.net.close)
        self._redis_port, calm_port = free_port(), free_port()
        self._exits.push_async_callback(self._close_relays)
        url = f"redis://{self.net.here}:{self._redis_port}/0"
        self.stack = HostedStack(run / "run", self._model_dir, url, self.net)
        await self._exits.enter_async_context(self.stack)
        await self._open_calm(run, calm_port)
        await self._start("redis")
        await self._start(*REPLICAS)
        await self._start("gateway")
        self.members = Watcher(f"redis://{self.services['redis'].address}/0")
        await self.members.start(require=True)
        self._exits.push_async_callback(self.members.close)
        self._orchestrator = asyncio.ensure_future(self._orchestrate())
        self._exits.callback(self._orchestrator.cancel)
        await self.until_ready()

    async def _open_calm(self, run: Path, port: int) -> None:
        url = f"redis://{self.net.here}:{port}/0"
        calm = HostedStack(run / "calm", self._model_dir, url, self.net)
        await self._exits.enter_async_context(calm)
        await calm.start_redis(port)
        self.calm = await calm.start("decode", "calm", *COMMON)
        gateway = await calm.start("gateway", "calm-gateway")
        client = Client(f"http://{gateway.address}", limit_s=CLIENT_LIMIT_S)
        self._exits.push_async_callback(client.close)
        self.truth = Truth(client)

    async def _start(self, *names: str) -> None:
        """Start services anew, each on a port that it did not have before; Redis on its own."""
        if names == ("redis",):
            self.services["redis"] = await self.stack.start_redis(self._redis_port)
            self.starts["redis"] += 1
            return
        ports = {name: free_port() for name in names}
        for name in set(names) & set(PREFILL):
            await self._open_relay(name, f"{self.net.address(name)}:{ports[name]}")
        commands = [(*self._command(name), "--port", str(ports[name])) for name in names]
        for service in await self.stack.start_all(*commands):
            # What a prefill replica advertises is its relay; the harness asks it directly.
            service.ready["address"] = f"{self.net.address(service.name)}:{ports[service.name]}"
            self.services[service.name] = service
            self.starts[service.name] += 1
        if "gateway" in names:
            self._open_client()

    def _command(self, name: str) -> tuple[str, ...]:
        if name == "gateway":
            return ("gateway", name, "--request-timeout", str(REQUEST_TIMEOUT_S))
        if name in DECODE:
            return ("decode", name, *self._shape.options("decode", self.run_dir))
        advertised = ("--advertise", self.relays[name].address)
        return ("prefill", name, *self._shape.options("prefill", self.run_dir), *advertised)

    async def _open_relay(self, name: str, upstream: str) -> None:
        if name in self.relays:
            await self.relays[name].close()
        self.relays[name] = Relay(name, self.net.here, self.traps)
        await self.relays[name].start(upstream)

    async def _close_relays(self) -> None:
        await asyncio.gather(*(relay.close() for relay in self.relays.values()))

    def _open_client(self) -> None:
        """Earlier clients stay open to the end: somebody may still be told that theirs broke."""
        url = f"http://{self.services['gateway'].address}"
        self.client = Client(url, limit_s=CLIENT_LIMIT_S)
        self._exits.push_async_callback(self.client.close)

    def keep_logs(self, folder: Path) -> None:
        """Copy what every service wrote."""
        shutil.copytree(self.run_dir / "run", folder, dirs_exist_ok=True)

    # What runs

    def processes(self, name: str, *, ranks_only: bool = False) -> list[int]:
        """Process ids of a service, its ranks last."""
        service = self.services[name]
        ranks = ranks_of(service) if name in REPLICAS else []
        return ranks if ranks_only else [service.child.process.pid, *ranks]

    def stop(self, pids: Iterable[int]) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
            self.stopped.add(pid)

    def cont_all(self) -> None:
        for pid in self.stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.stopped.clear()

    def alive(self, name: str) -> bool:
        return not self.services[name].child.ended.done()

    async def replace(self, name: str) -> None:
        """What an orchestrator does with one that is dead or does not answer. One that is being
        replaced already is only waited for."""
        if name not in self._replacing:
            self._replacing[name] = asyncio.ensure_future(self._replace(name))
            self._replacing[name].add_done_callback(lambda _: self._replacing.pop(name))
        await asyncio.shield(self._replacing[name])

    async def _replace(self, name: str) -> None:
        pids = self.processes(name) if self.alive(name) else []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.stopped.difference_update(pids)
        await self.services[name].child.ended
        await self._start(name)

    async def _orchestrate(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            for name in EVERYBODY:
                if not self.alive(name) and name not in self._replacing and not self._lost:
                    asyncio.ensure_future(self.replace(name)).add_done_callback(self._note_lost)

    def _note_lost(self, replacing: asyncio.Future[None]) -> None:
        if not replacing.cancelled() and (error := replacing.exception()) is not None:
            self._lost = f"what ended cannot be started again: {error!r}"

    # What the books say

    async def books(self, name: str) -> replica_pb2.AuditReply | None:
        """None if the replica does not answer."""
        try:
            return await audit(self.services[name])
        except grpc.aio.AioRpcError:
            return None

    async def states(self, *names: str) -> set[str]:
        """The states that anything is in on the replicas that answer."""
        found = await asyncio.gather(*(self.books(name) for name in names))
        return {state for books in found if books is not None for state in books.states}

    async def until_state(self, names: Sequence[str], *states: str, within_s: float) -> bool:
        """Whether one of ``states`` was seen on one of ``names`` in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not (await self.states(*names)) & set(states):
                    await asyncio.sleep(LOOK_S)
                return True
        return False

    async def until_ready(self) -> bool:
        """All processes are up, and the gateway serves over all replicas.

        Raises:
            RuntimeError: one that ended cannot be started again.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + READY_WITHIN_S
        while not await self._is_ready():
            if self._lost:
                raise RuntimeError(self._lost)
            if self._replacing:  # which has a deadline of its own
                deadline = loop.time() + READY_WITHIN_S
            if loop.time() > deadline:
                return False
            await asyncio.sleep(0.05)
        return True

    async def _is_ready(self) -> bool:
        if not all(map(self.alive, EVERYBODY)):
            return False
        known = {record.id: record for record in self.members.replicas()}
        for name in REPLICAS:
            record = known.get(name)
            if record is None or record.status != READY:
                return False
            if record.epoch != self.services[name].ready["epoch"]:
                return False
        return await self.client.ready()

    async def unsettled(self) -> str:
        """Empty once every replica's books are those of an idle one; else what is still held."""
        for name in REPLICAS:
            books = await self.books(name)
            if books is None:
                return f"{name} does not answer"
            if books.free + books.cached + books.held != books.total:
                return f"the books of {name} do not balance: {books}"
            if books.held or books.requests or books.sessions or books.states:
                return f"{name} still holds: {books}".replace("\n", " ")
        if in_flight := await self.client.metric("ekiden_gateway_in_flight"):
            return f"the gateway still holds {in_flight:g} requests"
        return ""

    async def until_settled(self, within_s: float = IDLE_WITHIN_S) -> str:
        """Empty when everything was let go in time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_s
        while (held := await self.unsettled()) and loop.time() < deadline:
            await asyncio.sleep(0.02)
        return held
