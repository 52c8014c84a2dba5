"""`ekiden verify`: pairs are equal or refused, and nothing wrong passes for equal."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from ekiden.cli.main import main
from ekiden.cli.verify import THREAD_WIRES
from ekiden.core.config import EngineConfig
from ekiden.text.tokenizer import Tokenizer
from ekiden.verify.bounds import Bounds
from ekiden.verify.compare import logprob_distances
from ekiden.verify.errand import Errand
from ekiden.verify.exchange import Exchange
from ekiden.verify.house import WIRES, House, quiet_threads
from ekiden.verify.inline import InlineReplica
from ekiden.verify.layouts import FULL, GRIDS, Layout, sample
from ekiden.verify.outcome import Outcome
from ekiden.verify.pair import Work, run_pair
from ekiden.verify.reference import reference_tokens
from ekiden.verify.script import Script, make_script
from ekiden.verify.shape import Shape
from ekiden.verify.threads import ThreadsRun
from ekiden.verify.tiny import write_tiny_model
from ekiden.verify.truth import Truths, converted_reference
from kv_transfer.session import SealedOut, SessionEvent

TOKENS = 9


def quiet(what: str, done: int, total: int) -> None:
    """Tells nobody."""


class Room:
    """A tiny model, and everything that a pair of its replicas needs."""

    def __init__(self, model_dir: Path, wire: str = "memory") -> None:
        self.engine = EngineConfig(
            model_dir=model_dir,
            model_name="tiny",
            dtype="float32",
            max_model_len=512,
            max_num_batched_tokens=64,
        )
        self.house = House.of(self.engine, wire)
        self.shape = Shape(engine=self.engine, cache_tokens=3072)
        self.script: Script = make_script(Tokenizer.load(model_dir), FULL.block_size, TOKENS)
        self.truths = Truths(self.house, self.shape, self.script.prompts, TOKENS, quiet)
        self.bounds = Bounds(self.truths)

    def grid(self, timeout_s: float = 60.0) -> ThreadsRun:
        return ThreadsRun(
            self.house, self.shape, self.script, self.truths, self.bounds, timeout_s, quiet
        )

    def run(
        self, prefill: str, decode: str, exchange: type[Exchange], timeout_s: float = 60.0
    ) -> Outcome:
        """One pair, with hand-offs that something is done to."""
        layouts = Layout.parse(prefill), Layout.parse(decode)
        kinds = [self.shape.of(layout, "decode").kv_cache_dtype for layout in layouts]
        references, bound = self.truths.of(*kinds), self.bounds.of(*kinds)
        with quiet_threads():
            replicas = [
                InlineReplica(self.house, self.shape.of(layout, role), role, str(layout))
                for layout, role in zip(layouts, ("prefill", "decode"), strict=True)
            ]
            try:
                work = Work(
                    script=self.script,
                    names=self.script.names(*layouts),
                    references=references,
                    bound=bound,
                    salt="pair",
                    timeout_s=timeout_s,
                )
                return run_pair(*replicas, work, self.house.clock, exchange)
            finally:
                for replica in replicas:
                    replica.close()


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Room(write_tiny_model(tmp_path_factory.mktemp("verify") / "tiny"))
    torch.set_num_threads(before)


def test_a_part_of_the_full_grid_is_equal_or_refused_where_activations_differ(
    room: Room,
) -> None:
    cells = sample(GRIDS["full"].cells(), 150, seed=1)
    results = room.grid().run(cells)
    assert set(results) == set(cells)
    bad = {cell: outcome for cell, outcome in results.items() if not outcome.ok}
    assert not bad
    for (prefill, decode), outcome in results.items():
        same = (prefill.kv == "bfloat16") == (decode.kv == "bfloat16")
        assert outcome.status == ("equal" if same else "refused")
    equal = [outcome for outcome in results.values() if outcome.status == "equal"]
    assert len(equal) >= 30
    assert all(o.prompts >= 7 and o.tokens >= 7 * TOKENS - 8 for o in equal)
    assert all(o.kv_tokens_compared > 300 and o.equal_tokens + o.ties == o.tokens for o in equal)


@pytest.mark.parametrize("wire", [wire for wire in WIRES if wire != "memory"])
def test_pairs_are_equal_over_the_real_wires_of_one_host(room: Room, wire: str) -> None:
    """``shm``: decode reads prefill's pool itself, and converts as it reads."""
    other = Room(room.engine.model_dir, wire)
    other.truths, other.bounds = room.truths, room.bounds  # no wire has a part in them
    pairs = [("TP2/48", "TP3xPP2"), ("TP4xPP2/32:int8", "TP1/48:int8"), ("TP1", "TP2/32:fp8_e4m3")]
    results = other.grid().run([(Layout.parse(p), Layout.parse(d)) for p, d in pairs])
    assert [outcome.status for outcome in results.values()] == ["equal"] * 3
    assert all(outcome.kv_bytes for outcome in results.values())


class WrongBlock(Exchange):
    """After the bytes were found equal, a block of ``long`` gets what stands in another one."""

    def adopt(self, errand: Errand) -> None:
        if errand.name == "long":
            blocks = errand.held.blocks
            wrong, right = blocks[0], blocks[len(blocks) // 2]
            for rank in range(len(self._decode.layout.ranks)):
                cache = self._decode.cache(rank).view(torch.uint8)
                cache[right] = cache[wrong]
        super().adopt(errand)


@pytest.mark.parametrize("kv", FULL.kv)
def test_a_wrong_block_that_the_bytes_would_not_tell_is_out_of_bounds(room: Room, kv: str) -> None:
    outcome = room.run(f"TP2:{kv}", f"PP2:{kv}", WrongBlock)
    assert outcome.status == "differs"
    assert "prompt long" in outcome.detail
    assert "equal to the bit" in outcome.detail


class WrongHead(Exchange):
    """As ``WrongBlock``, but one head of one layer of the block, on one rank."""

    def adopt(self, errand: Errand) -> None:
        if errand.name == "long":
            blocks = errand.held.blocks
            cache = self._decode.cache(0).view(torch.uint8)
            cache[blocks[len(blocks) // 2], 0, 0] = cache[blocks[0], 0, 0]
        super().adopt(errand)


def test_one_wrong_head_of_one_layer_in_one_block_is_out_of_bounds_in_float32(room: Room) -> None:
    assert room.run("TP2:float32", "TP1:float32", WrongHead).status == "differs"


class FlippedBit(Exchange):
    """A bit of what has arrived is flipped before the bytes are compared."""

    def _check_kv(self, errand: Errand) -> None:
        if errand.name == "long":
            cache = self._decode.cache(1).view(torch.uint8)
            cache[errand.held.blocks[2], 0, 1, 1, 5, 3] ^= 1
        super()._check_kv(errand)


@pytest.mark.parametrize("kv", FULL.kv)
def test_one_flipped_bit_is_named_by_layer_head_and_position(room: Room, kv: str) -> None:
    outcome = room.run(f"TP1/32:{kv}", f"TP3:{kv}", FlippedBit)
    assert outcome.status == "differs"
    assert (
        "prompt long: the KV differs first at layer 1, head 1, position 37 (V, decode rank 1)"
        in (outcome.detail)
    )


class LostSeal(Exchange):
    """Prefill's last word never reaches decode."""

    def _on_session(self, event: SessionEvent) -> None:
        if not isinstance(event, SealedOut):
            super()._on_session(event)


def test_a_hand_off_that_never_ends_is_told_as_hung_with_where_it_stands(room: Room) -> None:
    outcome = room.run("TP1:int8", "TP1:int8", LostSeal, timeout_s=1.5)
    assert outcome.status == "hung"
    assert "prompt long transferring" in outcome.detail


class KeptBlocks(Exchange):
    """The writer of one prompt never lets go of its blocks."""

    def _drained(self, errand: Errand, session: int) -> None:
        if errand.name == "1" and session == errand.receive:
            errand.received = True
        else:
            super()._drained(errand, session)


def test_a_leaked_block_fails_the_pair(room: Room) -> None:
    outcome = room.run("TP1:float32", "TP2:float32", KeptBlocks)
    assert outcome.status == "failed"
    assert "held=1" in outcome.detail


class WholePrompt(Exchange):
    """Decode forgets that it holds the beginning of ``fork``."""

    def _set_out(self, errand: Errand) -> None:
        if errand.name == "fork":
            errand.request = msgspec.structs.replace(errand.request, salt="another")
        super()._set_out(errand)


def test_moving_more_than_the_delta_fails_the_pair(room: Room) -> None:
    outcome = room.run("TP1:float32", "TP1:float32", WholePrompt)
    assert outcome.status == "failed"
    assert "prompt fork: decode holds 0 tokens of it already, of 90" in outcome.detail


def test_a_failed_pair_does_not_spoil_the_next(room: Room) -> None:
    """Both replicas are opened anew."""
    layout = Layout.parse("TP2:float32")
    grid = room.grid(timeout_s=0.0)
    assert grid.run([(layout, layout)])[layout, layout].status == "hung"
    grid = room.grid()
    cells = [(layout, layout), (Layout.parse("TP1:float32"), layout)]
    assert [outcome.status for outcome in grid.run(cells).values()] == ["equal", "equal"]


def test_a_layout_that_the_model_cannot_have_is_refused_in_one_sentence(room: Room) -> None:
    cell = Layout.parse("TP7:float32"), Layout.parse("TP1:float32")
    outcome = room.grid().run([cell])[cell]
    assert outcome.status == "refused"
    assert "7" in outcome.detail
    assert "\n" not in outcome.detail


@pytest.mark.parametrize("kv", FULL.kv)
def test_the_truth_of_two_dtypes_is_that_of_one_process_where_they_are_the_same(
    room: Room, kv: str
) -> None:
    engine = room.shape.of(Layout(kv=kv), "decode")
    prompts = [room.script.prompts[name] for name in ("1", "33", "long")]
    alone = reference_tokens(engine, prompts, TOKENS, lambda done, total: None)
    prefill = room.shape.of(Layout(kv=kv), "prefill")
    split = converted_reference(
        room.house, prefill, engine, prompts, TOKENS, lambda done, total: None
    )
    for one, other in zip(alone, split, strict=True):
        assert one.tokens == other.tokens
        assert max(logprob_distances(one, other.tops)) < 1e-4


def test_every_two_kv_dtypes_have_a_truth_of_their_own(room: Room) -> None:
    """Converted KV is not what decode would have computed itself."""
    seen = {}
    for prefill, decode in itertools.product(("float32", "int8", "fp8_e4m3"), repeat=2):
        truth = room.truths.of(prefill, decode)["long"]
        assert len(truth.tokens) == TOKENS
        seen[prefill, decode] = truth.tops
    assert len(set(seen.values())) == len(seen)


def verify(options: str, file: Path) -> int:
    return main(["verify", "--model", "tiny", "--json", str(file), *options.split()])


def test_the_command_offers_the_wires_that_there_are() -> None:
    assert THREAD_WIRES == WIRES


def test_the_command_tells_counts_and_writes_every_cell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out" / "verify.json"
    layouts = "--prefill TP1 --prefill TP2:bfloat16 --decode TP2xPP2/32 --decode TP9"
    assert verify(f"--replicas threads {layouts}", file) == 0
    said = capsys.readouterr().out
    assert "4 cells: 1 equal, 3 refused, 0 differs, 0 hung, 0 failed" in said
    cells = json.loads(file.read_text())["parts"][0]["cells"]
    assert Counter(cell["status"] for cell in cells) == {"equal": 1, "refused": 3}
    assert cells[0]["prefill"] == "TP1"
    assert cells[0]["decode"] == "TP2xPP2/32"
    assert cells[0]["tokens"] == cells[0]["equal_tokens"] + cells[0]["ties"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [9, 1], ids=["nine tokens", "the hand-off token alone"])
def test_real_processes_are_equal_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tokens: int
) -> None:
    layouts = "--prefill TP1 --prefill TP2/32:bfloat16 --decode TP3xPP2 --decode PP2/48:int8"
    options = f"--prompts 6 --max-tokens {tokens} {layouts}"
    assert verify(options, tmp_path / "verify.json") == 0
    assert "4 cells: 2 equal, 2 refused" in capsys.readouterr().out
