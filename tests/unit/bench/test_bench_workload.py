"""What is asked: lengths, shared beginnings, recorded requests."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tiny_tokenizers import byte_level

from ekiden.bench.trace import Traced
from ekiden.bench.wording import UNITS, Wording
from ekiden.bench.workload import NAMED, Drawn, Piece, Shape
from ekiden.core.errors import SetupError

LINES = (
    {"timestamp": 1000, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 600, "output_length": 7, "hash_ids": [0, 3]},
    {"timestamp": 2500, "input_length": 9000, "output_length": 1, "hash_ids": []},
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)) + "\n")
    return path


def words(pieces: tuple[Piece, ...], wording: Wording | None = None) -> list[str]:
    return (wording or Wording()).text(pieces).split()


def test_the_five_workloads_are_those_of_the_articles():
    assert {name: [tuple(shape) for shape in shapes] for name, shapes in NAMED.items()} == {
        "short-short": [(256, 128)],
        "short-long": [(256, 1024)],
        "long-short": [(8192, 128)],
        "long-long": [(8192, 1024)],
        "mixed": [(256, 128), (256, 1024), (8192, 128), (8192, 1024)],
    }


def test_a_mix_draws_each_of_its_shapes():
    drawn = Drawn(shapes=NAMED["mixed"])
    shapes = {(drawn.ask(i).prompt, drawn.ask(i).output) for i in range(100)}
    assert shapes == set(map(tuple, NAMED["mixed"]))


@given(
    prompt=st.integers(2, 600),
    shared=st.integers(0, 599),
    added=st.integers(0, 30),
    numbers=st.lists(st.integers(0, 1 << 40), min_size=2, max_size=2, unique=True),
)
def test_prompts_have_their_length_and_share_just_their_beginning(
    prompt: int, shared: int, added: int, numbers: list[int]
):
    shared = min(shared, prompt - 1)
    added = min(added, prompt - 1)
    drawn = Drawn(shapes=(Shape(prompt, 1),), shared_prefix=shared)
    first, second = (words(drawn.ask(n).pieces, Wording(added=added)) for n in numbers)
    assert len(first) == len(second) == prompt - added
    alike = max(0, shared - added)
    assert first[:alike] == second[:alike]
    if prompt - max(shared, added) > 8:
        assert first[alike:] != second[alike:]


def test_a_request_is_the_same_whoever_makes_it_and_another_seed_gives_another():
    asks = [Drawn(shapes=NAMED["mixed"], seed=seed).ask(7) for seed in (1, 1, 2)]
    assert words(asks[0].pieces) == words(asks[1].pieces)
    assert words(asks[0].pieces) != words(asks[2].pieces)


def test_another_salt_gives_other_texts_of_the_same_lengths(trace: Path):
    for kind in (Drawn(shapes=NAMED["mixed"], shared_prefix=9), Traced(path=str(trace))):
        for number in range(3):
            plain, salted = (k.ask(number) for k in (kind, replace(kind, salt="x")))
            assert [p.tokens for p in plain.pieces] == [p.tokens for p in salted.pieces]
            assert plain.output == salted.output
            assert words(plain.pieces)[:12] != words(salted.pieces)[:12]


def test_as_many_beginnings_as_asked_for():
    drawn = Drawn(shapes=(Shape(20, 1),), shared_prefix=10, prefixes=3)
    assert len({drawn.ask(i).pieces[0] for i in range(50)}) == 3


def test_a_prefix_as_long_as_the_prompt_is_refused():
    with pytest.raises(SetupError, match=r"shared_prefix_tokens 256 .*at most 255"):
        Drawn(shapes=NAMED["short-short"], shared_prefix=256)


def test_a_trace_is_replayed_in_order_of_its_moments(trace: Path):
    traced = Traced(path=str(trace))
    assert traced.moments == [0.0, 1.5, 2.0]
    assert [traced.ask(i).prompt for i in range(3)] == [1030, 9000, 600]
    assert [traced.ask(i).output for i in range(3)] == [5, 1, 7]


def test_equal_ids_of_a_trace_are_equal_text_at_equal_places(trace: Path):
    traced = Traced(path=str(trace))
    first, second = words(traced.ask(0).pieces), words(traced.ask(2).pieces)
    assert len(first) == 1030
    assert len(second) == 600
    assert first[:512] == second[:512]
    assert first[512:600] != second[512:]


def test_requests_that_do_not_fit_are_left_out_and_counted(trace: Path):
    traced = Traced(path=str(trace), max_len=2000)
    assert (traced.size, traced.left_out) == (2, 1)
    with pytest.raises(SetupError, match=r"--max-model-len 100 .*shortest has 607 tokens"):
        Traced(path=str(trace), max_len=100).ask(0)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2 is no request"),
        ('{"timestamp": 1}', "line 2 is no request .*input_length"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "line 2 .*1 or more"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str, says: str):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(LINES[0]) + "\n" + line)
    with pytest.raises(SetupError, match=says):
        Traced(path=str(path)).ask(0)


def test_a_trace_that_is_missing_or_empty_is_refused(tmp_path: Path):
    with pytest.raises(SetupError, match="cannot be read"):
        Traced(path=str(tmp_path / "none")).ask(0)
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(SetupError, match="holds no request"):
        Traced(path=str(tmp_path / "empty")).ask(0)


def test_digits_are_a_token_each_where_a_tokenizer_has_no_words():
    tokenizer = byte_level()
    for count in (1, 2, 17, 300):
        said = Wording(units="digits").text([Piece("x", count)])
        assert len(tokenizer.encode(said).ids) == count


def test_no_word_is_listed_twice_or_has_more_than_letters():
    for units, _ in UNITS.values():
        assert len(set(units)) == len(units)
        assert all(unit.isalnum() and unit.isascii() for unit in units)
