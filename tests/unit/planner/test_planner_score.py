"""Scoring over a file of our own making: errors, counts, and reasons for what is left out."""

import csv
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ekiden.cli.main import main
from ekiden.core.errors import SetupError
from ekiden.planner.memory import memory
from ekiden.planner.score import quantile, score
from ekiden.planner.score_perf import foretold
from ekiden.planner.score_rows import COLUMNS, PERF_COLUMNS, Row, engine_of, engine_profile, replica

BASE = {
    "kind": "kv",
    "model": "Llama-3.1-8B",
    "weights_quant": "bf16",
    "gpu": "h100_sxm",
    "engine": "vllm",
    "engine_version": "0.9.1",
    "tp": "1",
    "gpu_mem_util": "0.9",
    "max_model_len": "8192",
}

LOOP = {
    "kind": "perf",
    "metric": "tpot",
    "isl": "1024",
    "osl": "1024",
    "concurrency": "16",
    "unit": "ms",
    "gpu_mem_util": "",
    "source": "silicon.csv id=llama_h100_vllm_agg_1024x1024_c16_tp1_ep1_7",
}
ALL = (*COLUMNS, *PERF_COLUMNS)


def predicted_tokens(**cells: str) -> int:
    return memory(replica(Row({**BASE, **cells}))).pool_tokens


@pytest.fixture
def write(tmp_path: Path):
    def write_rows(*rows: dict[str, str]) -> Path:
        file = tmp_path / "rows.csv"
        with file.open("w", newline="") as lines:
            writer = csv.DictWriter(lines, COLUMNS)
            writer.writeheader()
            writer.writerows({"id": f"row{i}", **BASE, **row} for i, row in enumerate(rows))
        return file

    return write_rows


def test_errors_are_shares_of_what_was_measured(write):
    tokens = predicted_tokens()
    file = write(
        {"kv_tokens": str(tokens)},
        {"kv_tokens": str(tokens * 2)},
        {"kv_tokens": str(tokens / 2), "weights_gib_per_gpu": "29.9776"},
    )
    summary = score(file).summary()
    assert summary["kv_capacity"] == {"median_error": 0.5, "p90_error": 0.9, "rows": 3}
    assert summary["weights"]["median_error"] == pytest.approx(0.5, abs=1e-4)
    assert summary["weights"]["rows"] == 1


def test_a_hybrid_model_is_scored_by_bytes_and_not_by_logged_tokens(write):
    row = {"model": "gpt-oss-20b", "weights_quant": "mxfp4-moe"}
    room = memory(replica(Row({**BASE, **row}))).ranks[0].kv / (1 << 30)
    judged = score(write({**row, "kv_tokens": "1", "kv_gib_per_gpu": str(room)})).judged[0]
    assert judged.unit == "GiB"
    assert judged.error == pytest.approx(0)
    unscored = score(write({**row, "kv_tokens": "1"})).judged[0].unscored
    assert "state kv_gib_per_gpu" in unscored


def test_outcomes_are_counted_both_ways(write):
    oom = {"kind": "oom", "outcome": "fail: no room", "model": "Llama-3.1-70B"}
    fine = {"kind": "oom", "outcome": "ok at 8192"}
    file = write(
        oom,
        fine,
        {**oom, "model": "Llama-3.1-8B"},
        {**fine, "model": "Llama-3.1-70B"},
        {**oom, "model": "Llama-3.1-8B", "meaning": "should fit by arithmetic"},
        {**oom, "outcome": "TP=3 impossible"},
    )
    summary = score(file).summary()
    assert summary["oom_called_fitting"] == 1
    assert summary["fitting_called_oom"] == 1
    assert set(summary["unscored"]["fit"]) == {"row4", "row5"}


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"model": "Nonesuch-9B"}, "model 'Nonesuch-9B' is not"),
        ({"weights_quant": "?"}, "weights_quant is not stated"),
        ({"weights_quant": "int3"}, "weight format 'int3' is not known"),
        ({"gpu": "80GB card (not stated)"}, "GPU '80GB card"),
        ({"gpu_mem_util": "nan"}, "gpu_mem_util is not stated"),
        ({"tp": "three"}, "tp 'three' is not a number"),
        ({"tp": "3"}, "TP 3 does not divide"),
        ({"engine": "trtllm"}, "engine 'trtllm' has no profile"),
        ({"engine_version": "0.2.7", "tp": "2"}, "of one GPU only"),
        ({"meaning": "vision tower included"}, "a vision tower was loaded too"),
        ({"kv_tokens": "", "kv_gib_per_gpu": ""}, "neither kv_tokens nor"),
        ({"weights_gib_per_gpu": "60", "kv_gib_per_gpu": "20"}, "add up to 80.00 GiB"),
    ],
)
def test_what_cannot_be_scored_says_why(write, cells, reason):
    summary = score(write({"kv_tokens": "1000", **cells})).summary()
    assert reason in summary["unscored"]["kv_capacity"]["row0"]
    assert summary["kv_capacity"] == {"median_error": None, "p90_error": None, "rows": 0}


def test_weights_are_scored_whatever_the_card(write):
    file = write({"gpu": "?", "weights_gib_per_gpu": "14.99"})
    assert score(file).summary()["weights"]["rows"] == 1


@pytest.mark.parametrize(
    ("version", "meaning", "name"),
    [
        ("0.9.1", "", "vllm"),
        ("0.8.3 V0", "", "vllm-v0"),
        ("V0 0.6.x", "", "vllm-v0"),
        ("V1 alpha 2025-01", "", "vllm"),
        ("0.7.2", "", "vllm-v0"),
        ("0.2.x 2023-12", "", "vllm-0.2"),
        ("0.2x 2026-08", "", "vllm-0.16"),
        ("0.25.0", "", "vllm-0.16"),
        ("", "v0.5.3, 8 cards", "vllm-0.3"),
        ("", "v0.10.1", "vllm"),
        ("", "", "vllm"),
    ],
)
def test_versions_lead_to_profiles(version: str, meaning: str, name: str):
    row = Row({**BASE, "engine_version": version, "meaning": meaning})
    assert engine_profile(row).name == name


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([], 0.5, None), ([3.0], 0.9, 3.0), ([0.0, 1.0], 0.5, 0.5), ([0.0, 1.0, 3.0], 0.9, 2.6)],
)
def test_quantiles_lie_between_neighbours(values, share, expected):
    assert quantile(values, share) == (expected if expected is None else pytest.approx(expected))


@pytest.mark.parametrize("cell", ["inf", "-inf", "1e999"])
def test_a_number_without_end_is_none(write, cell):
    """Else an error that is endless too would make a percentile of the whole file null."""
    (judged,) = score(write({"kv_tokens": cell})).judged
    assert judged.unscored == f"kv_tokens {cell!r} is not a number"


def test_a_file_with_a_byte_order_mark_and_an_engine_in_capitals_is_read(write):
    file = write({"kv_tokens": "1", "engine": "vLLM"})
    file.write_text(file.read_text(), encoding="utf-8-sig")
    assert score(file).summary()["kv_capacity"]["rows"] == 1


def test_a_file_without_the_columns_is_refused(tmp_path):
    file = tmp_path / "rows.csv"
    for text in ("", "id\n", "id;kind;model\n"):
        file.write_text(text)
        with pytest.raises(SetupError, match=r"lacks the columns kind, model$"):
            score(file)
    with pytest.raises(SetupError, match="cannot be read"):
        score(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        ("kv", "gpu, engine, tp, gpu_mem_util, which rows of kind kv need"),
        ("oom", "gpu, engine, tp, outcome, which rows of kind oom need"),
        ("perf", "gpu, engine, tp, isl, osl, concurrency, metric, value, unit, which rows of kind"),
    ],
)
def test_columns_that_a_kind_of_row_needs_are_named(tmp_path, kind: str, missing: str):
    file = tmp_path / "rows.csv"
    file.write_text(f"kind,model,weights_quant\n{kind},Llama-3.1-8B,bf16\n")
    with pytest.raises(SetupError, match=missing):
        score(file)


def test_columns_that_no_row_needs_may_be_left_out(tmp_path):
    file = tmp_path / "rows.csv"
    tokens = predicted_tokens(engine_version="", max_model_len="")
    file.write_text(
        "kind,model,weights_quant,gpu,engine,tp,gpu_mem_util,kv_tokens\n"
        f"kv,Llama-3.1-8B,bf16,h100_sxm,vllm,1,0.9,{tokens}\n"
    )
    assert score(file).summary()["kv_capacity"] == {"median_error": 0, "p90_error": 0, "rows": 1}


def test_a_file_by_another_program_is_read_all_the_same(write):
    """Byte order mark, CRLF, blank lines, spaces, names in capitals, columns that nobody asked for,
    lines that are too short or too long."""
    tokens = predicted_tokens()
    file = write({"kv_tokens": f" {tokens} "}, {"kv_tokens": str(tokens), "kind": " KV "})
    head, *rows = file.read_text().splitlines()
    head = ", ".join(name.upper() for name in head.split(",")) + ",note"
    lines = ["", "\t ", head, ",,,", rows[0] + ",said,more,and more", " , ", rows[1], ""]
    lines.append("short,kv,Llama-3.1-8B")
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    summary = score(file).summary()
    assert summary["kv_capacity"] == {"median_error": 0, "p90_error": 0, "rows": 2}
    assert summary["unscored"]["kv_capacity"] == {"short": "weights_quant is not stated"}


CELLS = ["", " ", "nan", "?", "-1", "0", "1", "2", "7.5", "1e9", "1e308", "1e-308", "x", "[]", "ms"]
NAMES = ["Mixtral-8x7B", "gpt-oss-20b", "trt-llm", "fp8", "int4", "l4", "PCIe", "oom", "perf"]


@given(changes=st.lists(st.dictionaries(st.sampled_from(ALL), st.sampled_from([*CELLS, *NAMES]))))
@settings(max_examples=60, deadline=None)
def test_every_row_is_scored_or_has_a_reason_whatever_it_holds(tmp_path_factory, changes):
    file = tmp_path_factory.mktemp("rows") / "rows.csv"
    with file.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, ALL)
        writer.writeheader()
        for number, change in enumerate(changes):
            writer.writerow({**BASE, **LOOP, "kv_tokens": "9", **change, "id": f"row{number}"})
    found = score(file)
    assert {one.id for one in found.judged} == {f"row{i}" for i in range(len(changes))}
    for one in found.judged:
        assert one.unscored or one.predicted is not None
    json.dumps(found.summary(), allow_nan=False)


def test_no_row_vanishes(write, write_loops):
    rows = ({"kind": "allreduce"}, {"kind": ""}, {"kind": "kv", "kv_tokens": "5"})
    assert score(write(*rows)).summary()["unscored"]["row"] == {
        "row0": "kind 'allreduce' is not scored: kv, oom, perf are",
        "row1": "kind '' is not scored: kv, oom, perf are",
    }
    (judged,) = score(write_loops({"metric": "goodput", "value": "1"})).judged
    assert judged.unscored.startswith("metric 'goodput' is not scored: tpot, ttft")


def test_rows_without_an_id_or_with_one_that_is_taken_are_told_apart(write):
    rows = ({"id": "", "tp": "x"}, {"id": "a", "tp": "y"}, {"id": "a", "tp": "z"})
    found = score(write(*rows)).summary()["unscored"]["kv_capacity"]
    assert list(found) == ["line 2", "a", "a (2)"]


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"tp": "2.5"}, "tp '2.5' counts nothing: a whole number from 0 to 1,000,000,000 does"),
        ({"tp": "-1"}, "tp '-1' counts nothing"),
        ({"block_size": "1e300"}, "block_size '1e300' counts nothing"),
        ({"kv_tokens": "-5"}, "kv_tokens -5 is below 0"),
    ],
)
def test_numbers_that_count_nothing_are_reasons(write, cells, reason):
    judged = score(write({"kv_tokens": "1000", **cells})).judged[0]
    assert reason in judged.unscored


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("TensorRT-LLM", "trtllm"),
        ("tensorrt_llm", "trtllm"),
        ("trt-llm", "trtllm"),
        ("TRTLLM", "trtllm"),
        ("vLLM", "vllm"),
        ("SGLang", "sglang"),
        ("sg lang", "sglang"),
        ("TGI", "tgi"),
    ],
)
def test_engines_are_known_by_any_spelling(spelling: str, name: str):
    assert engine_of(Row({**BASE, "engine": spelling})) == name


def test_a_loop_of_an_engine_is_the_same_by_any_spelling(write_loops):
    spellings = ("trtllm", "TensorRT-LLM", "tensorrt_llm")
    file = write_loops(*({"value": "10", "engine": name} for name in spellings))
    assert len({one.predicted for one in score(file).judged}) == 1


def test_the_command_prints_a_table_and_json(write, capsys):
    file = str(
        write({"kv_tokens": str(predicted_tokens())}, {"model": "Nonesuch", "kv_tokens": "1"})
    )
    assert main(["plan", "--score", file]) == 0
    table = capsys.readouterr().out
    assert "kv_capacity: median 0.00%, P90 0.00% of 1 rows" in table
    assert "not scored: model 'Nonesuch'" in table
    assert main(["plan", "--score", file, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == [
        "kv_capacity",
        "weights",
        "tpot",
        "ttft",
        "oom_called_fitting",
        "fitting_called_oom",
        "unscored",
    ]
    assert main(["plan", "--score", "nowhere.csv"]) == 2


@pytest.fixture
def write_loops(tmp_path: Path):
    def write_rows(*rows: dict[str, str]) -> Path:
        file = tmp_path / "loops.csv"
        with file.open("w", newline="") as lines:
            writer = csv.DictWriter(lines, (*COLUMNS, *PERF_COLUMNS))
            writer.writeheader()
            writer.writerows({"id": f"row{i}", **BASE, **LOOP, **r} for i, r in enumerate(rows))
        return file

    return write_rows


def test_latencies_are_scored_by_kind_of_model(write_loops):
    told = foretold(Row({**BASE, **LOOP}))
    sparse = {"model": "Mixtral-8x7B", "tp": "2", "source": ""}
    file = write_loops(
        {"value": str(told.tpot * 1e3)},
        {"value": str(told.tpot * 2), "unit": "s"},
        {"value": str(foretold(Row({**BASE, **LOOP, **sparse})).tpot * 500), **sparse},
        {"metric": "ttft_mean_or_p50", "value": str(told.ttft * 2e3)},
        {"metric": "output_throughput_total", "value": "1"},
    )
    summary = score(file).summary()
    assert summary["tpot"]["dense"]["rows"] == 2
    assert summary["tpot"]["dense"]["median_error"] == pytest.approx(0.25)
    assert summary["tpot"]["moe"]["median_error"] == pytest.approx(1.0)
    assert summary["ttft"] == {"median_error": 0.5, "p90_error": 0.5, "rows": 1}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"value": "-3"}, "value '-3' in 'ms' is no time"),
        ({"engine": "sglang P-D"}, "layouts of its two pools"),
        ({"engine": "tgi"}, "choose one of vllm, trtllm, sglang"),
        ({"tp": "", "source": ""}, "tp is not stated"),
        ({"isl": ""}, "isl is not stated"),
        ({"concurrency": "0"}, "concurrency is not stated"),
        ({"unit": "tok/s"}, "is no time"),
        ({"tp": "64"}, "its source names tp1: one of them is wrong"),
        ({"ep": "8", "model": "Mixtral-8x7B"}, "EP 8 does not go with TP 1"),
        ({"model": "Nonesuch"}, "nearest are"),
    ],
)
def test_latencies_that_cannot_be_scored_say_why(write_loops, change, reason):
    judged = score(write_loops({"value": "10", **change})).judged[0]
    assert judged.error is None
    assert reason in judged.unscored


def test_a_model_whose_weights_are_not_stated_is_taken_as_published(write_loops):
    assert foretold(Row({**BASE, **LOOP, "weights_quant": "nan"})) == foretold(
        Row({**BASE, **LOOP, "weights_quant": "bf16"})
    )
