"""Every family and every split computes what transformers computes, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.models.tiny import FAMILIES, Replica, make_checkpoint, worst_error

TOLERANCE = 1e-4


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_family_equals_transformers_alone_and_split(tmp_path: Path, family: str) -> None:
    reference = make_checkpoint(tmp_path, family)
    assert worst_error(Replica(tmp_path), reference) < TOLERANCE
    assert worst_error(Replica(tmp_path, tp=2, pp=2), reference) < TOLERANCE
