"""``ekiden plan``: the page, the data, the files, and what is refused."""

import json
import re
import shlex
import subprocess
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path

import pytest
import yaml

from ekiden.cli.main import build_parser, main
from ekiden.verify.tiny import write_tiny_model

EIGHT = ("Llama-3.1-8B", "--gpu", "A6000", "--gpus-per-host", "8")
BIG = ("Llama-3.1-70B", "--gpu", "H100", "--gpus-per-host", "8")
SPLIT = (*BIG, "--weights", "fp8", "--workload", "rag", "--rate", "3")
APART = (*SPLIT, "--ttft-p95", "6s", "--tpot-p95", "30ms", "--smaller-weights", "none")


@cache
def ran(*words: str) -> tuple[int, str]:
    """Exit code and output: the same question has the same answer."""
    with redirect_stdout(StringIO()) as out:
        code = main(["plan", *words])
    return code, out.getvalue()


@pytest.fixture
def printed():
    def run(*words: str, code: int = 0) -> str:
        ended, text = ran(*words)
        assert ended == code
        return text

    return run


def test_the_page_says_what_why_and_what_lost(printed):
    page = printed(*EIGHT)
    assert page.startswith("8 x TP1, bf16 (8 of 8 GPUs)")
    assert "(assumed: state your own with --ttft-p95 and --tpot-p95)" in page
    for title in (
        *("Why", "Memory of a decode GPU", "Latency", "Throughput and cost", "If one GPU fails"),
        *("What lost, and why", "Measure first", "Deploy", "How far to believe this"),
    ):
        assert f"\n{title}" in page
    assert "communication" in page.partition("a decode step")[2]
    assert max(map(len, page.splitlines())) < 140


def test_the_memory_sum_is_right_to_the_byte(printed):
    for one in json.loads(printed(*BIG, "--json"))["memory"]:
        terms = ("weights", "activations", "sampler", "context", "communication", "graphs")
        assert one["usable"] - sum(one[name] for name in terms) == one["kv"]
        assert one["blocks"] * one["block_size"] <= one["kv_tokens"]
    page = printed(*BIG)
    row = next(line for line in page.splitlines() if "= left for KV" in line)
    assert f"{one['kv']:,}" in row


def test_the_data_have_a_stable_schema(printed):
    plan = json.loads(printed(*EIGHT, "--json"))
    assert plan["schema"] == 1
    assert list(plan) == [
        *("schema", "met", "short", "asked", "chosen", "why", "memory", "cost"),
        *("headroom", "failure", "lost", "measure_first", "deploy", "certainty"),
    ]
    assert plan["chosen"]["pools"] == [{"replicas": 8, "tp": 1, "pp": 1, "dp": 1, "ep": 1, "cp": 1}]
    assert all(one["why"] for one in plan["lost"])
    assert {one["weights"] for one in plan["lost"]} == {"bf16", "int8", "int4"}


def test_cost_is_in_gpu_hours_and_in_money_where_a_price_is_known(printed):
    plan = json.loads(printed(*EIGHT, "--rate", "20", "--gpu-price", "0.5", "--json"))
    cost = plan["cost"]
    assert cost["gpu_hours_per_hour"] == plan["chosen"]["gpus"] == 2
    assert cost["price_per_hour"] == 1.0
    hours = 2 / (20 * 200 * 3600) * 1e6
    assert cost["gpu_hours_per_million_tokens"] == pytest.approx(hours)
    assert cost["price_per_million_tokens"] == pytest.approx(hours / 2)
    assert json.loads(printed(*EIGHT, "--json"))["cost"]["price_per_hour"] is None


def test_what_is_not_met_ends_with_one_and_says_what_comes_nearest(printed):
    page = printed(*EIGHT, "--tpot-p95", "1ms", code=1)
    assert page.startswith("NOT MET, nearest: ")
    assert "over 1.0 ms" in page
    assert "Nothing meets the objectives" in page
    assert "one is enough" not in page


def test_a_model_that_fits_nowhere_is_told_what_would_do(printed):
    page = printed("Llama-3.1-405B", "--gpu", "A6000", code=1)
    assert "nearest that works: TP8 x PP4 (32 GPUs)" in " ".join(page.split())
    assert "nothing to deploy" in page
    assert page.startswith("NOT MET, nothing fits; nearest: TP1, bf16\n")
    assert "0 x" not in page


def test_what_is_served_in_place_of_a_plan_is_named_with_its_option(printed):
    words = ("Llama-3.1-405B", "--gpu", "H100", "--gpus-per-host", "8", "--hosts", "2")
    page = printed(*words)
    told = " ".join(page.partition("\nDeploy\n")[2].split())
    assert "does not place one replica on several hosts yet" in told
    assert "The best that is served: 2 x TP8, fp8: " in told
    assert "TPOT P95" in told
    assert "the same question with -tp 8 --weights fp8." in told
    servable = json.loads(printed(*words, "--json"))["deploy"]["servable"]
    pinned = json.loads(printed(*words, *servable.pop("pin").split(), "--json"))
    servable.pop("compared")
    assert pinned["chosen"] == servable
    assert pinned["deploy"]["hosts"]


def test_what_is_served_but_meets_less_is_not_called_the_best(printed):
    words = ("Llama-3.1-70B", "--gpu", "A6000", "--gpus-per-host", "8", "--workload", "rag")
    told = " ".join(printed(*words, "--ttft-p95", "3s").partition("\nDeploy\n")[2].split())
    assert "does not serve context parallelism" in told
    assert "What is served meets less; nearest: 1 x TP2 x PP4, bf16: too slow: TTFT P95" in told


def test_a_plan_without_flags_writes_no_files_that_deploy_and_says_why(capsys, tmp_path: Path):
    words = ("plan", "Mixtral-8x7B", "--gpu", "H200", "--out", str(tmp_path))
    assert main(list(words)) == 0
    told = capsys.readouterr()
    assert "Nothing else that was computed is served either" in told.out
    assert f"{tmp_path} has no files to deploy: ekiden does not serve" in told.err
    assert {file.name for file in tmp_path.iterdir()} == {"plan.txt", "plan.json"}


def test_an_answer_of_one_token_has_no_tpot(capsys, printed):
    words = (*EIGHT, "--output-tokens", "1")
    page, plan = printed(*words), json.loads(printed(*words, "--json"))
    assert "  TPOT " not in page
    assert "TPOT P95" not in page
    assert "a decode step" not in page
    assert "answers have one token" in page
    assert plan["chosen"]["latency"]["tpot_p95"] is None
    assert list(plan["asked"]["objectives"]) == ["ttft_p95"]
    assert {one["kind"] for one in plan["lost"]} == {"aggregated"}
    assert main(["plan", *words, "--tpot-p95", "50ms"]) == 2
    assert "answers of 1 token have no time between tokens" in capsys.readouterr().err


def test_simulated_answers_of_one_token_have_none_either(capsys):
    words = (*EIGHT, "--output-tokens", "1", "--rate", "20", "--simulate")
    assert main(["plan", *words]) == 0
    told = capsys.readouterr().out.partition("\nSimulated\n")[2]
    assert "TTFT" in told
    assert "TPOT" not in told


def test_p99_that_is_p95_is_explained_only_where_it_is(printed):
    assert "TTFT P99 is P95" not in printed(*EIGHT, "--rate", "2")
    full = json.loads(printed(*BIG, "--json"))
    assert full["chosen"]["latency"]["ttft_p99"] > full["chosen"]["latency"]["ttft_p95"] * 1.01
    assert "TTFT P99 is P95" not in printed(*BIG)
    words = ("Llama-3.1-8B", "--gpu", "A6000", "--gpus-per-host", "8", "--rate", "80")
    plan = json.loads(printed(*words, "--json"))
    latency, servers = plan["chosen"]["latency"], plan["certainty"]["ideal_queue_servers"]
    assert servers == plan["chosen"]["pools"][0]["replicas"]
    assert latency["ttft_p99"] <= latency["ttft_p95"] * 1.01
    assert f"the {servers} that compute prompts are taken as one ideal queue" in " ".join(
        printed(*words).split()
    )


def test_spare_replicas_are_said_on_the_page_and_the_rate_is_that_without_them(printed):
    words = (*EIGHT, "--spare-replicas", "2")
    page, plan = printed(*words), json.loads(printed(*words, "--json"))
    assert "with 2 replicas of each pool lost" in page
    assert "The rest still meets the objectives" in " ".join(page.split())
    bare = json.loads(printed(*EIGHT, "--json"))
    assert plan["chosen"]["rate"] == pytest.approx(6 / 8 * bare["chosen"]["rate"], rel=0.02)
    assert plan["asked"]["spare_replicas"] == 2


def test_two_pools_say_what_a_lost_gpu_of_each_takes(printed):
    told = " ".join(printed(*APART).partition("If one GPU fails")[2].split())
    assert "prefill: 2 GPUs stop with it, and 50% of its pool goes on." in told
    assert "decode: 2 GPUs stop with it, and nothing is served until it is back." in told


OLD = ("Llama-3.1-8B", "--gpu", "T4", "--gpus-per-host", "4", "--kv-cache-dtype", "fp8_e5m2")


@pytest.mark.parametrize("words", [EIGHT, BIG, APART, (*BIG, "--weights", "int8"), OLD])
def test_every_command_that_is_printed_is_one_of_ekiden(printed, words):
    plan = json.loads(printed(*words, "--json"))
    (lines,) = plan["deploy"]["hosts"]
    cards: list[str] = []
    for line in lines:
        said = shlex.split(line.replace("$REDIS_URL", "redis://127.0.0.1:6379/0"))
        if said[0].startswith("CUDA_VISIBLE_DEVICES="):
            cards += said.pop(0).partition("=")[2].split(",")
        assert said[0] == "ekiden"
        build_parser().parse_args(said[1:])
    assert len(cards) == len(set(cards)) == plan["chosen"]["gpus"], "no card is given twice"


def test_two_pools_have_their_own_layouts(printed):
    plan = json.loads(printed(*APART, "--json"))
    assert plan["chosen"]["kind"] == "disaggregated"
    assert [one["pool"] for one in plan["memory"]] == ["prefill", "decode"]
    lines = plan["deploy"]["hosts"][0]
    roles = [line.partition("ekiden serve ")[2].split()[0] for line in lines]
    assert set(roles) == {"prefill", "decode", "gateway"}


def test_a_model_that_ekiden_pulls_is_deployed_by_its_own_name(printed):
    assert "--model smollm2-135m-instruct " in printed("smollm2-135m-instruct", "--gpu", "l40s")


def test_the_overlay_gives_every_replica_cards_of_its_own(printed, tmp_path: Path):
    printed(*APART, "--out", str(tmp_path))
    services = yaml.safe_load((tmp_path / "compose.plan.yaml").read_text())["services"]
    base = yaml.safe_load(Path("compose/compose.yaml").read_text())["services"]
    taken: list[str] = []
    for name, service in services.items():
        role = name.partition("-")[0]
        assert role in base
        assert name == role or service["extends"] == {"file": "compose.yaml", "service": role}
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        taken += device["device_ids"]
        said = service["command"].replace("${EKIDEN_MODEL:?the model of the plan}", "m")
        build_parser().parse_args(shlex.split(said))
        assert f"serve {role}" in base[role]["command"]
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert len(taken) == len(set(taken)) == plan["chosen"]["gpus"]
    assert (tmp_path / "plan.txt").read_text().startswith(plan["chosen"]["name"])


def test_one_pool_turns_the_other_off(printed, tmp_path: Path):
    printed(*EIGHT, "--out", str(tmp_path))
    services = yaml.safe_load((tmp_path / "compose.plan.yaml").read_text())["services"]
    assert services.pop("prefill") == {"scale": 0}
    assert len(services) == 8


def test_the_script_is_one_for_each_host(printed, tmp_path: Path):
    printed(*BIG, "--hosts", "2", "--out", str(tmp_path))
    scripts = sorted(tmp_path.glob("*.sh"))
    assert [one.name for one in scripts] == ["host1-services.sh", "host2-services.sh"]
    for script in scripts:
        subprocess.run(["sh", "-n", str(script)], check=True)
    texts = [script.read_text() for script in scripts]
    assert ["serve gateway" in text for text in texts] == [True, False]
    assert not (tmp_path / "compose.plan.yaml").exists(), "compose/ is for one host"


def test_a_model_that_the_engine_does_not_serve_has_no_flags(printed, tmp_path: Path):
    page = printed("Mixtral-8x7B", "--gpu", "H200", "--out", str(tmp_path))
    assert "does not serve models of type mixtral yet" in page
    assert not list(tmp_path.glob("*.sh"))


def test_a_directory_is_planned_from_its_config(printed, tmp_path: Path):
    model = write_tiny_model(tmp_path / "tiny")
    plan = json.loads(printed(str(model / "config.json"), "--gpu", "l4", "--json"))
    assert plan["asked"]["model"] == str(model)


def test_cores_of_a_cpu_are_deployed_as_such(printed, tmp_path: Path):
    import msgspec

    from ekiden.planner.calibration import calibration
    from ekiden.planner.hardware import CPU_NAME, gpu

    cores = msgspec.structs.replace(gpu("l4"), name=f"{CPU_NAME}4")
    mine = msgspec.structs.replace(calibration("vllm"), device=cores)
    file = tmp_path / "here.json"
    file.write_bytes(msgspec.json.encode(mine))
    told = printed("Llama-3.2-1B", "--calibration", str(file))
    assert "ekiden serve decode" in told
    assert "--device cpu" in " ".join(told.split())
    assert "CUDA_VISIBLE_DEVICES" not in told


def test_a_plan_for_the_most_says_what_a_tenth_less_feels_like(printed):
    plan = json.loads(printed(*EIGHT, "--json"))
    room, most = plan["headroom"], plan["chosen"]
    assert room["rate"] == pytest.approx(0.9 * most["rate"])
    assert room["tpot_p95"] < most["latency"]["tpot_p95"]
    assert "which leaves a tenth as headroom: TTFT P95" in printed(*EIGHT)
    assert json.loads(printed(*EIGHT, "--rate", "4", "--json"))["headroom"] is None


def test_a_calibration_file_may_bring_its_own_device(printed, tmp_path: Path):
    import msgspec

    from ekiden.planner.calibration import calibration
    from ekiden.planner.hardware import gpu

    file = tmp_path / "mine.json"
    mine = msgspec.structs.replace(calibration("vllm"), name="my machine", device=gpu("l4"))
    file.write_bytes(msgspec.json.encode(mine))
    plan = json.loads(printed("Llama-3.2-1B", "--calibration", str(file), "--json"))
    assert plan["asked"]["gpu"] == "l4"
    assert plan["certainty"]["calibration"] == "my machine"
    page = printed("Llama-3.2-1B", "--calibration", str(file))
    assert "has not been measured on these machines" not in page
    assert "has not been measured on these machines" in " ".join(printed(*EIGHT).split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpus-per-host", "0"), "gpus per host 0 leaves nothing to plan for: choose 1 or more"),
        (("--hosts", "0"), "hosts 0 leaves nothing to plan for"),
        (("--gpus-per-host", "100000"), "choose 1 to 72 (72 in a host, 4,096 in all)"),
        (("--gpus-per-host", "8", "--hosts", "1000000"), "hosts 1000000 is more than plans are"),
        (("--rate", "1e7"), "rate 1e+07 is not requests a second: choose more than 0 and up to"),
        (("--gpu", "T4", "--weights", "bf16"), "bf16 begins with 8.0: choose fp16"),
        (("-tp", "65"), "TP 65 is more than the 32 query heads of Llama-3.1-8B: choose 1 to 32"),
        (("-pp", "2"), "PP2 takes 2 GPUs, and there are 1"),
        (("--max-model-len", "1000000"), "1000000 is more than the 131072 positions"),
        (("--max-model-len", "100"), "is less than the 400 tokens"),
        (("--gpu", "H1000"), "nearest are h100_sxm"),
        (("--workload", "chatt"), "nearest is chat; choose one of chat, rag, writing"),
        (("--interconnect", "infiniband"), "choose one of auto, nvlink, pcie, pcie-p2p"),
        (("--gpu", "l4", "--interconnect", "nvlink"), "l4 has no NVLink: choose pcie"),
        (("--weights", "fp9"), "nearest is fp8"),
        (("--smaller-weights", "int3"), "weight format 'int3' is not known"),
        (("--kv-cache-dtype", "int2"), "KV dtype 'int2' is not known: choose one of"),
        (("--calibration", "foo"), "choose one of vllm, trtllm, sglang"),
        (("--engine", "tgi"), "engine profile 'tgi' is not known"),
    ],
)
def test_odd_questions_are_refused_helpfully(capsys, words, message):
    assert main(["plan", "Llama-3.1-8B", "--gpu", "H100", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_question_without_a_model_or_a_gpu_is_refused(capsys):
    assert main(["plan"]) == 2
    assert "no MODEL" in capsys.readouterr().err
    assert main(["plan", "Llama-3.1-8B"]) == 2
    assert "no --gpu: choose one of a100_pcie" in capsys.readouterr().err
    assert main(["plan", "Lama-9", "--gpu", "H100"]) == 2
    assert "nearest are Llama-3-8B" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--tpot-p95", "50", "'50' is not a time: try 500ms or 1.5s"),
        ("--ttft-p95", "0s", "is not a time"),
        ("--rate", "0", "is not a number above 0"),
        ("--rate", "1e300", "'1e300' is not a number above 0 and up to 1,000,000,000"),
        ("--gpu-price", "inf", "is not a number above 0"),
        ("--ttft-p95", f"{10**30}s", "is not a time"),
        ("--concurrency", str(10**30), f"{10**19} is too large: at most 1,000,000,000"),
        ("--concurrency", "0", "0 is too small: at least 1"),
        ("--prefix-share", "1", "is not a share: 0 and up to below 1"),
    ],
)
def test_values_of_the_wrong_form_show_the_right_one(capsys, option, value, message):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "Llama-3.1-8B", "--gpu", "H100", option, value])
    assert message in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_one_sentence(capsys, tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("")
    assert main(["plan", *EIGHT, "--out", str(file / "below")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_named_itself(capsys, tmp_path: Path):
    assert main(["plan", *EIGHT, "--html", str(tmp_path)]) == 2
    assert f"{tmp_path} cannot be written" in capsys.readouterr().err


def test_a_checkpoint_at_hand_is_held_against_the_count(printed, tmp_path: Path):
    model = write_tiny_model(tmp_path / "tiny")
    sure = json.loads(printed(str(model), "--gpu", "l4", "--json", "--weights", "fp32"))[
        "certainty"
    ]
    assert sure["counted_bytes"] == pytest.approx(sure["checkpoint_bytes"], rel=0.01)
    assert "of tensors" in printed(str(model), "--gpu", "l4")


def test_a_trace_is_a_workload_with_its_own_rate_and_sharing(printed, tmp_path: Path):
    file = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 500 * i,
            "input_length": 1100,
            "output_length": 50,
            "hash_ids": [0, 1, 100 + i],
        }
        for i in range(21)
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    work = json.loads(printed("Llama-3.1-8B", "--gpu", "H100", "--trace", str(file), "--json"))
    asked = work["asked"]["workload"]
    assert asked["rate"] == pytest.approx(2.0)
    assert asked["prefix_share"] == pytest.approx(20 * 1024 / (21 * 1100))
    assert {kind["prompt"] for kind in asked["kinds"]} == {1100}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no request"),
        ('{"timestamp": 0}', "line 1 is no request (Object missing required field"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1}', "both must be 1 or more"),
    ],
)
def test_a_trace_that_is_none_names_the_line(capsys, tmp_path: Path, text, message):
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    assert main(["plan", "Llama-3.1-8B", "--gpu", "H100", "--trace", str(file)]) == 2
    assert message in capsys.readouterr().err


def test_the_report_has_three_pictures_and_needs_nothing_else(printed, tmp_path: Path):
    from xml.etree import ElementTree

    file = tmp_path / "plan.html"
    page = printed(*APART, "--html", str(file))
    text = file.read_text()
    pictures = [f"<svg{part.partition('</svg>')[0]}</svg>" for part in text.split("<svg")[1:]]
    trees = [ElementTree.fromstring(picture) for picture in pictures]
    lines, blocks = (
        [len(tree.findall(f"{{http://www.w3.org/2000/svg}}{part}")) for tree in trees]
        for part in ("polyline", "rect")
    )
    assert [count > 1 for count in lines] == [True, False, True]
    assert blocks[1] >= 6
    assert not re.search(r"<(script|link|img)|(src|href)=|url\(|@import", text)
    assert page.splitlines()[0] in text


def test_a_plan_that_fits_nowhere_has_a_report_without_pictures(printed, tmp_path: Path):
    file = tmp_path / "plan.html"
    printed("Llama-3.1-405B", "--gpu", "A6000", "--html", str(file), code=1)
    assert "<svg" not in file.read_text()


def test_the_example_in_the_docs_is_what_is_printed(printed):
    text = Path("docs/plan-example.md").read_text()
    command, _, page = text.partition("```console\n$ ")[2].removesuffix("```\n").partition("\n")
    assert printed(*shlex.split(command)[2:]) == page, "constants changed? print it anew"


def test_a_simulation_that_is_kinder_than_the_plan_says_so():
    from ekiden.cli.plan_simulate import section

    figures = {f"{what}_p{q}": 0.05 for what in ("ttft", "tpot") for q in (50, 95, 99)}
    told = {
        "latency": figures, "busy_share": {"decode": 1.0}, "requests": 9, "rate": 1.0, "missed": {},
        "cache_hit_share": 0.0, "failed": 0,
    }  # fmt: skip
    for computed, words in ((0.05, False), (0.09, True)):
        plan = {"simulated": told, "chosen": {"latency": figures | {"tpot_p50": computed}}}
        assert ("believe" in section(plan)) is words


def test_a_choice_is_checked_by_simulated_traffic(capsys):
    words = ("plan", "Llama-3.1-8B", "--gpu", "H100", "--rate", "4", "--simulate")
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    ours, computed = told["simulated"], told["chosen"]["latency"]
    assert ours["failed"] == 0
    assert not ours["missed"]
    assert ours["latency"]["tpot_p50"] == pytest.approx(computed["tpot_p50"], rel=0.1)
    assert ours["latency"]["ttft_p50"] == pytest.approx(computed["ttft_p50"], rel=0.2)
    assert main(list(words)) == 0
    page = capsys.readouterr().out.partition("\nSimulated\n")[2]
    assert "every objective was kept" in page
    assert "requests at 4/s" in page


def test_a_plan_that_misses_an_objective_under_traffic_says_so(capsys, monkeypatch):
    """As if the planner thought the replicas ten times as quick as the simulation does."""
    from ekiden.cli import plan_simulate

    monkeypatch.setattr(plan_simulate, "requests", _burst)
    words = ("plan", "Llama-3.1-8B", "--gpu", "H100", "--rate", "4", "--simulate")
    assert main(list(words)) == 1
    assert "objectives missed: TTFT P95" in capsys.readouterr().out


def _burst(decision, world, trace):
    from ekiden.sim.asked import Asked

    return [Asked(number=i, due_s=0.01 * i, prompt=900, output=20) for i in range(200)]


def test_what_cannot_serve_is_not_simulated(capsys):
    words = ("plan", "Llama-3.1-70B", "--gpu", "A6000", "--smaller-weights", "none", "--simulate")
    assert main(list(words)) == 2
    assert "--simulate" in capsys.readouterr().err


@pytest.mark.parametrize(("stated", "other"), [("tpot", "ttft"), ("ttft", "tpot")])
def test_an_objective_of_one_kind_leaves_the_other_assumed(printed, stated: str, other: str):
    """Else the most that is served within the one is what nobody would wait for in the other."""
    words = ("Llama-3.1-8B", "--gpu", "H100", f"--{stated}-p95", "70ms")
    asked = json.loads(printed(*words, "--json"))["asked"]
    assert set(asked["objectives"]) == {"ttft_p95", "tpot_p95"}
    assert (asked["assumed"], asked["objectives_assumed"]) == ([other], True)
    if stated == "tpot":
        assert "(TTFT assumed: state your own with --ttft-p95)" in printed(*words)


def test_r26_70b_in_8_bits_is_not_put_on_one_card_though_some_kv_would_be_left(printed):
    words = ("Llama-3.1-70B", "--gpu", "H100", "--gpus-per-host", "8", "--rate", "1", "--json")
    plan = json.loads(printed(*words))
    one = {"replicas": 0, "tp": 1, "pp": 1, "dp": 1, "ep": 1, "cp": 1}
    (eight,) = [o for o in plan["lost"] if o["weights"] == "fp8" and o["pools"] == [one]]
    assert "7712 tokens, and less than 5% of a card" in eight["refused"]


def test_a_step_that_is_nearly_always_alone_is_of_one_sequence(printed):
    page = printed("Llama-3.1-8B", "--gpu", "H100", "--rate", "0.01")
    assert "a decode step, 1 of at most" in page
    assert "a decode step of 1 sequence: " in page
