"""One rank's part of a step: copy blocks, compute, tell the KV port, sample.

Every rank of a replica runs the same plans in the same order; collectives and stage links inside
the model keep them together. Only the sampling rank, TP rank 0 of the last stage, has logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ekiden.cache.layout import KvLayout
from ekiden.cache.tensors import copy_blocks
from ekiden.core.clock import Clock, MonotonicClock
from ekiden.core.errors import InvariantBroken
from ekiden.engine.plan import Chunk, Sampled, SampleSpec, StepPlan, StepResult
from ekiden.engine.port import ChunkDone, KvPort
from ekiden.engine.sampler import sample
from ekiden.layers.batch import ForwardBatch, Span
from ekiden.models.registry import Model
from ekiden.parallel.mesh import Mesh


class Runner:
    """Runs steps on one rank. Used from one thread."""

    def __init__(
        self,
        *,
        model: Model,
        cache: torch.Tensor,
        mesh: Mesh,
        layout: KvLayout,
        port: KvPort | None = None,
        clock: Clock | None = None,
    ) -> None:
        """``cache`` is this rank's [blocks, kv_heads, layers, 2, block_size, head_dim]."""
        self._model = model
        self._cache = cache
        self._mesh = mesh
        self._layout = layout
        self._port = port
        self._clock = clock or MonotonicClock()

    @property
    def needs_tokens(self) -> bool:
        """Whether this rank does something with tokens: embeds them, or samples."""
        return self._mesh.is_first_stage or self._mesh.is_sampler

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Run one step. ``sampled`` is empty on all ranks but the sampling one.

        ``compute_s`` leaves out what this stage waited for its input, which is ``idle_s``.

        Raises:
            ReplicaFailed: another rank did not take part.
            InvariantBroken: broken logits, or a plan that cannot be run.
        """
        start = self._clock.now()
        seconds, moved, idle = self._counters()
        copy_blocks(self._cache, plan.copies)
        sampled: tuple[Sampled, ...] = ()
        if plan.chunks:
            logits_RV = self._model.forward(self._batch(plan.chunks), self._cache)
            self._tell_port(plan.chunks)
            if self._mesh.is_sampler:
                sampled = _sample(logits_RV, plan.chunks)
        seconds_after, moved_after, idle_after = self._counters()
        waited = idle_after - idle
        return StepResult(
            step=plan.step,
            sampled=sampled,
            compute_s=self._clock.now() - start - waited,
            collective_s=seconds_after - seconds,
            collective_bytes=moved_after - moved,
            idle_s=waited,
        )

    def _counters(self) -> tuple[float, int, float]:
        """Collective seconds and bytes, and seconds waited for the stage before, so far."""
        tp, pp = self._mesh.tp.counter, self._mesh.pp
        return (
            tp.seconds + pp.sent.seconds,
            tp.bytes + pp.sent.bytes,
            pp.received.seconds,
        )

    def _batch(self, chunks: Sequence[Chunk]) -> ForwardBatch:
        return ForwardBatch.build(
            [Span(c.tokens, c.start, c.blocks, c.logit_rows) for c in chunks],
            self._layout.block_size,
            self._cache.device,
        )

    def _tell_port(self, chunks: Sequence[Chunk]) -> None:
        wanted = [
            ChunkDone(session=c.session, end=c.start + len(c.tokens), blocks=c.blocks)
            for c in chunks
            if c.session
        ]
        if not wanted:
            return
        if self._port is None:
            raise InvariantBroken(
                f"hand-off session {wanted[0].session} wants KV sent, but this replica was "
                "started without a KV port"
            )
        if self._cache.is_cuda:
            # The port reads from another thread and stream: the kernels must have ended.
            torch.cuda.current_stream(self._cache.device).synchronize()
        self._port.chunks_finished(wanted)


def _sample(logits_RV: torch.Tensor | None, chunks: Sequence[Chunk]) -> tuple[Sampled, ...]:
    """Sample every spec of every chunk."""
    wanted = sum(chunk.logit_rows for chunk in chunks)
    rows = 0 if logits_RV is None else len(logits_RV)
    if rows != wanted:
        raise InvariantBroken(f"the chunks want logits of {wanted} tokens, the model gave {rows}")
    if logits_RV is None:
        return ()
    owners = _owners(chunks)
    choices = sample(logits_RV, [spec for _, _, spec in owners], [row for row, _, _ in owners])
    return tuple(
        Sampled(chunk.sequence, spec.choice, choice.token, choice.logprobs)
        for (_, chunk, spec), choice in zip(owners, choices, strict=True)
    )


def _owners(chunks: Sequence[Chunk]) -> list[tuple[int, Chunk, SampleSpec]]:
    """The row of each spec: choices share one, proposals have one each."""
    owners: list[tuple[int, Chunk, SampleSpec]] = []
    first = 0
    for chunk in chunks:
        owners += [
            (first + min(i, chunk.proposed), chunk, spec) for i, spec in enumerate(chunk.samples)
        ]
        first += chunk.logit_rows
    return owners
