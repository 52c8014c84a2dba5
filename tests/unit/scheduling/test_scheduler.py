"""What goes into a step, who is admitted, and who is pushed out."""

from __future__ import annotations

from collections.abc import Sequence as Items

from ekiden.cache.block_pool import BlockPool
from ekiden.cache.prefix_index import KeyChain
from ekiden.core.hashes import root_hash
from ekiden.engine.scheduling.policy import growth_allowance, rows_per_step
from ekiden.engine.scheduling.schedule import Limits, Schedule
from ekiden.engine.scheduling.scheduler import Scheduler
from ekiden.engine.scheduling.sequence import Gate, Sequence

ROOT = root_hash("m")


def scheduler(blocks: int = 100, *, budget: int = 16, seqs: int = 8, micro: int = 1) -> Scheduler:
    limits = Limits(
        block_size=4, max_num_batched_tokens=budget, max_num_seqs=seqs, micro_batches=micro
    )
    return Scheduler(BlockPool(blocks), limits)


def sequence(
    arrival: int,
    prompt: int,
    *,
    output: int = 8,
    priority: int = 0,
    choices: Items[int] = (0,),
    gate: Gate = Gate.NONE,
) -> Sequence:
    return Sequence(
        request_id=f"r{arrival}",
        order=(priority, arrival, 0),
        tokens=[arrival * 1000 + i for i in range(prompt)],
        choices=choices,
        chain=KeyChain(ROOT, 4, 4),
        max_tokens=prompt + output,
        gate=gate,
    )


def content(step: Schedule) -> list[tuple[str, int, int]]:
    return [(chunk.sequence.request_id, chunk.start, chunk.stop) for chunk in step.chunks]


def finish_step(sched: Scheduler, step: Schedule) -> None:
    """Collect it; whoever reached the end of its tokens gets one more."""
    for chunk in step.chunks:
        last = chunk.is_last
        sched.collected(chunk)
        if last and not chunk.sequence.dead:
            chunk.sequence.tokens.append(1)


def turn(sched: Scheduler) -> list[tuple[str, int, int]]:
    step = sched.schedule()
    finish_step(sched, step)
    return content(step)


def test_a_long_prompt_is_cut_into_chunks_and_does_not_stall_the_running_batch() -> None:
    sched = scheduler()
    sched.add(sequence(1, 3))
    assert turn(sched) == [("r1", 0, 3)]
    sched.add(sequence(2, 40))
    assert turn(sched) == [("r1", 3, 4), ("r2", 0, 15)]
    assert turn(sched) == [("r1", 4, 5), ("r2", 15, 30)]
    assert turn(sched) == [("r1", 5, 6), ("r2", 30, 40)]
    assert turn(sched) == [("r1", 6, 7), ("r2", 40, 41)]


def test_waiting_requests_go_in_order_of_priority_then_arrival() -> None:
    sched = scheduler(budget=4)
    for arrival, priority in ((1, 0), (2, 0), (3, -1)):
        sched.add(sequence(arrival, 4, priority=priority))
    assert [turn(sched)[-1][0] for _ in range(1)] == ["r3"]
    assert turn(sched) == [("r3", 4, 5), ("r1", 0, 3)]


def test_nobody_overtakes_the_first_one_that_does_not_fit() -> None:
    sched = scheduler(blocks=6, budget=64)
    sched.add(sequence(1, 12))
    turn(sched)
    sched.add(sequence(2, 16))
    sched.add(sequence(3, 2))
    assert turn(sched) == [("r1", 12, 13)]


def test_no_more_seats_are_taken_than_there_are_choices_to_sit() -> None:
    sched = scheduler(seqs=4, budget=64)
    sched.add(sequence(1, 4, choices=(0, 1, 2)))
    sched.add(sequence(2, 4, choices=(0, 1)))
    sched.add(sequence(3, 4))
    assert turn(sched) == [("r1", 0, 4)]


def test_micro_batches_share_the_rows_and_chunks_of_one_prompt_follow_each_other() -> None:
    sched = scheduler(micro=2, budget=16)
    for arrival in range(1, 5):
        sched.add(sequence(arrival, 2))
    turn(sched)
    first = sched.schedule()
    second = sched.schedule()
    assert content(first) == [("r1", 2, 3), ("r2", 2, 3)]
    assert content(second) == [("r3", 2, 3), ("r4", 2, 3)]
    assert not sched.schedule().chunks, "a row in flight has no next token yet"
    finish_step(sched, first)
    assert content(sched.schedule()) == [("r1", 3, 4), ("r2", 3, 4)]

    alone = scheduler(micro=2, budget=16)
    alone.add(sequence(1, 40))
    assert content(alone.schedule()) == [("r1", 0, 16)]
    assert content(alone.schedule()) == [("r1", 16, 32)]


def test_the_youngest_is_preempted_and_the_oldest_never() -> None:
    sched = scheduler(blocks=6, budget=64)
    old, middle, young = sequence(1, 4, output=99), sequence(2, 4), sequence(3, 4)
    for each in (young, middle, old):
        sched.add(each)
    turn(sched)
    pushed: list[Sequence] = []
    for _ in range(16):
        step = sched.schedule()
        pushed += step.preempted
        finish_step(sched, step)
    assert pushed[:2] == [young, middle]
    assert old not in pushed
    assert old.computed == 20


def test_a_row_that_cannot_grow_and_has_no_younger_one_keeps_its_blocks_and_waits() -> None:
    sched = scheduler(blocks=6, budget=64)
    old, young = sequence(1, 5, output=30), sequence(2, 4, output=30)
    sched.add(old)
    sched.add(young)
    turn(sched)
    sched.pool.allocate(sched.pool.available)
    assert turn(sched) == [("r1", 5, 6)]
    assert len(young.blocks) == 1
    assert young.preemptions == 0


def test_blocks_of_a_step_in_flight_are_neither_preempted_nor_freed() -> None:
    sched = scheduler(blocks=4, micro=2, budget=4, seqs=4)
    old, young = sequence(1, 4, output=30), sequence(2, 4, output=30)
    sched.add(old)
    first = sched.schedule()
    sched.add(young)
    second = sched.schedule()
    assert content(second) == [("r2", 0, 4)]
    sched.pool.allocate(2)
    finish_step(sched, first)
    assert not sched.schedule().chunks, "the only victim is in flight"
    sched.remove(young)
    assert sched.pool.available == 0, "its blocks are still being computed"
    finish_step(sched, second)
    assert sched.pool.available == 1
    assert content(sched.schedule()) == [("r1", 4, 5)]


def test_a_hand_off_that_is_being_sent_is_never_preempted() -> None:
    sched = scheduler(blocks=5, budget=64)
    local, sent = sequence(1, 4, output=30), sequence(2, 8, gate=Gate.CLOSED)
    sched.add(local)
    turn(sched)
    sched.add(sent)
    assert sched.announce() == [sent]
    sched.open(sent, 5)
    assert ("r2", 0, 8) in turn(sched)
    sched.pool.allocate(sched.pool.available)
    for _ in range(6):
        turn(sched)
    assert len(sent.blocks) == 2
    assert local.preemptions == 0


def test_a_preempted_request_waits_longer_every_time() -> None:
    assert [growth_allowance(times, 100) for times in range(4)] == [1, 2, 4, 8]
    assert growth_allowance(9, 5) == 5
    assert growth_allowance(10_000, 5) == 5


def test_rows_are_shared_so_that_none_is_left_over() -> None:
    assert [rows_per_step(rows, 2) for rows in (0, 1, 4, 5)] == [0, 1, 2, 3]
    assert rows_per_step(7, 1) == 7


def test_hand_offs_are_announced_ahead_but_not_without_bound_and_not_without_room() -> None:
    many = scheduler(blocks=100, budget=4)
    for arrival in range(1, 9):
        many.add(sequence(arrival, 8, gate=Gate.CLOSED))
    assert [s.request_id for s in many.announce()] == ["r1", "r2", "r3", "r4"]
    assert many.announce() == []
    many.remove(many.queues.announced[0])
    assert [s.request_id for s in many.announce()] == ["r5"]

    small = scheduler(blocks=6, budget=4)
    for arrival in (1, 2):
        small.add(sequence(arrival, 16, gate=Gate.CLOSED))
    assert [s.request_id for s in small.announce()] == ["r1"]


def test_a_hand_off_whose_session_is_not_open_lets_others_run() -> None:
    sched = scheduler(budget=8)
    first, second = sequence(1, 8, gate=Gate.CLOSED), sequence(2, 8, gate=Gate.CLOSED)
    sched.add(first)
    sched.add(second)
    sched.announce()
    assert turn(sched) == []
    sched.open(second, 2)
    assert turn(sched) == [("r2", 0, 8)]


def test_a_reservation_takes_nothing_from_what_runs_or_from_the_first_that_waits() -> None:
    sched = scheduler(blocks=8, budget=64)
    sched.add(sequence(1, 16, output=8))
    turn(sched)
    waiting = sequence(2, 20)
    sched.add(waiting)
    assert turn(sched) == [("r1", 16, 17)]
    assert not sched.reserve(sequence(3, 4)), "the one that waits comes first"
    sched.remove(waiting)
    assert not sched.reserve(sequence(4, 12)), "the running one could not grow"
    assert sched.reserve(sequence(5, 4))
    assert not sched.schedule().preempted


def test_reservations_count_seats() -> None:
    sched = scheduler(seqs=2)
    assert sched.reserve(sequence(1, 4))
    assert not sched.reserve(sequence(2, 4, choices=(0, 1)))
    assert sched.reserve(sequence(3, 4))
    assert not sched.reserve(sequence(4, 4))
