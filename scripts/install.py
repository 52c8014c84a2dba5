"""Make `.venv` and install ekiden into it. Standard library only; run by `make`.

uv does the work, because it is ten times faster than pip, but it is told what pip is configured
to: index, extra indexes, find-links, constraints, certificate. No index or folder is named here.

Which torch is the one thing to choose, by EKIDEN_TORCH:

    auto (default)  a GPU is here: the CUDA build for its driver; none: as cpu
    cpu             a CPU build: the pinned wheel of a find-links folder if there is one, else
                    from the CPU index that uv knows
    keep            whatever your own configuration gives
    cu128, ...      that build; any name that `uv pip install --torch-backend` knows

Under auto and without a GPU, a configured index of your own is left in charge (as keep).
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlparse

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / ".ci" / "constraints.txt"
INPUTS = (ROOT / "pyproject.toml", CONSTRAINTS, Path(__file__))
INCLUDED_IN = {"local": ("local", "test", "dev"), "test": ("test", "dev"), "dev": ("dev",)}
UV_INDEX_SETTINGS = ("UV_INDEX", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL")


class Choice(NamedTuple):
    """Arguments for uv that decide which torch comes, and why."""

    args: list[str]
    why: str


def main() -> int:
    parser = argparse.ArgumentParser(description="make .venv and install ekiden into it")
    parser.add_argument("--extra", choices=sorted(INCLUDED_IN), default="dev")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    args = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036  (an older Python gets this far)
        have = platform.python_version()
        return fail(f"Python 3.11 or newer is needed, {have} is here: make PYTHON=python3.11")
    setting = os.environ.get("EKIDEN_TORCH", "auto") or "auto"
    stamp = args.venv / ".ekiden-install"
    key = fingerprint(setting)
    if is_installed(stamp, args.extra, key):
        return 0
    began = time.monotonic()
    try:
        install(args.venv, args.extra, setting)
    except subprocess.CalledProcessError as error:
        command = " ".join(map(str, error.cmd))
        return fail(
            f"{command}\nended with exit code {error.returncode}; see EKIDEN_TORCH in {__file__}"
        )
    stamp.write_text(json.dumps({"extra": args.extra, "key": key}))
    say(f"installed in {time.monotonic() - began:.1f} s")
    return 0


def fingerprint(setting: str) -> str:
    digest = hashlib.sha256(f"{setting} {sys.version} {ROOT}".encode())
    for path in INPUTS:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def is_installed(stamp: Path, extra: str, key: str) -> bool:
    try:
        done = json.loads(stamp.read_text())
    except (OSError, ValueError):
        return False
    return done["key"] == key and done["extra"] in INCLUDED_IN[extra]


def install(venv: Path, extra: str, setting: str) -> None:
    python = venv / "bin" / "python"
    if not python.exists():
        say(f"making {venv}")
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", "uv"], check=True)
    config = pip_config(python)
    choice = choose_torch(setting, find_gpu(), config, (platform.system(), platform.machine()))
    say(f"torch: {choice.why}")
    command = [venv / "bin" / "uv", "pip", "install", "--python", python, "--compile-bytecode"]
    command += [*uv_arguments(config, dict(os.environ)), *choice.args, "-e", f"{ROOT}[{extra}]"]
    subprocess.run(command, check=True, env=uv_environment(config, dict(os.environ)))


def pip_config(python: Path) -> dict[str, str]:
    """What pip is configured to, the environment over its files, by option."""
    listed = subprocess.run(
        [python, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True
    )
    return parse_pip_config(listed.stdout)


def parse_pip_config(text: str) -> dict[str, str]:
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in text.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section in sections:
            sections[section][option] = ast.literal_eval(value)
    return {**sections["global"], **sections["install"], **sections[":env:"]}


def uv_arguments(config: dict[str, str], environ: dict[str, str]) -> list[str]:
    """pip's configuration in uv's words. uv's own index settings, where there are any, win."""
    args = [arg for link in config.get("find-links", "").split() for arg in ("--find-links", link)]
    for path in config.get("constraint", "").split():
        args += ["--constraints", path]
    for host in config.get("trusted-host", "").split():
        args += ["--allow-insecure-host", host]
    if any(environ.get(name) for name in UV_INDEX_SETTINGS):
        return args
    if config.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        args.append("--no-index")
    if index := config.get("index-url"):
        args += ["--default-index", index]
    for index in config.get("extra-index-url", "").split():
        args += ["--index", index]
    # pip looks at all indexes and takes the best version; uv would stop at the first.
    return [*args, "--index-strategy", "unsafe-best-match"]


def uv_environment(config: dict[str, str], environ: dict[str, str]) -> dict[str, str]:
    env = dict(environ)
    if cert := config.get("cert"):
        env.setdefault("SSL_CERT_FILE", cert)
    if proxy := config.get("proxy"):
        env.setdefault("ALL_PROXY", proxy)
    return env


def find_gpu() -> str:
    """How a GPU shows, or nothing."""
    if Path("/dev/nvidia0").exists():
        return "/dev/nvidia0"
    if (smi := shutil.which("nvidia-smi")) is None:
        return ""
    listed = subprocess.run([smi, "-L"], capture_output=True, text=True, check=False)
    return listed.stdout.strip().splitlines()[0] if "GPU" in listed.stdout else ""


def choose_torch(
    setting: str, gpu: str, config: dict[str, str], machine: tuple[str, str]
) -> Choice:
    if setting == "keep":
        return Choice([], "as your pip or uv is configured (EKIDEN_TORCH=keep)")
    if setting not in ("auto", "cpu"):
        return Choice(["--torch-backend", setting], f"{setting} (EKIDEN_TORCH)")
    if setting == "auto" and gpu:
        return Choice(["--torch-backend", "auto"], f"CUDA build, for there is a GPU ({gpu})")
    why = "EKIDEN_TORCH=cpu" if setting == "cpu" else "no GPU is here"
    if wheel := pinned_wheel(config):
        return Choice(["--constraints", str(CONSTRAINTS)], f"{wheel} of find-links ({why})")
    if machine != ("Linux", "x86_64"):
        return Choice([], f"the only build for {' '.join(machine)} has no CUDA")
    if setting == "auto" and ("index-url" in config or "no-index" in config):
        return Choice([], "from the index that pip is configured to; EKIDEN_TORCH=cpu overrules")
    return Choice(["--torch-backend", "cpu"], f"CPU build ({why})")


def pinned_wheel(config: dict[str, str]) -> str:
    """A CPU wheel of the pinned torch for this Python in a find-links folder, or nothing."""
    version = next(
        line.split("==")[1].strip()
        for line in CONSTRAINTS.read_text().splitlines()
        if line.startswith("torch==")
    )
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for link in config.get("find-links", "").split():
        for wheel in sorted(Path(urlparse(link).path).glob(f"torch-{version}*.whl")):
            build, python, _, where = wheel.stem.split("-")[1:]
            if python == tag and where.endswith(platform.machine()) and "+cu" not in build:
                return wheel.name
    return ""


def say(text: str) -> None:
    print(f"install: {text}", flush=True)


def fail(text: str) -> int:
    print(f"install: {text}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
