"""Steps planned before their rows' tokens are known: all rows or none, and nothing pushed out."""

from __future__ import annotations

from ekiden.cache.block_pool import BlockPool
from ekiden.cache.prefix_index import KeyChain
from ekiden.core.hashes import root_hash
from ekiden.engine.scheduling.schedule import Limits, Schedule
from ekiden.engine.scheduling.scheduler import Scheduler
from ekiden.engine.scheduling.sequence import Gate, Sequence

ROOT = root_hash("m")


def scheduler(*, blocks: int = 100, stages: int = 1, budget: int = 16) -> Scheduler:
    limits = Limits(
        block_size=4,
        max_num_batched_tokens=budget,
        max_num_seqs=8,
        micro_batches=stages,
        plan_ahead=True,
    )
    return Scheduler(BlockPool(blocks), limits)


def sequence(
    arrival: int,
    prompt: int = 2,
    *,
    output: int = 8,
    choices: tuple[int, ...] = (0,),
    gate: Gate = Gate.NONE,
) -> Sequence:
    return Sequence(
        request_id=f"r{arrival}",
        order=(0, arrival, 0),
        tokens=[arrival * 100 + i for i in range(prompt)],
        choices=choices,
        chain=KeyChain(ROOT, 4, 4),
        max_tokens=prompt + output,
        gate=gate,
    )


class Run:
    """A scheduler and the steps it has in flight, collected in order."""

    def __init__(self, sched: Scheduler) -> None:
        self.sched = sched
        self.in_flight: list[Schedule] = []

    def plan(self) -> list[tuple[str, int, int, int]]:
        """(request, start, stop, steps back to the one that samples its token) of each chunk."""
        step = self.sched.schedule(len(self.in_flight))
        if step.chunks:
            self.in_flight.append(step)
        return [
            (c.sequence.request_id, c.start, c.stop, c.after and step.number - c.after)
            for c in step.chunks
        ]

    def collect(self) -> None:
        for chunk in self.in_flight.pop(0).chunks:
            last = chunk.is_last
            self.sched.collected(chunk)
            if last and not chunk.sequence.dead:
                self.sched.extend(chunk.sequence, [1])


def test_the_next_step_is_planned_with_all_rows_while_one_runs() -> None:
    run = Run(scheduler())
    run.sched.add(sequence(1))
    run.sched.add(sequence(2, 3))
    assert run.plan() == [("r1", 0, 2, 0), ("r2", 0, 3, 0)]
    assert run.plan() == [("r1", 2, 3, 1), ("r2", 3, 4, 1)]
    assert run.plan() == [], "one token is unknown, never two"
    run.collect()
    assert run.plan() == [("r1", 3, 4, 1), ("r2", 4, 5, 1)]


def test_a_row_whose_last_token_is_being_sampled_is_not_planned_again() -> None:
    run = Run(scheduler())
    run.sched.add(sequence(1, output=2))
    run.sched.add(sequence(2, output=9))
    run.plan()
    assert run.plan() == [("r1", 2, 3, 1), ("r2", 2, 3, 1)]
    run.collect()
    assert run.plan() == [("r2", 3, 4, 1)]


def test_a_hand_off_never_goes_on_after_its_token() -> None:
    run = Run(scheduler())
    sent = sequence(1, gate=Gate.CLOSED)
    run.sched.add(sent)
    run.sched.announce()
    run.sched.open(sent, 7)
    assert run.plan() == [("r1", 0, 2, 0)]
    assert run.plan() == []


def test_choices_that_will_part_hold_the_next_step_back() -> None:
    run = Run(scheduler(budget=4))
    run.sched.add(sequence(1, choices=(0, 1)))
    run.sched.add(sequence(2, 30))
    assert run.plan() == [("r1", 0, 2, 0), ("r2", 0, 2, 0)]
    assert run.plan() == [], "else the choices would wait for a step more than their token"


def test_a_row_that_came_from_elsewhere_is_planned_beside_those_in_flight() -> None:
    run = Run(scheduler())
    run.sched.add(sequence(1))
    run.plan()
    adopted = sequence(2, 4)
    assert run.sched.reserve(adopted)
    adopted.tokens.append(5)
    run.sched.queues.discard(adopted)
    adopted.scheduled = adopted.computed = 4
    run.sched.queues.run(adopted)
    assert run.plan() == [("r2", 4, 5, 0), ("r1", 2, 3, 1)]


def test_a_prompt_goes_on_beside_rows_that_are_planned_ahead() -> None:
    run = Run(scheduler(budget=8))
    run.sched.add(sequence(1))
    run.plan()
    run.sched.add(sequence(2, 20))
    assert run.plan() == [("r1", 2, 3, 1), ("r2", 0, 7, 0)]
    run.collect()
    assert run.plan() == [("r1", 3, 4, 1), ("r2", 7, 14, 0)]


def test_where_blocks_are_short_the_steps_in_flight_end_first_and_nobody_is_pushed_out() -> None:
    run = Run(scheduler(blocks=4))
    old, young = sequence(1, 4, output=20), sequence(2, 4, output=20)
    run.sched.add(old)
    run.sched.add(young)
    run.plan()
    assert run.sched.pool.allocate(1)
    assert run.plan() == [], "both need a block and one is there"
    assert len(old.blocks) == len(young.blocks) == 1
    run.collect()
    assert run.plan() == [("r1", 4, 5, 0)]
    assert young.preemptions == 0
    assert run.plan() == [], "the young one waits for its block, and the old one with it"
    run.collect()
    run.plan()
    run.collect()
    run.plan()
    run.collect()
    run.plan()
    run.collect()
    assert run.plan() == [("r1", 8, 9, 0)], "the oldest needs a block: now it may be taken"
    assert young.preemptions == 1


def test_stages_take_rows_in_turn_and_one_more_step_is_planned() -> None:
    run = Run(scheduler(stages=2))
    for arrival in range(1, 5):
        run.sched.add(sequence(arrival))
    run.plan()
    assert run.plan() == [("r1", 2, 3, 1), ("r2", 2, 3, 1)]
    assert run.plan() == [("r3", 2, 3, 2), ("r4", 2, 3, 2)]
    assert run.plan() == [], "one token is unknown, never two"
    run.collect()
    assert run.plan() == [("r1", 3, 4, 2), ("r2", 3, 4, 2)]
    for start in range(3, 6):
        run.collect()
        assert run.plan() == [("r3", start, start + 1, 2), ("r4", start, start + 1, 2)]
        run.collect()
        assert run.plan() == [("r1", start + 1, start + 2, 2), ("r2", start + 1, start + 2, 2)]
