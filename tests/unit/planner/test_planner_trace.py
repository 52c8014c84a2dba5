"""Traces as workloads: kinds by length, rate, and what a cache of limited size finds again."""

import json
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from ekiden.core.errors import SetupError
from ekiden.planner.calibration import calibration
from ekiden.planner.catalogue import by_name
from ekiden.planner.devices import devices
from ekiden.planner.hardware import gpu
from ekiden.planner.limits import Limits
from ekiden.planner.memory import Replica, card_of
from ekiden.planner.serving import aggregated
from ekiden.planner.steps import Stepper
from ekiden.planner.trace import Line, from_trace, read_trace, shared, sharing
from ekiden.planner.workload import Requests, Workload


def line(ids: tuple[int, ...], length: int = 0) -> Line:
    return Line(timestamp=0, input_length=length or 512 * len(ids), output_length=1, hash_ids=ids)


def test_only_a_prefix_is_found_again():
    assert shared([line((1, 2, 3)), line((1, 2, 4))], 9) == pytest.approx(2 / 6)
    assert shared([line((1, 2, 3)), line((9, 2, 3))], 9) == 0
    whole = shared([line((1, 2)), line((1, 2))], 9)
    assert whole == pytest.approx(1023 / 2048), "the last token is computed all the same"


def test_what_was_used_least_recently_leaves_first():
    asked = [line((1,)), line((2,)), line((1,)), line((3,)), line((1,)), line((2,))]
    assert shared(asked, 2) == pytest.approx(2 * 511 / (6 * 512))
    assert shared(asked, 3) == pytest.approx(3 * 511 / (6 * 512))


def test_a_larger_cache_finds_more_and_a_workload_has_what_its_cache_finds():
    asked = [line((first, first + 1)) for first in (*range(0, 2000, 2), *range(0, 2000, 2))]
    curve = sharing(asked)
    shares = [share for _, share in curve]
    assert shares == sorted(shares)
    assert shares[:2] == [0.0, 0.0], "a thousand others came between"
    assert shares[-1] == pytest.approx(0.5, rel=0.01)
    work = Workload(name="w", kinds=(Requests(prompt=1024, output=1),), sharing=curve)
    assert work.cached(0).prefix_share == 0
    assert work.cached(1e9).prefix_share == shares[-1]
    (low, less), (high, more) = next((a, b) for a, b in pairwise(curve) if b[1] > a[1])
    assert work.cached((low + high) / 2).prefix_share == pytest.approx((less + more) / 2)
    stated = msgspec.structs.replace(work, prefix_share=0.3, sharing=())
    assert stated.cached(0) is stated


def test_a_trace_that_comes_back_is_served_faster_by_cards_with_more_room():
    """What running sequences leave of KV is the cache; nobody counts room that is not there."""
    asked = [line((2 * first, 2 * first + 1)) for first in (*range(200), *range(200))]
    work = Workload(name="w", kinds=(Requests(prompt=1024, output=8),), sharing=sharing(asked))
    card = gpu("h100_sxm")
    geometry = by_name("Llama-3.1-8B")

    def ttft(utilization: float) -> float:
        limits = Limits(max_model_len=2048, utilization=utilization)
        replica = Replica(geometry=geometry, card=card_of(card), limits=limits)
        stepper = Stepper(replica, devices(card, per_host=1), calibration("vllm"))
        return aggregated(stepper, work, 2.0, 1).ttft_p50

    assert ttft(0.9) < 0.95 * ttft(0.3)


def test_kinds_are_equal_parts_by_length_and_keep_the_means(tmp_path: Path):
    file = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 100 * i, "input_length": 10 * (i + 1), "output_length": i + 1}
        for i in range(160)
    ]
    file.write_text("\n".join(map(json.dumps, reversed(lines))))
    work = from_trace(file)
    assert len(work.kinds) == 16
    assert {kind.share for kind in work.kinds} == {1 / 16}
    assert work.prompt == pytest.approx(sum(x["input_length"] for x in lines) / 160, rel=0.01)
    assert work.output == pytest.approx(sum(x["output_length"] for x in lines) / 160, rel=0.01)
    assert work.longest == 1600 + 160, "of the longest request, not of a mean"
    assert work.rate == pytest.approx(10)
    assert from_trace(file, rate=3).rate == 3


def test_a_trace_out_of_order_is_read_in_order_of_arrival(tmp_path: Path):
    file = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 100 * i, "input_length": 512 * 3, "output_length": 1, "hash_ids": ids}
        for i, ids in enumerate([(1, 2, 3), (1, 2, 4), (5, 6, 7)])
    ]
    file.write_text("\n".join(map(json.dumps, (lines[2], lines[0], lines[1]))) + "\n\n")
    assert [one.timestamp for one in read_trace(file)] == [0, 100, 200]


def test_a_file_that_is_no_text_is_refused_by_its_line(tmp_path: Path):
    file = tmp_path / "trace.jsonl"
    file.write_bytes(b'\xff\xfe{"timestamp": 1}')
    with pytest.raises(SetupError, match=r"--trace .*trace.jsonl line 1 is no request"):
        read_trace(file)
