"""The address that peers will dial, its interface, and the port."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from ekiden.core.errors import SetupError
from ekiden.doctor.preflight.check import Check, failure, ok, warning

_SIOCGIFADDR = 0x8915
SLOW_MBIT = 10_000
"""A 70B model's KV of 8,192 tokens is 2.7 GB: at this speed it takes two seconds."""


def port(host: str, number: int) -> Check:
    from ekiden.rpc.listening import check_address

    try:
        check_address(host, number)
    except SetupError as error:
        return failure("port", error.message, "")
    return ok("port", f"{host}:{number or 'a free one'} can be listened on")


def address(host: str, number: int, advertise: str, redis: str, *, alone: bool) -> Check:
    """What peers would dial. ``alone``: Redis and all replicas are on this machine."""
    from ekiden.rpc.server import advertised_address

    try:
        told = advertised_address(host, number, advertise, redis)
    except SetupError as error:
        return failure("address", error.message, "")
    name = told.rpartition(":")[0].strip("[]")
    if _is_loopback(name) and not alone:
        return failure(
            "address", f"peers would dial {told}, and not all of them are on this machine",
            "--host 0.0.0.0, with --advertise HOST:PORT where it has several networks",
        )  # fmt: skip
    return _interface(told, name, alone=alone)


def _interface(told: str, name: str, *, alone: bool) -> Check:
    interface = interface_of(name)
    speed = _speed(interface)
    seen = f"peers dial {told}" + (f", interface {interface}" if interface else "")
    if speed:
        seen += f", {speed / 1000:g} Gbit/s"
    if 0 < speed < SLOW_MBIT and not alone:
        return warning("address", seen, "--advertise the address of a faster interface")
    return ok("address", seen)


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(name)).is_loopback
    except (OSError, ValueError):
        return False


def interface_of(name: str) -> str:
    """The interface that has the IPv4 address ``name``; empty: none of this machine's."""
    try:
        wanted = socket.gethostbyname(name)
    except OSError:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, interface in socket.if_nameindex():
            if _ipv4(probe, interface) == wanted:
                return interface
    return ""


def _ipv4(probe: socket.socket, interface: str) -> str:
    request = struct.pack("256s", interface.encode()[:15])
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
    except OSError:  # it has none
        return ""
    return socket.inet_ntoa(answer[20:24])


def _speed(interface: str) -> int:
    """Mbit/s; 0 where the interface does not tell, as virtual ones do not."""
    try:
        return max(0, int(Path(f"/sys/class/net/{interface}/speed").read_text()))
    except (OSError, ValueError):
        return 0
