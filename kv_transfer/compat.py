"""The first meeting: may KV of this prefill replica go to that decode replica?"""

from __future__ import annotations

from ekiden.cache.layout import KV_BYTES
from ekiden.core.errors import SetupError
from kv_transfer.description import ReplicaDescription
from kv_transfer.reshard import check_layout

_EQUAL = (
    ("wire_version", "wire version", "run the same release on both sides"),
    (
        "model_fingerprint",
        "model fingerprint",
        "load the same weights, with the same --quantization, on both sides",
    ),
    ("tokenizer_fingerprint", "tokenizer", "use the same tokenizer on both sides"),
    ("granule", "granule", "use the same release and options on both sides"),
    ("hash_scheme", "hash scheme", "run the same release on both sides"),
    # KV of another dtype is converted; weights and activations must be the same on both sides.
    ("dtype", "dtype of activations", "give both sides the same --dtype"),
)
_EQUAL_KV = (
    ("kind", "KV kind", "load the same model on both sides"),
    ("num_layers", "number of layers", "load the same model on both sides"),
    ("num_kv_heads", "number of KV heads", "load the same model on both sides"),
    ("head_dim", "head dimension", "load the same model on both sides"),
)


def check_pair(prefill: ReplicaDescription, decode: ReplicaDescription) -> None:
    """Return if the two can work together. TP, PP, block size and KV dtype may differ.

    Raises:
        SetupError: they cannot; one sentence with both values and what to do.
    """
    for field, name, remedy in _EQUAL:
        _same(prefill, decode, name, getattr(prefill, field), getattr(decode, field), remedy)
    for field, name, remedy in _EQUAL_KV:
        mine, theirs = getattr(prefill.kv, field), getattr(decode.kv, field)
        _same(prefill, decode, name, mine, theirs, remedy)
    common_wires(prefill, decode)
    _check_lengths(prefill, decode)
    for replica in (prefill, decode):
        _check_dtype(replica)
        _check_blocks(replica)
        _check_ranks(replica)


def common_wires(prefill: ReplicaDescription, decode: ReplicaDescription) -> tuple[str, ...]:
    """The wires that KV could take, in decode's order.

    Raises:
        SetupError: there is none.
    """
    common = tuple(wire for wire in decode.wires if wire in prefill.wires)
    if not common:
        raise SetupError(
            f"prefill {prefill.replica_id} has the KV wires {', '.join(prefill.wires)} and decode "
            f"{decode.replica_id} has {', '.join(decode.wires)}, none in common: give both sides "
            "the same --kv-transport"
        )
    return common


def _same(
    prefill: ReplicaDescription,
    decode: ReplicaDescription,
    name: str,
    mine: object,
    theirs: object,
    remedy: str,
) -> None:
    if mine != theirs:
        raise SetupError(
            f"prefill {prefill.replica_id} has {name} {mine} and decode {decode.replica_id} has "
            f"{name} {theirs}: {remedy}"
        )


def _check_lengths(prefill: ReplicaDescription, decode: ReplicaDescription) -> None:
    if prefill.max_model_len > decode.max_model_len:
        raise SetupError(
            f"prefill {prefill.replica_id} takes prompts of up to {prefill.max_model_len} tokens "
            f"but decode {decode.replica_id} holds only {decode.max_model_len}: lower "
            "--max-model-len of prefill or raise that of decode"
        )


def _check_dtype(replica: ReplicaDescription) -> None:
    if replica.kv.dtype not in KV_BYTES:
        raise SetupError(
            f"{replica.role} {replica.replica_id} keeps KV as {replica.kv.dtype}, which cannot be "
            f"converted: use one of {', '.join(KV_BYTES)}"
        )


def _check_blocks(replica: ReplicaDescription) -> None:
    if replica.kv.block_size % replica.granule:
        raise SetupError(
            f"{replica.role} {replica.replica_id} has block size {replica.kv.block_size}, which "
            f"is no multiple of the granule {replica.granule}: give it another --block-size"
        )


def _check_ranks(replica: ReplicaDescription) -> None:
    if len(replica.kv.ranks) != len(replica.endpoints):
        raise SetupError(
            f"{replica.role} {replica.replica_id} has {len(replica.kv.ranks)} ranks but names "
            f"{len(replica.endpoints)} KV endpoints: start it anew"
        )
    check_layout(replica.kv)
