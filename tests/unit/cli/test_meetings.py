"""The screen tells each wire once, also that of a replica that joins long after the start."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ekiden.cli import meetings
from ekiden.cli.meetings import Meetings


def takes(replica: str) -> str:
    return f"10:00:00 INFO [decode-0] decode_svc.wires: KV from {replica} takes shm 1.50 GB/s\n"


@pytest.fixture
def decode(tmp_path: Path) -> Any:
    log = tmp_path / "decode-0.log"
    log.touch()
    return SimpleNamespace(spec=SimpleNamespace(name="decode-0"), log=log)


def append(child: Any, text: str) -> None:
    with child.log.open("a") as log:
        log.write(text)


async def test_the_start_waits_for_the_replicas_of_this_run(decode: Any, capsys: Any) -> None:
    append(decode, takes("prefill-0"))
    waiting = asyncio.ensure_future(Meetings([decode], 2).at_start())
    while "prefill-0" not in (shown := capsys.readouterr().out):
        await asyncio.sleep(0)
    assert not waiting.done()
    append(decode, takes("prefill-1"))
    await asyncio.wait_for(waiting, 2)
    assert shown == "  decode-0   KV from prefill-0 takes shm 1.50 GB/s\n"
    assert capsys.readouterr().out == "  decode-0   KV from prefill-1 takes shm 1.50 GB/s\n"


async def test_a_pool_that_never_meets_does_not_hold_the_start_up(
    decode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meetings, "AT_START_S", 0.1)
    await asyncio.wait_for(Meetings([decode], 1).at_start(), 2)


async def test_one_that_joins_later_is_told_of(
    decode: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meetings, "LATER_LOOK_S", 0.01)
    told = Meetings([decode], 0)
    await told.at_start()
    later = asyncio.ensure_future(told.later())
    append(decode, takes("prefill-7"))
    async with asyncio.timeout(2):
        while "prefill-7 takes shm" not in capsys.readouterr().out:
            await asyncio.sleep(0.01)
    later.cancel()


def test_a_line_is_told_once_and_only_when_it_is_whole(decode: Any, capsys: Any) -> None:
    told = Meetings([decode], 1)
    line = takes("prefill-0")
    append(decode, line[:-8])
    told.tell_new()
    assert capsys.readouterr().out == ""
    append(decode, line[-8:] + line)
    told.tell_new()
    append(decode, line)
    told.tell_new()
    assert capsys.readouterr().out.count("prefill-0 takes shm 1.50 GB/s") == 1


def test_a_log_that_is_emptied_or_moved_away_is_read_on(decode: Any, capsys: Any) -> None:
    told = Meetings([decode], 1)
    append(decode, takes("prefill-0") + takes("prefill-1"))
    told.tell_new()
    decode.log.write_text("")
    append(decode, takes("prefill-2"))
    told.tell_new()
    decode.log.rename(decode.log.with_suffix(".1"))
    told.tell_new()
    append(decode, takes("prefill-3"))
    told.tell_new()
    shown = capsys.readouterr().out
    assert [shown.count(f"prefill-{n} takes") for n in range(4)] == [1, 1, 1, 1]


def test_a_line_without_an_end_is_passed_over(
    decode: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meetings, "LOOK_BYTES", 1000)
    told = Meetings([decode], 1)
    with decode.log.open("wb") as log:
        log.write(b"\xff" * 2500)
    append(decode, "\n" + takes("prefill-0"))
    for _ in range(4):
        told.tell_new()
    assert capsys.readouterr().out.count("prefill-0 takes") == 1
