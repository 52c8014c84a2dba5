"""``ekiden sim``: the table, the data, what is compared, and what is refused."""

import json
from pathlib import Path

import msgspec
import pytest

from ekiden.cli.main import main
from ekiden.cli.sim_options import POLICIES
from ekiden.core.config import ServiceConfig
from ekiden.sim import policies
from ekiden.sim.scenario import Scenario

ASKED = ("Llama-3.1-8B", "--gpu", "H100")
FEW = (*ASKED, "--rate", "8", "--requests", "40")


@pytest.fixture
def printed(capsys):
    def run(*words: str, code: int = 0) -> str:
        assert main(["sim", *words]) == code
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys):
    def run(*words: str) -> str:
        assert exit_code(words) == 2
        return capsys.readouterr().err

    return run


def exit_code(words: tuple[str, ...]) -> int:
    """Of the command, whether the parser ends it or what it starts."""
    try:
        return main(["sim", *words])
    except SystemExit as ended:
        return int(ended.code or 0)


def trace_file(folder: Path, lengths: tuple[int, ...] = (1000, 1500, 2000)) -> str:
    path = folder / "trace.jsonl"
    lines = [
        {"timestamp": 500 * i, "input_length": n, "output_length": 10, "hash_ids": [0, i + 1]}
        for i, n in enumerate(lengths)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def test_a_row_for_each_ratio_and_policy(printed):
    text = printed(*FEW, "--ratio", "1:1,0:2", "--policy", "router,round-robin")
    rows = [line.split("  ")[0] for line in text.splitlines()[1:5]]
    assert rows == ["1:1 router", "1:1 round-robin", "0:2 router", "0:2 round-robin"]
    assert "1:1 router: 1 prefill replicas" in text
    assert "0:2 router: 2 decode replicas" in text


def test_the_data_has_the_names_of_a_bench_result(printed):
    data = json.loads(printed(*FEW, "--ratio", "1:1", "--slo", "ttft=1000,tpot=50", "--json"))
    assert data["schema"] == "ekiden.sim/1"
    (run,) = data["runs"]
    assert (run["requests"], run["succeeded"], run["error_rate"]) == (40, 40, 0.0)
    for figure in ("ttft_ms", "tpot_ms", "e2e_ms"):
        assert 0 < run[figure]["p50"] <= run[figure]["p95"] <= run[figure]["p99"]
    assert run["goodput"]["share"] == 1.0
    assert [pool["role"] for pool in run["pools"]] == ["prefill", "decode"]
    assert not any("experts" in pool for pool in run["pools"])
    assert sum(run["prompt_sources"].values()) == 40 * 200


def test_replicas_are_shared_out_by_the_ratio(printed):
    text = printed(*FEW, "--replicas", "12", "--ratio", "1:3,1:99")
    assert [line.split()[0] for line in text.splitlines()[1:3]] == ["3:9", "1:11"]


def test_a_trace_is_replayed_and_what_is_too_long_is_told(printed, tmp_path):
    file = trace_file(tmp_path, (1000, 9000, 2000))
    run = json.loads(printed(*ASKED, "--trace", file, "--max-model-len", "4096", "--json"))["runs"][
        0
    ]
    assert (run["requests"], run["left_out"]) == (2, 1)
    assert run["prompt_sources"]["decode_cache"] == 512
    text = printed(*ASKED, "--trace", file, "--max-model-len", "4096")
    assert "1 requests are longer than a replica takes: left out" in text


def test_failures_are_counted(printed):
    text = printed(*FEW, "--ratio", "0:2", "--kill", "decode-0@2", "--output-tokens", "400")
    assert "1 replicas died" in text
    assert "failed, disconnected" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((*ASKED,), "no --rate"),
        (("--gpu", "H100", "--rate", "1"), "no MODEL"),
        ((*FEW, "--ratio", "3:0"), "as 1:3, or 0:4 for one pool"),
        ((*FEW, "--policy", "best"), "choose some of router, round-robin, least-requests"),
        ((*FEW, "--block-size", "48"), "choose one of 16, 32, 64"),
        ((*FEW, "--kill", "decode-5@3"), "there are decode 0 to 0"),
        ((*FEW, "--kill", "decode"), "as decode-0@30"),
        ((*FEW, "--slo", "itl=3"), "choose of ttft, tpot, e2e"),
        ((*FEW, "--autoscale", "5:2"), "as 2:40"),
        ((*FEW, "--autoscale-target", "0"), "above 0 and up to 1"),
        ((*FEW, "--replicas", "1", "--ratio", "1:3"), "choose 2 or more, or --ratio 0:1"),
        ((*FEW, "--prompt-tokens", "3000", "--max-model-len", "2048"), "which takes 2048"),
        (("Llama-3.1-70B", "--gpu", "H100", "--rate", "1"), "the nearest that fits is TP2"),
        ((*FEW, "--enable-expert-parallel"), "Llama-3.1-8B is dense and has no experts"),
        ((*FEW, "--expert-skew", "1"), "needs a mixture of experts, and Llama-3.1-8B is dense"),
        ((*FEW, "--expert-skew", "much"), "'much' is no exponent"),
        (
            ("Qwen3-30B-A3B", "--gpu", "H100", "--rate", "1", "--enable-expert-parallel"),
            "add -tp or -dp of 2 or more",
        ),
        (
            ("Qwen3-30B-A3B", "--gpu", "H100", "-dp", "2", "--rate", "1", "--expert-skew", "1"),
            "choose EP 2 or more (--enable-expert-parallel",
        ),
        ((*ASKED, "--trace", "nowhere.jsonl"), "nowhere.jsonl cannot be read"),
    ],
)
def test_what_cannot_be_is_refused_with_the_choices(refused, words, says):
    assert says in refused(*words)


def test_a_trace_and_a_rate_are_refused_together(refused, tmp_path):
    assert "--trace-speed" in refused(*ASKED, "--trace", trace_file(tmp_path), "--rate", "2")


def test_choices_and_defaults_are_those_of_the_rooms_that_own_them():
    assert tuple(policies.POLICIES) == POLICIES
    ours, theirs = (
        {field.name: field.default for field in msgspec.structs.fields(one)}
        for one in (Scenario, ServiceConfig)
    )
    assert ours["local_prefill_tokens"] == theirs["local_prefill_tokens"]


MIXTURE = ("Qwen3-30B-A3B", "--gpu", "H100", "--gpus-per-host", "8", "-dp", "8")
DEALT = (*MIXTURE, "--enable-expert-parallel", "--workload", "rag", "--rate", "40")


def test_experts_that_are_hit_unevenly_are_told_of_in_both_forms(printed):
    asked = (*DEALT, "--requests", "80", "--ratio", "0:1", "--expert-skew", "1")
    text = printed(*asked)
    assert "0:1: experts of decode: the busiest rank had " in text
    (run,) = json.loads(printed(*asked, "--json"))["runs"]
    (pool,) = run["pools"]
    told = pool["experts"]
    assert set(told) == {"steps", "tokens", "balancedness", "dispatch_share"}
    assert {len(layer) for layer in told["tokens"]} == {128}
    assert 0 < told["balancedness"]["worst"] <= told["balancedness"]["p95"]
    assert told["balancedness"]["p95"] <= told["balancedness"]["p50"] < 1


def test_doctor_finds_the_hot_experts_of_a_simulation_and_none_where_all_are_alike(
    printed, capsys, tmp_path
):
    for skew, found in (("1.2", 1), ("0", 0)):
        file = tmp_path / f"skew{skew}.json"
        asked = (*DEALT, "--requests", "200", "--ratio", "1:1", "--expert-skew", skew)
        file.write_text(printed(*asked, "--json"))
        main(["doctor", "--bench", str(file), "--json"])
        diagnosis = json.loads(capsys.readouterr().out)
        by_row = {one["requirement"]: one for one in diagnosis["findings"]}
        assert ("R46" in by_row) == bool(found)
        assert ("R46" in diagnosis["clean"]) != bool(found)
    main(["doctor", "--bench", str(tmp_path / "skew1.2.json")])
    page = capsys.readouterr().out
    assert "R46  the tail of a mixture of experts is unstable   confidence" in page
    assert "redundant copies of the hottest experts" in " ".join(page.split())


@pytest.mark.parametrize("words", [("--ratio", "0:100001"), ("--replicas", "200000")])
def test_more_replicas_than_memory_holds_are_refused(refused, words):
    assert "choose up to 100,000" in refused(*FEW, *words)


@pytest.mark.parametrize(
    "option", [("--gateways", "100000000"), ("--requests", "100000000000"), ("--gateways", "0")]
)
def test_counts_that_would_never_end_are_refused(option: tuple[str, str], capsys) -> None:
    words = ["sim", "Llama-3.1-8B", "--gpu", "H100", "--rate", "1", *option]
    with pytest.raises(SystemExit):
        main(words)
    assert "at most" in capsys.readouterr().err or option[1] == "0"
