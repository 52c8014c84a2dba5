"""Only a prefill and a decode replica may meet, whoever calls whom."""

from __future__ import annotations

import msgspec
import pytest

from ekiden.cache.layout import KvLayout, RankLayout
from ekiden.core.errors import SetupError
from ekiden.service.servicer import MAX_PEERS, PeerTable, check_meeting
from kv_transfer.description import WIRE_VERSION, ReplicaDescription

LAYOUT = KvLayout(
    dtype="float32",
    block_size=16,
    num_layers=2,
    num_kv_heads=1,
    head_dim=4,
    tp=1,
    pp=1,
    ranks=(
        RankLayout(tp_rank=0, pp_rank=0, head_start=0, head_stop=1, layer_start=0, layer_stop=2),
    ),
)
PREFILL = ReplicaDescription(
    replica_id="p",
    role="prefill",
    epoch=1,
    version="0",
    wire_version=WIRE_VERSION,
    model="m",
    model_fingerprint="f",
    tokenizer_fingerprint="t",
    granule=16,
    hash_scheme="h",
    dtype="float32",
    kv=LAYOUT,
    wires=("memory",),
    endpoints=(b"e",),
    max_model_len=64,
    vocab_size=10,
)
DECODE = msgspec.structs.replace(PREFILL, replica_id="d", role="decode")


def test_prefill_and_decode_meet_in_either_direction() -> None:
    check_meeting(PREFILL, DECODE)
    check_meeting(DECODE, PREFILL)


@pytest.mark.parametrize("one", [PREFILL, DECODE])
def test_two_of_a_kind_are_refused_with_both_roles(one: ReplicaDescription) -> None:
    with pytest.raises(SetupError, match=rf"{one.role} replica and .* a {one.role} one"):
        check_meeting(one, one)


def test_only_the_latest_life_of_a_peer_is_believed() -> None:
    table = PeerTable()
    table.add(DECODE)
    table.add(msgspec.structs.replace(DECODE, epoch=2))
    assert table.get("d", 1) is None
    assert table.get("d", 2) is not None
    assert len(table) == 1


def test_the_table_is_bounded_and_forgets_the_oldest() -> None:
    table = PeerTable()
    for number in range(MAX_PEERS + 1):
        table.add(msgspec.structs.replace(DECODE, replica_id=str(number)))
    assert len(table) == MAX_PEERS
    assert table.get("0", 1) is None
    assert table.get(str(MAX_PEERS), 1) is not None
