"""Frames survive any split of the stream, and a rank notices that its driver is gone."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ekiden.core.config import EngineConfig
from ekiden.core.types import TokenLogprobs
from ekiden.engine.plan import Chunk, Sampled, SampleSpec, StepPlan, StepResult
from ekiden.engine.wire import (
    Beat,
    Broken,
    Close,
    Done,
    DriverGone,
    FrameReader,
    FromPort,
    Loading,
    RankWire,
    Ready,
    Setup,
    Step,
    ToPort,
    Up,
    frame,
)
from ekiden.models.config import ModelConfig
from ekiden.models.layout import kv_layout

SAMPLED = Sampled(3, 1, 42, TokenLogprobs(42, -0.5, ((42, -0.5), (7, -1.25))))
UPWARD: list[Up] = [
    Beat(),
    Loading(10, 20),
    Ready(b"end\0point"),
    Done(StepResult(7, (SAMPLED,), 0.5, 0.25, 1000, 0.125)),
    FromPort(bytes(range(256)) * 300),
    Broken("what went wrong", True),
]
SPEC = SampleSpec(
    1, 2**63 - 1, 5, 0.7, 0.9, 40, 0.1, 0.5, 0.25, 1.1, {7: -100.0}, (2,), bytes(8), bytes(8), 5
)
PLAN = StepPlan(9, (Chunk(3, (5, 6), 16, (4, 2), (SPEC,), 2**40),), ((1, 2),))


@given(cuts=st.lists(st.integers(1, 5000), max_size=30))
def test_messages_come_out_whole_however_the_stream_was_cut(cuts: list[int]) -> None:
    stream = b"".join(frame(message) for message in UPWARD)
    reader, got, start = FrameReader(), [], 0
    for size in [*cuts, len(stream)]:
        got += reader.feed(stream[start : start + size])
        start += size
    assert got == UPWARD


def test_a_stream_that_is_no_stream_of_frames_is_refused() -> None:
    with pytest.raises(ValueError, match="limit"):
        FrameReader().feed(b"\xff\xff\xff\xff")
    with pytest.raises(msgspec.MsgspecError):
        FrameReader().feed(b"\x01\0\0\0\xc1")


@pytest.fixture
def setup(small_model: ModelConfig) -> Setup:
    config = EngineConfig(model_dir=Path("/models/a b"), model_name="m")
    return Setup(
        name="decode-0",
        rank=0,
        parent=1,
        config=config,
        model=small_model,
        layout=kv_layout(small_model, config),
        num_blocks=4,
        mesh=b"mesh",
        port="a.b:c",
        port_options=b"\0",
        epoch=2**62,
        threads=1,
    )


def test_a_rank_receives_what_the_driver_sent(setup: Setup) -> None:
    ours, theirs = socket.socketpair()
    sent = [setup, Step(PLAN, (1,)), ToPort(b"\0\1"), Close()]
    with ours, theirs:
        ours.sendall(b"".join(frame(message) for message in sent))
        wire = RankWire(theirs)
        assert [wire.receive() for _ in sent] == sent


def test_a_rank_notices_in_receive_and_in_send_that_its_driver_is_gone() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(frame(Step(PLAN, (1,)))[:10])
        ours.close()
        wire = RankWire(theirs)
        with pytest.raises(DriverGone):
            wire.receive()
        with pytest.raises(DriverGone):
            wire.send(Beat())


def test_what_is_neither_a_struct_nor_a_path_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="object"):
        frame(ToPort(object()))  # type: ignore[arg-type]
