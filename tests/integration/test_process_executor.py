"""Rank processes: the same tokens as one thread, and no way to leave one behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_llama import (
    PROMPT,
    Driver,
    chunk,
    greedy,
    save_tiny_llama,
    tiny_config,
    transformers_greedy,
)

from ekiden.core.errors import DeadlineExceeded, InvariantBroken, ReplicaFailed, SetupError
from ekiden.engine.inline_executor import InlineExecutor
from ekiden.engine.process_executor import ProcessExecutor
from ekiden.layers.backends.native import cores
from ekiden.models.config import ModelConfig
from tests.unit.native.native_rig import needs_native

PROMPTS = [PROMPT, PROMPT[:9]]
ECHO = "echo_port:echo"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("tiny")
    return path, save_tiny_llama(path)


@pytest.fixture(scope="module")
def model_dir(reference: Any) -> Path:
    path: Path = reference[0]
    return path


Start = Callable[..., ProcessExecutor]


@pytest.fixture
def start(model_dir: Path) -> Iterator[Start]:
    """Starts replicas, closes them, and sees that no process is left."""
    started: list[ProcessExecutor] = []

    def begin(**fields: Any) -> ProcessExecutor:
        layout = {name: fields.pop(name) for name in ("tp", "pp", "core_sharing") if name in fields}
        config = tiny_config(model_dir, **layout)
        executor = ProcessExecutor(config, ModelConfig.from_dir(model_dir), epoch=7, **fields)
        started.append(executor)
        return executor

    yield begin
    for executor in started:
        executor.close()
        assert not any(map(alive, executor.processes))


def alive(pid: int) -> bool:
    """Whether the process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def until(condition: Callable[[], Any], limit_s: float) -> float:
    """Seconds until ``condition`` holds; fails after ``limit_s``."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < limit_s, "it did not happen in time"
        time.sleep(0.01)
    return time.monotonic() - begin


class Mail:
    """What the ports said."""

    def __init__(self, executor: ProcessExecutor) -> None:
        self.heard: list[tuple[int, bytes]] = []
        self._changed = threading.Condition()
        executor.on_port_message(self._listen)

    def _listen(self, rank: int, message: bytes) -> None:
        with self._changed:
            self.heard.append((rank, message))
            self._changed.notify_all()

    def wait(self, count: int) -> list[tuple[int, bytes]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.heard) >= count, 20.0)
            return sorted(self.heard)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_tokens_equal_one_thread_and_transformers_with_steps_in_flight(
    start: Start, reference: Any, tp: int, pp: int
) -> None:
    path, model = reference
    inline = InlineExecutor(tiny_config(path), ModelConfig.from_dir(path))
    expected = [Driver(inline).generate(prompt, 10, cut=16) for prompt in PROMPTS]
    inline.close()
    assert expected == [transformers_greedy(model, prompt, 10) for prompt in PROMPTS]
    executor = start(tp=tp, pp=pp)
    driver = Driver(executor)
    assert [driver.generate(prompt, 10, cut=16) for prompt in PROMPTS] == expected
    if executor.max_in_flight > 1:
        assert driver.generate_interleaved(PROMPTS, 10) == expected
    assert executor.healthy() is None


def test_ports_are_opened_told_and_heard(start: Start) -> None:
    told: list[tuple[str, int, int]] = []
    executor = start(tp=2, port=ECHO, progress=lambda *news: told.append(news))
    assert executor.endpoints == (b"0 of epoch 7", b"1 of epoch 7")
    assert told[-1][0] == "loading weights"
    assert told[-1][1] == told[-1][2] > 0
    mail = Mail(executor)
    big = b"big " + bytes(range(256)) * 8192
    executor.send_port(b"all")
    executor.send_port(big, rank=1)
    assert mail.wait(3) == [(0, b"all"), (1, b"all"), (1, big)]
    Driver(executor).run(chunk(PROMPT, 0, 20, session=5, samples=(greedy(),)))
    assert mail.wait(5) == [
        (0, b"5 until 20"),
        (0, b"all"),
        (1, b"5 until 20"),
        (1, b"all"),
        (1, big),
    ]


def test_ranks_ignore_what_is_the_drivers_to_act_on(start: Start) -> None:
    executor = start(port=ECHO)
    mail = Mail(executor)
    executor.send_port(b"interrupt")
    assert mail.wait(1) == [(0, b"interrupt")]
    assert os.getpgid(executor.processes[0]) != os.getpgid(0)


def test_submitting_returns_at_once_whatever_the_ranks_are_at(start: Start) -> None:
    executor = start(port=ECHO)
    mail = Mail(executor)
    executor.send_port(b"freeze 3")
    mail.wait(1)
    # Megabytes, so that no socket buffer takes them while the rank does not read.
    bulky = greedy(output=tuple(range(120)) * 20000, presence_penalty=1e-6)
    driver = Driver(executor)
    driver.submit(chunk(PROMPT, 0, 9, samples=(bulky,)))
    assert mail.heard == [(0, b"started")], "it returned only when the rank was free again"
    assert driver.collect().keys() == {1}


def test_a_killed_rank_is_named_at_once_and_its_peer_is_not_left(start: Start) -> None:
    executor = start(tp=2, port=ECHO)
    mail = Mail(executor)
    executor.send_port(b"freeze 60", rank=1)
    mail.wait(1)
    driver = Driver(executor)
    driver.submit(chunk(PROMPT, 0, 5, samples=(greedy(),)))
    os.kill(executor.processes[1], signal.SIGKILL)
    # Long before any deadline: by its end, not by its silence.
    with pytest.raises(ReplicaFailed, match="rank 1 was killed by SIGKILL"):
        driver.collect()
    assert executor.healthy() == "rank 1 was killed by SIGKILL"
    with pytest.raises(ReplicaFailed, match="SIGKILL"):
        driver.submit(chunk(PROMPT, 0, 5))
    executor.close()
    assert not any(map(alive, executor.processes))


def test_a_rank_that_raises_ends_the_replica_with_its_reason(start: Start) -> None:
    executor = start(tp=2, port=ECHO)
    executor.send_port(b"raise the disk is gone", rank=1)
    with pytest.raises(ReplicaFailed, match="rank 1: RuntimeError: the disk is gone"):
        Driver(executor).run(chunk(PROMPT, 0, 5))


def test_a_stopped_rank_is_unhealthy_and_a_busy_one_is_not(start: Start) -> None:
    executor = start(tp=2, port=ECHO, silence_s=3.0)
    mail = Mail(executor)
    executor.send_port(b"busy 4.0", rank=0)
    mail.wait(1)
    deadline = time.monotonic() + 3.8
    while time.monotonic() < deadline:
        assert executor.healthy() is None
        time.sleep(0.1)
    stopped = executor.processes[1]
    os.kill(stopped, signal.SIGSTOP)
    until(executor.healthy, limit_s=10.0)
    assert f"rank 1 (process {stopped}) has not moved for" in (executor.healthy() or "")
    os.kill(stopped, signal.SIGCONT)
    until(lambda: executor.healthy() is None, limit_s=10.0)
    os.kill(stopped, signal.SIGSTOP)
    executor.close()
    assert not alive(stopped)


def test_a_step_that_takes_too_long_is_a_deadline_and_its_result_comes_later(
    start: Start,
) -> None:
    executor = start(port=ECHO)
    driver = Driver(executor)
    executor.send_port(b"busy 0.5")
    driver.submit(chunk(PROMPT, 0, 5, samples=(greedy(),)))
    with pytest.raises(DeadlineExceeded, match=r"step 1 was not finished by ranks \[0\]"):
        executor.collect(0.05)
    assert driver.collect().keys() == {1}


@pytest.mark.parametrize("command", ["echo", "busy 60", "freeze 60"])
def test_ranks_end_with_a_killed_driver_whatever_they_are_at(model_dir: Path, command: str) -> None:
    script = Path(__file__).parent / "orphan_maker.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, str(script), str(model_dir), command],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(alive, pids))
        driver.kill()
        until(lambda: not any(map(alive, pids)), limit_s=20.0)


def test_ranks_outlive_the_thread_that_started_them(start: Start) -> None:
    # Linux ends a child with the thread that spawned it, when it is told to end it at all.
    made: list[ProcessExecutor] = []
    thread = threading.Thread(target=lambda: made.append(start()))
    thread.start()
    thread.join()
    time.sleep(0.2)
    assert Driver(made[0]).run(chunk(PROMPT, 0, 5)) == {}


def test_a_missing_shard_is_the_same_sentence_as_in_one_process(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, shards="200KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) >= 3
    shards[1].unlink()
    model, sentences = ModelConfig.from_dir(tmp_path), []
    for executor in (InlineExecutor, ProcessExecutor):
        with pytest.raises(SetupError) as caught:
            executor(tiny_config(tmp_path, tp=2), model)
        sentences.append(caught.value.message)
    assert sentences[0] == sentences[1]
    assert shards[1].name in sentences[0]


def test_what_cannot_start_says_why_and_leaves_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SetupError, match=r"'echo_port:missing' cannot be loaded"):
        start(port="echo_port:missing")
    with pytest.raises(ReplicaFailed, match="rank 1 exited with code 3"):
        start(tp=2, port="echo_port:exits")
    spawned: list[int] = []
    popen = subprocess.Popen

    def spy(*args: Any, **kwargs: Any) -> Any:
        process = popen(*args, **kwargs)
        spawned.append(process.pid)
        return process

    monkeypatch.setattr(subprocess, "Popen", spy)
    with pytest.raises(DeadlineExceeded, match=r"ranks \[0\] were not ready within 4 s"):
        start(port="echo_port:hangs", start_timeout_s=4.0)
    assert len(spawned) == 1
    assert not alive(spawned[0])


def test_a_port_message_without_a_port_is_refused(start: Start) -> None:
    executor = start()
    assert executor.endpoints == ()
    with pytest.raises(InvariantBroken, match="have none"):
        executor.send_port(b"x")
    executor.close()
    executor.close()
    assert not [path for path in Path("/dev/shm").glob("*ekiden*") if path.is_file()]


def seated() -> set[int]:
    """Processes that share this host's cores."""
    table = Path(f"/dev/shm/ekiden-{os.geteuid()}/cores")
    if not table.exists():
        return set()
    return {seat.pid for seat in cores._Table.from_buffer_copy(table.read_bytes())}


@needs_native
def test_ranks_share_cores_where_they_are_told_to(start: Start) -> None:
    sharing, alone = start(tp=2, core_sharing=True), start()
    assert set(sharing.processes) <= seated()
    assert not set(alone.processes) & seated()


def test_the_driver_is_imported_without_torch() -> None:
    code = "import ekiden.engine.process_executor, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_rank_logs_by_name_which_kernels_compute(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    start(tp=2, name="decode-7").close()
    said = capfd.readouterr().err.splitlines()
    for rank in (0, 1):
        assert any(f"[decode-7 rank {rank}]" in line and "kernels of cpu" in line for line in said)
