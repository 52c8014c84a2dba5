"""What ``ekiden up`` starts follows from its options."""

from pathlib import Path

import pytest
from tiny_llama import save_tiny_llama

from ekiden.cli.deployment import Pool, check_model, gateway_url
from ekiden.cli.main import build_parser
from ekiden.cli.serve import service_config
from ekiden.cli.up import deployment, run_folder, threads_for
from ekiden.core.config import ServiceConfig
from ekiden.core.errors import SetupError
from ekiden.core.ready_file import write_ready_file
from ekiden.rpc.listening import check_address


def workers(tmp_path: Path, *options: str) -> dict[str, ServiceConfig]:
    """The configuration each started worker would read from its own command line."""
    args = build_parser().parse_args(["up", str(tmp_path), "--served-model-name", "m", *options])
    specs = deployment(args, tmp_path).workers(tmp_path, "redis://r:1/0")
    found = {}
    for spec in specs:
        # -P: a file of the user's that is called http.py must not be what a service imports.
        assert spec.argv[1:5] == ("-P", "-m", "ekiden.cli", "serve")
        read = build_parser().parse_args(spec.argv[4:])
        found[spec.name] = service_config(read, tmp_path, read.served_model_name)
    return found


def test_the_default_is_a_real_reshard(tmp_path: Path):
    configs = workers(tmp_path)
    splits = {name: config.engine.tensor_parallel_size for name, config in configs.items()}
    assert splits == {"prefill-0": 2, "decode-0": 1}
    assert {config.engine.model_name for config in configs.values()} == {"m"}
    assert {config.redis_url for config in configs.values()} == {"redis://r:1/0"}


def test_options_reach_the_workers_they_are_for(tmp_path: Path):
    configs = workers(
        tmp_path,
        *("--prefill", "2", "--prefill-tp", "3", "--prefill-pp", "2", "--decode-pp", "4"),
        *("--dtype", "float32", "--kv-cache-memory-bytes", "3MiB", "--no-enable-prefix-caching"),
        "--no-async-scheduling",
        *("--local-prefill-tokens", "5", "--drain-grace", "2.5", "--threads-per-rank", "7"),
    )
    assert set(configs) == {"prefill-0", "prefill-1", "decode-0"}
    engines = {name: config.engine for name, config in configs.items()}
    assert engines["prefill-1"].tensor_parallel_size == 3
    assert engines["prefill-1"].pipeline_parallel_size == 2
    assert engines["decode-0"].pipeline_parallel_size == 4
    for name, config in configs.items():
        assert config.replica_id == name
        assert config.drain_grace_s == 2.5
        assert config.engine.dtype == "float32"
        assert config.engine.kv_cache_memory_bytes == 3 << 20
        assert not config.engine.enable_prefix_caching
        assert not config.engine.async_scheduling
        assert config.engine.threads_per_rank == 7
    assert configs["decode-0"].local_prefill_tokens == 5


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (16, 2), (64, 9)])
def test_all_ranks_of_the_deployment_share_the_cores(cores: int, threads: int):
    pools = [Pool(role="prefill", size=2, tp=2, pp=1), Pool(role="decode", size=1, tp=1, pp=3)]
    assert threads_for(pools, cores) == threads


def test_ranks_lend_one_another_cores_unless_their_threads_are_given(tmp_path: Path):
    assert all(config.engine.core_sharing for config in workers(tmp_path).values())
    told = workers(tmp_path, "--threads-per-rank", "2")
    assert not any(config.engine.core_sharing for config in told.values())
    both = workers(tmp_path, "--threads-per-rank", "2", "--core-sharing")
    assert all(config.engine.core_sharing for config in both.values())


def test_a_port_in_use_is_refused_before_anything_starts():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=f":{port} .*choose another --port, or 0"):
            check_address("127.0.0.1", port)
    check_address("127.0.0.1", 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--decode-tp", "7"), "--decode-tp 7 is more than the model's 6 query heads"),
        (("--prefill-pp", "5"), "--prefill-pp 5 is more than the model's 4 layers"),
    ],
)
def test_a_split_that_cannot_work_is_refused_by_the_name_of_its_option(
    tmp_path: Path, options: tuple[str, str], words: str
):
    save_tiny_llama(tmp_path, num_attention_heads=6, hidden_size=48)
    args = build_parser().parse_args(["up", str(tmp_path), *options])
    with pytest.raises(SetupError, match=words):
        check_model(deployment(args, tmp_path))
    none = build_parser().parse_args(["up", str(tmp_path), "--prefill", "0", "--prefill-tp", "9"])
    check_model(deployment(none, tmp_path))


def test_a_run_folder_that_cannot_be_written_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match=r"--run-dir .*file/logs cannot be written"):
        run_folder(tmp_path / "file" / "logs")


def test_a_ready_file_that_cannot_be_written_is_refused(tmp_path: Path):
    with pytest.raises(SetupError, match=r"--ready-file .*cannot be written"):
        write_ready_file(str(tmp_path / "nonesuch" / "ready"), {})


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("0.0.0.0:8000", "http://127.0.0.1:8000"),
        ("[::]:8000", "http://127.0.0.1:8000"),
        ("[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_a_wildcard_address_is_dialled_by_loopback(tmp_path: Path, address: str, url: str):
    (tmp_path / "ready").write_text(f'{{"address": "{address}"}}')
    assert gateway_url(tmp_path / "ready") == url
