"""The team of threads: every operation whole before the next, errors told, nobody left waiting."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest
import torch

from ekiden.core.errors import InvariantBroken
from ekiden.layers.backends.native import build
from ekiden.layers.backends.native.library import KernelError, KernelFailed, Kind, Op, Pool
from ekiden.layers.backends.native.packed import linear_op, pack_dense
from tests.unit.native.native_rig import needs_native

pytestmark = needs_native

WIDTH = 256
HEADER = Path(build.__file__).with_name("src") / "ekiden.h"


class Ring:
    """Operations that each move every number one place on: what is computed early goes wrong."""

    def __init__(self, count: int) -> None:
        shift = pack_dense(torch.eye(WIDTH).roll(1, 0).contiguous())
        self.buffers = [torch.zeros(1, WIDTH) for _ in range(count + 1)]
        self.ops = (Op * count)(
            *(linear_op(shift, self.buffers[i], self.buffers[i + 1]) for i in range(count))
        )
        self.shift = shift

    def run(self, pool: Pool, start: float) -> None:
        self.buffers[0].copy_(torch.arange(WIDTH) + start)
        pool.run(self.ops)

    def right(self, start: float) -> bool:
        expected = (torch.arange(WIDTH) + start).roll(len(self.ops))
        return torch.equal(self.buffers[-1][0], expected)


@pytest.mark.parametrize("spin_us", [0.0, 50.0])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_an_operation_sees_all_that_the_one_before_it_wrote(threads, spin_us):
    """Four threads on fewer cores too, with and without spinning, over many short runs."""
    pool, ring = Pool(threads, spin_us=spin_us), Ring(20)
    for i in range(60):
        ring.run(pool, i)
        assert ring.right(i), f"run {i}"
    pool.close()


def test_a_list_may_follow_one_of_another_length():
    pool, long, short = Pool(2), Ring(30), Ring(1)
    for i in range(300):
        for ring in (short, long):
            ring.run(pool, i)
            assert ring.right(i), f"run {i}"
    pool.close()


def test_callers_on_two_threads_take_turns():
    pool, rings, wrong = Pool(2), [Ring(5), Ring(5)], []

    def work(ring: Ring) -> None:
        for i in range(200):
            ring.run(pool, i)
            if not ring.right(i):
                wrong.append(i)

    callers = [threading.Thread(target=work, args=(ring,)) for ring in rings]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
        assert not caller.is_alive()
    assert wrong == []


def test_only_as_many_operations_run_as_are_asked_for():
    pool, ring = Pool(2), Ring(4)
    ring.buffers[0].fill_(1)
    pool.run(ring.ops, 2)
    assert ring.buffers[2].eq(1).all()
    assert ring.buffers[3].eq(0).all()
    pool.run(ring.ops, 0)


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("kind", [-1, len(Kind), 1000])
def test_an_unknown_operation_ends_the_list_and_is_named(threads, kind):
    pool, ring = Pool(threads), Ring(4)
    ring.ops[2].kind = kind
    ring.buffers[0].fill_(1)
    for _ in range(20):
        with pytest.raises(KernelFailed, match=re.escape(f"operation 2 (kind {kind})")) as raised:
            pool.run(ring.ops)
        assert (raised.value.index, raised.value.error) == (2, KernelError.UNKNOWN_KIND)
    assert ring.buffers[2].eq(1).all()
    assert ring.buffers[3].eq(0).all()
    # The team is ready for the next list.
    ring.ops[2].kind = Kind.LINEAR
    ring.run(pool, 7)
    assert ring.right(7)


def test_a_matrix_too_wide_for_the_scratch_memory_is_refused():
    pool = Pool(1)
    op = linear_op(pack_dense(torch.ones(1, 1)), torch.ones(1, 1), torch.ones(1, 1))
    op.n[2] = 1 << 40
    with pytest.raises(KernelFailed, match="scratch memory"):
        pool.run((Op * 1)(op))


def test_a_closed_pool_says_so():
    pool, ring = Pool(2), Ring(1)
    pool.close()
    with pytest.raises(InvariantBroken, match="closed"):
        pool.run(ring.ops)


def test_closing_ends_the_threads():
    before = len(os.listdir("/proc/self/task"))
    pool = Pool(3)
    assert len(os.listdir("/proc/self/task")) == before + 2
    pool.close()
    assert len(os.listdir("/proc/self/task")) == before


def test_a_forked_child_is_refused_and_leaves_without_the_threads():
    pool, ring = Pool(2), Ring(1)
    child = os.fork()
    if child == 0:
        try:
            pool.run(ring.ops)
        except KernelFailed as error:
            pool.close()
            os._exit(error.error)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == KernelError.FORKED
    ring.run(pool, 3)
    assert ring.right(3)


@pytest.mark.parametrize("threads", [0, -1])
def test_a_team_has_at_least_its_caller(threads):
    with pytest.raises(ValueError, match=f"threads must be at least 1, not {threads}"):
        Pool(threads)


def test_time_is_counted_by_kind():
    pool, ring = Pool(2), Ring(10)
    ring.run(pool, 0)
    seconds = pool.seconds()
    assert 0 < seconds[Kind.LINEAR] < 60
    assert {kind: s for kind, s in seconds.items() if s} == {Kind.LINEAR: seconds[Kind.LINEAR]}


@pytest.mark.parametrize(("enum", "names"), [("Kind", Kind), ("Error", KernelError)])
def test_python_numbers_things_as_the_header_does(enum, names):
    body = re.search(rf"enum {enum} : int32_t {{(.*?)}};", HEADER.read_text(), re.DOTALL)
    assert body
    header = {
        re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper(): int(number)
        for name, number in re.findall(r"\bk(\w+) = (\d+)", body[1])
        if name not in ("Kinds", "Ok")
    }
    assert header == {member.name: member.value for member in names}
