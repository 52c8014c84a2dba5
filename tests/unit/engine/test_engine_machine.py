"""Random lives of requests in one engine: every token right, every block accounted for.

Requests of all three roles share a small pool, with chunks, prefix hits, forks, preemption, steps
in flight, cancels at any time, and transfers that write garbage until they have let go.
"""

from __future__ import annotations

from typing import Any

from engine_fakes import (
    EOS,
    Collected,
    FakeExecutor,
    kv_values,
    make_engine,
    make_request,
    pick,
    reference,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from ekiden.core.ids import choice_seed
from ekiden.core.types import Delta, Request, TokenLogprobs
from ekiden.engine.engine import Engine, PrefillDone, Ready, Reservation

BASE = tuple((7 * i + 3) % 40 for i in range(16))

prompts = st.builds(
    lambda keep, tail: BASE[:keep] + tuple(tail),
    st.sampled_from([0, 3, 8, 12, 13, 16, 16]),
    st.lists(st.integers(0, 1), min_size=1, max_size=4),
)
ACTS = st.sampled_from(["hand off", "arrive", "hand off", "arrive", "fail", "again"])
samplings = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 3),
        "max_tokens": st.integers(1, 24),
        "n": st.sampled_from([1, 1, 2, 3]),
    },
    optional={
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.just((5, 20)),
        "stop": st.just(("abc", "dabc")),
        "logprobs": st.just(0),
    },
)


class Writer:
    """A transfer into reserved blocks: garbage at any time until it has let go or arrived."""

    def __init__(self, request: Request, reservation: Reservation) -> None:
        self.request = request
        self.reservation = reservation
        self.complete = False

    def scribble(self, executor: FakeExecutor, value: int) -> None:
        held = self.reservation.held_tokens
        count = len(self.request.prompt) - held
        executor.write(self.reservation.blocks, held, [value + i for i in range(count)])

    def deliver(self, executor: FakeExecutor) -> None:
        held = self.reservation.held_tokens
        values = kv_values(self.request.prompt)[held:]
        executor.write(self.reservation.blocks, held, values)
        self.complete = True


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.engine: Engine
        self.executor: FakeExecutor
        self.count = 0
        self.live: dict[str, Request] = {}
        self.resumed: dict[tuple[str, int], int] = {}
        self.cancelled: set[str] = set()
        self.sessions: dict[str, int] = {}
        self.handoffs: set[str] = set()
        self.done: set[str] = set()
        self.latest: dict[str, Writer] = {}
        self.open_writers: list[Writer] = []
        self.handed: set[str] = set()
        self.local: set[str] = set()

    @initialize(
        blocks=st.integers(11, 14),
        budget=st.sampled_from([4, 7, 16, 40]),
        in_flight=st.integers(1, 3),
        late=st.booleans(),
        caching=st.booleans(),
        size=st.sampled_from([4, 8]),
        speculate=st.sampled_from([0, 0, 1, 3, 9]),
        ahead=st.booleans(),
    )
    def start(
        self,
        blocks: int,
        budget: int,
        in_flight: int,
        late: bool,
        caching: bool,
        size: int,
        speculate: int,
        ahead: bool,
    ) -> None:
        self.engine, self.executor = make_engine(
            num_blocks=blocks if size == 4 else 7,
            block_size=size,
            budget=budget,
            seqs=6,
            max_in_flight=in_flight,
            late=late,
            caching=caching,
            speculate=speculate,
            ahead=ahead,
        )
        self.said = Collected(self.engine)

    def new_request(
        self, prompt: tuple[int, ...], sampling: dict[str, Any], **more: Any
    ) -> Request:
        self.count += 1
        minimum = min(2, sampling["max_tokens"]) if self.count % 3 == 0 else 0
        name = f"r{self.count}"
        request = make_request(name, prompt, min_tokens=minimum, **sampling, **more)
        self.live[name] = request
        return request

    @rule(
        prompt=prompts,
        sampling=samplings,
        priority=st.sampled_from([0, 0, 0, -1]),
        salt=st.sampled_from(["", "", "tenant"]),
    )
    def add(
        self, prompt: tuple[int, ...], sampling: dict[str, Any], priority: int, salt: str
    ) -> None:
        request = self.new_request(prompt, sampling, priority=priority, salt=salt)
        self.engine.add(request)
        self.local.add(request.request_id)

    @rule(prompt=prompts, sampling=samplings, seen=st.lists(st.integers(0, 12)))
    def resume(self, prompt: tuple[int, ...], sampling: dict[str, Any], seen: list[int]) -> None:
        request = self.new_request(prompt, sampling)
        resume: dict[int, tuple[int, ...]] = {}
        for choice, length in enumerate(seen[: request.sampling.n]):
            resume[choice] = reference(request, choice).tokens[:length]
            self.resumed[request.request_id, choice] = len(resume[choice])
        self.engine.add(request, resume)
        self.local.add(request.request_id)

    @rule(prompt=prompts, sampling=samplings)
    def add_handoff(self, prompt: tuple[int, ...], sampling: dict[str, Any]) -> None:
        request = self.new_request(prompt, sampling)
        self.engine.add_handoff(request)
        self.handoffs.add(request.request_id)

    @rule()
    def open_sessions(self) -> None:
        for event in self.said.events:
            if isinstance(event, Ready) and event.request_id in self.handoffs:
                name = event.request_id
                if name not in self.sessions and name not in self.cancelled:
                    self.sessions[name] = len(self.sessions) + 1
                    self.engine.open_session(name, self.sessions[name])

    @rule()
    def let_go_of_one(self) -> None:
        finished = {e.request_id for e in self.said.events if isinstance(e, PrefillDone)}
        for name in self.sessions:
            if name in self.handoffs and (name in finished or name in self.cancelled):
                self.let_go(name)
                return

    def let_go(self, name: str) -> None:
        self.check_sent(name)
        self.handoffs.discard(name)
        self.engine.let_go(name)

    def check_sent(self, name: str) -> None:
        """What the transfer of a hand-off would read now is the prompt's KV."""
        report = self.executor.reported.get(self.sessions[name])
        if report is not None:
            expected = kv_values(self.live[name].prompt)[: report.end]
            assert self.executor.read(report.blocks, report.end) == expected

    @rule(prompt=prompts, sampling=samplings)
    def reserve(self, prompt: tuple[int, ...], sampling: dict[str, Any]) -> None:
        request = self.new_request(prompt, sampling)
        self.try_reserve(request)
        for attempt in range(12):
            if request.request_id in self.latest:
                break
            self.make_room(attempt)
            self.try_reserve(request)

    def make_room(self, attempt: int) -> None:
        """What happens by itself in time: transfers end, steps run."""
        self.transfers_go_on(attempt, ["hand off", "arrive"])
        self.writer_lets_go(attempt)
        self.let_go_of_one()
        self.said.step()
        self.said.step()

    def try_reserve(self, request: Request) -> None:
        before = self.engine.cached_prefix(request)
        reservation = self.engine.reserve(request)
        self.latest.pop(request.request_id, None)
        if reservation is None:
            return
        assert reservation.held_tokens == before
        writer = Writer(request, reservation)
        self.latest[request.request_id] = writer
        self.open_writers.append(writer)

    @rule(number=st.integers(0, 9), acts=st.lists(ACTS, min_size=1, max_size=3))
    def transfers_go_on(self, number: int, acts: list[str]) -> None:
        """Reservations that are still waited for take steps, in whichever order."""
        for act in acts:
            waiting = [name for name, writer in self.latest.items() if self.is_waited_for(writer)]
            if waiting:
                self.transfer_goes_on(waiting[number % len(waiting)], act)

    def transfer_goes_on(self, name: str, act: str) -> None:
        request, writer = self.live[name], self.latest[name]
        if act == "hand off" and name not in self.handed:
            self.hand_off(request)
        elif act == "arrive" and not writer.complete:
            writer.deliver(self.executor)
            self.engine.adopt(name)
        elif act == "fail" and not (writer.complete and name in self.handed):
            self.engine.recompute(name)
            self.local.add(name)
        elif act == "again" and name not in self.handed:
            self.try_reserve(request)
            if name not in self.latest:
                self.engine.add(request)
                self.local.add(name)

    def hand_off(self, request: Request) -> None:
        name, sampling = request.request_id, request.sampling
        eos = () if sampling.ignore_eos else EOS
        banned = (*eos, *sampling.stop_token_ids) if sampling.min_tokens else ()
        entry = () if sampling.logprobs is None else (TokenLogprobs(0, -1.0),)
        deltas = [
            Delta(request_id=name, choice=choice, tokens=(token,), logprobs=entry)
            for choice in range(sampling.n)
            for token in [
                pick(kv_values(request.prompt), choice_seed(sampling.seed, choice), 0, banned)
            ]
        ]
        self.engine.hand_off(name, deltas[::-1])
        self.handed.add(name)

    @rule(pick_one=st.integers(0, 9))
    def writer_lets_go(self, pick_one: int) -> None:
        """It is safe once it has arrived, or failed so that the request waits no more for it."""
        idle = [w for w in self.open_writers if w.complete or not self.is_waited_for(w)]
        if idle:
            writer = idle[pick_one % len(idle)]
            self.open_writers.remove(writer)
            self.engine.writer_done(writer.reservation.key)
            self.engine.writer_done(writer.reservation.key)

    def is_waited_for(self, writer: Writer) -> bool:
        name = writer.request.request_id
        gone = name in self.cancelled or name in self.local or name in self.said.finished
        return self.latest.get(name) is writer and not gone

    @rule(value=st.integers(1, 9))
    def late_writes(self, value: int) -> None:
        for writer in self.open_writers:
            if not writer.complete:
                writer.scribble(self.executor, value)

    @rule(number=st.integers(0, 29))
    def cancel(self, number: int) -> None:
        """One in a few goes away, in whichever state it is."""
        names = [n for n in self.live if n not in self.said.finished and n not in self.cancelled]
        if number < len(names):
            self.engine.cancel(names[number])
            self.cancelled.add(names[number])

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.said.step()
            self.engine.audit()

    @rule()
    def submit_only(self) -> None:
        while (plan := self.engine.next_plan()) is not None:
            self.executor.submit(plan)
        self.said.take()

    @invariant()
    def tokens_are_right(self) -> None:
        if not hasattr(self, "said"):
            return
        self.engine.audit()
        for (name, choice), tokens in self.said.tokens.items():
            skip = self.resumed.get((name, choice), 0)
            answer = reference(self.live[name], choice)
            expected = answer.tokens[skip:]
            if name in self.handoffs or name in self.sessions:
                expected = answer.tokens[:1]
            assert tuple(tokens) == expected[: len(tokens)]
            if (end := self.said.ends.get((name, choice))) is not None:
                assert end == (answer.finish, answer.stop_reason)
                assert tuple(tokens) == expected
            if self.live[name].sampling.logprobs is not None:
                assert self.said.logprobs[name, choice] == len(tokens)
        for name in self.sessions:
            if name in self.handoffs:
                self.check_sent(name)

    def teardown(self) -> None:
        if not hasattr(self, "said"):
            return
        self.settle()
        for name in list(self.live):
            if name not in self.sessions and name not in self.cancelled:
                self.check_complete(name)
        books = self.engine.books()
        assert books.idle, books
        self.engine.audit()

    def settle(self) -> None:
        """Let every transfer end, and see that everything else then ends by itself."""
        for name in list(self.handoffs):
            self.engine.cancel(name)
            self.cancelled.add(name)
            if name in self.sessions:
                self.let_go(name)
        for name in list(self.latest):
            writer = self.latest[name]
            if self.is_waited_for(writer) and not (writer.complete and name in self.handed):
                self.engine.recompute(name)
                self.local.add(name)
        for writer in self.open_writers:
            self.engine.writer_done(writer.reservation.key)
        for name in self.live:
            if name not in self.local | self.handed | set(self.latest):
                self.cancelled.add(name)
                assert not self.engine.cancel(name) or name in self.handoffs
        self.said.run()

    def check_complete(self, name: str) -> None:
        request = self.live[name]
        finished: Any = self.said.finished[name]
        answers = [reference(request, choice) for choice in range(request.sampling.n)]
        for choice, answer in enumerate(answers):
            skip = self.resumed.get((name, choice), 0)
            assert self.said.answer(name, choice) == answer._replace(tokens=answer.tokens[skip:])
        assert finished.completion_tokens == sum(len(answer.tokens) for answer in answers)


def test_every_token_is_right_and_every_block_accounted_for_in_random_lives() -> None:
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
