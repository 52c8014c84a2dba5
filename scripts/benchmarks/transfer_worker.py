"""Either process of a transfer: it receives, and has started the one that sends."""

from __future__ import annotations

import argparse
import socket
from typing import Any

import msgspec

from benchmarks.transfer_link import Link, PeerGone, Setup, start_sender, stay_on
from benchmarks.transfer_shape import Work


class Moves:
    """What the bench may call, over ``serve.py``."""

    def __init__(self, receiver: Any) -> None:
        self._receiver = receiver

    def check(self, tokens: int, turn: int, **how: Any) -> dict[str, Any]:
        """Move into emptied memory and compare. Raises ValueError: not what was sent."""
        self._receiver.check(Work(tokens, turn), **how)
        return {}

    def move(self, tokens: int, turns: list[int], **how: Any) -> dict[str, Any]:
        """Bytes a second of each turn."""
        moved = [self._receiver.move(Work(tokens, turn), **how) for turn in turns]
        return {"rates": [size / seconds for seconds, size in moved]}

    def trace(self, tokens: int, **how: Any) -> dict[str, Any]:
        """By how many bytes Python's objects grew at most, in either process."""
        return {"bytes": self._receiver.trace(Work(tokens, 0), **how)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("ours", "peers"))
    parser.add_argument("setup", help="as JSON")
    parser.add_argument("--link", type=int, help="send, for the process behind this socket")
    args = parser.parse_args()
    setup = msgspec.json.decode(args.setup, type=Setup)
    if args.link is not None:
        send(args.kind, setup, Link(socket.socket(fileno=args.link)))
    else:
        receive(args.kind, setup)


def send(kind: str, setup: Setup, link: Link) -> None:
    sender = _module(kind).Sender(setup)
    try:
        stay_on(setup.cores[0])
        sender.serve(link)
    except (PeerGone, ConnectionError):
        pass  # the receiver has ended, and so do we
    finally:
        sender.close()


def receive(kind: str, setup: Setup) -> None:
    from benchmarks.serve import serve

    link, process = start_sender(kind, setup)
    made: list[Any] = []

    def make() -> Any:
        made.append(_module(kind).Receiver(setup, link))
        stay_on(setup.cores[1])
        return made[0]

    bench: Any = Moves
    try:
        serve(make, bench)
    finally:
        for receiver in made:
            receiver.close()
        link.close()
        process.wait()


def _module(kind: str) -> Any:
    if kind == "peers":  # they do without torch, which takes a while to import
        from benchmarks import transfer_peers

        return transfer_peers
    from benchmarks import transfer_ours

    return transfer_ours


if __name__ == "__main__":
    main()
