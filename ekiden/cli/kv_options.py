"""What an option about KV between replicas may be: refused before a model is loaded."""

from __future__ import annotations

import argparse
import os
from importlib.util import find_spec
from pathlib import Path

from kv_transfer.description import ALL_WIRES, AUTO_WIRES, WIRE_PACKAGES


def wires(text: str) -> str:
    """``auto``, or names of wires with commas between, each of which can be imported here."""
    if text == "auto":
        return text
    names = text.split(",")
    if "auto" in names:
        raise argparse.ArgumentTypeError(
            f"{text!r}: auto stands alone and tries {', '.join(AUTO_WIRES)}; leave it out, or "
            "leave the others out"
        )
    for name in names:
        _check_wire(name)
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} names a wire twice: name each once")
    return text


def _check_wire(name: str) -> None:
    if name not in ALL_WIRES:
        raise argparse.ArgumentTypeError(
            f"{name!r} is not a wire for KV: choose auto, or some of {', '.join(ALL_WIRES)}"
        )
    module, package = WIRE_PACKAGES.get(name, ("", ""))
    if module and find_spec(module) is None:
        raise argparse.ArgumentTypeError(
            f"{name} needs a package that is not installed here: pip install {package!r}"
        )


def shared_folder(text: str) -> str:
    """A folder that exists and in which this user may make a socket; empty: none is named."""
    if text and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder: make it first, or mount it")
    if text and not os.access(text, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be written by user {os.geteuid()}: change its owner or its mode"
        )
    return text
