"""A recorded step gives what the same step gives when it is run, over and over."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ekiden.core.errors import InvariantBroken
from ekiden.layers.backends.native.arena import Arena
from ekiden.layers.backends.native.library import KernelFailed
from ekiden.layers.backends.native.ops import NativeOps
from ekiden.layers.backends.torch_ops import TorchOps
from ekiden.layers.batch import ForwardBatch, Span
from ekiden.layers.ops import AttentionKind, HeadShape, Ops
from ekiden.layers.quantised import quantise
from ekiden.layers.rope import Rope, Rotation, plain_frequencies
from ekiden.layers.weights import DenseWeight, LinearWeight
from tests.unit.native.native_rig import needs_native

pytestmark = needs_native

HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB, LAYERS = 48, 4, 2, 16, 40, 37, 3


class Stack:
    """A little decoder made of the seam's operations only, with random weights."""

    def __init__(self, ops: Ops) -> None:
        generator = torch.Generator().manual_seed(0)

        def matrix(outputs: int, inputs: int) -> LinearWeight:
            values = torch.randn((outputs, inputs), generator=generator) / inputs**0.5
            return DenseWeight(values=values)

        self.ops = ops
        self.table = torch.randn((VOCAB, HIDDEN), generator=generator)
        self.norm_weight = torch.rand(HIDDEN, generator=generator) + 0.5
        self.layers = [
            [
                ops.linear(matrix(outputs, inputs), None)
                for outputs, inputs in (
                    ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
                    (HIDDEN, HEADS * DIM),
                    (2 * INNER, HIDDEN),
                    (HIDDEN, INNER),
                )
            ]
            for _ in range(LAYERS)
        ]
        self.head = ops.linear(matrix(VOCAB, HIDDEN), None, float_out=True)

    def __call__(
        self, batch: ForwardBatch, rotation: Rotation, cache: Tensor
    ) -> tuple[Tensor, ...]:
        ops = self.ops
        hidden = ops.embed(batch.tokens_T, self.table, 0)
        normed = ops.norm(hidden, self.norm_weight, 1e-5)
        for i, (qkv, out, gate_up, down) in enumerate(self.layers):
            shape = HeadShape(HEADS, KV_HEADS, DIM, i, None)
            q = ops.rotate_and_store(qkv(normed), shape, rotation, cache, batch)
            attended = ops.attend(q, cache, i, batch, AttentionKind(DIM**-0.5))
            normed, hidden = ops.add_norm(hidden, out(attended.flatten(1)), self.norm_weight, 1e-5)
            delta = down(ops.gated(gate_up(normed), "silu"))
            normed, hidden = ops.add_norm(hidden, delta, self.norm_weight, 1e-5)
        return (self.head(normed),)


ROPE = Rope(plain_frequencies(1000.0, DIM))


def new_cache() -> Tensor:
    return torch.full((8, KV_HEADS, LAYERS, 2, 16, DIM), float("nan"))


def decode_batch(step: int, rows: int) -> ForwardBatch:
    """Sequence s has ``step + s`` tokens behind it, and two blocks of its own."""
    spans = [
        Span([(7 * step + 3 * s) % VOCAB], step + s, [2 * s, 2 * s + 1], 1) for s in range(rows)
    ]
    return ForwardBatch.build(spans, 16)


def prefill(stack: Stack, cache: Tensor, rows: int, step: int) -> None:
    """All that stands before ``decode_batch(step, rows)``."""
    spans = [
        Span([(5 * i + s) % VOCAB for i in range(step + s)], 0, [2 * s, 2 * s + 1], 0)
        for s in range(rows)
        if step + s
    ]
    batch = ForwardBatch.build(spans, 16)
    stack(batch, ROPE.rotation(batch.positions_T), cache)


def copy_into(fixed: ForwardBatch, rotation: Rotation, step: ForwardBatch) -> None:
    for name in ("tokens_T", "positions_T", "slots_T", "kv_lengths_S"):
        getattr(fixed, name).copy_(getattr(step, name))
    width = step.block_tables_SM.shape[1]
    fixed.block_tables_SM[:, :width] = step.block_tables_SM
    new = ROPE.rotation(step.positions_T)
    rotation.cos_TR.copy_(new.cos_TR)
    rotation.sin_TR.copy_(new.sin_TR)


@pytest.mark.parametrize("threads", [1, 2])
def test_twenty_replayed_steps_equal_steps_that_are_run_and_plain_torch(threads: int) -> None:
    rows = 3
    ops = NativeOps(torch.float32, threads)
    stack, reference = Stack(ops), Stack(TorchOps())
    caches = [new_cache() for _ in range(3)]
    for of, cache in ((stack, caches[0]), (stack, caches[1]), (reference, caches[2])):
        prefill(of, cache, rows, 0)
    fixed = decode_batch(19, rows)
    rotation = ROPE.rotation(fixed.positions_T)
    replay = ops.record(lambda: stack(fixed, rotation, caches[0]))
    for step in range(20):
        batch = decode_batch(step, rows)
        copy_into(fixed, rotation, batch)
        replayed = replay()[0].clone()
        angles = ROPE.rotation(batch.positions_T)
        (ran,) = stack(batch, angles, caches[1])
        (expected,) = reference(batch, angles, caches[2])
        assert torch.equal(replayed, ran)
        torch.testing.assert_close(ran, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(caches[0].nan_to_num(), caches[1].nan_to_num())


def test_recordings_and_steps_in_turn_do_not_touch_one_another_s_results() -> None:
    """Tapes share what lies between; outputs, and what is run in the meantime, do not."""
    ops = NativeOps(torch.float32, 1)
    stack = Stack(ops)
    cache = new_cache()
    prefill(stack, cache, 3, 5)
    recorded = {}
    for rows in (1, 3):
        batch = decode_batch(5, rows)
        rotation = ROPE.rotation(batch.positions_T)
        replay = ops.record(lambda b=batch, r=rotation: stack(b, r, cache))
        recorded[rows] = replay, stack(batch, rotation, cache)[0].clone()
    batch = decode_batch(5, 3)
    logits = [stack(batch, ROPE.rotation(batch.positions_T), cache)[0] for _ in range(4)]
    # As large as what lies between in the recording of three rows.
    ones, x = torch.ones(HIDDEN), torch.randn(3, HIDDEN)
    normed = [ops.norm(x, ones, 1e-5) for _ in range(8)]
    before = normed[0].clone()
    for rows in (3, 1, 1, 3):
        replay, expected = recorded[rows]
        assert torch.equal(replay()[0], expected)
        assert all(torch.equal(kept, recorded[3][1]) for kept in logits)
        assert all(torch.equal(kept, before) for kept in normed)


def test_layers_of_a_recording_share_memory() -> None:
    ops = NativeOps(torch.float32, 1)
    x, weight = torch.randn(4, 64), torch.ones(64)
    addresses = []

    def chain() -> tuple[Tensor, ...]:
        y = ops.norm(x, weight, 1e-5)
        for _ in range(20):
            y = ops.norm(y, weight, 1e-5)
            addresses.append(y.data_ptr())
        return (y,)

    ops.record(chain)
    assert len(set(addresses)) <= 2


def test_a_grouped_weight_with_its_inputs_in_another_order_can_be_recorded() -> None:
    weight = replace(quantise(torch.randn(12, 64), bits=8, size=32), order=torch.randperm(64))
    ops = NativeOps(torch.float32, 1)
    linear, expected = ops.linear(weight, None), TorchOps().linear(weight, None)
    x, unit = torch.randn(3, 64), torch.ones(64)
    replay = ops.record(lambda: (linear(ops.norm(x, unit, 1e-5)),))
    for _ in range(2):
        x.copy_(torch.randn(3, 64))
        torch.testing.assert_close(
            replay()[0], expected(TorchOps().norm(x, unit, 1e-5)), rtol=1e-3, atol=1e-3
        )


def test_an_error_of_a_replay_names_the_operation() -> None:
    ops = NativeOps(torch.float32, 1)
    stack = Stack(ops)
    cache = new_cache()
    fixed = decode_batch(0, 1)
    replay = ops.record(lambda: stack(fixed, ROPE.rotation(fixed.positions_T), cache))
    replay()
    fixed.slots_T.fill_(10_000)
    with pytest.raises(KernelFailed, match="ROTATE_STORE"):
        replay()
    fixed.slots_T.fill_(0)
    replay()


def test_recording_inside_of_a_recording_is_refused_and_leaves_the_kernels_usable() -> None:
    ops = NativeOps(torch.float32, 1)
    x, weight = torch.randn(1, 8), torch.ones(8)
    with pytest.raises(InvariantBroken, match="inside of another"):
        ops.record(lambda: ops.record(lambda: (x,))())
    assert ops.norm(x, weight, 1e-5).isfinite().all()


def test_an_arena_reuses_memory_once_the_last_view_is_gone_and_not_before() -> None:
    arena = Arena()
    first = arena.empty((4, 100), torch.bfloat16)
    address, view = first.data_ptr(), first.flatten()[3:].view(torch.int16)
    del first
    second = arena.empty((4, 100), torch.bfloat16)
    assert second.data_ptr() != address
    del view
    assert arena.empty((2, 200), torch.bfloat16).data_ptr() == address


def test_an_arena_lets_go_of_the_sizes_that_come_back_least() -> None:
    rare, often = 1 << 20, 2 << 20
    arena = Arena(spare_bytes=3 << 20)
    held = [arena.empty((size,), torch.uint8) for size in (rare, often, often)]
    addresses = [tensor.data_ptr() for tensor in held]
    held.clear()
    assert arena.spare <= 3 << 20
    assert arena.empty((often,), torch.uint8).data_ptr() in addresses[1:]
