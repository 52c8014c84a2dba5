"""``ekiden up`` supervises: one banner, and however it ends, no process is left."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from standin import NAMES

WAIT_S = 30.0
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
Start = Callable[..., "Run"]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def works_in(pid: int, folder: Path) -> bool:
    try:
        return Path(f"/proc/{pid}/cwd").readlink() == folder
    except OSError:
        return False


def processes_of(run_dir: Path) -> list[int]:
    """Processes, zombies excepted, that name the run folder or, as Redis does, work in it."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if str(run_dir) in command_line(pid) or works_in(pid, run_dir)]


class Run:
    """A running ``up`` over stand-ins."""

    def __init__(self, run_dir: Path, *options: str) -> None:
        self.run_dir = run_dir
        argv = [sys.executable, str(Path(__file__).with_name("standin.py")), "up", str(run_dir)]
        env = {key: value for key, value in os.environ.items() if key != "REDIS_URL"}
        self.process = subprocess.Popen(
            [*argv, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
        )
        self.output = ""
        self._seen = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._seen:
                self.output += line
                self._seen.notify_all()

    def wait_for(self, words: str) -> None:
        with self._seen:
            found = self._seen.wait_for(lambda: words in self.output, WAIT_S)
        assert found, self.output

    def end(self) -> int:
        code = self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        return code

    def log(self, name: str) -> str:
        return (self.run_dir / f"{name}.log").read_text()

    def pid(self, name: str) -> int:
        if name == "redis":
            return next(pid for pid in self.left() if works_in(pid, self.run_dir))
        return int(re.search(r"begins with pid (\d+)", self.log(name))[1])

    def left(self) -> list[int]:
        return processes_of(self.run_dir)

    def nothing_left(self) -> bool:
        until = time.monotonic() + WAIT_S
        while self.left() and time.monotonic() < until:
            time.sleep(0.05)
        return not self.left()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    runs: list[Run] = []

    def begin(*options: str) -> Run:
        runs.append(Run(tmp_path, *options))
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
        run.end()
        assert run.process.stdout is not None
        run.process.stdout.close()
        assert run.nothing_left()


READY = "Ctrl-C drains and ends all of it."


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains_everything_and_exits_0(start: Start, number: int):
    run = start()
    run.wait_for(READY)
    assert len(run.left()) == 5  # itself, redis, prefill, decode, gateway
    run.process.send_signal(number)
    assert run.end() == 0
    assert run.left() == []
    for name in NAMES:
        assert run.log(name).endswith(f"{name} drained\n")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not here")
def test_the_banner_has_a_curl_line_that_works(start: Start):
    run = start("--served-model-name", "m")
    run.wait_for(READY)
    curl = re.search(r"curl .*?\}'", run.output, re.DOTALL)[0]
    done = subprocess.run(["/bin/sh", "-c", curl], capture_output=True, text=True, timeout=WAIT_S)
    assert "A sash." in done.stdout
    assert '"model": "m"' in curl


@pytest.mark.parametrize("name", ["redis", "prefill-0", "gateway"])
def test_a_childs_death_ends_all_and_exits_1_with_its_last_words(start: Start, name: str):
    run = start()
    run.wait_for(READY)
    os.kill(run.pid(name), signal.SIGKILL)
    assert run.end() == 1
    assert run.left() == []
    assert f"{name} ended: killed by SIGKILL" in run.output
    assert run.log(name).splitlines()[-1] in run.output
    assert run.log("decode-0").endswith("decode-0 drained\n")


def test_a_set_up_that_cannot_work_exits_2_with_the_childs_sentence(start: Start):
    run = start("--misbehave", "prefill-0=die-at-start")
    assert run.end() == 2
    assert "prefill-0 has no model" in run.output
    assert run.left() == []


def test_not_ready_in_time_exits_3_and_names_who(start: Start):
    run = start("--misbehave", "decode-0=never-ready", "--startup-timeout", "5")
    assert run.end() == 3
    assert re.search(r"not ready within \d s: decode-0$", run.output, re.MULTILINE)
    assert run.left() == []


def test_who_is_deaf_to_sigterm_is_killed_and_named(start: Start):
    run = start("--misbehave", "decode-0=deaf")
    run.wait_for(READY)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 0
    assert "decode-0 did not end in time and was killed" in run.output
    assert run.left() == []


def test_a_signal_during_start_up_ends_all(start: Start):
    run = start("--misbehave", "decode-0=never-ready")
    run.wait_for("gateway")
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 0
    assert run.left() == []


def test_everything_ends_when_nobody_reads_the_output_any_more(tmp_path: Path):
    """In a pipe, as `ekiden up | tee`, whose reader was killed."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    argv = [sys.executable, str(Path(__file__).with_name("standin.py")), "up", str(run_dir)]
    errors = tmp_path / "errors"
    with (
        errors.open("w") as file,
        subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=file, text=True) as process,
    ):
        assert process.stdout is not None
        while READY not in process.stdout.readline():
            continue
        process.stdout.close()
        process.terminate()
        try:
            process.wait(WAIT_S)
        finally:
            process.kill()
    assert processes_of(run_dir) == []
    assert "BrokenPipeError" not in errors.read_text()


def test_children_end_when_up_itself_is_killed(start: Start):
    run = start()
    run.wait_for(READY)
    run.process.kill()
    run.end()
    assert run.nothing_left()
    assert run.log("decode-0").endswith("decode-0 drained\n")


def test_ask_puts_one_question_and_ends(start: Start):
    run = start("--ask", "What is handed over?")
    assert run.end() == 0
    assert "> What is handed over?\n\nA sash.\n" in run.output
    assert re.search(r"output tokens +2", run.output)
    assert run.left() == []


def test_more_replicas_are_started_as_asked(start: Start):
    run = start("--prefill", "2", "--decode", "2")
    run.wait_for(READY)
    for name in ("prefill-1", "decode-1"):
        assert f"{name}  ready" in re.sub(" +", "  ", run.output)
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 0


@pytest.mark.slow
def test_a_real_question_is_answered_over_both_pools(tmp_path: Path):
    question = "Tell me who runs in a relay race, what they hand over, and why. " * 8
    argv = [sys.executable, "-m", "ekiden.cli", "up", "--port", "0", "--run-dir", str(tmp_path)]
    done = subprocess.run(
        [*argv, "--ask", question, "--max-tokens", "16"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"computed on prefill +[1-9]", done.stdout)
    assert re.search(r"KV moved +[0-9.]+ MB", done.stdout)
    assert re.search(r"wire +(shm|ucx|tcp)", done.stdout)
    assert "fallback" not in done.stdout
    assert processes_of(tmp_path) == []
