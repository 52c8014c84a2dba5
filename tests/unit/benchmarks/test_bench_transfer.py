"""What `make bench-transfer` moves and what it calls a goal; every way moves the right bytes."""

import argparse
import itertools
import os
import socket
from contextlib import ExitStack
from pathlib import Path

import bench_transfer
import msgspec
import numpy as np
import pytest
from benchmarks import transfer_rows, transfer_stack
from benchmarks.client import Sample
from benchmarks.results import COLUMNS
from benchmarks.transfer_link import Link, PeerGone, Setup
from benchmarks.transfer_shape import Sources, Work, check, layout, map_source

POOL_BLOCKS = 6
BLOCK_BYTES = 2 << 20


@pytest.fixture(scope="module")
def sources():
    made = Sources(POOL_BLOCKS)
    yield made
    made.close()


def pool(sources: Sources, tp: int = 1, rank: int = 0) -> np.ndarray:
    pool_BN, fd = map_source(sources.paths()[tp][rank], BLOCK_BYTES // tp)
    os.close(fd)
    return pool_BN


def arrived(sources: Sources, work: Work) -> tuple[np.ndarray, np.ndarray]:
    """Both pools after ``work`` was done as it should be."""
    source_BN = pool(sources)
    target_BN = np.zeros_like(source_BN)
    there, here = work.tables(POOL_BLOCKS)
    target_BN[here] = source_BN[there]
    return source_BN, target_BN


def test_a_block_is_that_of_llama_3_1_8b():
    assert layout(1).block_bytes(0) == BLOCK_BYTES
    assert [layout(2).block_bytes(rank) for rank in (0, 1)] == [BLOCK_BYTES // 2] * 2


def test_blocks_are_scattered_on_both_sides_none_twice_and_others_in_the_next_turn():
    for one in (Work(1000, 0).tables(512), Work(8000, 3).tables(512)):
        for table in one:
            assert len(set(table)) == len(table)
            assert sum(b - a == 1 for a, b in itertools.pairwise(table)) < len(table) / 20
    first, second = (set(Work(1000, turn).tables(512)[0]) for turn in (0, 1))
    assert not first & second


def test_a_round_takes_other_blocks_than_the_last_and_never_too_many_transfers():
    plan = bench_transfer.Plan(5, 8000, True)
    assert [plan.turns(8000, number) for number in (0, 1)] == [[0], [1]]
    assert plan.turns(1000, 1) == list(range(8, 16))
    assert len(plan.turns(128, 0)) == 8


def test_what_arrived_as_it_was_sent_passes(sources: Sources):
    work = Work(40, 1)
    check(work, *arrived(sources, work))


def test_bytes_behind_the_last_token_do_not_count(sources: Sources):
    work = Work(40, 1)
    source_BN, target_BN = arrived(sources, work)
    last = work.tables(POOL_BLOCKS)[1][-1]
    target_BN[last].reshape(-1, 16, 256)[:, 8:] = 0
    check(work, source_BN, target_BN)


@pytest.mark.parametrize("position", [0, 39])
def test_one_wrong_byte_of_any_token_is_found(sources: Sources, position: int):
    work = Work(40, 1)
    source_BN, target_BN = arrived(sources, work)
    block = target_BN[work.tables(POOL_BLOCKS)[1][position // 16]].reshape(-1, 16, 256)
    block[-1, position % 16, -1] ^= 1
    with pytest.raises(ValueError, match=f"block {position // 16} .*did not arrive"):
        check(work, source_BN, target_BN)


def test_blocks_that_changed_places_are_found(sources: Sources):
    work = Work(40, 0)
    source_BN, target_BN = arrived(sources, work)
    a, b, _ = work.tables(POOL_BLOCKS)[1]
    target_BN[[a, b]] = target_BN[[b, a]]
    with pytest.raises(ValueError, match="block 0 "):
        check(work, source_BN, target_BN)


def test_two_ranks_hold_what_one_holds_heads_cut_in_two(sources: Sources):
    halves = [pool(sources, 2, rank) for rank in (0, 1)]
    assert np.array_equal(np.concatenate(halves, axis=1), pool(sources))


RATES = {
    "memcpy": [10e9, 12e9, 11e9], "NIXL READ": [8e9], "TCP sockets": [3e9], "UCX untuned": [1e9],
    "shm": [10e9], "ucx": [3e9], "tcp": [2e9],
    "shm TP2 to TP1": [8e9], "ucx TP2 to TP1": [3e9], "tcp TP2 to TP1": [2e9],
}  # fmt: skip


def goals(rows: list[dict]) -> dict[tuple[str, str], tuple[float, bool | None]]:
    return {
        (row["name"], row["peer_name"]): (row["goal"], row["met"])
        for row in rows
        if row["goal"] is not None
    }


def test_goals_are_those_that_were_set_and_medians_meet_them_or_not():
    found = goals(transfer_rows.transfer_rows({1000: RATES}, nixl=True))
    assert found == {
        ("1,000 tokens, shm", "memcpy"): (0.9, True),
        ("1,000 tokens, shm", "NIXL READ"): (1.1, True),
        ("1,000 tokens, ucx", "TCP sockets"): (1.0, True),
        ("1,000 tokens, ucx", "UCX untuned"): (2.0, True),
        ("1,000 tokens, shm TP2 to TP1", "shm"): (0.9, False),
        ("1,000 tokens, ucx TP2 to TP1", "ucx"): (0.9, True),
        ("1,000 tokens, tcp TP2 to TP1", "tcp"): (0.9, True),
    }


def test_short_transfers_are_shown_without_a_goal():
    rows = transfer_rows.transfer_rows({128: RATES}, nixl=True)
    assert len(rows) == 8
    assert goals(rows) == {}
    assert rows[0]["ratio"] == pytest.approx(10 / 11)


def test_without_nixl_its_row_says_how_to_get_it_and_the_others_stand():
    rates = {name: found for name, found in RATES.items() if name != "NIXL READ"}
    rows = transfer_rows.transfer_rows({1000: rates}, nixl=False)
    (missing,) = [row for row in rows if "NIXL" in row["peer_name"]]
    assert missing["peer_name"] == "NIXL READ (not installed: pip install nixl-cu12)"
    assert (missing["ours"], missing["peer"], missing["met"]) == (10.0, None, None)
    assert sum(row["met"] is not None for row in rows) == 6


def test_the_chart_has_a_bar_for_all_that_was_measured(tmp_path: Path):
    transfer_rows.draw(tmp_path / "c.svg", {128: RATES, 1000: RATES})
    text = (tmp_path / "c.svg").read_text()
    assert text.count("<rect") == 1 + 6 * 2
    assert "1,000 tokens" in text


@pytest.mark.parametrize(
    ("ours", "ratio", "met"), [(2.4, 0.8, True), (3.3, 1.1, False), (None, None, None)]
)
def test_a_limit_is_met_up_to_it(ours: float | None, ratio: float | None, met: bool | None):
    row = transfer_rows.at_most("a", ours, "ms", 3.0)
    assert tuple(row) == COLUMNS
    assert (row["peer"], row["goal"], row["met"]) == (3.0, 1.0, met)
    assert row["ratio"] == (None if ratio is None else pytest.approx(ratio))


def sample(moved: int = 1, **times: float) -> Sample:
    usage = {"ekiden": {"times": times, "transfer": {"bytes": moved}}}
    return Sample(0.0, 0.0, 1, usage, [])


def test_a_hand_off_is_all_of_the_time_to_its_kv_but_prefill():
    times = {"queue_s": 1.0, "prefill_s": 4.0, "transfer_s": 2.0, "first_decode_s": 8.0}
    assert transfer_stack.beside_prefill(sample(**times)) == 3.0
    assert transfer_stack.exposed_share(sample(**times)) == 0.5


def test_a_request_that_was_not_handed_over_is_no_figure():
    with pytest.raises(RuntimeError, match="nothing was handed over"):
        transfer_stack.exposed_share(sample(0, prefill_s=1.0, transfer_s=0.0))


def test_untuned_means_ucx_s_own_value_of_all_that_we_set_but_the_transport():
    pytest.importorskip("libucx")
    from kv_transfer.transports.ucx import SETTINGS

    found = bench_transfer.ucx_defaults()
    assert set(found) == {f"UCX_{name}" for name in SETTINGS}
    assert found["UCX_TLS"] == "tcp"
    ours = {name for name in SETTINGS if found[f"UCX_{name}"] == SETTINGS[name]}
    assert ours == {"TLS"}


def ends() -> tuple[Link, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Link(ours), theirs


def test_a_link_keeps_messages_apart():
    link, sock = ends()
    other = Link(sock)
    other.say("a", 1, b"x")
    other.say("b")
    assert link.expect("a") == [1, b"x"]
    assert link.expect("b") == []
    link.close()
    other.close()


def test_a_link_tells_of_another_word_of_silence_and_of_an_end():
    link, sock = ends()
    Link(sock).say("failed", "why")
    with pytest.raises(PeerGone, match=r"'failed' where 'sealed' was due: \['why'\]"):
        link.expect("sealed")
    with pytest.raises(PeerGone, match="said nothing within"):
        link.hear(0.01)
    sock.close()
    with pytest.raises(PeerGone, match="has ended"):
        link.hear(1.0)
    link.close()


def test_both_processes_are_told_the_same():
    setup = Setup(sources={1: ["a"]}, pool_blocks=3, cores=(0, 1), untuned={}, nixl=True)
    assert msgspec.json.decode(setup.text(), type=Setup) == setup


@pytest.mark.slow
def test_every_way_moves_what_was_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("benchmarks.worker.FOLDER", tmp_path)
    monkeypatch.setattr(bench_transfer, "QUICK_POOL_BLOCKS", POOL_BLOCKS)
    nixl = bench_transfer.has_nixl()
    with ExitStack() as held:
        workers = bench_transfer.start(argparse.Namespace(quick=True), held, nixl=nixl)
        rates = bench_transfer.measure(workers, 40, bench_transfer.Plan(1, 80, nixl))
        grown = bench_transfer.python_row(workers["ours"], "tcp", tokens=40)
    assert len(rates) == 9 + nixl
    assert all(rate > 0 for found in rates.values() for rate in found)
    assert grown["ours"] > 0
