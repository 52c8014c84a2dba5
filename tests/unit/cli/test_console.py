"""What `ekiden up` shows of services that are not ready yet."""

from __future__ import annotations

import logging

import pytest
import torch

from ekiden.cli.console import at_work, killed, slower
from ekiden.layers.backends.choose import choose_ops
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


def test_a_service_that_could_not_have_faster_kernels_says_so_once(caplog):
    """What the choice of kernels logs is what is looked for."""
    with caplog.at_level(logging.WARNING):
        choose_ops("auto", torch.device("cpu"), torch.float16)
    line = f"01:02:03 WARNING [decode-0 rank 0] {caplog.messages[0]}"
    shown = slower(f"loading\n{line}\n{line.replace('rank 0', 'rank 1')}\nready")
    assert len(shown) == 1
    assert shown[0].startswith("plain torch's, not native: they compute in float32 and bfloat16")
    assert slower("kernels of cpu in torch.bfloat16: native, 2 threads") == []
