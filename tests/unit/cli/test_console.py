"""What `ekiden up` shows of services that are not ready yet."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from ekiden.cli import console
from ekiden.cli.console import at_work, killed, slower, wires
from ekiden.core.clock import ManualClock
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


def test_the_wire_that_kv_takes_is_found_in_what_a_decode_service_says():
    log = (
        "10:00:00 INFO [decode-0] decode_svc.wires: KV from prefill-0 takes shm 1.50 GB/s\n"
        "10:00:01 INFO [decode-0] ekiden.service.main: decode-0 serves on 127.0.0.1:1\n"
        "10:00:02 WARNING [decode-0] decode_svc.greeter: prefill replica prefill-1: it refused: x\n"
        "10:00:03 INFO [decode-0 rank 0] kv_transfer.transports: KV wire ucx is left out: no ucxx\n"
        "10:00:04 WARNING [decode-0] decode_svc.wires: KV from prefill-0: one host, yet shm 9\n"
    )
    assert wires(log) == [
        "KV from prefill-0 takes shm 1.50 GB/s",
        "prefill replica prefill-1: it refused: x",
        "KV wire ucx is left out: no ucxx",
        "KV from prefill-0: one host, yet shm 9",
    ]
    assert wires("loading weights: 40%") == []


def test_where_there_is_no_terminal_a_long_start_says_now_and_then_what_it_is_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = ManualClock()
    monkeypatch.setattr(console.time, "monotonic", clock.now)
    child = SimpleNamespace(
        spec=SimpleNamespace(name="decode-0"), tail=lambda lines: "INFO main: loading weights: 30%"
    )
    with console.Waiting([child]) as waiting:  # type: ignore[list-item]
        for passed in (1.0, 8.9, 0.1, 1.0, 9.0):
            clock.advance(passed)
            waiting.tick()
    assert capsys.readouterr().out.splitlines() == [
        "starting decode-0",
        "  … 10 s: decode-0 (weights 30%)",
        "  … 20 s: decode-0 (weights 30%)",
    ]
