"""Bounds follow what was measured between splits of one process, and are never below a floor."""

from collections.abc import Sequence

import pytest

from ekiden.core.errors import SetupError
from ekiden.verify.bounds import FLOORS, MARGIN, Bounds
from ekiden.verify.compare import TIE, Reference
from ekiden.verify.layouts import Layout


def answer(off: float, tokens: Sequence[int] = (5, 6)) -> Reference:
    tops = tuple(((token, -0.5 + off), (99, -1.5)) for token in tokens)
    return Reference(prompt=(1,), tokens=tuple(tokens), gaps=(1.0, 1.0), tops=tops)


class FakeTruths:
    """One prompt's answer, and what splits of TP 2 and 3 make of it, by KV dtype."""

    def __init__(self, **off: dict[int, Reference]) -> None:
        self._off = off

    def of(self, prefill: str, decode: str) -> dict[str, Reference]:
        return {"p": answer(0.0)}

    def alone(self, layout: Layout) -> list[Reference]:
        if layout.tp not in self._off[layout.kv]:
            raise SetupError("the model has too few heads")
        return [self._off[layout.kv][layout.tp]]


def bounds(**off: dict[int, Reference]) -> Bounds:
    return Bounds(FakeTruths(**off))  # type: ignore[arg-type]


def test_the_worst_split_decides_with_a_margin() -> None:
    found = bounds(int8={2: answer(0.1), 3: answer(0.3)}).of("int8", "int8")
    assert found.logprob == pytest.approx(MARGIN * 0.15)  # one of two logprobs is off
    assert found.tie == pytest.approx(2 * MARGIN * 0.3)


def test_what_two_dtypes_do_adds_up() -> None:
    both = bounds(int8={2: answer(0.1)}, bfloat16={2: answer(0.2)}).of("int8", "bfloat16")
    assert both.logprob == pytest.approx(MARGIN * 0.15)


def test_where_nothing_was_seen_the_floor_stands() -> None:
    found = bounds(int8={2: answer(0.0)}).of("int8", "int8")
    assert found.logprob == FLOORS["int8"]
    assert found.tie == 2 * FLOORS["int8"]


def test_in_float32_a_tie_is_a_tie_whatever_was_measured() -> None:
    assert bounds(float32={2: answer(0.5)}).of("float32", "float32").tie == TIE


def test_a_model_that_cannot_be_split_has_the_floor() -> None:
    assert bounds(int8={}).of("int8", "int8").logprob == FLOORS["int8"]


def test_an_answer_that_parts_at_once_does_not_widen_the_bound() -> None:
    found = bounds(int8={2: answer(5.0, tokens=(7, 8)), 3: answer(0.0)}).of("int8", "int8")
    assert found.logprob == FLOORS["int8"]
