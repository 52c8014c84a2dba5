"""More of a trouble is never less of a finding, and more evidence never makes it less sure."""

from __future__ import annotations

from collections.abc import Callable

from healthy import (
    ANSWERS,
    DECODE,
    EXPERTS,
    HEALTHY,
    PREFILL,
    mixture,
    replace,
    watched,
    with_replica,
)
from hypothesis import given
from hypothesis import strategies as st

from ekiden.doctor.evidence import Evidence, SamePrompts, Times
from ekiden.doctor.finding import confidence
from ekiden.doctor.symptoms import SYMPTOMS
from ekiden.measures.experts import Balancedness

RULES = {symptom.requirement: symptom.rule for symptom in SYMPTOMS}
shares = st.floats(0, 1)
two = st.tuples(shares, shares).map(sorted)


def sure(requirement: str, evidence: Evidence, words: str) -> float:
    """How sure the cause is that has ``words``; 0: it is not found."""
    found = [one for one in RULES[requirement](evidence) if words in one.what]
    return max((one.confidence for one in found), default=0.0)


def grows(requirement: str, words: str, spoil: Callable[[float], Evidence]) -> None:
    """The property, over a figure between 0 and 1 that means more of the trouble."""

    @given(two)
    def check(levels: list[float]) -> None:
        less, more = (sure(requirement, spoil(level), words) for level in levels)
        assert less <= more

    check()
    assert sure(requirement, spoil(0.0), words) == 0.0
    assert sure(requirement, spoil(1.0), words) > 0.0


def test_collectives() -> None:
    grows(
        "R43", "collectives",
        lambda level: with_replica(replace(DECODE, tp=4, collective_share=level)),
    )  # fmt: skip


def test_jitter() -> None:
    def spoil(level: float) -> Evidence:
        return watched(tpot=Times(count=200, p50=0.012, p95=0.012 + level, p99=1.1))

    grows("R44", "memory bandwidth", spoil)


def test_uneven_stages() -> None:
    grows(
        "R45", "slowest",
        lambda level: with_replica(replace(DECODE, pp=2, stage_idle=(0.0, level))),
    )  # fmt: skip


def test_bubble() -> None:
    grows(
        "R45", "bubble",
        lambda level: with_replica(replace(DECODE, pp=2, stage_idle=(level, level))),
    )  # fmt: skip


def test_hot_experts() -> None:
    def spoil(level: float) -> Evidence:
        share = 1 / (1 + 2 * level)
        even = Balancedness(p50=share, p95=share, worst=share)
        return mixture(replace(EXPERTS, hottest=5.0, dispatch_share=0.4, balancedness=even))

    grows("R46", "most steps", spoil)


def test_answers_put_back() -> None:
    grows("R47", "KV", lambda level: watched(fallbacks={"preempted": round(200 * level)}))


def test_wire() -> None:
    grows("R48", "wire", lambda level: watched(moved={"shm": 2e11 * level}))


def test_uneven_queue() -> None:
    def spoil(level: float) -> Evidence:
        busy = replace(DECODE, id="d-1", running=6.0, waiting=40.0 * level)
        return with_replica(busy, in_flight=50.0)

    grows("R50", "dealt out", spoil)


def test_requests_in_the_gateway() -> None:
    grows("R51", "gateway", lambda level: with_replica(DECODE, in_flight=200 * level))


def test_small_batch() -> None:
    def spoil(level: float) -> Evidence:
        return with_replica(replace(DECODE, max_num_seqs=4, running=4.0, waiting=20 * level))

    grows("R51", "batch", spoil)


def test_busy_with_collectives() -> None:
    def spoil(level: float) -> Evidence:
        return with_replica(replace(DECODE, stage_idle=(0.0,), waiting=4.0, collective_share=level))

    grows("R52", "communicate", spoil)


def test_queue() -> None:
    def spoil(level: float) -> Evidence:
        return watched(
            ttft=Times(count=200, p50=0.1 + 5 * level, p95=9.0, p99=9.0),
            phases={"queue": 5 * level, "prefill": 0.1},
        )

    grows("R53", "queue for", spoil)


def test_other_answers() -> None:
    def spoil(level: float) -> Evidence:
        same = SamePrompts(asked=100, equal=round(100 - 100 * level), against="-")
        return replace(HEALTHY, same_prompts=same)

    grows("R54", "suit", spoil)


def test_exposed_transfer() -> None:
    grows("R55", "the link", lambda level: watched(phases={**ANSWERS.phases, "transfer": level}))


def test_ratio_of_the_pools() -> None:
    grows("R55", "ratio", lambda level: with_replica(replace(PREFILL, waiting=20 * level)))


@given(
    st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0.1, 5), st.floats(0, 100), st.floats(0, 100)
)
def test_confidence_grows_with_the_distance_and_with_what_was_seen(
    value: float, other: float, threshold: float, seen: float, more: float
) -> None:
    low, high = sorted((value, other))
    few, many = sorted((seen, more))
    found = confidence(low, threshold, few, 20)
    assert 0.25 <= found <= 1
    assert found <= confidence(high, threshold, few, 20)
    assert found <= confidence(low, threshold, many, 20)


def test_confidence_is_what_its_docstring_says() -> None:
    assert confidence(1, 1, 0, 20) == 0.25
    assert confidence(1, 1, 20, 20) == 0.5
    assert confidence(2, 1, 20, 20) == 1.0
    assert confidence(9, 1, 20, 20) == 1.0
