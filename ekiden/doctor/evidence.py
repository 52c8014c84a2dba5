"""What doctor judges: plain data, whoever gathered it. Times in seconds, sizes in bytes.

A **situation** is a deployment under one load: what was watched just now, or one level of a bench.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import msgspec

from ekiden.doctor.thresholds import KV_FULL, MANY_FAILED
from ekiden.measures.experts import Balancedness

PREFILL, DECODE = "prefill", "decode"


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """How a time is spread over answers."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that ended while the situation lasted."""

    count: int = 0
    """That came whole."""
    errors: dict[str, int] = {}
    """Failures that are not the client's own, by HTTP status or kind."""
    error_details: dict[str, str] = {}
    """The first message of a kind, where it is known."""
    tokens_per_s: float = 0.0
    ttft: Times = Times()
    tpot: Times = Times()
    phases: dict[str, float] = {}
    """Mean of each phase: queue, prefill, transfer, first_decode, decode."""
    prompt_tokens: float = 0.0
    """Mean, as ``output_tokens``."""
    output_tokens: float = 0.0
    sources: dict[str, float] = {}
    """Prompt tokens by where their KV came from."""
    predicted_cached: float | None = None
    """Prompt tokens that the router expected to be cached."""
    fallbacks: dict[str, int] = {}
    moved: dict[str, float] = {}
    """KV bytes by wire."""
    shares: dict[str, dict[str, int]] = {}
    """By role, then replica: tokens that it had of the load."""

    @property
    def cached_share(self) -> float:
        """Of the prompt tokens."""
        total = sum(self.sources.values())
        return (total - self.computed) / total if total else 0.0

    @property
    def computed(self) -> float:
        return sum(n for source, n in self.sources.items() if source.endswith("computed"))

    @property
    def local_share(self) -> float:
        """Of the prompt tokens that were computed: those that decode computed itself."""
        return self.sources.get("local_computed", 0.0) / self.computed if self.computed else 0.0

    @property
    def failed(self) -> int:
        return sum(self.errors.values())


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """What KV takes from a prefill replica, and what that did when it was measured."""

    peer: str
    wire: str
    bytes_per_s: float


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One replica while the situation lasted: means over its readings unless said otherwise."""

    id: str
    role: str
    model: str = ""
    """Empty: not told, and the only one."""
    host: str = ""
    """Of the address that peers dial; empty: not told."""
    tp: int = 0
    """0: not told, as ``pp`` and ``max_num_seqs``."""
    pp: int = 0
    max_num_seqs: int = 0
    readings: int = 0
    running: float = 0.0
    waiting: float = 0.0
    receiving: float = 0.0
    """Requests of a decode replica whose KV is computed or sent by a prefill replica."""
    kv_share: float = 0.0
    """Of its KV blocks, those that requests held."""
    kv_peak: float = 0.0
    kv_tokens: int = 0
    """Of the whole cache; 0: not told."""
    step_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    collective_share: float = 0.0
    stage_idle: tuple[float, ...] = ()
    lost: str = ""
    """What became of it while it was watched: ``gone``, ``restarted`` or ``unwell``."""
    wires: tuple[Wire, ...] = ()

    def lacks_room(self, prompt_tokens: float) -> bool:
        """Whether, at its fullest, another prompt of that length found no place in its cache."""
        left = (1 - self.kv_peak) * self.kv_tokens
        return self.kv_peak > KV_FULL or (self.kv_tokens > 0 and left < prompt_tokens)

    @property
    def ranks(self) -> int:
        return max(self.tp, 1) * max(self.pp, 1)

    @property
    def pending(self) -> float:
        """Requests that it has itself to do, running or not."""
        return self.running + self.waiting

    @property
    def split(self) -> str:
        return f"TP{self.tp}" + (f" x PP{self.pp}" if self.pp > 1 else "")


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """Who made the load, where that is known."""

    cpu_share: float
    """Of a core, the busiest process."""
    lag_p99_s: float
    """By how much requests were sent late."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked of a level."""

    kind: str
    """``rate``, ``concurrency`` or ``trace``."""
    value: float
    """Infinite: all at once."""


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """Of a mixture, on the replicas of one role, while the situation lasted."""

    role: str
    steps: int
    tokens: float
    """That an expert had, mean."""
    hottest: float
    """Tokens of a layer's hottest expert over those of a mean one."""
    balancedness: Balancedness
    dispatch_share: float
    """Of a step, as a mean rank sees it: dispatch and combine, the wait for the busiest rank
    included."""


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """One deployment under one load."""

    name: str
    seconds: float
    answers: Answers | None = None
    replicas: tuple[Replica, ...] = ()
    in_flight: float | None = None
    """Requests at the gateway, mean."""
    client: Client | None = None
    load: Load | None = None
    """Of a bench; None where it is not told: of what was watched, or simulated."""
    experts: tuple[Experts, ...] = ()

    def of(self, role: str, model: str | None = None) -> tuple[Replica, ...]:
        """Replicas of one role, of every model or of one: a pool."""
        found = (replica for replica in self.replicas if replica.role == role)
        return tuple(replica for replica in found if model in (None, replica.model))

    @property
    def models(self) -> list[str]:
        return sorted({replica.model for replica in self.replicas})

    @property
    def busy(self) -> tuple[Replica, ...]:
        """Replicas that had work: what the others last measured may be long ago."""
        return tuple(replica for replica in self.replicas if replica.pending >= 0.5)

    @property
    def known(self) -> float:
        """Requests that any replica has. What decode receives may stand in prefill's queue too."""
        decode, prefill = self.of(DECODE), self.of(PREFILL)
        handed = max(sum(one.receiving for one in decode), sum(one.pending for one in prefill))
        return sum(one.pending for one in decode) + handed

    def full(self, replica: Replica) -> bool:
        """Whether ``replica`` had no room for one more prompt as they come here."""
        return replica.lacks_room(self.answers.prompt_tokens if self.answers else 0.0)

    @property
    def tp(self) -> int:
        """Of the decode replicas, the largest; 0: not told."""
        return max((replica.tp for replica in self.of(DECODE)), default=0)


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """This machine, for the replicas that run on it."""

    cores: int
    load: float
    """Processes that want a core, mean of the last minute."""
    replicas: tuple[str, ...] = ()
    """Ids of those that run here."""


class SamePrompts(msgspec.Struct, frozen=True, kw_only=True):
    """What two deployments said to the same prompts."""

    asked: int
    equal: int
    """Prompts after which both had the same most likely token."""
    against: str


class Objectives(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator asks of P95; 0: nothing."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known. ``missing`` says of what is not there why."""

    situations: tuple[Situation, ...] = ()
    objectives: Objectives = Objectives()
    host: Host | None = None
    same_prompts: SamePrompts | None = None
    missing: dict[str, str] = {}
    """By what is missing: ``gateway``, ``registry``, ``bench``, ``same prompts``."""

    @property
    def answered(self) -> Iterator[tuple[Situation, Answers]]:
        """Situations in which anybody was answered, or should have been."""
        for situation in self.situations:
            answers = situation.answers
            if answers is not None and (answers.count or answers.errors):
                yield situation, answers

    @property
    def failing(self) -> list[tuple[Situation, Answers]]:
        """Those in which so many requests failed that it is no accident."""
        return [
            (situation, answers)
            for situation, answers in self.answered
            if answers.failed and answers.failed >= MANY_FAILED * (answers.count + answers.failed)
        ]

    def pairs(self) -> Iterator[tuple[Situation, Situation]]:
        """Every two situations of benches, in both orders."""
        yield from permutations((one for one in self.situations if one.load is not None), 2)


def same_lengths(one: Answers, other: Answers) -> bool:
    """Whether prompts and answers of two loads are about as long, so that times compare."""
    pairs = ((one.prompt_tokens, other.prompt_tokens), (one.output_tokens, other.output_tokens))
    return all(abs(a - b) <= 0.2 * max(a, b) for a, b in pairs)
