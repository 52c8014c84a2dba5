"""Start a decode replica: ``run(config)`` returns the process's exit code."""

from __future__ import annotations

from ekiden.core.config import ServiceConfig
from ekiden.service.main import run_service

from .service import DecodeService


def run(config: ServiceConfig) -> int:
    """Serve until SIGTERM; 0 after a drain, 1 when the replica broke, 2 for a bad set-up."""
    return run_service(config, DecodeService)
