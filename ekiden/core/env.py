"""Every environment variable the product reads, in one place."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where models are kept: ``EKIDEN_CACHE``, else the user's cache folder."""
    if value := os.environ.get("EKIDEN_CACHE"):
        return Path(value).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ekiden"


def native_dir() -> str:
    """``EKIDEN_NATIVE``: a folder of kernels that were compiled ahead, for hosts without g++."""
    return os.environ.get("EKIDEN_NATIVE", "")


def secret() -> str:
    """``EKIDEN_SECRET``: shared by all services; never taken from a command line."""
    return os.environ.get("EKIDEN_SECRET", "")


def api_key() -> str:
    """``EKIDEN_API_KEY``: what clients of the gateway must send."""
    return os.environ.get("EKIDEN_API_KEY", "")


def redis_url() -> str:
    """``REDIS_URL``: an existing Redis or Valkey."""
    return os.environ.get("REDIS_URL", "")


def log_level() -> str:
    return os.environ.get("EKIDEN_LOG", "INFO").upper()


def ucx_settings() -> frozenset[str]:
    """Names of the UCX options (without ``UCX_``) that the operator has set."""
    return frozenset(name[4:] for name in os.environ if name.startswith("UCX_"))


def search_path() -> str:
    """``PATH``: where programs are looked for."""
    return os.environ.get("PATH", "")


def for_child(**changes: str) -> dict[str, str]:
    """The environment of a process to start: ours, with ``changes``."""
    return {**os.environ, **changes}


def quiet_grpc_forks() -> None:
    """gRPC prints a line at each fork of a process that uses it, and its handlers may hold the
    child for ever; ours only fork to exec. Call before grpc is imported."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def poll_grpc_in_one_thread() -> None:
    """Have gRPC read a client's connections on the thread that hands on what came, instead of one
    that wakes another that wakes that one: of 8 streams' steps 4 of 5 wake-ups go, and a tenth of
    the gateway's time. Call before grpc is imported.
    """
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client")


def quiet_ucx() -> None:
    """UCXX sets an option that UCX without a GPU then warns about; keep that off the screen."""
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")


def let_triton_fuse() -> None:
    """Triton asks to be told whether a product and a sum may become one operation: they may."""
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
