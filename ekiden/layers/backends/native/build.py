"""Builds the library of kernels, once for this machine and compiler.

``python -m ekiden.layers.backends.native.build`` does it ahead of the first start. With a folder
behind it, it builds there, for other machines: they find it by ``EKIDEN_NATIVE``.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ekiden.core.env import cache_dir, native_dir
from ekiden.core.file_lock import file_lock

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"
CPU_INFO = Path("/proc/cpuinfo")
COMPILER = "g++"
FEATURES = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni")
"""What the kernels use, in the kernel's words; the compiler's lack the underscore."""
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",  # the same sum must not be fused in one place and not in another
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-uninitialized",  # GCC 12 warns inside its own intrinsics
    "-Wno-maybe-uninitialized",
    "-march=haswell",
    *(f"-m{feature.replace('_', '')}" for feature in FEATURES),
)
COMPILE_TIMEOUT_S = 120.0
COMPILING = "compiling kernels, once for this machine: about 10 s"
"""`ekiden up` looks for the first two words in a service's log."""


class NativeUnavailable(Exception):
    """The native kernels cannot be had here; the message says why."""


def library_file(compiler: str = COMPILER) -> Path:
    """The library built for this machine: found in the cache, else built there.

    Raises:
        NativeUnavailable: another kind of CPU or system, no compiler, or it failed.
    """
    check_cpu()
    if native_dir() and (prebuilt := _prebuilt_file(Path(native_dir()))).exists():
        return prebuilt
    path = cache_dir() / "native" / f"ekiden-{_key(compiler)}.so"
    if path.exists():
        return path
    logger.info(COMPILING)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # One builder at a time; past the deadline both build, which is slower and no less right.
        with file_lock(path.with_suffix(".lock"), COMPILE_TIMEOUT_S):
            if not path.exists():  # another rank may have built it meanwhile
                _build(compiler, path)
    except OSError as error:
        raise NativeUnavailable(f"{path.parent} cannot be written: {error}") from error
    return path


def build_ahead(folder: Path, compiler: str = COMPILER) -> Path:
    """The library in ``folder``, built whatever this machine can run.

    Raises:
        NativeUnavailable: no compiler, or it failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = _prebuilt_file(folder)
    _build(compiler, path)
    return path


def check_cpu(info: Path = CPU_INFO) -> None:
    """Raises NativeUnavailable, naming what this machine lacks."""
    if sys.platform != "linux":
        raise NativeUnavailable(f"the kernels are for Linux, not {sys.platform}")
    try:
        lines = info.read_text().splitlines()
    except OSError as error:
        raise NativeUnavailable(f"{info} cannot be read: {error}") from error
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), [])
    if missing := [feature for feature in FEATURES if feature not in flags]:
        raise NativeUnavailable(f"this CPU lacks {', '.join(missing)}")


def _prebuilt_file(folder: Path) -> Path:
    """Named after the sources, so that kernels of another version are never taken."""
    return folder / f"ekiden-{_source_key('')}.so"


def _key(compiler: str) -> str:
    """Sources, flags and compiler: what the library's content follows from."""
    return _source_key(_output([compiler, "--version"]))


def _source_key(compiler: str) -> str:
    digest = hashlib.sha256(compiler.encode())
    digest.update("\0".join(FLAGS).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _build(compiler: str, path: Path) -> None:
    """Compile the files in parallel and move the whole library into place at once."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        _run_all(
            [compiler, *FLAGS, "-c", str(source), "-o", str(target)]
            for source, target in zip(sources, objects, strict=True)
        )
        library = Path(folder) / path.name
        _run_all([[compiler, "-shared", "-pthread", *map(str, objects), "-o", str(library)]])
        os.replace(library, path)


def _run_all(commands: Iterator[list[str]] | Sequence[list[str]]) -> None:
    running: list[subprocess.Popen[str]] = []
    try:
        running += [_start(command) for command in commands]
        for process in running:
            _, errors = process.communicate(timeout=COMPILE_TIMEOUT_S)
            if process.returncode:
                raise NativeUnavailable(f"the compiler failed: {errors.strip()[-2000:]}")
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailable(f"compiling took over {COMPILE_TIMEOUT_S:.0f} s") from error
    finally:
        for process in running:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:  # a compiler is several processes: end them all
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _start(command: list[str]) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        raise NativeUnavailable(f"{command[0]} cannot be run: {error}") from error


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{command[0]} cannot be run: {error}") from error
    return done.stdout


if __name__ == "__main__":
    try:
        print(build_ahead(Path(sys.argv[1])) if len(sys.argv) > 1 else library_file())
    except NativeUnavailable as error:
        sys.exit(f"no native kernels: {error}")
