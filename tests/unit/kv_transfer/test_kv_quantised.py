"""A quantised cache moves with its scales: bit for bit, whatever the layouts, and decode goes on
from it as the one process does that computed the prompt."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from kv_rig import FAKES, Pair, describe, layout, read

from ekiden.cache.layout import KvLayout
from ekiden.cache.tensors import KV_TORCH_DTYPES, as_stored
from ekiden.core.clock import ManualClock
from ekiden.core.errors import SetupError
from ekiden.layers.batch import Span
from ekiden.models.layout import kv_layout
from kv_transfer import port, reshard
from kv_transfer.compat import check_pair
from kv_transfer.convert import convert_rows
from kv_transfer.reshard import pairs
from kv_transfer.transports.memory import Hub
from tests.unit.models.tiny import Replica, make_checkpoint, random_prompt

KINDS = ("int8", "fp8_e4m3")
SOURCE, TARGET = [7, 3, 1, 5, 9, 11], [2, 4, 6, 8, 10, 0]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def connected(prefill: KvLayout, decode: KvLayout, wire: str = "memory") -> Pair:
    hub, clock = Hub(), ManualClock()
    make = FAKES[wire]
    return Pair(prefill, decode, lambda rank: make(hub, clock=clock), clock=clock, wire=wire)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(
    ("source", "target"), [((1, 1), (2, 1)), ((4, 1), (1, 2)), ((2, 2), (4, 1))]
)
def test_every_byte_arrives_the_scales_too(
    dtype: str, source: tuple[int, int], target: tuple[int, int]
) -> None:
    prefill, decode = (
        layout(tp=tp, pp=pp, dtype=dtype, head_dim=8, block_size=size)
        for (tp, pp), size in ((source, 16), (target, 32))
    )
    p = connected(prefill, decode)
    _, send = p.hand_off(90, SOURCE, TARGET[:3])
    p.run()
    assert p.equal(send, TARGET[:3], 90)
    assert sum(pair.token_bytes(prefill) for pair in pairs(prefill, decode)) == sum(
        decode.block_bytes(rank) // decode.block_size for rank in range(len(decode.ranks))
    )
    p.close()


@pytest.mark.parametrize("dtype", KINDS)
def test_decode_goes_on_as_the_process_that_computed_the_prompt(tmp_path: Path, dtype: str) -> None:
    """Prefill on TP1 in two chunks, the hand-off, 12 greedy tokens on TP2 x PP2."""
    make_checkpoint(tmp_path, "llama3")
    prompt, count = random_prompt(45, seed=3), 12
    options = {"kernels": "torch", "kv_cache_dtype": dtype}
    alone = Replica(tmp_path, **options)
    prefill, decode = Replica(tmp_path, **options), Replica(tmp_path, tp=2, pp=2, **options)
    expected = _generate(alone, prompt, _prefill(alone, prompt, SOURCE), count, SOURCE)
    p = connected(*(kv_layout(r.model, r.config) for r in (prefill, decode)))
    prefill.caches, decode.caches = p.prefill.caches, p.decode.caches
    _, offer = p.receiving.open("r", p.prefill.me, 0, len(prompt), TARGET, "memory")
    send = p.sending.open(offer, p.decode.me)
    first = _prefill(prefill, prompt, SOURCE)
    p.computed(send, len(prompt), SOURCE)
    p.run()
    assert not p.receiving.open_count
    p.close()
    assert _generate(decode, prompt, first, count, TARGET) == expected


def _prefill(replica: Replica, prompt: list[int], blocks: list[int]) -> int:
    """In two chunks; the hand-off token."""
    replica.step([Span(prompt[:20], 0, blocks, 1)])
    return int(replica.step([Span(prompt[20:], 20, blocks, 1)]).argmax())


def _generate(
    replica: Replica, prompt: list[int], first: int, count: int, blocks: list[int]
) -> list[int]:
    tokens = [first]
    while len(tokens) < count:
        at = len(prompt) + len(tokens) - 1
        tokens.append(int(replica.step([Span(tokens[-1:], at, blocks, 1)]).argmax()))
    return tokens


DTYPES = ("float32", "bfloat16", "int8", "fp8_e4m3")
KV = KV_TORCH_DTYPES


@pytest.mark.parametrize("wire", FAKES)
@pytest.mark.parametrize("there", DTYPES)
@pytest.mark.parametrize("here", DTYPES)
@pytest.mark.parametrize("size", [16, 32])
def test_kv_of_another_dtype_arrives_as_decode_would_keep_it(
    wire: str, there: str, here: str, size: int
) -> None:
    source = layout(tp=2, dtype=there, head_dim=8)
    target = layout(pp=2, dtype=here, head_dim=8, block_size=size)
    p = connected(source, target, wire)
    blocks = TARGET[: -(-90 // size)]
    _, offer = p.receiving.open("r", p.prefill.me, 0, 90, blocks, wire)
    send = p.sending.open(offer, p.decode.me)
    numbers = torch.randn(90, source.num_kv_heads, source.num_layers, 2, 8)
    for rank, cache in enumerate(p.prefill.caches):
        held = numbers[(slice(None), *shares(source, rank))]
        write_rows(cache, source, SOURCE, kept(held, there))
    p.computed(send, 90, SOURCE)
    p.run()
    for rank, cache in enumerate(p.decode.caches):
        want = convert_rows(kept(numbers[(slice(None), *shares(target, rank))], there), KV[here])
        got = read(cache, target, blocks, 90)
        assert torch.equal(as_stored(got.contiguous()), as_stored(want.contiguous()))
    p.close()


def test_a_slot_of_decode_holds_a_message_of_wider_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model, scaled down: one granule of prefill's float32 passes the usual message, and
    a block of decode's bytes."""
    for module in (port, reshard):
        monkeypatch.setattr(module, "MESSAGE_BYTES", 1)
    p = connected(layout(head_dim=32), layout(head_dim=32, dtype="int8"))
    _, offer = p.receiving.open("r", p.prefill.me, 0, 90, TARGET, "memory")
    send = p.sending.open(offer, p.decode.me)
    p.computed(send, 90, SOURCE)
    p.run()
    assert [type(event).__name__ for event in p.received_events] == ["Arrived", "Drained"]
    p.close()


def shares(kv: KvLayout, rank: int) -> tuple[slice, slice]:
    r = kv.ranks[rank]
    return slice(r.head_start, r.head_stop), slice(r.layer_start, r.layer_stop)


def kept(numbers: torch.Tensor, dtype: str) -> torch.Tensor:
    """As a cache of ``dtype`` keeps them."""
    return convert_rows(numbers, KV[dtype])


def write_rows(cache: torch.Tensor, kv: KvLayout, blocks: list[int], rows: torch.Tensor) -> None:
    for position, row in enumerate(rows):
        block, offset = blocks[position // kv.block_size], position % kv.block_size
        cache[block, :, :, :, offset] = row


@pytest.mark.parametrize("dtype", KINDS)
def test_two_dtypes_of_activations_are_refused_although_they_share_a_quantised_kv(
    dtype: str,
) -> None:
    """Decode would go on from keys and values that it would not have computed itself."""
    kv = layout(dtype=dtype, head_dim=8)
    prefill, decode = (describe(kv, [b"a"], role=role) for role in ("prefill", "decode"))
    check_pair(prefill, decode)
    with pytest.raises(SetupError, match=r"activations float32 and .* activations bfloat16.*--dty"):
        check_pair(prefill, msgspec.structs.replace(decode, dtype="bfloat16"))
