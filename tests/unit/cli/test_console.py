"""What `ekiden up` shows of services that are not ready yet."""

from __future__ import annotations

import pytest

from ekiden.cli.console import at_work, killed
from ekiden.layers.backends.native.build import COMPILING


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("INFO main: loading weights: 30%", "decode-0 (weights 30%)"),
        (f"INFO build: {COMPILING}", "decode-0 (compiling kernels)"),
        ("INFO admission: memory: 2 GiB", "decode-0"),
        ("", "decode-0"),
    ],
)
def test_a_start_shows_what_a_service_is_at(said: str, shown: str) -> None:
    assert at_work("decode-0", said) == shown


def test_what_was_killed_because_somebody_hurried_is_not_said_to_have_been_slow() -> None:
    assert killed("decode-0", asked=True) == "decode-0 was killed"
    assert killed("decode-0", asked=False) == "decode-0 did not end in time and was killed"
