"""A whole deployment of real processes over a tiny model, for one test."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
from tiny_tokenizers import byte_level, write

from ekiden.core.clock import MonotonicClock
from ekiden.core.types import PrefillCandidate
from ekiden.rpc import replica_pb2, replica_pb2_grpc
from ekiden.rpc.channel import open_channel
from ekiden.service.supervisor import Child, ChildSpec, Supervisor

MODEL = "tiny"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
START_S = 90.0


def save_tiny_model(path: Path, *, seed: int = 0, max_len: int = 8192) -> Any:
    """A chat model of a megabyte: random weights, a real byte-level tokenizer, a template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_level()
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        vocab_size=tokenizer.get_vocab_size(),
        max_position_embeddings=max_len,
        eos_token_id=1,
        bos_token_id=0,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(path)
    write(path, tokenizer, chat_template=TEMPLATE)
    return model


class TinyModel(msgspec.Struct):
    """A checkpoint and the model that ``transformers`` makes of it."""

    directory: Path
    reference: Any

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """What transformers generates greedily in fp32."""
        import torch

        torch.set_num_threads(1)  # two that wait for each other crawl where replicas run beside
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(count):
                logits = self.reference(torch.tensor([tokens])).logits[0, -1]
                tokens.append(int(logits.argmax()))
        return tokens[len(prompt) :]


class Service(msgspec.Struct):
    """One running service of the stack."""

    name: str
    child: Child
    ready: dict[str, Any]

    @property
    def address(self) -> str:
        return str(self.ready["address"])

    @property
    def candidate(self) -> PrefillCandidate:
        return PrefillCandidate(
            replica_id=self.ready["replica_id"], address=self.address, epoch=self.ready["epoch"]
        )

    def kill(self) -> None:
        """SIGKILL to the service and everything it started."""
        self.child.signal_group(signal.SIGKILL)


class Stack:
    """Starts services of ``model_dir``; closes them all, without grace, at the end."""

    start_s = START_S

    def __init__(self, run_dir: Path, model_dir: Path, redis_url: str) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._supervisor = Supervisor(run_dir)
        self._run_dir = run_dir
        self._model_dir = model_dir
        self._redis_url = redis_url
        self._clock = MonotonicClock()

    async def __aenter__(self) -> Stack:
        return self

    async def __aexit__(self, *_: object) -> None:
        hurry = asyncio.Event()
        hurry.set()
        await self._supervisor.close(hurry)

    async def start(self, role: str, name: str, *options: str) -> Service:
        """Start one service and wait until it is ready."""
        return (await self.start_all((role, name, *options)))[0]

    async def start_all(self, *services: tuple[str, ...]) -> list[Service]:
        """Start several at once: each is (role, name, *options)."""
        specs = [self._spec(role, name, options) for role, name, *options in services]
        children = await self._supervisor.start(specs)
        try:
            await self._wait(children)
        except Exception:
            for child in children:
                print(child.spec.name, child.tail(40), file=sys.stderr)
            raise
        return [
            Service(child.spec.name, child, json.loads(self._ready(child.spec.name).read_text()))
            for child in children
        ]

    async def deploy(self, *workers: tuple[str, ...]) -> str:
        """Start workers and a gateway that has found them all; the gateway's URL."""
        await self.start_all(*workers)
        return await self.start_gateway()

    async def start_gateway(self, *options: str) -> str:
        """A gateway over the workers that are ready already; its URL."""
        return f"http://{(await self.start('gateway', 'gateway', *options)).address}"

    async def _wait(self, children: list[Child]) -> None:
        deadline = self._clock.now() + self.start_s
        for child in children:
            while not await child.spec.ready():
                if child.ended.done():
                    raise AssertionError(f"{child.spec.name} ended: {child.cause()}")
                if self._clock.now() > deadline:
                    raise AssertionError(f"{child.spec.name} is not ready")
                await asyncio.sleep(0.05)

    def _ready(self, name: str) -> Path:
        return self._run_dir / f"{name}.ready"

    def _spec(self, role: str, name: str, options: list[str]) -> ChildSpec:
        ready = self._ready(name)
        ready.unlink(missing_ok=True)

        async def written() -> bool:
            return ready.exists()

        argv = [
            *(sys.executable, "-m", "ekiden.cli", "serve", role),
            *("--model", str(self._model_dir), "--served-model-name", MODEL),
            *("--redis", self._redis_url, "--ready-file", str(ready), "--port", "0"),
        ]
        if role != "gateway":
            argv += ["--replica-id", name, "--dtype", "float32", "--threads-per-rank", "1"]
        return ChildSpec(name=name, argv=(*argv, *options), ready=written, grace_s=5.0)


async def audit(service: Service) -> replica_pb2.AuditReply:
    """The block books of one replica."""
    async with open_channel(service.address) as channel:
        stub = replica_pb2_grpc.ReplicaStub(channel)
        return await stub.Audit(replica_pb2.AuditRequest(), timeout=5.0)


async def wait_idle(*services: Service, within_s: float = 5.0) -> None:
    """Until every replica's books show nothing held by anybody; AssertionError if not in time."""
    clock = MonotonicClock()
    deadline = clock.now() + within_s
    for service in services:
        while True:
            books = await audit(service)
            assert books.free + books.cached + books.held == books.total
            if not (books.held or books.requests or books.sessions):
                break
            assert clock.now() < deadline, f"{service.name} still holds: {books}"
            await asyncio.sleep(0.05)


def ranks_of(service: Service) -> list[int]:
    """Process ids of a service's ranks."""
    pid = service.child.process.pid
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


async def until_prefilling(prefill: Service) -> None:
    """Until prefill has put a chunk into a step: its books show blocks held."""
    async with asyncio.timeout(20):
        while not (await audit(prefill)).held:
            await asyncio.sleep(0.002)
