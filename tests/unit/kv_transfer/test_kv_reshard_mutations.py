"""Every rule of reshard is guarded: with any one of them broken, a named check fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
from _pytest.outcomes import Failed
from kv_reshard_rules import (
    Case,
    draw,
    elements_once,
    holes_are_refused,
    in_order,
    in_turn,
    largest_unit,
    messages_fit,
    positions_once,
)

from ekiden.core.errors import SetupError
from kv_transfer import reshard

SOURCE = Path(reshard.__file__).read_text()
CASES = [draw(seed) for seed in range(300)]


class Mutation(NamedTuple):
    rule: str
    old: str
    new: str
    caught_by: Callable[[ModuleType, Case], None]


MUTATIONS = (
    Mutation(
        "a target's turn picks the replica",
        "replicas[turn % len(replicas)]",
        "replicas[0]",
        in_turn,
    ),
    Mutation(
        "turns count the replicas before", "for r in layout.ranks[:rank])", "for r in ())", in_turn
    ),
    Mutation(
        "turns count equal ranks only", "sum(_holding(r) == mine for", "sum(True for", in_turn
    ),
    Mutation(
        "replicas are one source",
        "groups[_holding(r)].append",
        "groups[rank].append",
        elements_once,
    ),
    Mutation(
        "replicas hold the same layers too",
        "(r.head_start, r.head_stop, r.layer_start, r.layer_stop)",
        "(r.head_start, r.head_stop)",
        elements_once,
    ),
    Mutation(
        "replicas hold the same heads too",
        "(r.head_start, r.head_stop, r.layer_start, r.layer_stop)",
        "(r.layer_start, r.layer_stop)",
        elements_once,
    ),
    Mutation(
        "heads start where both have begun",
        "max(a.head_start, b.head_start)",
        "min(a.head_start, b.head_start)",
        elements_once,
    ),
    Mutation(
        "heads stop where one has ended",
        "min(a.head_stop, b.head_stop)",
        "max(a.head_stop, b.head_stop)",
        elements_once,
    ),
    Mutation(
        "layers start where both have begun",
        "max(a.layer_start, b.layer_start)",
        "min(a.layer_start, b.layer_start)",
        elements_once,
    ),
    Mutation(
        "layers stop where one has ended",
        "min(a.layer_stop, b.layer_stop)",
        "max(a.layer_stop, b.layer_stop)",
        elements_once,
    ),
    Mutation("no heads, no pair", "if head_start >= head_stop or ", "if ", elements_once),
    Mutation("no layers, no pair", " or layer_start >= layer_stop:", ":", elements_once),
    Mutation(
        "ranges that only touch share nothing",
        "head_start >= head_stop",
        "head_start > head_stop",
        elements_once,
    ),
    Mutation(
        "heads of a slice are local",
        "slice(self.head_start - rank.head_start, self.head_stop - rank.head_start)",
        "slice(self.head_start, self.head_stop)",
        elements_once,
    ),
    Mutation(
        "layers of a slice are local",
        "slice(self.layer_start - rank.layer_start, self.layer_stop - rank.layer_start)",
        "slice(self.layer_start, self.layer_stop)",
        elements_once,
    ),
    Mutation(
        "pairs are sorted",
        "return sorted(found, key=lambda pair: (pair.target, pair.source))",
        "return found",
        in_order,
    ),
    Mutation("units end in both caches", "math.gcd(", "max(", positions_once),
    Mutation("units divide both blocks", "math.gcd(", "min(", positions_once),
    Mutation(
        "units are as large as can be",
        "math.gcd(source.block_size, target.block_size)",
        "1",
        largest_unit,
    ),
    Mutation(
        "the first partial unit is sent",
        "if start < first:\n        yield Run(start, first - start, 1)",
        "if start < first:\n        pass",
        positions_once,
    ),
    Mutation(
        "the first partial unit ends on the grid",
        "min(-(-start // unit) * unit, end)",
        "start",
        positions_once,
    ),
    Mutation(
        "the first partial unit ends with the segment",
        "min(-(-start // unit) * unit, end)",
        "-(-start // unit) * unit",
        positions_once,
    ),
    Mutation(
        "whole units are sent",
        "yield Run(first, unit, (last - first) // unit)",
        "pass",
        positions_once,
    ),
    Mutation("whole units end on the grid", "end // unit * unit", "end", positions_once),
    Mutation(
        "whole units begin after the first partial one",
        "max(end // unit * unit, first)",
        "end // unit * unit",
        positions_once,
    ),
    Mutation(
        "the last partial unit is sent",
        "if last < end:\n        yield Run(last, end - last, 1)",
        "if last < end:\n        pass",
        positions_once,
    ),
    Mutation(
        "segments are cut on one grid",
        "range((start // size + 1) * size, end, size)",
        "range(start + size, end, size)",
        positions_once,
    ),
    Mutation(
        "segments are cut", "range((start // size + 1) * size, end, size)", "()", positions_once
    ),
    Mutation(
        "nothing to move has no segment",
        "if start >= end:",
        "if start > end:",
        positions_once,
    ),
    Mutation(
        "units follow each other",
        "run.tokens * run.count, run.tokens)",
        "run.tokens * run.count)",
        positions_once,
    ),
    Mutation(
        "blocks come from the table", "(blocks[p // block_size]", "(p // block_size", positions_once
    ),
    Mutation("offsets begin anew in a block", "p % block_size", "p", positions_once),
    Mutation("the widest pair rules", "widest = max(", "widest = min(", messages_fit),
    Mutation(
        "no more than was wanted",
        "min(wanted, message_bytes // widest)",
        "message_bytes // widest",
        messages_fit,
    ),
    Mutation(
        "messages keep to their bytes",
        "min(wanted, message_bytes // widest)",
        "wanted",
        messages_fit,
    ),
    Mutation(
        "segments are of whole blocks of both sides",
        "math.lcm(source.block_size, target.block_size)",
        "source.block_size",
        messages_fit,
    ),
    Mutation(
        "segments shorter than a block are of granules",
        "        step = granule\n",
        "        pass\n",
        messages_fit,
    ),
    Mutation(
        "a segment has a granule at least",
        "max(limit // step * step, granule)",
        "limit // step * step",
        messages_fit,
    ),
    Mutation(
        "K and V count",
        "(self.layer_stop - self.layer_start) * 2",
        "(self.layer_stop - self.layer_start)",
        messages_fit,
    ),
    Mutation(
        "rows count with their scales",
        "rows * layout.row_bytes",
        "rows * layout.head_dim",
        messages_fit,
    ),
    Mutation(
        "layers are looked at one by one",
        "if r.layer_start <= layer < r.layer_stop",
        "if True",
        holes_are_refused,
    ),
    Mutation(
        "all heads are there", "if heads != list(", "if not heads != list(", holes_are_refused
    ),
    Mutation(
        "ranks may come in any order", "in sorted(ranges) for", "in ranges for", holes_are_refused
    ),
    Mutation(
        "ranges do not overlap",
        "heads = [head for start",
        "heads = [head for head in range(99) if any(a <= head < b for a, b, _, _ in ranges)]\n"
        "        _ = [head for start",
        holes_are_refused,
    ),
)


def mutated(mutation: Mutation) -> ModuleType:
    assert mutation.old in SOURCE, "reshard.py has changed: say how to break this rule now"
    module = ModuleType("kv_transfer_reshard_mutated")
    exec(compile(SOURCE.replace(mutation.old, mutation.new), module.__name__, "exec"), vars(module))
    return module


def fails(check: Callable[[ModuleType, Case], None], module: ModuleType) -> bool:
    for case in CASES:
        try:
            check(module, case)
        except (AssertionError, Failed, IndexError, ValueError, SetupError):  # or does not even run
            return True
    return False


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.rule)
def test_no_rule_can_be_broken_unseen(mutation: Mutation) -> None:
    assert fails(mutation.caught_by, mutated(mutation))


@pytest.mark.parametrize("check", {m.caught_by for m in MUTATIONS}, ids=lambda c: c.__name__)
def test_the_rules_as_they_are_pass(check: Callable[[ModuleType, Case], None]) -> None:
    assert not fails(check, mutated(Mutation("none", "import math", "import math", check)))
