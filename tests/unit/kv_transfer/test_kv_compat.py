"""The first meeting refuses what cannot work, naming both values."""

from __future__ import annotations

import msgspec
import pytest
from kv_rig import describe, layout

from ekiden.core.errors import SetupError
from kv_transfer.compat import check_pair, common_wires
from kv_transfer.description import ReplicaDescription


def pair() -> tuple[ReplicaDescription, ReplicaDescription]:
    prefill = describe(layout(tp=2, block_size=32), [b"a", b"b"], role="prefill")
    return prefill, describe(layout(tp=1, pp=2), [b"c", b"d"], role="decode")


def test_different_splits_and_block_sizes_are_fine() -> None:
    check_pair(*pair())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("wire_version", 999),
        ("model_fingerprint", "other-weights"),
        ("tokenizer_fingerprint", "other-tokenizer"),
        ("granule", 8),
        ("hash_scheme", "other-scheme"),
        ("dtype", "bfloat16"),
        ("max_model_len", 777),
    ],
)
def test_a_difference_is_refused_with_both_values(field: str, value: object) -> None:
    prefill, decode = pair()
    changed = msgspec.structs.replace(decode, **{field: value})
    with pytest.raises(SetupError) as caught:
        check_pair(prefill, changed)
    assert str(value) in caught.value.message
    assert str(getattr(prefill, field)) in caught.value.message


@pytest.mark.parametrize(
    ("field", "value"),
    [("kind", "latent"), ("num_layers", 9), ("head_dim", 77)],
)
def test_another_kind_of_kv_is_refused_with_both_values(field: str, value: object) -> None:
    prefill, decode = pair()
    kv = msgspec.structs.replace(decode.kv, **{field: value})
    with pytest.raises(SetupError) as caught:
        check_pair(prefill, msgspec.structs.replace(decode, kv=kv))
    assert str(value) in caught.value.message
    assert str(getattr(prefill.kv, field)) in caught.value.message


def test_kv_of_another_dtype_is_converted_and_an_unknown_one_refused() -> None:
    prefill, decode = pair()
    kv = msgspec.structs.replace(decode.kv, dtype="fp8_e4m3")
    check_pair(prefill, msgspec.structs.replace(decode, kv=kv))
    kv = msgspec.structs.replace(decode.kv, dtype="float4")
    with pytest.raises(SetupError, match=r"decode-1 keeps KV as float4.*use one of float32"):
        check_pair(prefill, msgspec.structs.replace(decode, kv=kv))


def test_two_without_a_wire_in_common_are_refused_with_both_lists() -> None:
    prefill, decode = pair()
    changed = msgspec.structs.replace(decode, wires=("pigeon", "drum"))
    with pytest.raises(SetupError, match=r"wires memory and .* pigeon, drum, none in common"):
        check_pair(prefill, changed)


def test_the_wires_in_common_come_in_the_order_of_decode() -> None:
    prefill, decode = pair()
    prefill = msgspec.structs.replace(prefill, wires=("shm", "ucx", "tcp"))
    decode = msgspec.structs.replace(decode, wires=("tcp", "nixl", "shm"))
    assert common_wires(prefill, decode) == ("tcp", "shm")


def test_a_block_size_off_the_granule_is_refused() -> None:
    prefill, decode = pair()
    kv = msgspec.structs.replace(decode.kv, block_size=24)
    with pytest.raises(SetupError, match=r"24.*16"):
        check_pair(prefill, msgspec.structs.replace(decode, kv=kv))


def test_ranks_without_an_endpoint_are_refused() -> None:
    prefill, decode = pair()
    with pytest.raises(SetupError, match="2 ranks but names 1"):
        check_pair(prefill, msgspec.structs.replace(decode, endpoints=(b"c",)))
