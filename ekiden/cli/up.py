"""``ekiden up``: Redis, prefill, decode and gateway on this machine, as one command.

1. The model is found or fetched, the port and Redis are checked.
2. Redis starts, then every worker, then the gateway; each is waited for with a deadline.
3. One banner says that it is ready. ``--ask`` puts one question and ends.
4. Ctrl-C, SIGTERM or the death of any child: gateway, workers and Redis are drained and ended, in
   this order. A second Ctrl-C skips the draining.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ekiden.cli import console, redis_server
from ekiden.cli.chat import ask, first_model, open_client
from ekiden.cli.command import DEFAULT_MODEL, MODEL_HELP, SERVED_NAME_HELP, add_command
from ekiden.cli.deployment import Deployment, Pool, check_model, gateway_url
from ekiden.cli.kv_options import check_shared_folder
from ekiden.cli.meetings import Meetings
from ekiden.cli.models import resolve
from ekiden.cli.options import (
    ENGINE_OPTIONS,
    LOCAL_PREFILL,
    SERVICE_OPTIONS,
    add_options,
    add_redis,
    add_switches,
    as_argv,
    at_least,
    default_of,
    port_number,
    redis_url,
    seconds,
    switched,
)
from ekiden.cli.room import check_room
from ekiden.cli.serve import name_of
from ekiden.core.config import EngineConfig, GatewayConfig, ServiceConfig
from ekiden.core.cores import usable_cores
from ekiden.core.errors import SetupError
from ekiden.rpc.listening import check_address
from ekiden.service.supervisor import Child, ChildDied, NotReady, Supervisor

_SPLITS = ("tensor_parallel_size", "pipeline_parallel_size")
_ENGINE = tuple(option for option in ENGINE_OPTIONS if option.field not in _SPLITS)
_SERVICE = tuple(option for option in SERVICE_OPTIONS if option.field != "drain_grace_s")
_DRAIN = tuple(option for option in SERVICE_OPTIONS if option.field == "drain_grace_s")

_EXAMPLES = """examples:
  ekiden up                                         1 prefill TP2, 1 decode TP1, the default model
  ekiden up /models/llama --prefill 2 --decode 4    your own model, larger pools
  ekiden up --prefill 0                             no prefill pool: classic aggregated serving
  ekiden up --ask "What is a relay race?"           one question, then a clean end

exit codes: 0 ended by Ctrl-C or SIGTERM, 1 a service died, 2 the set-up cannot work,
3 not ready in time
"""


def add_parser(commands: Any) -> None:
    parser = add_command(commands, "up", "run a whole deployment on this machine", _EXAMPLES)
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help=f"{MODEL_HELP} (default: {DEFAULT_MODEL})",
    )
    parser.add_argument("--served-model-name", metavar="NAME", default="", help=SERVED_NAME_HELP)
    pools = parser.add_argument_group("pools")
    for role, size, tp in (("prefill", 1, 2), ("decode", 1, 1)):
        _add_pool(pools, role, size, tp)
    gateway = parser.add_argument_group("gateway")
    host, port = default_of(GatewayConfig, "host"), default_of(GatewayConfig, "port")
    gateway.add_argument("--host", default=host, metavar="HOST", help=f"default: {host}")
    gateway.add_argument(
        "--port", type=port_number, default=port, metavar="N", help=f"0: a free one; default {port}"
    )
    add_redis(gateway)
    engine = parser.add_argument_group("every worker")
    add_options(engine, _ENGINE, EngineConfig)
    add_switches(engine)
    add_options(engine, (*_SERVICE, *_DRAIN, LOCAL_PREFILL), ServiceConfig)
    _add_run(parser.add_argument_group("this run"))
    parser.set_defaults(run=_run)


def _add_pool(group: Any, role: str, size: int, tp: int) -> None:
    least = 1 if role == "decode" else 0
    group.add_argument(f"--{role}", type=at_least(least), default=size, metavar="N",
                       help=f"{role} replicas (default: {size})")  # fmt: skip
    group.add_argument(f"--{role}-tp", type=at_least(1), default=tp, metavar="N",
                       help=f"tensor-parallel size of each (default: {tp})")  # fmt: skip
    group.add_argument(f"--{role}-pp", type=at_least(1), default=1, metavar="N",
                       help="pipeline-parallel size of each (default: 1)")  # fmt: skip


def _add_run(group: Any) -> None:
    group.add_argument("--ask", metavar="PROMPT", help="ask this once it is ready, then end")
    group.add_argument(
        "--max-tokens",
        type=at_least(1),
        default=128,
        metavar="N",
        help="tokens of the answer to --ask, at most (default: 128)",
    )
    group.add_argument(
        "--startup-timeout", type=seconds, default=300.0, metavar="SECONDS",
        help="for all services to be ready (default: 300)",
    )  # fmt: skip
    group.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="for logs (default: a new temporary folder)"
    )


def deployment(args: argparse.Namespace, model_dir: Path) -> Deployment:
    """What to start. Options that no engine could take are refused here, before any process."""
    pools = tuple(
        Pool(role=role, size=getattr(args, role), tp=getattr(args, f"{role}_tp"),
             pp=getattr(args, f"{role}_pp"))
        for role in ("prefill", "decode")
    )  # fmt: skip
    engine_of_all(args, model_dir)
    if not args.threads_per_rank:
        args.threads_per_rank, args.core_sharing = threads_for(pools, usable_cores()), True
    return Deployment(
        model_dir=model_dir,
        model_name=name_of(args.model, args.served_model_name),
        pools=pools,
        host=args.host,
        port=args.port,
        drain_grace_s=args.drain_grace_s,
        options=(*as_argv((*_ENGINE, *_SERVICE), args), *switched(args)),
        decode_options=tuple(as_argv([LOCAL_PREFILL], args)),
    )


def engine_of_all(args: argparse.Namespace, model_dir: Path) -> EngineConfig:
    """What all engines have in common; pools differ in their splits."""
    fields = {option.field: getattr(args, option.field) for option in _ENGINE}
    return EngineConfig(model_dir=model_dir, model_name="", **fields).check()


def threads_for(pools: Sequence[Pool], cores: int) -> int:
    """Threads of a rank when all replicas share this machine and all compute.

    A replica that took all cores for itself, as it does by default, would leave its threads waiting
    for one another: five times slower where another process is busy. What the others leave idle
    it gets by ``--core-sharing``.
    """
    ranks = sum(pool.size * pool.tp * pool.pp for pool in pools)
    return max(1, cores // ranks)


def _run(args: argparse.Namespace) -> int:
    began = time.monotonic()
    check_address(args.host, args.port)
    check_shared_folder(args.kv_shm_dir)
    if url := redis_url(args):
        asyncio.run(redis_server.check_url(url))
    plan = deployment(args, resolve(args.model))
    check_model(plan)
    check_room(plan.pools, engine_of_all(args, plan.model_dir))
    model_s = time.monotonic() - began
    run_dir = run_folder(args.run_dir)
    code = asyncio.run(Up(plan, args, run_dir).run())
    if args.ask and code == 0:
        run_s = time.monotonic() - began - model_s
        print(f"\nmodel {model_s:.1f} s, run {run_s:.1f} s (start, answer, clean end)")
    return code


def run_folder(given: Path | None) -> Path:
    """The folder for logs and ready files, those of an earlier run in it removed.

    Raises:
        SetupError: nothing can be written there.
    """
    try:
        folder = given or Path(tempfile.mkdtemp(prefix="ekiden-up-"))
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.ready"):
            old.unlink()
    except OSError as error:
        raise SetupError(
            f"--run-dir {given or tempfile.gettempdir()} cannot be written: {error.strerror}"
        ) from None
    return folder


class Up:
    """One run, from the first process to the last."""

    def __init__(self, plan: Deployment, args: argparse.Namespace, run_dir: Path) -> None:
        self.plan = plan
        self.args = args
        self.run_dir = run_dir
        self.supervisor = Supervisor(run_dir)
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> int:
        """The exit code; whatever happens, no process is left."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._signalled)
        try:
            return await self._until_stopped()
        except ChildDied as error:
            return console.report_death(error, self.run_dir)
        except NotReady as error:
            return console.report_not_ready(error, self.run_dir)
        finally:
            for name in await self.supervisor.close(self._hurry):
                print(console.killed(name, asked=self._hurry.is_set()), file=sys.stderr)

    def _signalled(self) -> None:
        again = self._stop.is_set()
        self._stop.set()
        if again:
            self._hurry.set()
        else:
            console.say("ending: draining what is in flight (Ctrl-C again: at once)")

    async def _until_stopped(self) -> int:
        work = asyncio.ensure_future(self._work())
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else 0
        finally:
            for task in (work, stopped):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, ChildDied, NotReady):
                    await task

    async def _work(self) -> int:
        url = await self._start()
        if not self.args.ask:
            console.banner(self.plan, url, self.redis_url, self.run_dir)
            await self._watch()
            return 1
        console.say(f"ready: {self.plan.model_name} on {url}; logs in {self.run_dir}\n")
        return await self._ask(url)

    async def _watch(self) -> None:
        """Until a child dies; replicas that join meanwhile are told of."""
        telling = asyncio.ensure_future(self._meetings.later())
        try:
            await self.supervisor.watch()
        finally:
            telling.cancel()

    async def _start(self) -> str:
        """Everything up and ready; the gateway's URL."""
        deadline = time.monotonic() + self.args.startup_timeout
        self.redis_url = await self._redis()
        workers = await self.supervisor.start(self.plan.workers(self.run_dir, self.redis_url))
        gateway = [self.plan.gateway(self.run_dir, self.redis_url)]
        children = [*workers, *await self.supervisor.start(gateway)]
        remaining = max(0.0, deadline - time.monotonic())
        with console.Waiting(children) as waiting:
            await self.supervisor.wait_ready(children, remaining, waiting.ready, waiting.tick)
        decoders = [child for child in workers if child.spec.name.startswith("decode")]
        prefills = sum(pool.size for pool in self.plan.pools if pool.role == "prefill")
        self._meetings = Meetings(decoders, prefills)
        await self._meetings.at_start()
        return gateway_url(self.run_dir / "gateway.ready")

    async def _redis(self) -> str:
        if url := redis_url(self.args):
            return url
        port = redis_server.free_port()
        children = await self.supervisor.start([redis_server.server_spec(self.run_dir, port)])
        await self.supervisor.wait_ready(children, self.args.startup_timeout, _announce)
        return f"redis://127.0.0.1:{port}/0"

    async def _ask(self, url: str) -> int:
        """Ask in a thread, and notice a child's death meanwhile."""
        asking = asyncio.ensure_future(asyncio.to_thread(self._ask_now, url))
        watching = asyncio.ensure_future(self.supervisor.watch())
        try:
            await asyncio.wait({asking, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
            return await asking
        finally:
            watching.cancel()

    def _ask_now(self, url: str) -> int:
        question = [{"role": "user", "content": self.args.ask}]
        print(f"> {self.args.ask}\n")
        options = {"max_tokens": self.args.max_tokens, "temperature": 0}
        with open_client(url) as client:
            if not ask(client, first_model(client), question, options).strip():
                raise SetupError("the model gave an empty answer")
        return 0


def _announce(child: Child) -> None:
    console.say(console.ready_line(child))
