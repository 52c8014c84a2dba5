"""No stage idles more than it must: the real engine over stages whose work is counted, not timed.

Stage s works on step k once stage s - 1 has done with it and stage s with step k - 1; the first
one, once the step is there and the tokens it goes on from have been sampled. The clock moves by
the cost of the steps and by nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from engine_fakes import Collected, FakeExecutor, check, make_engine, make_request

from ekiden.core.clock import ManualClock
from ekiden.engine.engine import Engine
from ekiden.engine.plan import StepPlan, StepResult

ROW = 0.01
"""What a token costs each stage; reading its weights costs 1."""


class CountedPipeline(FakeExecutor):
    """A fake executor that says when each stage would have worked on each step."""

    def __init__(self, inner: FakeExecutor, costs: Sequence[float], clock: ManualClock) -> None:
        super().__init__(
            inner.num_blocks, inner.block_size, max_in_flight=inner.max_in_flight, late=True
        )
        self.clock = clock
        self.costs = costs
        self.hop = 0.0
        """From the end of a step until the first stage's rank has its tokens, if it is another."""
        self.driver = 0.0
        """From the end of a step until the driver has taken it in and planned the next one."""
        self.free = [0.0] * len(costs)
        self.ended: dict[int, float] = {}
        self.spent: dict[int, tuple[float, ...]] = {}

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        hop = self.hop if len(self.costs) > 1 else 0.0
        known = [self.ended[chunk.after] + hop for chunk in plan.chunks if chunk.after]
        at = max([self.clock.now(), *known])
        tokens = sum(len(chunk.tokens) for chunk in plan.chunks)
        self.spent[plan.step] = tuple(cost * (1 + ROW * tokens) for cost in self.costs)
        for stage, cost in enumerate(self.spent[plan.step]):
            at = self.free[stage] = max(at, self.free[stage]) + cost
        self.ended[plan.step] = at

    def collect(self, timeout_s: float) -> StepResult:
        result = super().collect(timeout_s)
        heard = self.ended[result.step] + self.driver
        self.clock.advance(max(0.0, heard - self.clock.now()))
        return msgspec.structs.replace(result, stage_s=self.spent[result.step])


def counted(
    costs: Sequence[float], *, ahead: bool = True, hop: float = 0.0, driver: float = 0.0
) -> tuple[Engine, CountedPipeline]:
    engine, inner = make_engine(
        num_blocks=400, budget=64, seqs=32, max_in_flight=len(costs), ahead=ahead
    )
    clock = engine._clock
    assert isinstance(clock, ManualClock)
    pipeline = CountedPipeline(inner, costs, clock)
    pipeline.hop, pipeline.driver = hop, driver
    engine.executor = pipeline
    return engine, pipeline


def idle(engine: Engine, requests: int) -> tuple[tuple[float, ...], int]:
    """Each stage's idle share while ``requests`` are served, and the steps that took."""
    wanted = [
        make_request(f"r{i}", range(1, 5 + i % 7), max_tokens=40, seed=2 * i)
        for i in range(requests)
    ]
    said = Collected(engine)
    for request in wanted:
        engine.add(request)
    steps, shares = 0, ()
    while engine.has_work():
        said.step()
        if not said.finished:
            steps, shares = steps + 1, engine.stats().stage_idle
    check(said, *wanted)
    return shares, steps


def textbook(stages: int, micro_batches: int) -> float:
    return (stages - 1) / (micro_batches + stages - 1)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("ahead", [True, False])
def test_no_stage_idles_more_than_the_textbook_says(stages: int, ahead: bool) -> None:
    """M is all micro-batches of the run, so that the bound is hardly more than the five points."""
    engine, _ = counted([1.0] * stages, ahead=ahead)
    shares, steps = idle(engine, 4 * stages)
    assert len(shares) == stages
    assert max(shares) <= textbook(stages, steps) + 0.05


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_what_the_driver_takes_between_steps_is_hidden_by_planning_ahead(stages: int) -> None:
    costs, hop, driver = [1.0] * stages, 0.02, 0.2
    shares, steps = idle(counted(costs, hop=hop, driver=driver)[0], 4 * stages)
    waits, _ = idle(counted(costs, hop=hop, driver=driver, ahead=False)[0], 4 * stages)
    assert max(shares) <= textbook(stages, steps) + 0.05
    assert min(waits) > max(shares) + 0.04


def test_one_dear_stage_leaves_the_others_idle_and_the_share_says_how_much() -> None:
    shares, _ = idle(counted([1.0, 2.0])[0], 8)
    assert shares == pytest.approx((0.5, 0.0), abs=0.03)


def test_one_request_keeps_one_stage_at_a_time_busy() -> None:
    shares, _ = idle(counted([1.0, 1.0, 1.0])[0], 1)
    assert shares == pytest.approx((2 / 3,) * 3, abs=0.01)
