"""What is asked of a deployment: lengths of prompts and outputs, how many, and how fast."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from ekiden.core.errors import SetupError
from ekiden.planner.names import unknown


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of request. Lengths in tokens."""

    prompt: int
    output: int
    share: float = 1.0
    """Of all requests."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Kinds of requests whose shares add up to 1, arriving at random (Poisson)."""

    name: str
    kinds: tuple[Requests, ...]
    rate: float | None = None
    """Requests a second of the whole deployment; None: as many as the GPUs serve."""
    prefix_share: float = 0.0
    """Of a prompt's tokens, those whose KV a replica has from an earlier request."""
    sharing: tuple[tuple[int, float], ...] = ()
    """(tokens of cache, prefix share that they give), by tokens; empty: ``prefix_share`` anyhow."""
    extreme: int = 0
    """Tokens of the longest single request, where kinds are means; 0: as the kinds say."""

    def mean(self, values: Iterable[float]) -> float:
        """Of one value for each kind."""
        return sum(kind.share * value for kind, value in zip(self.kinds, values, strict=True))

    @property
    def prompt(self) -> float:
        """Mean tokens of a prompt."""
        return self.mean(kind.prompt for kind in self.kinds)

    @property
    def output(self) -> float:
        """Mean tokens of an output."""
        return self.mean(kind.output for kind in self.kinds)

    @property
    def context(self) -> float:
        """Tokens that a token being decoded sees, on average."""
        seen = sum(k.share * k.output * (k.prompt + k.output / 2) for k in self.kinds)
        return seen / self.output

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output together."""
        return max(self.extreme, *(kind.prompt + kind.output for kind in self.kinds))

    @property
    def decodes(self) -> bool:
        """Whether any answer goes beyond the token that prefill gives; else there is no TPOT."""
        return any(kind.output > 1 for kind in self.kinds)

    def cached(self, tokens: float) -> Workload:
        """As it is for a deployment that has KV of ``tokens`` to spare for reuse."""
        if not self.sharing:
            return self
        sizes, shares = zip(*self.sharing, strict=True)
        share = float(np.interp(tokens, sizes, shares))
        return msgspec.structs.replace(self, prefix_share=share, sharing=())

    def fresh(self, kind: Requests) -> float:
        """Tokens of a prompt that are computed; at least its last one always is."""
        return max(1.0, kind.prompt * (1 - self.prefix_share))


def _one(name: str, prompt: int, output: int) -> Workload:
    return Workload(name=name, kinds=(Requests(prompt=prompt, output=output),))


def _mix(name: str, parts: tuple[Workload, ...]) -> Workload:
    kinds = tuple(kind for part in parts for kind in part.kinds)
    share = 1 / len(kinds)
    return Workload(
        name=name, kinds=tuple(msgspec.structs.replace(kind, share=share) for kind in kinds)
    )


_ARTICLES = (_one("chat", 200, 200), _one("rag", 8192, 200), _one("writing", 200, 2000))
VOICE = "voice"
_BENCHES = (
    _one("short-short", 256, 128),
    _one("short-long", 256, 1024),
    _one("long-short", 8192, 128),
    _one("long-long", 8192, 1024),
)
WORKLOADS = {
    found.name: found
    for found in (
        *_ARTICLES,
        _mix("mixed", _ARTICLES),
        _one(VOICE, 1000, 60),
        *_BENCHES,
        _mix("bench-mixed", _BENCHES),
    )
}
"""Tokens of prompt/output. The mixes have equal parts."""


MOST_RATE = 1e6
"""Requests a second, beyond which nobody asks."""


def check_rate(rate: float) -> float:
    """The same. Raises SetupError: it is no rate."""
    if not 0 < rate <= MOST_RATE:
        raise SetupError(
            f"rate {rate:g} is not requests a second: choose more than 0 and up to "
            f"{MOST_RATE:,.0f}, as 2.5"
        )
    return rate


def workload(
    name: str = "chat",
    *,
    prompt: int | None = None,
    output: int | None = None,
    rate: float | None = None,
    prefix_share: float = 0.0,
) -> Workload:
    """A named one, or one of given lengths; a length alone replaces that of the named one.

    Raises:
        SetupError: no such name, or a number that cannot be; names it and the valid choices.
    """
    if name not in WORKLOADS:
        raise unknown("workload", name, WORKLOADS)
    for what, value in (("prompt tokens", prompt), ("output tokens", output)):
        if value is not None and value < 1:
            raise SetupError(f"{what} {value} is too few: choose 1 or more")
    if rate is not None:
        check_rate(rate)
    if not 0 <= prefix_share < 1:
        raise SetupError(f"prefix share {prefix_share:g} is none: choose 0 up to below 1, as 0.3")
    found = WORKLOADS[name]
    if prompt or output:
        kinds = {
            msgspec.structs.replace(k, prompt=prompt or k.prompt, output=output or k.output)
            for k in found.kinds
        }
        share = 1 / len(kinds)
        ordered = sorted(kinds, key=lambda k: (k.prompt, k.output))
        found = Workload(
            name="of given lengths",
            kinds=tuple(msgspec.structs.replace(k, share=share) for k in ordered),
        )
    return msgspec.structs.replace(found, rate=rate, prefix_share=prefix_share)


class Objectives(msgspec.Struct, frozen=True, kw_only=True):
    """Most that is allowed, in seconds; None: no objective."""

    ttft_p50: float | None = None
    ttft_p95: float | None = None
    ttft_p99: float | None = None
    tpot_p50: float | None = None
    tpot_p95: float | None = None
    tpot_p99: float | None = None
    assumed: tuple[str, ...] = ()
    """``ttft`` and ``tpot``, where nobody stated one."""
    eased_from: float | None = None
    """What would usually be assumed of TTFT P95; None: that is (``easing``)."""

    def stated(self) -> dict[str, float]:
        """Those that there are, by name."""
        fields = (f"{what}_p{q}" for what in ("ttft", "tpot") for q in (50, 95, 99))
        return {name: value for name in fields if (value := getattr(self, name)) is not None}


TTFT_P95_S, TTFT_TOKENS_S, TPOT_P95_S = 1.0, 4096, 0.1
"""Assumed: a second to the first token, one more for each 4,096 tokens of the longest prompt, and
10 tokens a second, about twice as fast as people read."""


def assumed_objectives(work: Workload) -> Objectives:
    """What people usually find quick enough, where nobody has said what is."""
    longest = max(kind.prompt for kind in work.kinds)
    ttft = TTFT_P95_S + longest // TTFT_TOKENS_S
    if not work.decodes:
        return Objectives(ttft_p95=ttft, assumed=("ttft",))
    return Objectives(ttft_p95=ttft, tpot_p95=TPOT_P95_S, assumed=("ttft", "tpot"))
