"""One behaviour of the engine at a time, against the naive reference."""

from __future__ import annotations

import msgspec
import pytest
from engine_fakes import (
    EOS,
    MAX_MODEL_LEN,
    Collected,
    kv_values,
    make_engine,
    make_request,
    reference,
)

from ekiden.cache import prefix_index
from ekiden.core.errors import BadRequest, InvariantBroken, ReplicaFailed
from ekiden.core.hashes import granule_hashes
from ekiden.core.types import Delta, FinishReason, Request, TokenLogprobs
from ekiden.engine.engine import Engine, PrefillDone, Ready, RequestFinished, Started
from ekiden.engine.plan import Sampled, StepResult

PROMPT = tuple(range(1, 11))


def tokens_for_hand_off(request: Request) -> list[Delta]:
    return [
        Delta(
            request_id=request.request_id,
            choice=choice,
            tokens=reference(request, choice).tokens[:1],
        )
        for choice in range(request.sampling.n)
    ]


def check(said: Collected, *requests: Request) -> None:
    for request in requests:
        for choice in range(request.sampling.n):
            assert said.answer(request.request_id, choice) == reference(request, choice)


def prompt_ending_in(token: int) -> tuple[int, ...]:
    """A prompt after which ``token`` comes first."""
    for last in range(1000):
        prompt = (last % 50, last // 50, 1)
        if reference(make_request(prompt=prompt, max_tokens=1), 0).tokens == (token,):
            return prompt
    raise AssertionError("no such prompt")


# Local requests


def test_a_request_is_answered_and_accounted_for() -> None:
    engine, _ = make_engine()
    said = Collected(engine)
    request = make_request(prompt=PROMPT, max_tokens=9, logprobs=0)
    engine.add(request)
    said.run()
    check(said, request)
    assert said.logprobs["r", 0] == 9
    assert said.events == [Started("r", 0)]
    assert said.finished["r"] == RequestFinished(
        request_id="r", completion_tokens=9, cached_tokens=0, computed_tokens=10, preemptions=0
    )
    assert engine.books().idle


def test_choices_share_one_prefill_and_the_blocks_of_the_prompt() -> None:
    engine, executor = make_engine()
    said = Collected(engine)
    request = make_request(prompt=PROMPT, max_tokens=5, n=3)
    engine.add(request)
    said.step()
    assert engine.books().held == 3 + 2, "two whole blocks shared, the third once a choice"
    said.run()
    check(said, request)
    assert sum(len(c.tokens) for plan in executor.ran for c in plan.chunks if c.start < 10) == 10
    assert sum(len(plan.copies) for plan in executor.ran) == 2
    answers = {said.answer("r", choice).tokens for choice in range(3)}
    assert len(answers) == 3, "each choice has a seed of its own"


def test_eos_as_the_first_token_ends_the_request_at_once() -> None:
    engine, _ = make_engine()
    said = Collected(engine)
    request = make_request(prompt=prompt_ending_in(EOS[0]), ignore_eos=False)
    engine.add(request)
    said.run()
    assert said.answer("r") == ((EOS[0],), FinishReason.STOP, None)
    assert engine.books().idle


def test_the_second_turn_of_a_chat_finds_prompt_and_answer_of_the_first() -> None:
    engine, _ = make_engine()
    said = Collected(engine)
    first = make_request("one", PROMPT, max_tokens=7)
    engine.add(first)
    said.run()
    turn = PROMPT + reference(first, 0).tokens + (1, 2, 3)
    second = make_request("two", turn, max_tokens=5)
    assert engine.cached_prefix(second) == 16, "the last token's KV was never computed"
    engine.add(second)
    said.run()
    check(said, first, second)
    finished = said.finished["two"]
    assert (finished.cached_tokens, finished.computed_tokens) == (16, 4)


def test_a_prompt_that_is_cached_whole_still_computes_its_last_token() -> None:
    engine, _ = make_engine()
    said = Collected(engine)
    first, again = make_request("one", PROMPT[:8]), make_request("two", PROMPT[:8])
    engine.add(first)
    said.run()
    engine.add(again)
    said.run()
    check(said, first, again)
    assert said.finished["two"].cached_tokens == 4


def test_a_tenant_never_hits_another_tenants_prefix() -> None:
    engine, _ = make_engine()
    said = Collected(engine)
    engine.add(make_request("one", PROMPT, salt="a"))
    said.run()
    for salt in ("b", "", "aa"):
        assert engine.cached_prefix(make_request("two", PROMPT, salt=salt)) == 0
    assert engine.cached_prefix(make_request("two", PROMPT, salt="a")) == 8


def test_output_stays_right_when_block_hashes_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    def truncated(*args: object, **kwargs: object) -> list[bytes]:
        return [digest[:1] for digest in granule_hashes(*args, **kwargs)]

    monkeypatch.setattr(prefix_index, "granule_hashes", truncated)
    engine, _ = make_engine(num_blocks=64)
    said = Collected(engine)
    requests = [
        make_request(f"r{i}", (i, i, i, i, *PROMPT[4:], i % 7), max_tokens=3) for i in range(49)
    ]
    for request in requests:
        engine.add(request)
        said.run()
    check(said, *requests)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_pool_for_one_and_a_half_requests_serves_four(in_flight: int) -> None:
    engine, _ = make_engine(num_blocks=9, max_in_flight=in_flight)
    said = Collected(engine)
    requests = [make_request(f"r{i}", (i, *PROMPT), max_tokens=13) for i in range(4)]
    for request in requests:
        engine.add(request)
    said.run(limit=200)
    check(said, *requests)
    assert said.finished["r0"].preemptions == 0
    assert sum(f.preemptions for f in said.finished.values()) <= 6
    assert engine.books().idle


def test_choices_that_find_no_block_at_the_fork_are_computed_again() -> None:
    engine, _ = make_engine(num_blocks=5)
    said = Collected(engine)
    request = make_request(prompt=PROMPT, max_tokens=6, n=4)
    engine.add(request)
    said.run()
    check(said, request)
    assert said.finished["r"].preemptions > 0


def test_resume_goes_on_after_what_the_client_has_seen() -> None:
    request = make_request(prompt=PROMPT, max_tokens=8, n=3, logprobs=0, presence_penalty=0.5)
    answers = [reference(request, choice).tokens for choice in range(3)]
    engine, executor = make_engine()
    said = Collected(engine)
    engine.add(request, {0: answers[0][:3], 1: answers[1][:8]})
    said.run()
    assert said.answer("r", 0).tokens == answers[0][3:]
    assert said.answer("r", 1) == ((), FinishReason.LENGTH, None)
    assert said.answer("r", 2).tokens == answers[2]
    assert said.logprobs["r", 0] == 5
    specs = [s for plan in executor.ran for c in plan.chunks for s in c.samples if s.choice == 0]
    assert [spec.position for spec in specs] == [3, 4, 5, 6, 7]
    assert specs[0].output == answers[0][:3]
    assert said.finished["r"].completion_tokens == 24


@pytest.mark.parametrize("resume", [{1: (1,)}, {0: (1, 1, 1)}])
def test_resume_of_what_cannot_have_been_is_refused(resume: dict[int, tuple[int, ...]]) -> None:
    engine, _ = make_engine()
    with pytest.raises(BadRequest, match="resume"):
        engine.add(make_request(max_tokens=2), resume)
    assert engine.books().requests == 0


# What can never be served


@pytest.mark.parametrize(
    ("request_", "field", "says"),
    [
        (make_request(prompt=[1] * 60, max_tokens=5), "max_tokens", f"65.*{MAX_MODEL_LEN}"),
        (make_request(prompt=[1] * 64, max_tokens=1), "prompt", f"64 tokens.*{MAX_MODEL_LEN}"),
        (make_request(prompt=[1] * 40, max_tokens=9), "max_tokens", "49 tokens.*48"),
        (make_request(prompt=[]), "prompt", "empty"),
        (make_request(prompt=[50]), "prompt", "0 to 49"),
        (make_request(max_tokens=0), "max_tokens", "at least 1"),
        (make_request(n=9), "n", "1 to 8"),
        (make_request(min_tokens=7), "min_tokens", "0 to max_tokens"),
        (make_request(temperature=float("nan")), "temperature", "0 or more"),
        (make_request(top_p=0.0), "top_p", "more"),
        (make_request(repetition_penalty=0.0), "repetition_penalty", "more"),
        (make_request(frequency_penalty=float("inf")), "frequency_penalty", "finite"),
        (make_request(logit_bias={50: 1.0}), "logit_bias", "0 to 49"),
        (make_request(stop_token_ids=(50,)), "stop_token_ids", "0 to 49"),
        (make_request(stop=("",)), "stop", "empty"),
        (make_request(logprobs=21), "logprobs", "0 to 20"),
    ],
)
@pytest.mark.parametrize("how", ["add", "reserve"])
def test_a_request_that_can_never_be_served_is_refused(
    request_: Request, field: str, says: str, how: str
) -> None:
    engine, _ = make_engine(num_blocks=12)
    with pytest.raises(BadRequest, match=says) as caught:
        getattr(engine, how)(request_)
    assert caught.value.field == field
    assert engine.books().requests == 0


def test_a_request_that_just_fits_is_served() -> None:
    engine, _ = make_engine(num_blocks=16)
    said = Collected(engine)
    request = make_request(prompt=[1] * 60, max_tokens=4)
    engine.add(request)
    said.run()
    check(said, request)


def test_an_id_in_use_is_refused() -> None:
    engine, _ = make_engine()
    engine.add(make_request())
    with pytest.raises(BadRequest, match="in use"):
        engine.add(make_request())


# Cancelling


def test_cancelling_gives_blocks_back_only_after_the_step_that_uses_them() -> None:
    engine, executor = make_engine(num_blocks=4, late=True)
    engine.add(make_request("one", PROMPT))
    plan = engine.next_plan()
    assert plan is not None
    executor.submit(plan)
    assert engine.cancel("one")
    assert engine.books().held == 3
    other = make_request("two", PROMPT[::-1])
    assert engine.reserve(other) is None, "a transfer must not write where a step still writes"
    engine.apply(executor.collect(1.0))
    assert engine.books().free == 4
    assert not engine.take_output().deltas
    assert not engine.cancel("one")


def test_an_id_can_be_used_again_while_its_cancelled_life_is_in_flight() -> None:
    engine, executor = make_engine(late=True)
    said = Collected(engine)
    engine.add(make_request("r", PROMPT[::-1]))
    plan = engine.next_plan()
    assert plan is not None
    executor.submit(plan)
    engine.cancel("r")
    request = make_request("r", PROMPT)
    engine.add(request)
    said.run()
    check(said, request)


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


# Trust and figures


@pytest.mark.parametrize(
    "answer",
    [
        StepResult(99, ()),
        StepResult(1, ()),
        StepResult(1, (Sampled(0, 0, 1),)),
    ],
)
def test_an_executor_that_answers_wrongly_is_not_believed(answer: StepResult) -> None:
    engine, _ = make_engine()
    engine.add(make_request())
    assert engine.next_plan() is not None
    with pytest.raises(InvariantBroken, match="executor"):
        engine.apply(answer)


def test_a_token_outside_the_vocabulary_is_not_believed() -> None:
    engine, _ = make_engine()
    engine.add(make_request())
    plan = engine.next_plan()
    assert plan is not None
    with pytest.raises(InvariantBroken, match="sampled"):
        engine.apply(StepResult(plan.step, (Sampled(plan.chunks[0].sequence, 0, 50),)))


def test_a_leaked_block_is_found_on_idle() -> None:
    engine, _ = make_engine()
    engine.step(1.0)
    engine.pool.allocate(1)
    with pytest.raises(InvariantBroken, match="owners"):
        engine.step(1.0)


def test_stats_tell_the_load_and_the_measured_speed() -> None:
    engine, executor = make_engine(budget=8)
    clock = engine._clock
    for i in range(2):
        engine.add(make_request(f"r{i}", (i, *PROMPT[1:]), max_tokens=3))
    before = engine.stats()
    assert (before.running, before.waiting, before.waiting_tokens) == (0, 2, 20)
    plan = engine.next_plan()
    assert plan is not None
    executor.submit(plan)
    clock.advance(0.5)
    engine.apply(executor.collect(1.0))
    during = engine.stats()
    assert (during.running, during.waiting, during.waiting_tokens) == (1, 1, 12)
    assert during.prefill_tokens_per_s == 16.0
    assert during.kv_blocks_held == 3
    while engine.has_work():
        plan = engine.next_plan()
        assert plan is not None
        executor.submit(plan)
        clock.advance(0.1)
        engine.apply(executor.collect(1.0))
        engine.take_output()
    after = engine.stats()
    assert after.step_s == pytest.approx(0.1)
    assert after.ttft_s > 0.5
    assert after.tpot_s == pytest.approx(0.1)


# What a service may ask


def test_a_request_that_would_be_refused_is_refused_by_check_alone() -> None:
    engine, _ = make_engine()
    engine.check(make_request(prompt=PROMPT, max_tokens=4))
    with pytest.raises(BadRequest) as caught:
        engine.check(make_request(prompt=(1,) * MAX_MODEL_LEN, max_tokens=4))
    assert caught.value.field == "prompt"
    assert engine.books().requests == 0


def test_cached_blocks_are_held_while_they_are_read_and_only_for_their_tenant() -> None:
    engine, executor = make_engine()
    said = Collected(engine)
    request = make_request(prompt=PROMPT, max_tokens=1, salt="a")
    engine.add(request)
    said.run()
    whole = len(PROMPT) // engine.config.block_size * engine.config.block_size
    held = engine.hold_cached(PROMPT, "a")
    assert held.held_tokens == whole > 0
    assert executor.read(held.blocks, whole) == kv_values(PROMPT)[:whole]
    assert engine.books().held == len(held.blocks)
    engine.audit()
    engine.writer_done(held.key)
    assert engine.books().held == 0
    assert engine.hold_cached(PROMPT, "b").blocks == ()
