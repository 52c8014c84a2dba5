"""One request inside the engine: its choices, its sequences, what is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from enum import Enum, auto

from ekiden.core.errors import BadRequest, ReplicaFailed
from ekiden.core.ids import choice_seed
from ekiden.core.types import Delta, Request, TokenLogprobs
from ekiden.engine.advance import ChoiceState, advance
from ekiden.engine.history import TokenCounts, penalises
from ekiden.engine.plan import SampleSpec
from ekiden.engine.scheduling.sequence import Sequence


class Role(Enum):
    """What this replica does for the request."""

    LOCAL = auto()
    """Computes and decodes it."""
    PREFILL = auto()
    """Computes its prompt for another replica."""
    RESERVED = auto()
    """Waits for its prompt's KV from another replica, to decode it afterwards."""


class Job:
    """A request and its choices. ``sequences`` are those that stand for unfinished choices."""

    def __init__(
        self, request: Request, role: Role, arrival: int, states: list[ChoiceState], now: float
    ) -> None:
        self.request = request
        self.role = role
        self.arrival = arrival
        self.states = states
        self.sequences: list[Sequence] = []
        self.started = False
        self.cancelled = False
        """Only of a hand-off that is sent: it waits for ``let_go``."""
        self.arrived = False
        """The KV is in the reserved blocks."""
        self.cached_tokens = 0
        self.computed_tokens = 0
        self.preemptions = 0
        self.added_at = now
        self.first_at = now

    @property
    def done(self) -> bool:
        return all(state.finish is not None for state in self.states)

    @property
    def handed(self) -> bool:
        """Whether any choice has tokens that the client may have seen."""
        return any(state.output for state in self.states)

    @property
    def completion_tokens(self) -> int:
        return sum(len(state.output) for state in self.states)

    def take(self, choice: int, token: int, logprobs: TokenLogprobs | None) -> Delta:
        """Advance one choice by one token."""
        result = advance(self.states[choice], token, logprobs)
        return Delta(
            request_id=self.request.request_id,
            choice=choice,
            tokens=(token,),
            logprobs=() if logprobs is None else (logprobs,),
            finish=result.finish,
            stop_reason=result.stop_reason,
        )

    def replay(self, resume: Mapping[int, tuple[int, ...]]) -> list[Delta]:
        """Bring the choices to where the client has seen them.

        Tokens are not told again, but a choice that ended with them says so once more, without
        tokens: the client may have missed it.

        Raises:
            BadRequest: a choice that is none, or tokens beyond the choice's end.
        """
        ends: list[Delta] = []
        for choice, tokens in sorted(resume.items()):
            if not 0 <= choice < len(self.states):
                raise BadRequest(
                    f"resume names choice {choice} of {len(self.states)}", field="resume"
                )
            for token in tokens:
                if self.states[choice].finish is not None:
                    raise BadRequest(
                        f"resume goes on after the end of choice {choice}", field="resume"
                    )
                delta = self.take(choice, token, None)
                if delta.finish is not None:
                    ends.append(
                        Delta(
                            request_id=delta.request_id,
                            choice=choice,
                            tokens=(),
                            finish=delta.finish,
                            stop_reason=delta.stop_reason,
                        )
                    )
        return ends

    def groups(self) -> dict[tuple[int, ...], list[int]]:
        """Unfinished choices by their output so far: those with the same share a sequence."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for choice, state in enumerate(self.states):
            if state.finish is None:
                groups.setdefault(tuple(state.output), []).append(choice)
        return groups

    def specs(
        self, choices: Items[int], draft: Items[int], unknown: tuple[int, ...] = ()
    ) -> tuple[SampleSpec, ...]:
        """How the next token of each choice is to be sampled, ``unknown`` tokens coming before it,
        or with a draft of the one choice the next ones, each as if the draft's tokens before it
        had come."""
        if not draft:
            return tuple(self.spec(choice, unknown=len(unknown)) for choice in choices)
        (choice,) = choices
        return tuple(self.spec(choice, tuple(draft[:i])) for i in range(len(draft) + 1))

    def spec(self, choice: int, ahead: tuple[int, ...] = (), unknown: int = 0) -> SampleSpec:
        """How the token of ``choice`` that follows its output and ``ahead`` is to be sampled, or
        ``unknown`` tokens later; those the rank adds to what is penalised."""
        sampling, state = self.request.sampling, self.states[choice]
        seen, seen_counts = self._seen(state, ahead)
        return SampleSpec(
            choice=choice,
            seed=choice_seed(sampling.seed, choice),
            position=len(state.output) + len(ahead) + unknown,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=sampling.logit_bias,
            banned=state.banned(len(ahead) + unknown),
            seen=seen,
            seen_counts=seen_counts,
            logprobs=sampling.logprobs,
        )

    def _seen(self, state: ChoiceState, ahead: tuple[int, ...]) -> tuple[bytes, bytes]:
        sampling = self.request.sampling
        if not penalises(sampling):
            return b"", b""
        repeats = sampling.repetition_penalty != 1.0
        if state.counts is None:
            state.counts = TokenCounts(self.request.prompt if repeats else (), state.output)
        return state.counts.snapshot(ahead)


def check_hand_off(job: Job, deltas: Items[Delta], vocab_size: int) -> None:
    """Raise ReplicaFailed unless ``deltas`` are exactly one usable token for every choice."""
    choices = sorted(delta.choice for delta in deltas)
    if job.handed or choices != list(range(len(job.states))):
        raise ReplicaFailed(
            f"prefill sent hand-off tokens for choices {choices}, "
            f"expected one for each of {len(job.states)}, once"
        )
    wants = job.request.sampling.logprobs is not None
    for delta in deltas:
        usable = len(delta.tokens) == 1 and 0 <= delta.tokens[0] < vocab_size
        if not usable or (wants and len(delta.logprobs) != 1):
            raise ReplicaFailed(
                f"prefill sent the hand-off {delta}, expected one token below {vocab_size}"
                + (" with its logprobs" if wants else "")
            )
