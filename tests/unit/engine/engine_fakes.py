"""A fake executor whose KV is real enough to be got wrong, and the naive reference beside it.

Every position's KV is a number that depends on all tokens before it, read through the block table
like attention does, so a wrong, freed, overwritten or uncopied block changes the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ekiden.cache.layout import KvLayout
from ekiden.core.clock import ManualClock
from ekiden.core.config import EngineConfig, SpeculativeConfig
from ekiden.core.ids import choice_seed, mix64
from ekiden.core.types import FinishReason, Request, SamplingParams, TokenLogprobs
from ekiden.engine.engine import Engine
from ekiden.engine.feed import Feed, tokens_of
from ekiden.engine.plan import Sampled, SampleSpec, StepPlan, StepResult
from ekiden.engine.port import ChunkDone

VOCAB = 50
EOS = (7, 11)
MAX_MODEL_LEN = 64
PROMPT = tuple(range(1, 11))


def kv_values(tokens: Sequence[int]) -> list[int]:
    """The KV of each position: a chain over everything before it."""
    values: list[int] = []
    for position, token in enumerate(tokens):
        values.append(mix64(values[-1] if values else 1, token, position))
    return values


def pick(values: Sequence[int], seed: int, position: int, banned: Sequence[int]) -> int:
    """The next token after ``values``; under an odd seed it often goes round, as text does."""
    number = mix64(*values, seed, position)
    token = 1 + position % 3 if seed % 2 and number % 16 else number // 16 % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token


class FakeExecutor:
    """Runs steps on numbers. ``late``: not when they are submitted but when they are collected."""

    def __init__(
        self, num_blocks: int, block_size: int, *, max_in_flight: int = 1, late: bool = False
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_in_flight = max_in_flight
        self.late = late
        self.cells: dict[tuple[int, int], int] = {}
        self.plans: list[StepPlan] = []
        self.reported: dict[int, ChunkDone] = {}
        self.ran: list[StepPlan] = []
        self.logprobs = True
        self._results: list[StepResult] = []
        self._feed = Feed(needs_tokens=True)

    def submit(self, plan: StepPlan) -> None:
        assert len(self.plans) + len(self._results) < self.max_in_flight
        self.plans.append(plan)
        if not self.late:
            self._results.append(self._run(self.plans.pop(0)))

    def collect(self, timeout_s: float) -> StepResult:
        if self.late:
            return self._run(self.plans.pop(0))
        return self._results.pop(0)

    def write(self, blocks: Sequence[int], start: int, values: Sequence[int]) -> None:
        """What a step or a transfer does: put KV at positions from ``start``."""
        for position, value in enumerate(values, start):
            self.cells[self._cell(blocks, position)] = value

    def read(self, blocks: Sequence[int], end: int) -> list[int]:
        return [self.cells.get(self._cell(blocks, position), 0) for position in range(end)]

    def _cell(self, blocks: Sequence[int], position: int) -> tuple[int, int]:
        return blocks[position // self.block_size], position % self.block_size

    def _run(self, plan: StepPlan) -> StepResult:
        plan = self._feed.fill(plan)
        self.ran.append(plan)
        for source, target in plan.copies:
            for offset in range(self.block_size):
                self.cells[target, offset] = self.cells.get((source, offset), 0)
        sampled: list[Sampled] = []
        for chunk in plan.chunks:
            for position, token in enumerate(chunk.tokens, chunk.start):
                before = self.cells.get(self._cell(chunk.blocks, position - 1), 0)
                value = mix64(before if position else 1, token, position)
                self.cells[self._cell(chunk.blocks, position)] = value
            end = chunk.start + len(chunk.tokens)
            if chunk.session:
                self.reported[chunk.session] = ChunkDone(chunk.session, end, chunk.blocks)
            values = self.read(chunk.blocks, end)
            for i, spec in enumerate(chunk.samples):
                known = end - max(0, chunk.proposed - i)
                sampled.append(self._sample(chunk.sequence, spec, values[:known]))
        self._feed.tell(plan.step, tokens_of(sampled))
        return StepResult(plan.step, tuple(sampled))

    def _sample(self, sequence: int, spec: SampleSpec, values: Sequence[int]) -> Sampled:
        token = pick(values, spec.seed, spec.position, spec.banned)
        logprobs = TokenLogprobs(token, -1.0) if spec.logprobs is not None else None
        return Sampled(sequence, spec.choice, token, logprobs)

    @property
    def layout(self) -> KvLayout:
        raise NotImplementedError

    @property
    def endpoints(self) -> tuple[bytes, ...]:
        return ()

    def send_port(self, message: bytes, rank: int | None = None) -> None:
        raise NotImplementedError

    def on_port_message(self, listener: object) -> None:
        raise NotImplementedError

    def healthy(self) -> str | None:
        return None

    def close(self) -> None:
        pass


class Found(NamedTuple):
    stop: str


class LetterText:
    """Every token is one letter; stop strings are looked for in the plainest way."""

    def __init__(self, stops: Sequence[str], min_tokens: int) -> None:
        self.stops = stops
        self.min_tokens = min_tokens
        self.text = ""

    def push(self, token: int) -> Found | None:
        self.text += letter(token)
        if len(self.text) <= self.min_tokens:
            return None
        hits = [stop for stop in self.stops if self.text.endswith(stop)]
        return Found(max(hits, key=len)) if hits else None

    def finish(self) -> Found | None:
        return None


def letter(token: int) -> str:
    return chr(ord("a") + token % 4)


class Answer(NamedTuple):
    """One choice as it must come out."""

    tokens: tuple[int, ...]
    finish: FinishReason
    stop_reason: str | int | None


def reference(request: Request, choice: int, max_model_len: int = MAX_MODEL_LEN) -> Answer:
    """Generate one choice naively: one sequence, no cache, the rules written out."""
    sampling = request.sampling
    seed = choice_seed(sampling.seed, choice)
    output: list[int] = []
    while True:
        early = len(output) < sampling.min_tokens
        eos = () if sampling.ignore_eos else EOS
        banned = (*eos, *sampling.stop_token_ids) if early else ()
        values = kv_values((*request.prompt, *output))
        token = pick(values, seed, len(output), banned)
        output.append(token)
        ended = _ended(request, output, eos, max_model_len)
        if ended is not None:
            return Answer(tuple(output), *ended)


def _ended(
    request: Request, output: list[int], eos: tuple[int, ...], max_model_len: int
) -> tuple[FinishReason, str | int | None] | None:
    sampling, token = request.sampling, output[-1]
    if len(output) > sampling.min_tokens:
        if token in eos:
            return FinishReason.STOP, None
        if token in sampling.stop_token_ids:
            return FinishReason.STOP, token
        text = "".join(map(letter, output))
        hits = [stop for stop in sampling.stop if text.endswith(stop)]
        if hits:
            return FinishReason.STOP, max(hits, key=len)
    full = len(request.prompt) + len(output) >= max_model_len
    return (FinishReason.LENGTH, None) if len(output) == sampling.max_tokens or full else None


def make_engine(
    *,
    num_blocks: int = 16,
    block_size: int = 4,
    budget: int = 16,
    seqs: int = 8,
    max_in_flight: int = 1,
    late: bool = False,
    caching: bool = True,
    speculate: int = 0,
    ahead: bool = False,
) -> tuple[Engine, FakeExecutor]:
    config = EngineConfig(
        model_dir=Path("unused"),
        model_name="m",
        block_size=block_size,
        granule=4,
        pipeline_parallel_size=max_in_flight,
        async_scheduling=ahead,
        max_num_batched_tokens=budget,
        max_num_seqs=seqs,
        enable_prefix_caching=caching,
        speculative_config=SpeculativeConfig(num_speculative_tokens=speculate),
    )
    executor = FakeExecutor(num_blocks, block_size, max_in_flight=config.steps_in_flight, late=late)
    engine = Engine(
        config,
        executor,
        eos_token_ids=EOS,
        vocab_size=VOCAB,
        max_model_len=MAX_MODEL_LEN,
        model_fingerprint="fake",
        text_factory=LetterText,
        clock=ManualClock(),
    )
    return engine, executor


def make_request(
    request_id: str = "r",
    prompt: Sequence[int] = (1, 2, 3, 4, 5),
    *,
    salt: str = "",
    priority: int = 0,
    seed: int = 0,
    max_tokens: int = 6,
    ignore_eos: bool = True,
    **sampling: object,
) -> Request:
    params = SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=ignore_eos, **sampling)
    return Request(
        request_id=request_id,
        model="m",
        prompt=tuple(prompt),
        sampling=params,
        salt=salt,
        priority=priority,
    )


class Collected:
    """All that an engine has said, by request and choice."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], tuple[FinishReason, str | int | None]] = {}
        self.events: list[object] = []
        self.finished: dict[str, object] = {}
        self.logprobs: dict[tuple[str, int], int] = {}

    def step(self) -> None:
        self.take(self.engine.step(1.0))

    def take(self, output: object = None) -> None:
        output = self.engine.take_output() if output is None else output
        for delta in output.deltas:
            key = (delta.request_id, delta.choice)
            assert key not in self.ends, "a choice went on after its end"
            self.tokens.setdefault(key, []).extend(delta.tokens)
            self.logprobs[key] = self.logprobs.get(key, 0) + len(delta.logprobs)
            if delta.finish is not None:
                self.ends[key] = (delta.finish, delta.stop_reason)
        self.events += output.events
        for finished in output.finished:
            assert finished.request_id not in self.finished
            self.finished[finished.request_id] = finished

    def run(self, limit: int = 2000) -> None:
        """Step until nothing can get on."""
        for _ in range(limit):
            if not self.engine.has_work():
                break
            self.step()
        else:
            raise AssertionError("no end in sight")
        self.step()

    def answer(self, request_id: str, choice: int = 0) -> Answer:
        key = (request_id, choice)
        return Answer(tuple(self.tokens.get(key, ())), *self.ends[key])


def check(said: Collected, *requests: Request) -> None:
    for request in requests:
        for choice in range(request.sampling.n):
            assert said.answer(request.request_id, choice) == reference(request, choice)


def prompt_ending_in(token: int) -> tuple[int, ...]:
    """A prompt after which ``token`` comes first."""
    for last in range(1000):
        prompt = (last % 50, last // 50, 1)
        if reference(make_request(prompt=prompt, max_tokens=1), 0).tokens == (token,):
            return prompt
    raise AssertionError("no such prompt")
