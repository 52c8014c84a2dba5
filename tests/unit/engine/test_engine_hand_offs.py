"""Both halves of a hand-off: prefill for another replica, decode of another's prefill."""

from __future__ import annotations

import msgspec
import pytest
from engine_fakes import (
    EOS,
    PROMPT,
    Collected,
    check,
    kv_values,
    make_engine,
    make_request,
    prompt_ending_in,
    reference,
)

from ekiden.core.errors import BadRequest, ReplicaFailed
from ekiden.core.types import Delta, FinishReason, Request, TokenLogprobs
from ekiden.engine.engine import Engine, PrefillDone, Ready, Started


def tokens_for_hand_off(request: Request) -> list[Delta]:
    return [
        Delta(
            request_id=request.request_id,
            choice=choice,
            tokens=reference(request, choice).tokens[:1],
        )
        for choice in range(request.sampling.n)
    ]


# Prefill for another replica


def test_a_hand_off_computes_the_prompt_and_keeps_its_blocks_until_let_go() -> None:
    engine, executor = make_engine(budget=8)
    said = Collected(engine)
    request = make_request(prompt=PROMPT, max_tokens=6, n=2)
    engine.add_handoff(request)
    assert not engine.has_work()
    said.step()
    assert said.events == [Ready("r")]
    engine.open_session("r", 77)
    said.run()
    assert said.events == [Ready("r"), Started("r", 0), PrefillDone("r", 0, 10)]
    for choice in range(2):
        assert said.tokens["r", choice] == list(reference(request, choice).tokens[:1])
    assert [c.session for plan in executor.ran for c in plan.chunks] == [77, 77]
    assert executor.reported[77].end == 10
    assert engine.books().held == 3
    engine.let_go("r")
    assert engine.books().idle
    engine.let_go("r")


def test_the_first_chunk_of_a_hand_off_covers_what_was_cached() -> None:
    engine, executor = make_engine()
    said = Collected(engine)
    engine.add(make_request("first", PROMPT[:8], max_tokens=1))
    said.run()
    engine.add_handoff(make_request("r", PROMPT))
    said.step()
    engine.open_session("r", 1)
    said.run()
    assert PrefillDone("r", 8, 2) in said.events
    report = executor.reported[1]
    assert executor.read(report.blocks, report.end) == kv_values(PROMPT)


def test_hand_off_blocks_are_kept_when_it_is_cancelled_while_its_transfer_reads() -> None:
    engine, executor = make_engine(num_blocks=3, budget=4)
    said = Collected(engine)
    engine.add_handoff(make_request("r", PROMPT))
    said.step()
    engine.open_session("r", 1)
    said.step()
    assert engine.cancel("r")
    other = make_request("other", PROMPT[::-1], max_tokens=2)
    engine.add(other)
    for _ in range(3):
        said.step()
    report = executor.reported[1]
    assert executor.read(report.blocks, report.end) == kv_values(PROMPT)[:4]
    assert not any(isinstance(event, PrefillDone) for event in said.events)
    engine.let_go("r")
    said.run()
    check(said, other)


def test_two_prompts_in_a_pool_for_little_more_than_one_are_prefilled_in_turn() -> None:
    engine, executor = make_engine(num_blocks=4)
    said = Collected(engine)
    requests = [make_request(f"r{i}", (i, *PROMPT[1:]), max_tokens=2) for i in range(2)]
    for request in requests:
        engine.add_handoff(request)
    said.step()
    assert said.events == [Ready("r0")]
    engine.open_session("r0", 1)
    for _ in range(4):
        said.step()
    assert Ready("r1") not in said.events, "the first prompt's blocks are still being sent"
    assert executor.read(executor.reported[1].blocks, 10) == kv_values(requests[0].prompt)
    engine.let_go("r0")
    said.step()
    engine.open_session("r1", 2)
    said.run()
    assert executor.read(executor.reported[2].blocks, 10) == kv_values(requests[1].prompt)
    engine.let_go("r1")
    assert engine.books().idle


def test_a_hand_off_cancelled_before_its_session_is_gone_at_once() -> None:
    engine, _ = make_engine()
    engine.add_handoff(make_request())
    engine.step(1.0)
    engine.cancel("r")
    engine.open_session("r", 1)
    assert engine.next_plan() is None
    assert engine.books().idle


# Decode of another replica's prefill


def reserved(engine: Engine, request: Request) -> tuple[int, tuple[int, ...], int]:
    reservation = engine.reserve(request)
    assert reservation is not None
    return reservation.key, reservation.blocks, reservation.held_tokens


@pytest.mark.parametrize("order", ["hand_off adopt done", "adopt hand_off done", "done last"])
def test_an_adopted_request_goes_on_from_the_hand_off_token(order: str) -> None:
    engine, executor = make_engine()
    said = Collected(engine)
    request = make_request(prompt=PROMPT, max_tokens=6, n=2)
    key, blocks, held = reserved(engine, request)
    assert held == 0
    acts = {
        "hand_off": lambda: engine.hand_off("r", tokens_for_hand_off(request)),
        "adopt": lambda: (executor.write(blocks, 0, kv_values(PROMPT)), engine.adopt("r")),
        "done": lambda: engine.writer_done(key),
    }
    for act in ("hand_off adopt last" if order == "done last" else order).split():
        acts.get(act, said.run)()
        said.take()
    engine.writer_done(key)
    said.run()
    check(said, request)
    assert said.finished["r"].computed_tokens == 0
    assert said.events == [], "nothing was prefilled here"
    assert all(c.start >= 10 for plan in executor.ran for c in plan.chunks)
    assert engine.cached_prefix(make_request("next", PROMPT)) == 8
    assert engine.books().idle


def test_the_hand_off_token_is_told_before_its_kv_has_arrived() -> None:
    engine, _ = make_engine()
    request = make_request(prompt=PROMPT)
    reserved(engine, request)
    engine.hand_off("r", tokens_for_hand_off(request))
    (delta,) = engine.take_output().deltas
    assert delta.tokens == reference(request, 0).tokens[:1]
    assert engine.next_plan() is None, "nothing is decoded without the prompt's KV"


def test_a_request_whose_kv_is_on_its_way_is_told_until_it_runs() -> None:
    engine, executor = make_engine()
    request = make_request(prompt=PROMPT)
    key, blocks, _ = reserved(engine, request)
    engine.hand_off("r", tokens_for_hand_off(request))
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.receiving) == (0, 0, 1)
    executor.write(blocks, 0, kv_values(PROMPT))
    engine.adopt("r")
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.receiving) == (1, 0, 0)
    engine.writer_done(key)


def test_eos_as_the_hand_off_token_ends_the_choice_and_decode_does_not_go_on() -> None:
    engine, executor = make_engine()
    said = Collected(engine)
    request = make_request(prompt=prompt_ending_in(EOS[1]), ignore_eos=False, max_tokens=9)
    key, blocks, _ = reserved(engine, request)
    engine.hand_off("r", tokens_for_hand_off(request))
    said.take()
    assert said.answer("r") == ((EOS[1],), FinishReason.STOP, None)
    assert said.finished["r"].completion_tokens == 1
    assert engine.books().held == len(blocks), "the writer has not let go"
    engine.adopt("r")
    said.run()
    assert executor.ran == []
    engine.writer_done(key)
    assert engine.books().idle


def test_a_choice_that_ended_at_the_hand_off_does_not_join() -> None:
    engine, executor = make_engine()
    said = Collected(engine)
    stop = reference(make_request(prompt=PROMPT, n=3), 1).tokens[0]
    request = make_request(prompt=PROMPT, n=3, stop_token_ids=(stop,))
    key, blocks, _ = reserved(engine, request)
    engine.hand_off("r", tokens_for_hand_off(request))
    executor.write(blocks, 0, kv_values(PROMPT))
    engine.adopt("r")
    engine.writer_done(key)
    said.run()
    check(said, request)
    assert said.answer("r", 1) == ((stop,), FinishReason.STOP, stop)
    assert not any(
        spec.choice == 1 for plan in executor.ran for c in plan.chunks for spec in c.samples
    )


def test_what_decode_has_already_is_not_to_be_written_again() -> None:
    engine, executor = make_engine()
    said = Collected(engine)
    engine.add(make_request("first", PROMPT, max_tokens=1))
    said.run()
    request = make_request("r", PROMPT)
    key, blocks, held = reserved(engine, request)
    assert held == engine.cached_prefix(request) == 8
    executor.write(blocks, held, kv_values(PROMPT)[held:])
    engine.hand_off("r", tokens_for_hand_off(request))
    engine.adopt("r")
    engine.writer_done(key)
    said.run()
    check(said, request)
    assert said.finished["r"].cached_tokens == 8


@pytest.mark.parametrize("end", ["recompute", "cancel", "unreserve"])
def test_a_late_writer_cannot_touch_anybody_else_whatever_became_of_its_request(end: str) -> None:
    engine, executor = make_engine(num_blocks=9)
    said = Collected(engine)
    request = make_request(prompt=PROMPT, max_tokens=5)
    key, blocks, _ = reserved(engine, request)
    if end == "recompute":
        engine.hand_off("r", tokens_for_hand_off(request))
    getattr(engine, end)("r")
    other = make_request("other", PROMPT[::-1], max_tokens=5)
    engine.add(other)
    while engine.has_work():
        executor.write(blocks, 0, [666] * len(PROMPT))
        said.step()
    assert engine.books().held == 3
    engine.writer_done(key)
    check(said, other)
    if end == "recompute":
        check(said, request)
        assert said.finished["r"].computed_tokens == 10
    assert engine.books().idle


def test_a_second_reservation_leaves_the_first_writers_blocks_alone() -> None:
    engine, executor = make_engine()
    said = Collected(engine)
    request = make_request(prompt=PROMPT)
    first, lost, _ = reserved(engine, request)
    second, blocks, _ = reserved(engine, request)
    assert not set(lost) & set(blocks)
    engine.writer_done(second)
    assert engine.books().held == 6, "the first writer and the request still hold theirs"
    executor.write(blocks, 0, kv_values(PROMPT))
    executor.write(lost, 0, [666] * len(PROMPT))
    engine.hand_off("r", tokens_for_hand_off(request))
    engine.adopt("r")
    said.run()
    check(said, request)
    engine.writer_done(first)
    engine.writer_done(first)
    assert engine.books().idle


def test_a_reservation_whose_tokens_the_client_has_seen_cannot_be_given_up() -> None:
    engine, _ = make_engine()
    said = Collected(engine)
    request = make_request(prompt=PROMPT)
    key, _, _ = reserved(engine, request)
    engine.hand_off("r", tokens_for_hand_off(request))
    engine.unreserve("r")
    for how in (engine.add, engine.reserve):
        with pytest.raises(BadRequest, match="in use"):
            how(request)
    engine.recompute("r")
    engine.writer_done(key)
    said.run()
    check(said, request)


def test_add_after_a_failed_reservation_prefills_here() -> None:
    engine, _ = make_engine()
    said = Collected(engine)
    request = make_request(prompt=PROMPT)
    key, _, _ = reserved(engine, request)
    engine.add(request)
    said.run()
    check(said, request)
    engine.writer_done(key)
    assert engine.books().idle


@pytest.mark.parametrize(
    "spoil",
    [
        lambda deltas: deltas[:1],
        lambda deltas: [*deltas, deltas[0]],
        lambda deltas: [msgspec.structs.replace(d, tokens=()) for d in deltas],
        lambda deltas: [msgspec.structs.replace(d, tokens=(50,)) for d in deltas],
        lambda deltas: [msgspec.structs.replace(d, logprobs=()) for d in deltas],
    ],
)
def test_hand_off_tokens_that_cannot_be_are_refused_and_not_told(spoil: object) -> None:
    engine, _ = make_engine()
    request = make_request(prompt=PROMPT, n=2, logprobs=0)
    reserved(engine, request)
    good = [
        msgspec.structs.replace(d, logprobs=(TokenLogprobs(d.tokens[0], -1.0),))
        for d in tokens_for_hand_off(request)
    ]
    with pytest.raises(ReplicaFailed, match="prefill sent"):
        engine.hand_off("r", spoil(good))
    assert not engine.take_output()
    engine.hand_off("r", good)
    with pytest.raises(ReplicaFailed, match="once"):
        engine.hand_off("r", good)


def test_calls_about_requests_that_are_gone_have_no_effect() -> None:
    engine, _ = make_engine()
    engine.hand_off("gone", [])
    engine.adopt("gone")
    engine.recompute("gone")
    engine.unreserve("gone")
    engine.let_go("gone")
    engine.open_session("gone", 1)
    engine.writer_done(5)
    assert not engine.cancel("gone")
    assert engine.books().idle
