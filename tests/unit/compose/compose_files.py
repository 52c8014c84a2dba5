"""Reads what is in compose/: its scripts as modules, its variables at their defaults."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
COMPOSE = ROOT / "compose"

Document = dict[str, Any]


def load_script(name: str) -> ModuleType:
    """A script of compose/, which is no package, as a module."""
    spec = importlib.util.spec_from_file_location(f"compose_{name}", COMPOSE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_defaults(value: Any) -> Any:
    """``${NAME:-default}`` replaced by its default, as on a machine where nothing is set."""
    if isinstance(value, dict):
        return {key: with_defaults(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_defaults(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)
    return value
