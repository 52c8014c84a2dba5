"""What is done to a deployment, and what it promises all the same.

A fault names the victim's own replicas: ``prefill`` is the one that prefills for the request under
attack, ``decode`` the one that decodes for it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import msgspec
from chaos_net import LINKS, Namespaces
from chaos_relay import LIES
from chaos_stages import STAGES, Scene
from chaos_world import EVERYBODY

PAUSE_S = 1.2
HELD = tuple(stage.name for stage in STAGES.values() if stage.point and not stage.gone)
BEFORE_TOKENS = tuple(name for name in HELD if name != "delivered")
ON_THE_WIRE = ("prefilling", "moving", "transferring", "sealed")
ALL = tuple(STAGES)
FOR_GOOD = ("queued", "moving", "delivered", "decoding")
"""A process that never moves again costs every round the deadline that ends it."""
SIDES = ("prefill", "prefill rank", "decode", "decode rank", "gateway", "redis")


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One way to break something."""

    name: str
    inject: Callable[[Scene], None]
    stages: tuple[str, ...]
    lasts_s: float = 0.0
    """Until it is undone; 0: once every request has ended."""
    ends: str = ""
    """Whose process ends and is started anew."""
    frozen: str = ""
    """Who never moves again, until the orchestrator replaces it."""
    lie: str = ""
    promise: bool = False
    """No request may fail: what broke is not the last resort."""
    hosts: bool = False
    """Needs hosts that can be cut off."""
    link: bool = False
    """Needs a link that carries the KV."""


def name_of(scene: Scene, side: str) -> str:
    """The service that ``side`` means for this request."""
    role = side.removesuffix(" rank")
    return role if role in EVERYBODY else str(getattr(scene.trap, role))


def _pids(scene: Scene, side: str) -> list[int]:
    """All processes of a side, or the last of its ranks."""
    name = name_of(scene, side)
    if side.endswith(" rank"):
        return scene.world.processes(name, ranks_only=True)[-1:]
    return scene.world.processes(name)


def _kill(side: str) -> Callable[[Scene], None]:
    def inject(scene: Scene) -> None:
        for pid in _pids(scene, side)[:1]:  # a service's ranks die with it
            os.kill(pid, signal.SIGKILL)

    return inject


def _stop(side: str) -> Callable[[Scene], None]:
    return lambda scene: scene.world.stop(_pids(scene, side))


def _drain(side: str) -> Callable[[Scene], None]:
    def inject(scene: Scene) -> None:
        os.kill(scene.world.services[name_of(scene, side)].child.process.pid, signal.SIGTERM)

    return inject


def _cut_off(side: str) -> Callable[[Scene], None]:
    def inject(scene: Scene) -> None:
        for link in LINKS:
            _hosts(scene).cut(name_of(scene, side), link)

    return inject


def _cut_wire(scene: Scene) -> None:
    _hosts(scene).cut(name_of(scene, "decode"), scene.world.wire.link)


def _throttle(scene: Scene) -> None:
    _hosts(scene).throttle(name_of(scene, "decode"), scene.world.wire.link, 150e3)


def _hosts(scene: Scene) -> Namespaces:
    if not isinstance(scene.world.net, Namespaces):
        raise RuntimeError("links can only be cut between hosts")
    return scene.world.net


def _leave(scene: Scene) -> None:
    scene.leave.set()


def _nothing(scene: Scene) -> None:
    """The relay tells the lie."""


def _kills() -> list[Fault]:
    return [
        Fault(
            name=f"SIGKILL {side}",
            inject=_kill(side),
            stages=ALL,
            ends=side,
            promise=side in ("prefill", "prefill rank", "redis"),
        )
        for side in SIDES
    ]


def _stops() -> list[Fault]:
    return [
        Fault(
            name=f"SIGSTOP {side}, SIGCONT",
            inject=_stop(side),
            stages=ALL,
            lasts_s=PAUSE_S,
            promise=True,
        )
        for side in SIDES
    ]


def _freezes() -> list[Fault]:
    return [
        Fault(
            name=f"SIGSTOP {side} for good",
            inject=_stop(side),
            stages=FOR_GOOD,
            frozen=side,
            promise=side in ("prefill", "redis"),
        )
        for side in SIDES
    ]


def _wires() -> list[Fault]:
    wire = {"stages": ON_THE_WIRE, "hosts": True, "link": True, "promise": True}
    away = {"stages": (*ON_THE_WIRE, "queued", "decoding"), "hosts": True, "promise": True}
    return [
        Fault(name="KV wire cut, mended", inject=_cut_wire, lasts_s=PAUSE_S, **wire),
        Fault(name="KV wire cut for good", inject=_cut_wire, **wire),
        Fault(name="KV wire throttled", inject=_throttle, lasts_s=2 * PAUSE_S, **wire),
        *(
            Fault(
                name=f"{side}'s host cut off, back",
                inject=_cut_off(side),
                lasts_s=PAUSE_S,
                **away,
            )
            for side in ("prefill", "decode")
        ),
    ]


def _others() -> list[Fault]:
    drains = [
        Fault(name=f"SIGTERM {side}", inject=_drain(side), stages=ALL, ends=side, promise=True)
        for side in ("prefill", "decode")
    ]
    lies = [
        Fault(
            name=f"prefill {lie}",
            inject=_nothing,
            stages=HELD,
            lie=lie,
            promise=lie != "says nothing more",
        )
        for lie in LIES
    ]
    stages = tuple(name for name, stage in STAGES.items() if not stage.gone)
    return [*drains, *lies, Fault(name="client leaves", inject=_leave, stages=stages)]


FAULTS = {fault.name: fault for fault in (*_kills(), *_stops(), *_freezes(), *_wires(), *_others())}
