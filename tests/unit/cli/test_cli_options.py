"""What is typed reaches the configuration structs; what cannot work is refused in a sentence."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ekiden.cli import kv_options
from ekiden.cli.kv_options import check_shared_folder
from ekiden.cli.main import build_parser, main
from ekiden.cli.options import size, speculative
from ekiden.cli.serve import gateway_config, gateway_models, service_config
from ekiden.core.config import EngineConfig, ServiceConfig, SpeculativeConfig
from ekiden.core.errors import SetupError

MODEL = Path("/models/m")


def worker(*options: str, role: str = "decode") -> ServiceConfig:
    args = build_parser().parse_args(["serve", role, "--model", "m", *options])
    return service_config(args, MODEL, "m")


def test_defaults_are_those_of_the_structs():
    config = worker()
    plain = ServiceConfig(role="decode", engine=EngineConfig(model_dir=MODEL, model_name="m"))
    assert msgspec.structs.asdict(config) == msgspec.structs.asdict(plain)


def test_stages_of_a_prefill_replica_are_balanced_for_prefill_alone():
    assert worker(role="prefill").engine.prefill_only
    assert not worker(role="decode").engine.prefill_only


def test_every_option_reaches_its_field():
    config = worker(
        *("-tp", "3", "-pp", "2", "--block-size", "32", "--dtype", "float32"),
        *("--max-model-len", "100", "--num-gpu-blocks-override", "7"),
        *("--kv-cache-memory", "2MiB", "--max-num-batched-tokens", "99"),
        *("--gpu-memory-utilization", "0.5"),
        *("--speculative-config", '{"num_speculative_tokens": 4, "prompt_lookup_max": 3}'),
        *("--max-num-seqs", "9", "--threads-per-rank", "4", "--no-enable-prefix-caching"),
        "--no-async-scheduling",
        *("--host", "0.0.0.0", "--port", "5", "--advertise", "a:5", "--replica-id", "d-1"),
        *("--redis", "redis://h:1/0", "--kv-transport", "tcp", "--drain-grace", "1.5"),
        *("--ready-file", "/r", "--local-prefill-tokens", "0", "--enable-kv-debug"),
    )
    engine = EngineConfig(
        model_dir=MODEL,
        model_name="m",
        tensor_parallel_size=3,
        pipeline_parallel_size=2,
        block_size=32,
        dtype="float32",
        max_model_len=100,
        num_gpu_blocks_override=7,
        kv_cache_memory_bytes=2 << 20,
        gpu_memory_utilization=0.5,
        max_num_batched_tokens=99,
        max_num_seqs=9,
        threads_per_rank=4,
        enable_prefix_caching=False,
        async_scheduling=False,
        speculative_config=SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_max=3),
    )
    assert config == ServiceConfig(
        role="decode",
        engine=engine,
        host="0.0.0.0",
        port=5,
        advertise="a:5",
        replica_id="d-1",
        redis_url="redis://h:1/0",
        kv_transport="tcp",
        drain_grace_s=1.5,
        ready_file="/r",
        local_prefill_tokens=0,
        enable_kv_debug=True,
    )


@pytest.mark.parametrize(
    "config",
    [
        SpeculativeConfig(),
        SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_max=3, prompt_lookup_min=1),
    ],
)
def test_speculation_reads_what_it_writes_for_its_children(config: SpeculativeConfig):
    assert speculative(str(config)) == config


def test_secrets_come_from_the_environment_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EKIDEN_SECRET", "s3cret")
    monkeypatch.setenv("EKIDEN_API_KEY", "key")
    assert worker().secret == "s3cret"
    args = build_parser().parse_args(["serve", "gateway", "--model", "m", "--redis", "redis://h"])
    config = gateway_config(args, {"m": MODEL})
    assert (config.secret, config.api_key) == ("s3cret", "key")


def test_redis_url_option_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("REDIS_URL", "redis://from-env")
    assert worker().redis_url == "redis://from-env"
    assert worker("--redis", "redis://given").redis_url == "redis://given"


def test_gateway_serves_several_models_by_name(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert gateway_models(paths, []) == {"a": tmp_path / "a", "b": tmp_path / "b"}
    assert gateway_models(paths, ["x", "y"]) == {"x": tmp_path / "a", "y": tmp_path / "b"}


def test_vllms_spelling_of_the_kv_memory_is_understood_too():
    assert worker("--kv-cache-memory-bytes", "3MiB") == worker("--kv-cache-memory", "3MiB")


@pytest.mark.parametrize("text", ["auto", "tcp", "shm,ucx,tcp", "tcp, shm"])
def test_wires_are_auto_or_names(text: str):
    assert worker("--kv-transport", text).kv_transport == text.replace(" ", "")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rdma", "'rdma' is not a wire for KV: choose auto, or some of shm, ucx, tcp, nixl"),
        ("", "'' is not a wire for KV"),
        ("tcp,", "'' is not a wire for KV"),
        ("auto,tcp", "auto stands alone and tries shm, ucx, tcp"),
        ("tcp,shm,tcp", "'tcp,shm,tcp' names a wire twice"),
        ("shm,nixl", "nixl needs a package that is not installed here: pip install 'ekiden[nixl]'"),
    ],
)
def test_wires_that_cannot_be_are_refused_before_a_model_is_loaded(
    text: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    monkeypatch.setattr(kv_options, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        worker("--kv-transport", text)
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("command", [("serve", "decode", "--model"), ("up",)])
def test_a_shared_folder_that_is_not_there_is_refused_before_the_model_is_looked_for(
    command: tuple[str, ...], tmp_path: Path, capsys: Any
):
    gone = str(tmp_path / "nowhere")
    assert main([*command, str(tmp_path / "model"), "--port", "0", "--kv-shm-dir", gone]) == 2
    assert f"--kv-shm-dir {gone} is not a folder: make it first, or mount it" in (
        capsys.readouterr().err
    )


def test_a_shared_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kv_options.os, "access", lambda path, mode: False)
    with pytest.raises(SetupError, match=f"cannot be written by user {os.geteuid()}"):
        check_shared_folder(str(tmp_path))


def test_a_shared_folder_in_which_no_socket_can_be_made_is_refused(tmp_path: Path):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    for folder, why in {
        str(long): "no socket can be made there: AF_UNIX path too long",
        "/proc/self/fd": "no socket can be made there|cannot be written",
        str(tmp_path / ("x" * 300)): "is not a folder",
    }.items():
        with pytest.raises(SetupError, match=why):
            check_shared_folder(folder)
    check_shared_folder(str(tmp_path))
    check_shared_folder("")
    assert [path.name for path in tmp_path.iterdir()] == ["x" * 100]


@pytest.mark.parametrize(
    ("text", "value"),
    [("1024", 1024), ("1GiB", 1 << 30), ("1.5K", 1500), ("500MB", 500_000_000), ("2gi", 2 << 30)],
)
def test_sizes_are_read_with_units(text: str, value: int):
    assert size(text) == value


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serve", "decode", "--model", "m", "-tp", "0"], "at least 1"),
        (["serve", "decode", "--model", "m", "--block-size", "x"], "not a whole number"),
        (["serve", "decode", "--model", "m", "--kv-cache-memory-bytes", "1 TB"], "1GiB"),
        (["serve", "decode", "--model", "m", "--gpu-memory-utilization", "90"], "up to 1"),
        (["serve", "decode", "--model", "m", "--drain-grace", "nan"], "number of seconds"),
        (["serve", "decode", "--model", "m", "--dtype", "int8"], "bfloat16"),
        (["serve", "decode", "--model", "m", "--block", "16"], "unrecognized"),
        (["up", "--decode", "0"], "at least 1"),
        (["up", "--speculative-config", "4"], "num_speculative_tokens, prompt_lookup_max"),
        (["up", "--speculative-config", '{"prompt_lookup_max": 3}'], "lacks num_speculative"),
        (["up", "--port", "65536"], "0 to 65535"),
        (["serve", "decode", "--model", "m", "--port", "99999"], "0 to 65535"),
    ],
)
def test_a_wrong_value_is_refused_with_what_would_be_right(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serve", "decode", "--model", "nonesuch"], "smollm2-135m-instruct"),
        (["serve", "decode", "--model", "./none/such"], "no such directory"),
        (["up", "./nonesuch", "--port", "0"], "no such directory"),
        (["up", "{dir}", "--host", "192.0.2.1", "--port", "0"], "--host must be an address"),
        (["audit", "--redis", "redis://127.0.0.1:1/0"], "cannot reach Redis"),
        (["serve", "decode", "--model", "{dir}", "--block-size", "24"], "multiple of the granule"),
        (["up", "{dir}", "--port", "0", "--threads-per-rank", "1025"], "choose 1 to 1024, or 0"),
        (
            [
                "up",
                "{dir}",
                "--port",
                "0",
                "--speculative-config",
                '{{"num_speculative_tokens": 99}}',
            ],
            "num_speculative_tokens is 99: use 0 to 64",
        ),
        (["serve", "gateway", "--model", "{dir}"], "--redis URL"),
        (["serve", "gateway", "--model", "{dir}", "--model", "{dir}"], "one name"),
        (["serve", "decode", "--model", "{empty}"], "no config.json"),
        (["models", "pull", "nonesuch"], "smollm2-135m-instruct"),
        (["models", "import-gguf", "{dir}/no.gguf", "--out", "{dir}/o"], "does not exist"),
        (["models", "import-gguf", "x.gguf", "--out", "{dir}"], "exists already"),
        (["audit"], "--redis URL"),
        (["chat", "hi", "--url", "http://127.0.0.1:1"], "no gateway answers"),
        (["chat", "hi", "--url", "nonsense"], "not an HTTP address"),
        (["up", "{dir}", "--port", "0", "--block-size", "24"], "multiple of the granule"),
        (["up", "{dir}", "--port", "0", "--redis", "nonsense"], "nonsense"),
        (["up", "{dir}", "--port", "0", "--redis", "redis://127.0.0.1:1/0"], "does not answer"),
    ],
)
def test_a_setup_that_cannot_work_is_one_sentence_and_exit_code_2(
    argv: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    monkeypatch.delenv("REDIS_URL", raising=False)
    places = {"dir": tmp_path / "model", "empty": tmp_path / "empty"}
    for folder in places.values():
        folder.mkdir()
    (places["dir"] / "config.json").write_text("{}")
    assert main([text.format(**places) for text in argv]) == 2
    err = capsys.readouterr().err.strip()
    assert err.startswith("ekiden: ")
    assert words in err
    assert len(err.splitlines()) == 1
