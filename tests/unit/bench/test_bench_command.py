"""``ekiden bench`` as it is typed, against a mock of ours in this process."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from on_a_thread import on_a_thread
from ports import free_port

from ekiden.bench import asking, sweep
from ekiden.bench import result as results
from ekiden.bench.config import BenchConfig
from ekiden.bench.mock import MockConfig, serving
from ekiden.bench.result import Result
from ekiden.bench.wording import Wording
from ekiden.cli.bench import ENDPOINTS
from ekiden.cli.main import main
from ekiden.cli.slo import SLO_PARTS
from ekiden.core.errors import SetupError
from ekiden.measures.goodput import Slo


@pytest.fixture(scope="module")
def mock() -> Iterator[str]:
    """The URL of a mock without waits."""
    with on_a_thread(lambda: serving(MockConfig(ttft_s=0.0, itl_s=0.0))) as url:
        yield url


def test_a_sweep_writes_its_result_in_every_form(
    mock: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = {name: tmp_path / f"r.{name}" for name in ("json", "csv", "html")}
    code = main([
        "bench", "--base-url", mock, "--rate", "50,inf", "--num-prompts", "20", "--processes", "2",
        "--prompt-tokens", "30", "--output-tokens", "5", "--slo", "ttft=60000",
        *(text for name, path in out.items() for text in (f"--{name}", str(path))),
    ])  # fmt: skip
    assert code == 0
    found = results.read(out["json"])
    assert found.model == "mock"
    assert found.prompts.startswith("exact")
    for level in found.levels:
        assert sorted(level.samples.index) == list(
            range(min(level.samples.index), max(level.samples.index) + 1)
        )
        assert (level.requests, level.succeeded, level.errors) == (20, 20, {})
        assert (level.prompt_tokens.min, level.prompt_tokens.max) == (30, 30)
        assert (level.output_tokens.min, level.itl_ms.count) == (5, 80)
        assert level.goodput is not None
        assert level.goodput.share == 1.0
    assert len(out["csv"].read_text().splitlines()) == 3
    assert "TTFT against load" not in out["html"].read_text()  # of inf there is no place on a line
    assert "rate 50" in capsys.readouterr().out


def test_a_file_that_cannot_be_written_does_not_cost_the_others(
    mock: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    csv = tmp_path / "r.csv"
    argv = ["bench", "--base-url", mock, "--num-prompts", "4", "--output-tokens", "2"]
    assert main([*argv, "--json", str(tmp_path), "--csv", str(csv)]) == 2
    assert len(csv.read_text().splitlines()) == 2
    assert f"ekiden: {tmp_path} cannot be written: Is a directory" in capsys.readouterr().err


def test_levels_ask_for_different_prompts(mock: str, tmp_path: Path):
    path = tmp_path / "r.json"
    argv = ["bench", "--base-url", mock, "--concurrency", "1,3", "--num-prompts", "4"]
    assert main([*argv, "--output-tokens", "2", "--num-warmups", "2", "--json", str(path)]) == 0
    seen = [index for level in results.read(path).levels for index in level.samples.index]
    assert len(set(seen)) == 8


def test_a_second_run_asks_anew_unless_told_to_repeat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Else the server would have every prompt of the first in its cache."""
    asked: list[str] = []

    async def note(config: BenchConfig, *_: object) -> Result:
        asked.append(Wording().text(config.workload.ask(3).pieces))
        raise SetupError("enough")

    monkeypatch.setattr(sweep, "run", note)
    for option in ([], [], ["--repeat-prompts"], ["--repeat-prompts"]):
        main(["bench", *option])
    assert len(set(asked)) == 3
    assert asked[2] == asked[3]


def test_a_closed_loop_ends_by_time(mock: str, tmp_path: Path):
    path = tmp_path / "r.json"
    argv = ["bench", "--base-url", mock, "--concurrency", "2", "--duration", "0.3"]
    assert main([*argv, "--output-tokens", "2", "--json", str(path)]) == 0
    (level,) = results.read(path).levels
    assert 1 <= level.requests < 100_000


def test_a_trace_is_replayed_over_chat(mock: str, tmp_path: Path):
    trace, path = tmp_path / "t.jsonl", tmp_path / "r.json"
    lines = [
        {"timestamp": 10 * i, "input_length": 520 + i, "output_length": 2, "hash_ids": [0, i + 1]}
        for i in range(8)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    argv = ["bench", "--base-url", mock, "--endpoint", "chat", "--trace", str(trace)]
    assert main([*argv, "--num-warmups", "1", "--trace-speed", "2", "--json", str(path)]) == 0
    (level,) = results.read(path).levels
    assert level.name == "trace 2"
    assert level.samples.prompt_tokens == [521 + i for i in range(7)]
    assert level.samples.scheduled_s == pytest.approx([0.005 * i for i in range(7)])


def test_a_level_without_an_answer_fails_and_says_why(
    mock: str, capsys: pytest.CaptureFixture[str]
):
    argv = ["bench", "--base-url", mock, "--num-prompts", "2", "--timeout", "5"]
    code = main([*argv, "--extra-body", '{"max_tokens": "many"}'])
    assert code == 2
    assert "refuses to complete a short prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--rate", "0"], "'0' is not a number above 0"),
        (["--rate", "1,x"], "'x' is not a number above 0"),
        (["--concurrency", "0"], "0 is too small: at least 1"),
        (["--slo", "itl=3"], "'itl' is no part of an SLO: choose of ttft, tpot, e2e"),
        (["--slo", "ttft"], "'' is not a number above 0"),
        (["--extra-body", "[]"], "'[]' is not a JSON object"),
        (["--workload", "huge"], "short-short"),
    ],
)
def test_an_option_that_cannot_be_read_is_named(
    capsys: pytest.CaptureFixture[str], argv: list[str], says: str
):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *argv])
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--rate", "1", "--concurrency", "1"], "--rate and --concurrency each say"),
        (["--trace", "x"], "--trace x cannot be read"),
        (["--trace", "x", "--prompt-tokens", "5"], "--prompt-tokens is for prompts that are drawn"),
        (["--trace", "x", "--workload", "mixed"], "--workload is for prompts that are drawn"),
        (["--trace", "x", "--output-tokens", "5"], "--output-tokens is for prompts that are drawn"),
        (["--trace", "x", "--shared-prefix-tokens", "5"], "--shared-prefix-tokens is for prompts"),
        (["--max-model-len", "5"], "--max-model-len leaves out requests of a trace"),
        (["--trace-speed", "2"], "--trace-speed replays a trace"),
        (["--trace", "x", "--trace-speed", "2", "--concurrency", "1"], "--trace-speed replays"),
        (["--rate", "1", "--burst-size", "2"], "--burst-size needs --arrival burst"),
        (["--arrival", "constant"], "--arrival is of an open loop"),
        (["--prefixes", "2"], "--prefixes needs --shared-prefix-tokens"),
        (["--rate", "1", "--trace", "x"], "--rate and --trace each say"),
        (["--rate", "inf", "--duration", "1"], "say how many with --num-prompts"),
        (["--base-url", "nowhere"], "--base-url nowhere is not an HTTP address"),
        (["--shared-prefix-tokens", "256"], "shared_prefix_tokens 256 leaves nothing"),
        (["--base-url", f"http://127.0.0.1:{free_port()}"], "no server answers"),
    ],
)
def test_a_run_that_cannot_be_is_refused_in_a_sentence(
    capsys: pytest.CaptureFixture[str], argv: list[str], says: str
):
    assert main(["bench", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_the_command_offers_what_the_bench_has():
    """Written down a second time, so that `ekiden --help` does not load an HTTP client."""
    assert set(ENDPOINTS) == set(asking.ENDPOINTS)
    assert {f"{part}_ms" for part in SLO_PARTS} == set(Slo.__struct_fields__)
