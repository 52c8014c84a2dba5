"""Models by name: the shipped table of configs (``models.toml``)."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from ekiden.core.errors import SetupError
from ekiden.planner import names
from ekiden.planner.geometry import Geometry, from_config, from_path

_STORED = ("fp8", "awq", "gptq")
_SUFFIXES = ("instruct", "chat", "base", "hf", "it", "pt", "bf16", *_STORED)
"""What a hub name says of training or storage, and not of shape."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One shape of the table and every name that it goes by."""

    name: str
    source: str
    """Repository on the hub whose config.json it is."""
    config: dict[str, Any]
    aliases: tuple[str, ...] = ()
    tower_parameters: int = 0
    """Of the checkpoint's vision tower and projector: its parameters less those of the text."""


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: tuple[Entry, ...]


@cache
def entries() -> tuple[Entry, ...]:
    """The whole table, in its order."""
    with (Path(__file__).parent / "models.toml").open("rb") as file:
        return msgspec.convert(tomllib.load(file), _Table).model


@cache
def _by_name() -> dict[str, Entry]:
    return {
        plain(name): entry
        for entry in entries()
        for name in (entry.name, entry.source, *entry.aliases)
    }


def plain(name: str) -> str:
    """What is compared: no owner, no remark in brackets, no suffix of training or storage."""
    return "-".join(_words(name)[0])


def stored_as(name: str) -> str:
    """The quantisation that a hub name ends in, as ``Qwen2.5-7B-Instruct-AWQ``; empty for none."""
    return next((word for word in _words(name)[1] if word in _STORED), "")


def _words(name: str) -> tuple[list[str], list[str]]:
    """Of the shape, and of training and storage, the last first."""
    text = re.sub(r"\s*\(.*?\)", "", name).strip().rsplit("/", 1)[-1]
    words, suffixes = re.split(r"[-_\s]+", text.lower()), []
    while len(words) > 1 and words[-1] in _SUFFIXES:
        suffixes.append(words.pop())
    return words, suffixes


def by_name(name: str) -> Geometry:
    """The geometry of a model of the table, under its name there, stored as ``name`` says.

    Raises:
        SetupError: no such model; the message has the nearest names.
    """
    entry = _by_name().get(plain(name))
    if entry is None:
        raise SetupError(
            f"model {name!r} is not in the planner's table: nearest are {nearest(name)}; or give "
            "a config.json, or the directory of a model"
        )
    found = from_config(entry.config, entry.name)
    method = found.quant_method or stored_as(name)
    return msgspec.structs.replace(
        found, tower_parameters=entry.tower_parameters, quant_method=method
    )


def nearest(name: str) -> str:
    """Up to three names of the table that look like ``name``, with commas between."""
    return names.nearest(plain(name), {plain(e.name): e.name for e in entries()})


def servable(model: str) -> str:
    """What other commands call it: a directory for its config.json, a hub id for a name of the
    table. An alias stays as it is: it is another model of the same shape."""
    path = Path(model)
    if path.exists():
        return str(path.parent) if path.is_file() else model
    entry = _by_name().get(plain(model))
    return entry.source if entry and model.lower() == entry.name.lower() else model


def geometry(model: str) -> Geometry:
    """Of a directory, a ``config.json``, or a name of the table: a path that exists wins.

    Raises:
        SetupError: it is none of these, or the config cannot be read.
    """
    path = Path(model)
    return from_path(path) if path.exists() else by_name(model)
