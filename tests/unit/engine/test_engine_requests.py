"""Requests that the engine serves from prompt to end, against the naive reference."""

from __future__ import annotations

import pytest
from engine_fakes import (
    EOS,
    MAX_MODEL_LEN,
    PROMPT,
    Collected,
    check,
    kv_values,
    make_engine,
    make_request,
    prompt_ending_in,
    reference,
)

from ekiden.cache import prefix_index
from ekiden.core.errors import BadRequest, InvariantBroken
from ekiden.core.hashes import granule_hashes
from ekiden.core.types import FinishReason, Request
from ekiden.engine.engine import RequestFinished, Started
from ekiden.engine.history import TokenCounts
from ekiden.engine.plan import Sampled, StepResult

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
    seen = TokenCounts((), answers[0][:3]).snapshot()
    assert (specs[0].seen, specs[0].seen_counts) == seen
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


def test_speculation_says_that_it_turns_planning_ahead_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO"):
        make_engine(ahead=True)
        make_engine(ahead=False, speculate=2)
        assert not caplog.records
        engine, _ = make_engine(ahead=True, speculate=2)
    assert "--speculative-config" in caplog.text
    engine.add(make_request())
    assert engine.next_plan() is not None
    assert engine.next_plan() is None
