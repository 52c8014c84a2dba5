"""One rank's step, and a replica of threads, against ``transformers``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import (
    PROMPT,
    Driver,
    chunk,
    greedy,
    save_tiny_llama,
    tiny_config,
    transformers_greedy,
)

from ekiden.core.errors import InvariantBroken, ReplicaFailed, SetupError
from ekiden.engine.inline_executor import InlineExecutor
from ekiden.engine.plan import StepPlan
from ekiden.engine.port import ChunkDone, PortContext
from ekiden.models.config import ModelConfig

torch.set_num_threads(1)
COUNT = 12


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Any:
    return save_tiny_llama(model_dir)


@pytest.fixture(scope="module")
def expected(reference: Any) -> list[int]:
    return transformers_greedy(reference, PROMPT, COUNT)


@pytest.fixture
def replica(model_dir: Path, reference: Any) -> Iterator[Callable[..., InlineExecutor]]:
    """Starts replicas and closes them."""
    started: list[InlineExecutor] = []

    def start(port: Any = None, **fields: Any) -> InlineExecutor:
        config = tiny_config(model_dir, **fields)
        started.append(InlineExecutor(config, ModelConfig.from_dir(model_dir), port=port, epoch=5))
        return started[-1]

    yield start
    for executor in started:
        executor.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("ekiden-rank")]


Replica = Callable[..., InlineExecutor]


@pytest.mark.parametrize("cut", [7, 16, 100])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)])
def test_tokens_equal_transformers_in_every_layout_and_chunking(
    replica: Replica, expected: list[int], tp: int, pp: int, cut: int
) -> None:
    assert Driver(replica(tp=tp, pp=pp)).generate(PROMPT, COUNT, cut=cut) == expected


def test_several_steps_in_flight_change_nothing(replica: Replica, reference: Any) -> None:
    prompts = [PROMPT, PROMPT[:9], PROMPT[3:20]]
    executor = replica(pp=3)
    assert executor.max_in_flight == 4, "one a stage, and one that is planned ahead"
    assert Driver(executor).generate_interleaved(prompts, 6) == [
        transformers_greedy(reference, prompt, 6) for prompt in prompts
    ]


def test_blocks_are_copied_before_anything_is_computed(
    replica: Replica, expected: list[int]
) -> None:
    driver = Driver(replica(tp=2))
    end = len(PROMPT)
    # KV in blocks 0-2; the step that reads blocks 10-12 copies them there first.
    driver.run(chunk(PROMPT, 0, end - 1))
    last = chunk(PROMPT, end - 1, end, first_block=10, samples=(greedy(),))
    assert driver.run(last, copies=((0, 10), (1, 11), (2, 12))) == {1: expected[0]}


def test_a_step_may_have_copies_only_or_nothing_to_sample(replica: Replica) -> None:
    driver = Driver(replica(pp=2))
    assert driver.run(copies=((0, 1),)) == {}
    assert driver.run(chunk(PROMPT, 0, 5)) == {}


def test_choices_of_one_prompt_are_sampled_from_the_same_logits(replica: Replica) -> None:
    driver = Driver(replica(tp=2))
    specs = tuple(greedy(choice=i, seed=i, temperature=5.0) for i in range(20))
    end = len(PROMPT)

    def sampled(*picked: Any) -> list[tuple[int, int]]:
        driver.submit(chunk(PROMPT, 0, end, samples=picked))
        return [(s.choice, s.token) for s in driver.executor.collect(30.0).sampled]

    together = sampled(*specs)
    assert [choice for choice, _ in together] == list(range(20))
    assert len({token for _, token in together}) > 3
    assert together[7:8] == sampled(specs[7])


def test_a_batch_of_sequences_gives_each_its_own_token(replica: Replica, reference: Any) -> None:
    prompts = [PROMPT[i : i + 11] for i in range(4)]
    chunks = [
        chunk(p, 0, 11, first_block=2 * i, sequence=i, samples=(greedy(),) if i != 2 else ())
        for i, p in enumerate(prompts)
    ]
    expected = {i: transformers_greedy(reference, prompts[i], 1)[0] for i in (0, 1, 3)}
    assert Driver(replica()).run(*chunks) == expected


def test_a_result_tells_of_collectives_and_of_the_bubble(replica: Replica) -> None:
    def result(**fields: Any) -> Any:
        executor = replica(**fields)
        executor.submit(StepPlan(1, (chunk(PROMPT, 0, 10, samples=(greedy(),)),)))
        return executor.collect(30.0)

    alone, split, staged = result(), result(tp=2), result(pp=2)
    assert alone.compute_s > 0
    assert (alone.collective_bytes, alone.collective_s, alone.idle_s) == (0, 0.0, 0.0)
    # Two all-reduces of [10, 64] float32 a layer on each of two ranks, at least.
    assert split.collective_bytes >= 2 * 4 * 2 * 10 * 64 * 4
    assert 0 < split.collective_s < split.compute_s
    assert staged.idle_s > 0
    assert staged.collective_bytes >= 10 * 64 * 4


class Port:
    """Notes what it is told; ``boom`` raises."""

    def __init__(self, cache: torch.Tensor, context: PortContext, emit: Any) -> None:
        self.cache, self.context, self.emit = cache, context, emit
        self.opened_on = threading.current_thread()
        self.finished: list[ChunkDone] = []
        self.closed = False

    def describe(self) -> bytes:
        return b"endpoint %d" % self.context.rank

    def command(self, message: bytes) -> None:
        if message == b"boom":
            raise RuntimeError("no such session")
        on_rank = threading.current_thread() is self.opened_on
        self.emit(b"%d %s %d" % (self.context.rank, message, on_rank))

    def chunks_finished(self, chunks: Sequence[ChunkDone]) -> None:
        self.finished += chunks

    def close(self) -> None:
        self.closed = True


class Ports:
    """A PortFactory that keeps what it made."""

    def __init__(self) -> None:
        self.made: dict[int, Port] = {}
        self.heard: list[tuple[int, bytes]] = []
        self.changed = threading.Condition()

    def __call__(self, cache: torch.Tensor, context: PortContext, emit: Any) -> Port:
        self.made[context.rank] = Port(cache, context, emit)
        return self.made[context.rank]

    def listen(self, rank: int, message: bytes) -> None:
        with self.changed:
            self.heard.append((rank, message))
            self.changed.notify_all()

    def hear(self, count: int) -> list[tuple[int, bytes]]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.heard) >= count, 10.0)
            return sorted(self.heard)


def test_every_rank_tells_its_port_which_chunks_sessions_want(replica: Replica) -> None:
    ports = Ports()
    driver = Driver(replica(ports, tp=2, pp=2))
    assert driver.executor.endpoints == tuple(b"endpoint %d" % r for r in range(4))
    driver.run(
        chunk(PROMPT, 0, 20, session=9),
        chunk(PROMPT, 0, 5, first_block=4),
        chunk(PROMPT, 0, 7, first_block=8, session=10),
    )
    driver.run(chunk(PROMPT, 20, 41, session=9, samples=(greedy(),)))
    for rank, port in ports.made.items():
        assert (port.context.rank, port.context.epoch) == (rank, 5)
        assert port.finished == [
            ChunkDone(9, 20, (0, 1)),
            ChunkDone(10, 7, (8,)),
            ChunkDone(9, 41, (0, 1, 2)),
        ]
        # What the port was given is the cache that the step wrote.
        shape = driver.executor.layout.block_shape(rank)
        assert port.cache.shape == (32, *shape)
        assert port.cache[:2].any()
        assert not port.cache[12:].any()


def test_ports_are_commanded_on_their_rank_and_heard(replica: Replica) -> None:
    ports = Ports()
    executor = replica(ports, tp=2)
    executor.on_port_message(ports.listen)
    executor.send_port(b"all")
    executor.send_port(b"one", rank=1)
    assert ports.hear(3) == [(0, b"0 all 1"), (1, b"1 all 1"), (1, b"1 one 1")]
    executor.close()
    assert all(port.closed for port in ports.made.values())


def test_a_port_that_raises_ends_the_replica_and_names_the_rank(replica: Replica) -> None:
    executor = replica(Ports(), tp=2)
    assert executor.healthy() is None
    executor.send_port(b"boom", rank=1)
    driver = Driver(executor)
    with pytest.raises(ReplicaFailed, match=r"rank 1: RuntimeError: no such session"):
        driver.run(chunk(PROMPT, 0, 5))
    assert "rank 1" in (executor.healthy() or "")


def test_a_session_without_a_port_and_a_port_message_without_one_are_refused(
    replica: Replica,
) -> None:
    executor = replica()
    assert executor.endpoints == ()
    with pytest.raises(InvariantBroken, match="have none"):
        executor.send_port(b"x")
    with pytest.raises(ReplicaFailed, match="session 4 wants KV sent"):
        Driver(executor).run(chunk(PROMPT, 0, 5, session=4))


def test_a_rank_that_cannot_run_a_plan_fails_the_replica_at_once(replica: Replica) -> None:
    executor = replica(tp=2, step_timeout_s=60.0)
    driver = Driver(executor)
    with pytest.raises(ReplicaFailed, match=r"rank [01]: "):
        driver.run(chunk(PROMPT, 0, 5, first_block=1000))
    with pytest.raises(ReplicaFailed):
        driver.submit(chunk(PROMPT, 0, 5))


def test_weights_that_are_not_numbers_give_an_error_and_never_a_token(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path)
    with torch.no_grad():
        model.lm_head.weight[17] = torch.nan
    model.save_pretrained(tmp_path)
    executor = InlineExecutor(tiny_config(tmp_path), ModelConfig.from_dir(tmp_path))
    with pytest.raises(ReplicaFailed, match="NaN or infinite"):
        Driver(executor).run(chunk(PROMPT, 0, 5, samples=(greedy(),)))
    executor.close()


def test_a_checkpoint_that_cannot_be_read_is_a_setup_error(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(SetupError, match=r"safetensors"):
        InlineExecutor(tiny_config(tmp_path, tp=2), ModelConfig.from_dir(tmp_path))


def test_closing_twice_is_closing_once(replica: Replica) -> None:
    executor = replica(tp=2)
    executor.close()
    executor.close()
    with pytest.raises(ReplicaFailed, match="closed"):
        executor.submit(StepPlan(1, (chunk(PROMPT, 0, 5),)))
