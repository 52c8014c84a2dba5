"""Server-sent events: the same however they are cut; what is none is said to be none."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import DONE, GOOD, event, text

from ekiden.bench import events
from ekiden.bench.events import ErrorEvent, Event, EventLines, Malformed
from ekiden.bench.reading import Reading


def read(*pieces: bytes, step_s: float = 1.0) -> Reading:
    reading = Reading()
    for number, piece in enumerate(pieces):
        reading.take(number * step_s, piece)
    return reading


@given(
    cuts=st.lists(st.integers(0, len(GOOD)), max_size=20), ends=st.sampled_from([b"\n", b"\r\n"])
)
def test_a_stream_reads_the_same_however_it_is_cut(cuts: list[int], ends: bytes):
    stream = GOOD.replace(b"\n", ends)
    at = [0, *sorted(cuts), len(stream)]
    lines = EventLines()
    found = [d for a, b in itertools.pairwise(at) for d in lines.feed(stream[a:b])]
    whole = [part.removeprefix(b"data: ") for part in GOOD.split(b"\n\n") if part]
    assert found == whole


def test_comments_names_and_ids_of_events_are_passed_over():
    stream = b": hello\nevent: x\nid: 3\n" + GOOD
    assert list(EventLines().feed(stream)) == list(EventLines().feed(GOOD))


def test_data_of_several_lines_is_one_event():
    assert list(EventLines().feed(b"data: a\ndata:b\n\n")) == [b"a\nb"]


def test_moments_are_those_of_the_pieces_and_gaps_lie_between_events_with_text():
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    reading = read(role, text(" a"), event({"choices": [], "usage": None}), text(" b"), DONE)
    assert (reading.first, reading.last, list(reading.gaps)) == (1.0, 3.0, [2.0])
    assert (reading.events, reading.done) == (2, True)


def test_events_of_one_piece_have_its_moment():
    reading = read(text("a"), text("b") + text("c"))
    assert list(reading.gaps) == [1.0, 0.0]


@pytest.mark.parametrize(
    "delta", [{"content": "x"}, {"reasoning_content": "x"}, {"reasoning": "x"}]
)
def test_an_answer_and_its_reasoning_are_both_text(delta: dict[str, str]):
    assert Event.of(json.dumps({"choices": [{"delta": delta}]}).encode()).has_text


def test_only_an_end_that_was_told_finishes():
    assert not read(text("a")).finished
    assert read(text("a", "stop")).finished
    assert read(text("a"), DONE).finished


@pytest.mark.parametrize("data", [b"data: {\n\n", b"data: []\n\n", b'data: {"choices": 3}\n\n'])
def test_data_that_is_no_chunk_is_malformed(data: bytes):
    with pytest.raises(Malformed, match="no chunk"):
        read(data)


def test_a_line_that_is_none_of_an_event_is_malformed():
    with pytest.raises(Malformed, match="none of an event"):
        read(b"<html>\n")


@pytest.mark.parametrize("piece", [b"x" * 100, b"data: " + b"x" * 93 + b"\n"])
def test_an_event_without_end_is_given_up(piece: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(events, "MAX_EVENT", 1000)
    lines = EventLines()
    for _ in range(10):
        list(lines.feed(piece))
    with pytest.raises(Malformed, match="more than 1000"):
        list(lines.feed(piece))


@pytest.mark.parametrize("error", [{"message": "out of blocks"}, "out of blocks"])
def test_an_error_event_says_what_the_server_said(error: object):
    with pytest.raises(ErrorEvent, match=r"^out of blocks$"):
        read(text("a"), event({"error": error}))


def test_an_account_of_another_shape_is_none_of_ours():
    for ours in (None, 3, {"sources": 3}, {"times": {"queue_s": "x"}}):
        assert events.Usage(ekiden=ours).account() is None
    account = events.Usage(
        ekiden={
            "sources": {"decode_cache": 4, "reason": "found"},
            "times": {"queue_s": 0.5},
            "transfer": {"bytes": 9, "wire": "shm", "seconds": 1.0},
            "fallbacks": [{"kind": "local", "reason": "short"}],
            "decode_replica": "d",
        }
    ).account()
    assert account is not None
    assert account.sources == {"decode_cache": 4}
    assert (account.wire, account.moved_bytes, account.fallbacks) == ("shm", 9, ("local",))
