"""What ``ekiden top`` shows of pools, replicas and requests."""

from __future__ import annotations

from typing import Any

import pytest

from ekiden.cli.main import main
from ekiden.cli.top_view import View, screen
from ekiden.core.types import ReplicaStats
from ekiden.doctor.scrape import Interval, read_scrape
from ekiden.registry.record import DRAINING, ReplicaRecord


def record(name: str, role: str, stats: ReplicaStats, **more: Any) -> ReplicaRecord:
    return ReplicaRecord(
        id=name,
        role=role,
        model="m",
        address="127.0.0.1:1",
        epoch=1,
        version="0",
        block_size=16,
        granule=16,
        max_model_len=100,
        stats=stats,
        **more,
    )


PREFILL = record(
    "prefill-0",
    "prefill",
    ReplicaStats(
        running=2,
        waiting=3,
        waiting_tokens=12_345,
        kv_blocks_total=1000,
        kv_blocks_held=400,
        kv_blocks_cached=250,
        prefill_tokens_per_s=8_000.4,
        stage_idle=(0.1, 0.25),
        collective_share=0.07,
    ),
    tp=2,
    pp=2,
)
DECODE = record(
    "decode-0",
    "decode",
    ReplicaStats(running=5, receiving=2, kv_blocks_total=1000, kv_blocks_held=100, step_s=0.0123),
    status=DRAINING,
)


def gateway() -> Interval:
    def text(scale: int) -> str:
        return (
            f'ekiden_requests_total{{endpoint="c",status="200"}} {20 * scale}\n'
            f'ekiden_requests_total{{endpoint="c",status="503"}} {2 * scale}\n'
            f'ekiden_prompt_tokens_total{{source="decode_cache"}} {100 * scale}\n'
            f'ekiden_prompt_tokens_total{{source="prefill_computed"}} {300 * scale}\n'
            f"ekiden_completion_tokens_total {400 * scale}\n"
            f'ekiden_transfer_bytes_total{{wire="shm"}} {3_000_000 * scale}\n'
            f'ekiden_fallbacks_total{{kind="recompute"}} {scale}\n'
            f'ekiden_ttft_seconds_bucket{{le="0.1"}} {10 * scale}\n'
            f'ekiden_ttft_seconds_bucket{{le="+Inf"}} {20 * scale}\n'
            "ekiden_gateway_in_flight 7\n"
        )

    return Interval(before=read_scrape(text(1), 0.0), after=read_scrape(text(2), 2.0))


def test_the_screen_has_requests_then_each_pool_with_its_replicas() -> None:
    shown = screen(View(replicas=(DECODE, PREFILL), stale_s=0.0, gateway=gateway()), 200)
    assert shown.splitlines() == [
        "gateway   7 in flight   11.0 answers/s   1.0 errors/s   200 tokens/s   prompts 25% cached",
        "          TTFT P50 100.0 ms P95 100.0 ms   TPOT P50 - P95 -   KV 2 MB/s over shm",
        "          fallbacks since the start: 2 recompute",
        "",
        "prefill   1 replica   2 running   3 waiting   KV 40%",
        (
            "  replica    status  split      running  waiting  to prefill  KV               cached"
            "  prefill      step  comm  idle"
        ),
        (
            "  prefill-0  ready   TP2 x PP2  2        3        12,345      ████░░░░░░  40%  25%   "
            "  8,000 tok/s  -     7%    10%/25%"
        ),
        "",
        "decode    1 replica   5 running   0 waiting   2 receiving KV   KV 10%",
        (
            "  replica   status    split  running  waiting  to prefill  KV               cached"
            "  prefill  step     comm  idle"
        ),
        (
            "  decode-0  DRAINING  TP1    5        0        0           █░░░░░░░░░  10%  0%    "
            "  -        12.3 ms  0%    -"
        ),
    ]


def test_lines_are_cut_to_the_screen() -> None:
    shown = screen(View(replicas=(DECODE, PREFILL), stale_s=0.0, gateway=gateway()), 40)
    assert max(map(len, shown.splitlines())) == 40


def test_what_is_not_there_is_said() -> None:
    shown = screen(View(replicas=(), stale_s=12.3, trouble="http://g tells nothing"), 100)
    assert shown.splitlines() == [
        "gateway   http://g tells nothing",
        "",
        "prefill   no replica",
        "",
        "decode    no replica",
        "",
        "Redis has not answered for 12 s: this is what it said then",
    ]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "give --redis URL or set REDIS_URL"),
        (["--redis", "redis://127.0.0.1:1/0", "--interval", "0.1"], "--interval 0.1 is too short"),
        (["--redis", "redis://127.0.0.1:1/0"], "cannot reach Redis at redis://127.0.0.1:1/0"),
    ],
)
def test_what_cannot_be_looked_at_is_refused_in_a_sentence(
    argv: list[str], words: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)
    assert main(["top", *argv]) == 2
    assert words in capsys.readouterr().err
