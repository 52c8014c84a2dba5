"""What is around a CUDA graph: run once, recorded once, replayed with its collectives counted.

There is no card here, so torch's own part is a stand-in that keeps what was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ekiden.layers.backends.triton import graphs
from ekiden.parallel.communicator import Solo


class CountedSolo(Solo):
    """A group of one that counts what it is asked, as a real group does."""

    def all_reduce(self, x: Tensor) -> Tensor:
        with self.counter.measure(x):
            return x


class FakeCuda:
    """Says in ``events`` what torch.cuda was asked for."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.pools: list[object] = []

    @contextmanager
    def graph(self, graph: object, *, pool: object, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        self.pools.append(pool)
        self.events.append("recording")
        yield
        self.events.append("recorded")

    def new_graph(self) -> SimpleNamespace:
        return SimpleNamespace(replay=lambda: self.events.append("replay"))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake, stream = FakeCuda(), SimpleNamespace(wait_stream=lambda other: None)
    replaced: dict[str, Callable[..., object]] = {
        "graph_pool_handle": object,
        "Stream": lambda device: stream,
        "current_stream": lambda device: stream,
        "stream": lambda stream: nullcontext(),
        "CUDAGraph": fake.new_graph,
        "graph": fake.graph,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return fake


def test_a_step_runs_once_before_it_is_recorded(cuda: FakeCuda) -> None:
    recorder = graphs.Graphs(torch.device("cuda", 0))

    def run() -> tuple[Tensor, ...]:
        cuda.events.append("run")
        return (torch.ones(1),)

    replay = recorder.record(run)
    assert cuda.events == ["run", "recording", "run", "recorded"]
    first, second = replay(), replay()
    assert cuda.events[4:] == ["replay", "replay"]
    assert first[0] is second[0], "a replay gives the memory that was recorded"


def test_all_recordings_share_one_pool(cuda: FakeCuda) -> None:
    recorder = graphs.Graphs(torch.device("cuda", 0))
    recorder.record(tuple)
    recorder.record(tuple)
    assert len(cuda.pools) == 2
    assert cuda.pools[0] is cuda.pools[1]


def test_a_replay_counts_its_collectives_and_a_recording_does_not(cuda: FakeCuda) -> None:
    recorder, tp = graphs.Graphs(torch.device("cuda", 0)), CountedSolo()

    def run() -> tuple[Tensor, ...]:
        return (recorder.all_reduce(torch.ones(4), tp), recorder.all_reduce(torch.ones(6), tp))

    replay = recorder.record(run)
    assert (tp.counter.calls, tp.counter.bytes) == (2, 40), "the run before moved bytes, once"
    replay()
    replay()
    assert (tp.counter.calls, tp.counter.bytes) == (6, 120)
    recorder.all_reduce(torch.ones(1), tp)
    assert (tp.counter.calls, tp.counter.bytes) == (7, 124)


def test_a_recording_that_fails_leaves_no_trace(cuda: FakeCuda) -> None:
    recorder, tp, runs = graphs.Graphs(torch.device("cuda", 0)), CountedSolo(), []

    def run() -> tuple[Tensor, ...]:
        runs.append(1)
        if len(runs) == 2:
            raise RuntimeError("not while recording")
        return ()

    with pytest.raises(RuntimeError, match="not while recording"):
        recorder.record(run)
    recorder.all_reduce(torch.ones(1), tp)
    assert tp.counter.calls == 1, "a collective outside a recording counts itself"
