"""Fetches one package with the pip or uv that is here, as the user has configured it.

No index is named, so mirrors, find-links folders and offline set-ups work as they do for every
other package. pip comes first: its configuration is the one that most people have. uv has no
download command, so it installs into a folder, without dependencies.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from ekiden.core.env import for_child, search_path
from ekiden.core.errors import SetupError

FETCH_TIMEOUT_S = 1800.0
_POLL_S = 0.2

Commands = Callable[[str, Path], list[str]]


def fetch_package(
    requirement: str,
    into: Path,
    *,
    progress: Callable[[int], None],
    command: Commands | None = None,
    timeout_s: float = FETCH_TIMEOUT_S,
) -> Path:
    """Unpack the package's files into a folder under ``into`` and return it.

    ``progress`` is called with the bytes on disk so far. Raises SetupError with the tool's own
    last words when it fails, and when it takes longer than ``timeout_s``.
    """
    target, scratch = into / "package", into / "scratch"
    for folder in (target, scratch):
        folder.mkdir(parents=True)
    argv = (command or _command)(requirement, target)
    env = for_child(TMPDIR=str(scratch))  # so that what arrives can be measured
    with (into / "fetch.log").open("w+b") as log:
        child = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, env=env)
        try:
            _wait(child, lambda: progress(_bytes_under(into)), timeout_s)
        finally:
            child.kill()
            child.wait()
    if child.returncode:
        raise SetupError(f"could not fetch {requirement}: {_last_words(into / 'fetch.log')}")
    for wheel in target.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
    return target


def _command(requirement: str, target: Path) -> list[str]:
    if importlib.util.find_spec("pip"):
        pip = [sys.executable, "-P", "-m", "pip", "download", "--disable-pip-version-check"]
        only = ["--no-deps", "--only-binary", ":all:"]
        return [*pip, *only, "--dest", str(target), requirement]
    if uv := shutil.which("uv", path=_search_path()):
        return [uv, "pip", "install", "--no-deps", "--target", str(target), requirement]
    raise SetupError(f"fetching {requirement} needs pip or uv, and neither is here")


def _search_path() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), search_path()])


def _wait(child: subprocess.Popen[bytes], tick: Callable[[], None], timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while True:
        tick()
        try:
            child.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            if time.monotonic() > until:
                raise SetupError(f"the download took longer than {timeout_s:.0f} s") from None
        else:
            return


def _bytes_under(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).stat().st_size
            except FileNotFoundError:  # moved while we looked
                continue
    return total


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["it said nothing"])[-1].strip()
