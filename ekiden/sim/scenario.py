"""What is simulated, and what is not stated elsewhere: pools, policy, ages of figures, failures."""

from __future__ import annotations

import msgspec

from ekiden.core.errors import SetupError
from ekiden.core.hashes import GRANULE
from ekiden.planner.steps import Stepper
from ekiden.registry.record import POLL_S, RENEW_S
from ekiden.sim.policies import POLICIES, ROUTER

MOST_SKEW = 4
"""Beyond it all tokens want the same few experts."""


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """A replica dies at ``at_s``: ``number`` of its pool, from 0."""

    at_s: float
    role: str
    number: int = 0


class Autoscale(msgspec.Struct, frozen=True, kw_only=True):
    """Each pool is kept at ``target`` of its load, between ``least`` and ``most`` replicas."""

    least: int
    most: int
    target: float = 0.7
    every_s: float = 15.0
    start_s: float = 60.0
    """From the decision until a new replica is registered: weights are loaded."""
    calm_s: float = 120.0
    """How long fewer must have been enough before one leaves."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Times in seconds."""

    prefill: int
    """Replicas; 0: decode prefills by itself."""
    decode: int
    prefill_stepper: Stepper
    decode_stepper: Stepper
    policy: str = ROUTER
    gateways: int = 1
    """Requests come to them in turn; each knows its own bookings only."""
    block_size: int = GRANULE
    blocks: int = 0
    """Of each replica's pool; 0: as the planner sums up its memory."""
    local_prefill_tokens: int = 64
    """As ``ekiden.core.config.ServiceConfig`` has it."""
    renew_s: float = RENEW_S
    poll_s: float = POLL_S
    timeout_s: float = 600.0
    kills: tuple[Kill, ...] = ()
    mtbf_s: float = 0.0
    """Mean time until a replica dies; 0: none does by chance."""
    mttr_s: float = 60.0
    """Until a dead one is back, with an empty cache."""
    autoscale: Autoscale | None = None
    expert_skew: float | None = None
    """Zipf exponent of how popular the experts of a mixture are, 0: all alike; None: their ranks
    share the tokens as the latency model says."""
    seed: int = 0
    strides: bool = True
    """Decode steps are taken together where nothing else can happen; the result is the same."""

    def check(self) -> Scenario:
        """Itself. Raises SetupError that names the field, its value and the choices."""
        if self.decode < 1 or self.prefill < 0:
            raise SetupError(
                f"{self.prefill} prefill and {self.decode} decode replicas serve nobody: choose 0 "
                "or more of prefill and 1 or more of decode"
            )
        if self.gateways < 1:
            raise SetupError(f"{self.gateways} gateways place nothing: choose 1 or more")
        if self.policy not in POLICIES:
            raise SetupError(
                f"policy {self.policy!r} is not known: choose one of {', '.join(POLICIES)}"
            )
        for name in ("renew_s", "poll_s", "timeout_s", "mttr_s"):
            if not 0 < (value := getattr(self, name)) < float("inf"):
                raise SetupError(f"{name} {value:g} is no time: choose seconds above 0")
        for kill in self.kills:
            self._check_kill(kill)
        if self.expert_skew is not None:
            self._check_skew(self.expert_skew)
        return self

    @property
    def steppers(self) -> dict[str, Stepper]:
        """By role."""
        return {"prefill": self.prefill_stepper, "decode": self.decode_stepper}

    def blocks_of(self, stepper: Stepper) -> int:
        """In the pool of one replica."""
        return self.blocks or stepper.tokens // self.block_size

    def _check_kill(self, kill: Kill) -> None:
        pools = {"prefill": self.prefill, "decode": self.decode}
        size = pools.get(kill.role, 0)
        if kill.number >= size:
            there = ", ".join(f"{role} 0 to {n - 1}" for role, n in pools.items() if n)
            raise SetupError(
                f"replica {kill.number} of {kill.role!r} cannot be killed: there are {there}"
            )

    def _check_skew(self, skew: float) -> None:
        if not 0 <= skew <= MOST_SKEW:
            raise SetupError(
                f"expert skew {skew:g} is no exponent: choose 0, all experts alike, to {MOST_SKEW}"
            )
        for stepper in self.steppers.values():
            name, layout = stepper.replica.geometry.name, stepper.replica.layout
            if not stepper.replica.geometry.experts:
                raise SetupError(
                    f"expert skew {skew:g} needs a mixture of experts, and {name} is dense: leave "
                    "it out, or choose a model such as Qwen3-30B-A3B"
                )
            if layout.ep == 1:
                raise SetupError(
                    f"expert skew {skew:g} needs experts on several ranks, and each rank of "
                    f"{layout} has a part of every expert of {name}: choose EP 2 or more "
                    "(--enable-expert-parallel, with -tp or -dp)"
                )
