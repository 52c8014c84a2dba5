"""Two results of a bench beside one another: TP, replicas, a split."""

from __future__ import annotations

import pytest
from cases import causes
from healthy import ANSWERS, DECODE, LEVEL, replace, spoilt

from ekiden.doctor.evidence import Load, Situation, Times


def level(name: str, value: float, *, tp: int = 1, decode: int = 1, **answers: object) -> Situation:
    replicas = tuple(replace(DECODE, id=f"{name}-{n}", tp=tp, wires=()) for n in range(decode))
    return replace(
        LEVEL,
        name=name,
        load=Load(kind="concurrency", value=value),
        replicas=replicas,
        in_flight=None,
        answers=replace(ANSWERS, shares={}, **answers),
    )


SLOW = Times(count=200, p50=0.03, p95=0.04, p99=0.05)


def test_two_runs_tell_that_more_tp_is_slower() -> None:
    evidence = spoilt(level("tp4", 8, tp=4, tpot=SLOW), level("tp1", 8))
    (found,) = causes(evidence, "R43")
    assert found.what.startswith("TP4 is slower than TP1")
    assert "TPOT 12.0 ms -> 30.0 ms" in found.seen


def test_runs_of_another_load_or_other_lengths_are_not_compared() -> None:
    other_load = spoilt(level("tp4", 16, tp=4, tpot=SLOW), level("tp1", 8))
    longer = spoilt(level("tp4", 8, tp=4, tpot=SLOW, prompt_tokens=9000.0), level("tp1", 8))
    assert causes(other_load, "R43") == causes(longer, "R43") == ()


def test_more_tp_that_buys_something_is_no_trouble() -> None:
    faster = Times(count=200, p50=0.06, p95=0.1, p99=0.12)
    evidence = spoilt(level("tp4", 8, tp=4, tpot=SLOW, ttft=faster), level("tp1", 8))
    assert causes(evidence, "R43") == ()


def test_replicas_that_add_too_little_are_seen_in_two_runs() -> None:
    evidence = spoilt(level("four", 32, decode=4, tokens_per_s=700.0), level("one", 8))
    (found,) = causes(evidence, "R48")
    assert "4 decode replicas in place of 1 give 1.75 times" in found.seen
    assert "share what one machine has" in found.what
    scaled = spoilt(level("four", 32, decode=4, tokens_per_s=1500.0), level("one", 8))
    assert causes(scaled, "R48") == ()


@pytest.mark.parametrize(
    ("hosts", "words"), [(("a", "b"), ["link"]), (("a", "a"), ["one machine"]),
                         (("", ""), ["one machine", "link"])]
)  # fmt: skip
def test_where_the_replicas_run_tells_what_they_share(
    hosts: tuple[str, str], words: list[str]
) -> None:
    many = level("four", 32, decode=4, tokens_per_s=700.0)
    told = [replace(one, host=hosts[n % 2]) for n, one in enumerate(many.replicas)]
    few = level("one", 8)
    few = replace(few, replicas=tuple(replace(one, host=hosts[0]) for one in few.replicas))
    found = causes(spoilt(replace(many, replicas=tuple(told)), few), "R48")
    assert len(found) == len(words)
    assert all(word in one.what for word, one in zip(words, found, strict=True))


def test_replicas_that_are_asked_for_less_each_are_not_compared() -> None:
    evidence = spoilt(level("four", 8, decode=4, tokens_per_s=500.0), level("one", 8))
    assert causes(evidence, "R48") == ()


def test_a_rate_or_the_same_replicas_tell_nothing_of_scaling() -> None:
    def at_rate(found: Situation) -> Situation:
        return replace(found, load=replace(found.load, kind="rate"))

    many, one = level("four", 32, decode=4, tokens_per_s=500.0), level("one", 8)
    assert causes(spoilt(many, one), "R48")
    assert causes(spoilt(at_rate(many), at_rate(one)), "R48") == ()
    assert causes(spoilt(level("again", 8, tokens_per_s=200.0), one), "R48") == ()


def test_an_aggregated_run_that_is_faster_says_do_not_split() -> None:
    whole = level("whole", 8, moved={})
    apart = level("apart", 8, tpot=SLOW)
    found = causes(spoilt(whole, apart), "R55")
    assert "does not pay" in found[0].what
    assert causes(spoilt(whole, level("apart", 8)), "R55") == ()
    assert causes(spoilt(replace(whole, answers=ANSWERS), apart), "R55") == ()


def test_one_cause_in_many_levels_is_told_once_where_it_shows_best() -> None:
    levels = [
        replace(level(f"l{n}", n), answers=replace(ANSWERS, phases={"queue": n, "prefill": 0.1}))
        for n in (1, 3, 2)
    ]
    (found,) = causes(spoilt(*levels), "R53")
    assert found.confidence == max(
        causes(spoilt(one), "R53")[0].confidence for one in levels
    )  # fmt: skip
