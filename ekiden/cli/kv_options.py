"""What an option about KV between replicas may be: refused before a model is loaded."""

from __future__ import annotations

import argparse
import os
import secrets
import socket
from importlib.util import find_spec

from ekiden.core.errors import SetupError
from kv_transfer.description import ALL_WIRES, AUTO_WIRES, WIRE_PACKAGES


def wires(text: str) -> str:
    """``auto``, or names of wires with commas between, each of which can be imported here."""
    if text == "auto":
        return text
    names = [name.strip() for name in text.split(",")]
    if "auto" in names:
        raise argparse.ArgumentTypeError(
            f"{text!r}: auto stands alone and tries {', '.join(AUTO_WIRES)}; leave it out, or "
            "leave the others out"
        )
    for name in names:
        _check_wire(name)
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} names a wire twice: name each once")
    return ",".join(names)


def _check_wire(name: str) -> None:
    if name not in ALL_WIRES:
        raise argparse.ArgumentTypeError(
            f"{name!r} is not a wire for KV: choose auto, or some of {', '.join(ALL_WIRES)}, with "
            "a comma between two"
        )
    module, package = WIRE_PACKAGES.get(name, ("", ""))
    if module and find_spec(module) is None:
        raise argparse.ArgumentTypeError(
            f"{name} needs a package that is not installed here: pip install {package!r}"
        )


def check_shared_folder(folder: str) -> None:
    """Of ``--kv-shm-dir``; empty: none is named.

    Raises:
        SetupError: it is not there, or this user can make no socket in it.
    """
    if not folder:
        return
    what = f"--kv-shm-dir {folder}"
    if not os.path.isdir(folder):  # Path's own fails where a folder above cannot be entered
        raise SetupError(f"{what} is not a folder: make it first, or mount it")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SetupError(
            f"{what} cannot be written by user {os.geteuid()}: change its owner or its mode"
        )
    # As long a name as the wire's own: that of a socket has about 100 characters, folders included.
    trial = f"{folder}/ekiden-kv-{os.getpid()}-{secrets.token_hex(8)}.sock.new"
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(trial)
        os.unlink(trial)
    except OSError as error:
        raise SetupError(
            f"{what}: no socket can be made there: {error.strerror or error}"
        ) from None
