"""Hosts for the replicas: network namespaces with two links each, or plain loopback.

Every replica's host has ``eth0`` for control (gRPC, Redis) and ``kv0`` for KV; the harness sits at
the first address of both networks and holds the far ends, so it can cut or throttle one link of one
host without the host's doing. The harness runs in a network namespace too (``private_argv``): then
everything made here goes with it, however it ends.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

CONTROL, KV = "10.77.0", "10.78.0"
HERE = f"{CONTROL}.1"
LINKS = {"control": ("c", "eth0", CONTROL), "kv": ("k", "kv0", KV)}
BURST_BYTES = 8 << 10
_READY_S = 5.0
_RULES = (["--net"], ["--user", "--map-root-user", "--net"])
"""As root, else where ordinary users may have namespaces of their own."""


def why_not() -> str:
    """Why hosts of one's own cannot be had on this machine; empty if they can."""
    for tool in ("unshare", "nsenter", "ip", "tc"):
        if shutil.which(tool) is None:
            return f"the program {tool} is not installed"
    return "" if _rule() is not None else "network namespaces are not allowed here"


def _rule() -> list[str] | None:
    probe = (
        "ip link add far type veth peer name near"
        " && tc qdisc add dev far root tbf rate 1mbit burst 8kb latency 1s"
        " && unshare --net --mount mount -t sysfs none /sys"
    )
    for rule in _RULES:
        argv = ["unshare", *rule, "sh", "-c", probe]
        if subprocess.run(argv, capture_output=True).returncode == 0:
            return rule
    return None


def private_argv(argv: Sequence[str]) -> list[str]:
    """``argv`` in a network namespace of its own. Only where ``why_not`` is empty."""
    return ["unshare", *(_rule() or _RULES[0]), *argv]


class Loopback:
    """All replicas on 127.0.0.1; no link can be cut."""

    here = "127.0.0.1"

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def address(self, name: str) -> str:
        return self.here

    def prefix(self, name: str) -> tuple[str, ...]:
        """What goes before a command so that it runs on the host of ``name``."""
        return ()

    def mend(self) -> None:
        """Undo whatever was done to a link."""

    def close(self) -> None:
        """Nothing was made."""


class Namespaces(Loopback):
    """A host for each name."""

    here = HERE

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._cut: set[tuple[str, str]] = set()
        self._slow: set[tuple[str, str]] = set()
        _ip("link", "set", "lo", "up")
        for letter, _, net in LINKS.values():
            _ip("link", "add", f"br-{letter}", "type", "bridge")
            _ip("addr", "add", f"{net}.1/24", "dev", f"br-{letter}")
            _ip("link", "set", f"br-{letter}", "up")
        for name in names:
            self._add(name)

    def address(self, name: str) -> str:
        return f"{CONTROL}.{self._number(name)}" if name in self._names else self.here

    def prefix(self, name: str) -> tuple[str, ...]:
        if name not in self._names:
            return ()
        # UCX would spread its bytes over both links.
        return ("env", "UCX_NET_DEVICES=kv0", *self._enter(name))

    def cut(self, name: str, link: str) -> None:
        """No packet passes; neither end is told."""
        self._cut.add((name, link))
        _ip("link", "set", self._far(name, link), "down")

    def throttle(self, name: str, link: str, bytes_per_s: float) -> None:
        """What the host receives comes at this rate at most."""
        self._slow.add((name, link))
        rate = ("rate", f"{int(8 * bytes_per_s)}bit", "burst", str(BURST_BYTES), "latency", "400ms")
        _tc("replace", self._far(name, link), *("root", "tbf"), *rate)

    def mend(self) -> None:
        for name, link in self._cut:
            _ip("link", "set", self._far(name, link), "up")
        self._cut.clear()
        self.unthrottle()

    def unthrottle(self) -> None:
        """Links that are cut stay cut."""
        for name, link in self._slow:
            _tc("del", self._far(name, link), "root")
        self._slow.clear()

    def close(self) -> None:
        for holder in self._holders.values():
            holder.kill()
            holder.wait()

    def _add(self, name: str) -> None:
        # UCX finds its devices in /sys, which shows those of whoever mounted it. The shell ends
        # with us: its input does.
        shell = ["unshare", "--net", "--mount", "sh", "-c", "mount -t sysfs none /sys && exec cat"]
        holder = subprocess.Popen(shell, stdin=subprocess.PIPE)
        self._holders[name] = holder
        _wait_for_cat(holder.pid)
        self._in(name, "link", "set", "lo", "up")
        for letter, device, net in LINKS.values():
            far = f"{letter}{self._number(name)}"
            peer = ("peer", "name", device, "netns", str(holder.pid))
            _ip("link", "add", far, "type", "veth", *peer)
            _ip("link", "set", far, "master", f"br-{letter}", "up")
            self._in(name, "addr", "add", f"{net}.{self._number(name)}/24", "dev", device)
            self._in(name, "link", "set", device, "up")

    def _enter(self, name: str) -> tuple[str, ...]:
        return ("nsenter", "--target", str(self._holders[name].pid), "--net", "--mount")

    def _in(self, name: str, *what: str) -> None:
        _run([*self._enter(name), "ip", *what])

    def _number(self, name: str) -> int:
        return 11 + list(self._names).index(name)

    def _far(self, name: str, link: str) -> str:
        return f"{LINKS[link][0]}{self._number(name)}"


def _wait_for_cat(pid: int) -> None:
    """Until the holder has its namespaces and has gone over to waiting for our end."""
    deadline = time.monotonic() + _READY_S
    while Path(f"/proc/{pid}/comm").read_text().strip() != "cat":
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} has no network namespace of its own")
        time.sleep(0.005)


def _ip(*what: str) -> None:
    _run(["ip", *what])


def _tc(verb: str, device: str, *what: str) -> None:
    _run(["tc", "qdisc", verb, "dev", device, *what])


def _run(argv: Sequence[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(argv)}: {done.stderr.strip()}")
