"""Engines take turns; one that fails leaves the others alone."""

import argparse
from pathlib import Path

import pytest
from benchmarks.contenders import (
    BESIDE_WEIGHTS,
    WEIGHT_COPIES,
    available_memory,
    check_memory,
    started,
)
from benchmarks.llama_cpp import decode_figures
from benchmarks.options import result_name
from benchmarks.rounds import SETTLE_S, Plan, alternate, medians, spread, widest_spread
from benchmarks.stack import percentile
from benchmarks.work import Decode, Prefill
from benchmarks.worker import WorkerFailed


class Fake:
    """Gives its rates in order, and fails where there are none left or it is told to."""

    def __init__(self, name: str, rates: list[float], log: list[str], opens: bool = True) -> None:
        self.name, self._rates, self._log, self._opens = name, rates, log, opens

    def open(self, work: object, tokens: int) -> None:
        self._log.append(f"open {self.name}")
        if not self._opens:
            raise WorkerFailed("no")

    def run(self, work: object, steps: int) -> float:
        self._log.append(self.name)
        if not self._rates:
            raise WorkerFailed("worn out")
        return self._rates.pop(0)

    def close(self, work: object) -> None:
        self._log.append(f"close {self.name}")

    def end(self) -> None: ...


@pytest.fixture(autouse=True)
def settle_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("benchmarks.rounds.SETTLE_S", 0.0)
    assert SETTLE_S > 0


def test_every_round_has_a_turn_of_each_in_another_order_and_the_first_does_not_count():
    log: list[str] = []
    a, b = Fake("a", [99.0, 1.0, 2.0], log), Fake("b", [99.0, 5.0, 7.0], log)
    heard: list[str] = []
    rates = alternate([a, b], Decode(2), Plan(2, 4), lambda c: heard.append(c.name))
    assert rates == {"a": [1.0, 2.0], "b": [5.0, 7.0]}
    assert log[2:-2] == ["a", "b", "b", "a", "a", "b"]
    assert log[-2:] == ["close a", "close b"]
    assert heard == ["b", "a", "a", "b"]
    assert medians(rates) == {"a": 1.5, "b": 6.0}


def test_one_that_fails_in_the_middle_is_left_out_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str],
):
    log: list[str] = []
    tired, well = Fake("tired", [1.0, 1.0], log), Fake("well", [2.0] * 4, log)
    assert alternate([tired, well], Prefill(9), Plan(3, 1)) == {"well": [2.0] * 3}
    assert "close tired" not in log
    assert "tired is left out: worn out" in capsys.readouterr().err


def test_one_that_cannot_open_is_left_out():
    log: list[str] = []
    shut, well = Fake("shut", [1.0] * 2, log, opens=False), Fake("well", [2.0] * 2, log)
    assert alternate([shut, well], Decode(1), Plan(1, 1)) == {"well": [2.0]}


def test_nothing_to_measure_gives_nothing():
    assert alternate([], Decode(1), Plan(1, 1)) == {}


def test_a_stream_asks_for_more_tokens_than_all_rounds_take():
    plan = Plan(rounds=5, steps=16)
    opened = 3  # tokens a stream has given before the first round
    assert plan.stream_tokens > (plan.rounds + 1) * plan.steps + opened


def test_spread_is_of_the_median():
    assert spread([8.0, 10.0, 13.0]) == 0.5
    assert widest_spread([{"a": [1.0, 1.0], "b": []}, {"a": [8.0, 10.0, 13.0]}]) == 0.5


def test_an_engine_that_memory_has_no_room_for_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    needed = WEIGHT_COPIES * 1000 + BESIDE_WEIGHTS
    check_memory(tmp_path, needed)
    with pytest.raises(WorkerFailed, match="are left"):
        check_memory(tmp_path, needed - 1)
    monkeypatch.setattr("benchmarks.contenders.available_memory", lambda: 0.0)
    assert started("big", tmp_path, lambda: Fake("big", [], [])) is None
    assert "big is left out: it may take 3.2 GB" in capsys.readouterr().err
    assert available_memory() > 0


def test_a_quick_run_does_not_overwrite_a_real_one():
    names = [result_name("engine", argparse.Namespace(quick=quick)) for quick in (True, False)]
    assert names == ["engine-quick", "engine"]
    for bench in Path("scripts").glob("bench_*.py"):
        assert 'publish("' not in bench.read_text(), bench


def test_percentiles_are_values_that_were_seen():
    values = [float(v) for v in range(200, 0, -1)]
    assert [percentile(values, p) for p in (50, 99, 100)] == [100.0, 198.0, 200.0]
    assert percentile([3.0], 99) == 3.0


def test_llama_cpps_line_is_found_among_its_log():
    line = '{"pp": 128, "tg": 16, "pl": 8, "speed_tg": 61.5}'
    output = f"loading\n\n{line}\n\nllama_perf_context_print: ..."
    assert decode_figures(output, 8, 16)["speed_tg"] == 61.5
    with pytest.raises(WorkerFailed, match="batch 32"):
        decode_figures(output, 32, 16)
