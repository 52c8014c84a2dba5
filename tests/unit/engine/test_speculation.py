"""Speculation changes how many steps an answer takes, and nothing else.

Under an odd seed the fake model goes round and round, so that proposals are often right.
"""

from __future__ import annotations

import msgspec
import pytest
from engine_fakes import (
    MAX_MODEL_LEN,
    PROMPT,
    Collected,
    FakeExecutor,
    check,
    kv_values,
    make_engine,
    make_request,
    reference,
)

from ekiden.core.errors import InvariantBroken
from ekiden.core.types import Delta, FinishReason, Request
from ekiden.engine.engine import Engine, Ready
from ekiden.engine.plan import Chunk, StepResult


def drafts(executor: FakeExecutor) -> list[Chunk]:
    return [c for plan in executor.ran for c in plan.chunks if c.proposed]


def run(*requests: Request, **fields: object) -> tuple[Collected, Engine, FakeExecutor]:
    """Serve them all and compare every token with the reference."""
    engine, executor = make_engine(**({"num_blocks": 64, "budget": 64} | fields))
    said = Collected(engine)
    for request in requests:
        engine.add(request)
    said.run(limit=400)
    check(said, *requests)
    assert engine.books().idle
    return said, engine, executor


@pytest.mark.parametrize("in_flight", [1, 2])
def test_the_output_is_the_same_in_fewer_steps(in_flight: int) -> None:
    requests = [
        make_request(f"r{i}", (i, *PROMPT), seed=1 + 2 * i, max_tokens=40) for i in range(3)
    ]
    _, engine, executor = run(*requests, speculate=4, max_in_flight=in_flight)
    _, _, plain = run(*requests, max_in_flight=in_flight)
    assert len(executor.ran) < len(plain.ran) / 2
    stats = engine.stats()
    assert 0 < stats.spec_accepted_tokens < stats.spec_proposed_tokens
    assert stats.spec_proposed_tokens == sum(chunk.proposed for chunk in drafts(executor))
    # Each step of a request gives one token, and those that were proposed rightly on top.
    steps = sum(len(plan.chunks) for plan in executor.ran)
    assert steps + stats.spec_accepted_tokens == 3 * 40


def test_off_by_default_nothing_is_proposed() -> None:
    _, engine, executor = run(make_request(seed=1, max_tokens=40))
    assert not drafts(executor)
    assert engine.stats().spec_proposed_tokens == 0


def test_every_choice_speculates_on_its_own_output() -> None:
    request = make_request(prompt=PROMPT, n=3, seed=1, max_tokens=40, logprobs=0)
    said, _, executor = run(request, speculate=4)
    assert {spec.choice for c in drafts(executor) for spec in c.samples} >= {0, 1}
    assert [said.logprobs["r", choice] for choice in range(3)] == [40, 40, 40]


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_token_ids": (2,), "min_tokens": 17},
        {"stop": ("cdb",), "min_tokens": 16},
        {"stop": ("cdbcdb",)},
    ],
)
def test_an_end_inside_a_draft_is_the_end(fields: dict[str, object]) -> None:
    """By a stop id or a stop string; what was sampled after it is never told."""
    inside = 0
    for seed in range(1, 41, 2):
        request = make_request(seed=seed, **({"max_tokens": 50} | fields))
        _, _, executor = run(request, speculate=5)
        positions = [spec.position for spec in executor.ran[-1].chunks[-1].samples]
        inside += positions[0] < len(reference(request, 0).tokens) - 1 < positions[-1]
    assert inside


def test_no_position_is_computed_that_no_token_can_be_sampled_for() -> None:
    for max_tokens in range(1, 12):
        request = make_request(seed=1, prompt=(1, 2, 3) * 3, max_tokens=max_tokens)
        _, _, executor = run(request, speculate=9)
        ends = [c.start + len(c.tokens) for plan in executor.ran for c in plan.chunks]
        assert max(ends) <= 9 + max_tokens - 1


def test_the_models_length_ends_a_draft() -> None:
    request = make_request(seed=1, prompt=(1, 2, 3) * 17, max_tokens=MAX_MODEL_LEN - 51)
    _, _, executor = run(request, speculate=9)
    assert drafts(executor)
    assert max(c.start + len(c.tokens) for c in drafts(executor)) <= MAX_MODEL_LEN - 1


@pytest.mark.parametrize("speculate", [0, 1, 4, 9])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_pool_for_one_and_a_half_requests_serves_four(in_flight: int, speculate: int) -> None:
    requests = [
        make_request(f"r{i}", (i, *PROMPT), seed=2 * i + 1, max_tokens=13) for i in range(4)
    ]
    said, _, executor = run(
        *requests, num_blocks=9, budget=16, max_in_flight=in_flight, speculate=speculate
    )
    assert bool(drafts(executor)) == bool(speculate)
    finished = [said.finished[f"r{i}"] for i in range(4)]
    assert finished[0].preemptions == 0
    assert sum(f.preemptions for f in finished) <= 6


@pytest.mark.parametrize("speculate", [0, 1, 4, 9])
def test_a_pool_for_exactly_one_request_serves_eight(speculate: int) -> None:
    """Proposals ask for no block that is not free, so nobody waits for another's."""
    requests = [
        make_request(f"r{i}", (i, 1, 2, 3), seed=2 * i + 1, max_tokens=20) for i in range(8)
    ]
    run(*requests, num_blocks=6, speculate=speculate)


def test_proposals_take_the_tokens_of_a_step_that_are_left() -> None:
    engine, executor = make_engine(num_blocks=64, budget=8, seqs=8, speculate=9)
    said = Collected(engine)
    rounds = [make_request(f"r{i}", (1, 2, 3, 1, 2, 3, i), seed=1, max_tokens=30) for i in range(3)]
    for request in rounds:
        engine.add(request)
    while len(said.tokens) < 3:
        said.step()
    long = make_request("long", range(40), max_tokens=2)
    engine.add(long)
    said.run()
    check(said, *rounds, long)
    assert drafts(executor)
    for plan in executor.ran:
        assert sum(len(chunk.tokens) for chunk in plan.chunks) <= 8
        waits = any(len(c.tokens) > 1 and not c.samples for c in plan.chunks)
        assert not (waits and any(c.proposed for c in plan.chunks)), "a prompt had to wait"


@pytest.mark.parametrize("speculate", [0, 5])
def test_what_is_cached_of_an_answer_is_its_kv_and_as_much_as_without(speculate: int) -> None:
    request = make_request(seed=5, prompt=PROMPT, max_tokens=33)
    _, engine, executor = run(request, speculate=speculate)
    tokens = (*PROMPT, *reference(request, 0).tokens)
    held = engine.hold_cached(tokens, "")
    assert held.held_tokens == 40
    assert executor.read(held.blocks, 40) == kv_values(tokens)[:40]
    engine.writer_done(held.key)


def hand_over(prefill: int, decode: int, request: Request) -> tuple[Collected, FakeExecutor]:
    """Prefill on one engine, decode on another; each may speculate or not."""
    there, sender = make_engine(speculate=prefill)
    here, receiver = make_engine(num_blocks=64, speculate=decode)
    first, said = Collected(there), Collected(here)
    reservation = here.reserve(request)
    assert reservation is not None
    there.add_handoff(request)
    first.step()
    assert first.events == [Ready("r")]
    there.open_session("r", 1)
    first.run()
    assert not drafts(sender), "a hand-off sends no guesses"
    report = sender.reported[1]
    assert report.end == len(request.prompt)
    receiver.write(reservation.blocks, 0, sender.read(report.blocks, report.end))
    deltas = [
        Delta(request_id="r", choice=choice, tokens=tuple(tokens))
        for (_, choice), tokens in first.tokens.items()
    ]
    here.hand_off("r", deltas)
    here.adopt("r")
    here.writer_done(reservation.key)
    said.take()
    said.run()
    assert here.books().idle
    return said, receiver


@pytest.mark.parametrize("prefill", [0, 4])
@pytest.mark.parametrize("decode", [0, 4])
def test_prefill_and_decode_need_not_agree_on_it(prefill: int, decode: int) -> None:
    request = make_request(prompt=PROMPT, seed=3, n=2, max_tokens=40, presence_penalty=0.5)
    said, receiver = hand_over(prefill, decode, request)
    check(said, request)
    assert bool(drafts(receiver)) == bool(decode)


def test_each_position_is_sampled_as_if_the_tokens_before_it_had_come() -> None:
    request = make_request(
        prompt=(1, 2, 3, 1, 2), seed=1, max_tokens=30, min_tokens=30, stop_token_ids=(44,)
    )
    penalised = make_request(
        "p", (1, 2, 3, 1, 2), seed=1, max_tokens=30, repetition_penalty=1.1, frequency_penalty=0.5
    )
    _, _, executor = run(request, penalised, speculate=4)
    _, _, plain = run(request, penalised)
    for name in ("r", "p"):
        assert (name, True) in {
            (r, bool(c.proposed)) for r, plans in by_request(executor).items() for c in plans
        }
    expected = {
        (len(spec.seen) > 0, spec.position): spec
        for plan in plain.ran
        for chunk in plan.chunks
        for spec in chunk.samples
    }
    told = 0
    for chunk in drafts(executor):
        tokens = chunk.tokens[-chunk.proposed :]
        answer = reference(request, 0).tokens
        for i, spec in enumerate(chunk.samples):
            before = answer[chunk.samples[0].position : spec.position]
            if before == tokens[:i]:
                told += 1
                assert canonical(spec) == canonical(expected[len(spec.seen) > 0, spec.position])
    assert told > 20


def by_request(executor: FakeExecutor) -> dict[str, list[Chunk]]:
    """Chunks that were penalised, and those that were not."""
    found: dict[str, list[Chunk]] = {"r": [], "p": []}
    for plan in executor.ran:
        for chunk in plan.chunks:
            if chunk.samples:
                found["p" if chunk.samples[0].seen else "r"].append(chunk)
    return found


def canonical(spec: object) -> object:
    """With the penalised tokens in order: the same tokens may be listed in another one."""
    ids = [spec.seen[i : i + 4] for i in range(0, len(spec.seen), 4)]
    counts = [spec.seen_counts[i : i + 4] for i in range(0, len(spec.seen), 4)]
    pairs = sorted(zip(ids, counts, strict=True))
    return msgspec.structs.replace(spec, seen=repr(pairs).encode(), seen_counts=b"")


def test_an_answer_that_lacks_a_position_of_the_draft_is_not_believed() -> None:
    engine, executor = make_engine(speculate=4)
    said = Collected(engine)
    engine.add(make_request(prompt=(1, 2, 3, 1, 2), seed=1, max_tokens=30))
    while not drafts(executor):
        said.step()
    plan = engine.next_plan()
    assert plan is not None
    assert plan.chunks[0].proposed == 4
    sampled = executor._run(plan).sampled
    with pytest.raises(InvariantBroken, match="expected 5 tokens"):
        engine.apply(StepResult(plan.step, sampled[:-1]))


def test_a_request_cancelled_while_its_draft_is_checked_gives_all_blocks_back() -> None:
    engine, executor = make_engine(speculate=9, late=True)
    said = Collected(engine)
    engine.add(make_request(prompt=(1, 2, 3, 1, 2), seed=1, max_tokens=40))
    while not drafts(executor):
        said.step()
    plan = engine.next_plan()
    assert plan is not None
    assert plan.chunks[0].proposed
    executor.submit(plan)
    engine.cancel("r")
    assert engine.books().held > 0
    said.run()
    assert engine.books().idle
    assert ("r", 0) not in said.ends
    assert FinishReason.STOP not in said.ends.values()
