"""The truth for each pair of KV dtypes, computed when it is first asked for.

One dtype: one process that prefills and decodes. Two: prefill of the one and decode of the other in
one process, a rank each, without wire and session: the prompt's rows are read out of one cache,
converted by the rule and written into the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from ekiden.core.config import EngineConfig
from ekiden.core.errors import ReplicaFailed
from ekiden.core.types import Delta, Request
from ekiden.engine.engine import PrefillDone, Ready, Reservation

from .compare import Bits, Reference
from .house import House, quiet_threads
from .inline import InlineReplica
from .layouts import Layout
from .reference import Progress, Record, greedy, reference_tokens
from .rule import bits_tensor, converted
from .shape import Shape


class Truths:
    """References by prompt, for whichever two KV dtypes."""

    def __init__(
        self,
        house: House,
        shape: Shape,
        prompts: Mapping[str, tuple[int, ...]],
        max_tokens: int,
        show: Callable[[str, int, int], None],
    ) -> None:
        """``show(what, done, total)`` hears how far a truth is."""
        self._house = house
        self._shape = shape
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._show = show
        self._known: dict[tuple[str, str], dict[str, Reference]] = {}

    def of(self, prefill: str, decode: str) -> dict[str, Reference]:
        """What a prefill replica of the one KV dtype and a decode replica of the other give."""
        if (prefill, decode) not in self._known:
            found = self._compute(prefill, decode)
            self._known[prefill, decode] = dict(zip(self._prompts, found, strict=True))
        return self._known[prefill, decode]

    def alone(self, layout: Layout) -> list[Reference]:
        """What one replica of this layout gives that prefills and decodes, without any hand-off.

        Raises:
            SetupError: the model cannot be split so.
        """
        engine, prompts = self._shape.of(layout, "decode"), list(self._prompts.values())
        what = f"one process, {layout}"
        with quiet_threads():
            return reference_tokens(engine, prompts, self._max_tokens, partial(self._show, what))

    def _compute(self, prefill: str, decode: str) -> list[Reference]:
        if prefill == decode:
            return self.alone(Layout(kv=decode))
        source, target = (self._shape.of(Layout(kv=kv), "decode") for kv in (prefill, decode))
        show = partial(self._show, f"one process, KV {prefill} to {decode}")
        prompts = list(self._prompts.values())
        with quiet_threads():
            return converted_reference(self._house, source, target, prompts, self._max_tokens, show)


def converted_reference(
    house: House,
    prefill: EngineConfig,
    decode: EngineConfig,
    prompts: Sequence[tuple[int, ...]],
    max_tokens: int,
    progress: Progress,
) -> list[Reference]:
    """What ``decode`` generates from the KV that ``prefill`` computed, prompt by prompt.

    Both configurations are of one rank.
    """
    source = InlineReplica(house, prefill, "prefill", "truth-prefill")
    try:
        target = InlineReplica(house, decode, "decode", "truth-decode")
        try:
            truth = _Truth(source, target, max_tokens)
            references = []
            for number, prompt in enumerate(prompts):
                references.append(truth.of(number, prompt))
                progress(number + 1, len(prompts))
            return references
        finally:
            target.close()
    finally:
        source.close()


class _Truth:
    """One prompt at a time goes through both replicas."""

    def __init__(self, source: InlineReplica, target: InlineReplica, max_tokens: int) -> None:
        self._source = source
        self._target = target
        self._max_tokens = max_tokens

    def of(self, number: int, prompt: tuple[int, ...]) -> Reference:
        request = Request(
            request_id=str(number),
            model=self._source.me.model,
            prompt=prompt,
            sampling=greedy(number, self._max_tokens),
            salt=str(number),
        )
        session = 2 * number + 2
        first = self._prefill(request, session)
        reservation = self._target.engine.reserve(request)
        if reservation is None:
            raise ReplicaFailed(f"the truth of prompt {number} finds no room in an idle cache")
        self._move(self._source.sent_blocks(session), reservation)
        self._source.engine.let_go(request.request_id)
        return self._decode(request, first, reservation)

    def _prefill(self, request: Request, session: int) -> list[Delta]:
        engine, first, done = self._source.engine, [], False
        engine.add_handoff(request)
        while not done:
            output, _ = self._source.turn()
            first += output.deltas
            if any(isinstance(event, Ready) for event in output.events):
                engine.open_session(request.request_id, session)
            done = any(isinstance(event, PrefillDone) for event in output.events)
        return first

    def _move(self, blocks: Sequence[int], reservation: Reservation) -> None:
        source, target = self._source.me.kv.dtype, self._target.me.kv.dtype
        rows = converted(self._source.kv(blocks)[0], source, target)
        write_rows(self._target, reservation.blocks, rows)

    def _decode(self, request: Request, first: list[Delta], held: Reservation) -> Reference:
        engine, record, done = self._target.engine, Record(request.prompt), False
        engine.hand_off(request.request_id, first)
        engine.adopt(request.request_id)
        engine.writer_done(held.key)
        while not done:
            output, _ = self._target.turn()
            for delta in output.deltas:
                record.add(delta)
            done = bool(output.finished)
        return record.reference()


def write_rows(replica: InlineReplica, blocks: Sequence[int], rows: Bits) -> None:
    """Put ``rows [layers, kv_heads, tokens, 2, row]`` into these blocks of the one rank."""
    cache_BHL2SD, size = replica.cache(0), replica.me.kv.block_size
    values_LHT2D = bits_tensor(rows, replica.me.kv.dtype)
    for index, block in enumerate(blocks):
        part_LHT2D = values_LHT2D[:, :, index * size : (index + 1) * size]
        place_HL2SD: torch.Tensor = cache_BHL2SD[block]
        place_HL2SD[:, :, :, : part_LHT2D.shape[2]] = part_LHT2D.permute(1, 0, 3, 2, 4)
