"""The sampler against a slow reference, in properties, and in every rule it promises."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_reference import seen_of, slow_sample
from tiny_llama import greedy

from ekiden.core.errors import InvariantBroken
from ekiden.core.ids import mix64
from ekiden.engine.draw import BLOCK, gumbel, masses, masses_on_device, race
from ekiden.engine.plan import SampleSpec
from ekiden.engine.ranking import on_device, ranked
from ekiden.engine.sampler import sample

torch.set_num_threads(1)
WIDE = 5000
"""A vocabulary larger than the sorted head."""


def spec(**fields: Any) -> SampleSpec:
    return greedy(**({"temperature": 1.0, "seed": 7} | fields))


def one(logits: list[float] | torch.Tensor, **fields: Any) -> int:
    return sample(torch.as_tensor(logits).float()[None], [spec(**fields)], [0])[0].token


def normal(rows: int, size: int, seed: int = 0) -> torch.Tensor:
    # Rounded to bf16, as a bf16 model's logits are: many of them tie.
    logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 2
    return logits.bfloat16().float()


def reference(logits: torch.Tensor, s: SampleSpec) -> int:
    """The rules again, token by token, in plain Python doubles."""
    x = [float(v) for v in logits]
    for t, times in seen_of(s).items():
        x[t] = x[t] / s.repetition_penalty if x[t] > 0 else x[t] * s.repetition_penalty
        x[t] -= (s.frequency_penalty * times + s.presence_penalty) * (times > 0)
    for t, bias in s.logit_bias.items():
        x[t] += bias
    for t in s.banned:
        x[t] = -math.inf
    order = sorted(range(len(x)), key=lambda t: (-x[t], t))
    if s.temperature < 1e-5:
        return order[0]
    weights = [math.exp((x[t] - x[order[0]]) / s.temperature) for t in order]
    if s.top_k > 0:
        weights = weights[: s.top_k]
    total, mass, kept = sum(weights), 0.0, []
    for w in weights:
        if kept and mass >= s.top_p * total:
            break
        kept.append(w)
        mass += w
    kept = [w for w in kept if w >= s.min_p * kept[0]]
    weight = dict(zip(order, kept, strict=False))
    blocks: Counter[int] = Counter()
    for t, w in weight.items():
        blocks[t // BLOCK] += w  # type: ignore[assignment]
    block = winner(blocks, s, heat=0)
    return winner({t: w for t, w in weight.items() if t // BLOCK == block}, s, heat=1)


def winner(weights: Mapping[int, float], s: SampleSpec, heat: int) -> int:
    """Gumbel-max, number by number."""

    def score(t: int) -> float:
        uniform = ((mix64(s.seed, s.position, heat, t) >> 12) + 0.5) * 2.0**-52
        return math.log(weights[t]) - math.log(-math.log(uniform))

    return max((t for t in sorted(weights) if weights[t]), key=score)


tokens_20 = st.integers(0, 19)
specs = st.builds(
    spec,
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 5000),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 3, 300, 5000]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.7, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.dictionaries(tokens_20, st.sampled_from([-100.0, 1.5, 3.0]), max_size=4),
    banned=st.lists(tokens_20, max_size=3).map(tuple),
    prompt=st.lists(tokens_20, max_size=4).map(tuple),
    output=st.lists(tokens_20, max_size=6).map(tuple),
    logprobs=st.sampled_from([None, 0, 3]),
)
specs |= specs.map(lambda s: msgspec.structs.replace(s, top_p=1.0, top_k=0, min_p=0.0))
"""Half of them unfiltered: those are drawn another way."""


@settings(deadline=None, max_examples=100)
@given(spec=specs, size=st.sampled_from([20, 700, WIDE]), seed=st.integers(0, 50))
def test_agrees_with_the_slow_reference(spec: SampleSpec, size: int, seed: int) -> None:
    logits = normal(1, size, seed)
    assert sample(logits, [spec], [0])[0].token == reference(logits[0], spec)


@settings(deadline=None, max_examples=40)
@given(
    batch=st.lists(specs, min_size=1, max_size=20),
    size=st.sampled_from([20, 700, 20_011]),
    scale=st.sampled_from([0.02, 0.5, 1.0, 3.0]),
)
def test_a_batch_equals_the_scalar_sampler_to_the_bit(
    batch: list[SampleSpec], size: int, scale: float
) -> None:
    logits = normal(len(batch), size) * scale
    expected = [slow_sample(row, s) for row, s in zip(logits, batch, strict=True)]
    assert [c.token for c in sample(logits, batch, range(len(batch)))] == expected


@settings(deadline=None, max_examples=60)
@given(batch=st.lists(specs, min_size=1, max_size=7), size=st.sampled_from([20, WIDE]))
def test_a_row_gives_the_same_alone_in_a_batch_and_in_any_order(
    batch: list[SampleSpec], size: int
) -> None:
    logits = normal(len(batch), size)
    rows = list(range(len(batch)))
    alone = [sample(logits[i : i + 1], [s], [0])[0] for i, s in enumerate(batch)]
    assert sample(logits, batch, rows) == alone
    assert sample(logits, batch[::-1], rows[::-1]) == alone[::-1]
    assert sample(logits.flip(0), batch, rows[::-1]) == alone


@settings(deadline=None, max_examples=60)
@given(spec=specs, seed=st.integers(0, 50))
def test_logits_are_never_written(spec: SampleSpec, seed: int) -> None:
    logits = normal(1, 20, seed)
    before = logits.clone()
    sample(logits, [spec], [0])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 1e-9}, {"top_p": 0.0}, {"min_p": 1.0}])
def test_the_tightest_filter_is_greedy_with_the_lowest_id_on_ties(filters: dict[str, Any]) -> None:
    logits = [0.0, 3.0, 1.0, 2.999]
    drawn = {one(logits, seed=seed, **filters) for seed in range(50)}
    assert drawn == {one(logits, temperature=0.0)} == {1}
    tied = [0.0, 3.0, 1.0, 3.0]
    assert one(tied, temperature=0.0) == 1
    if "min_p" not in filters:
        assert {one(tied, seed=seed, **filters) for seed in range(50)} == {1}


def test_top_k_keeps_exactly_k_tokens_and_top_p_the_smallest_set_that_reaches_it() -> None:
    logits = torch.log(torch.tensor([0.1, 0.4, 0.3, 0.2]))
    assert {one(logits, seed=s, top_k=2) for s in range(200)} == {1, 2}
    assert {one(logits, seed=s, top_p=0.69) for s in range(200)} == {1, 2}
    assert {one(logits, seed=s, top_p=0.71) for s in range(200)} == {1, 2, 3}
    assert {one(logits, seed=s, min_p=0.6) for s in range(200)} == {1, 2}


def test_top_p_counts_within_what_top_k_kept() -> None:
    logits = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    # Of the two kept, the first has 4/7 of the mass: alone it reaches 0.55, not 0.6.
    assert {one(logits, seed=s, top_k=2, top_p=0.55) for s in range(200)} == {0}
    assert {one(logits, seed=s, top_k=2, top_p=0.6) for s in range(200)} == {0, 1}


@pytest.mark.parametrize("size", [8, 700])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_frequencies_match_the_softmax_by_chi_square(size: int, temperature: float) -> None:
    logits = normal(1, size, seed=3) / 2
    draws = 6000
    batch = [spec(seed=s, position=11, temperature=temperature) for s in range(draws)]
    counts: Counter[int] = Counter()
    for start in range(0, draws, 500):
        counts.update(c.token for c in sample(logits, batch[start : start + 500], [0] * 500))
    expected = torch.softmax(logits[0].double() / temperature, dim=-1) * draws
    common = (expected >= 8).nonzero().flatten().tolist()
    rest = draws - float(expected[common].sum())
    chi = sum((counts[t] - float(expected[t])) ** 2 / float(expected[t]) for t in common)
    if rest > 1:
        chi += (draws - sum(counts[t] for t in common) - rest) ** 2 / rest
    freedom = len(common)
    # Six standard deviations of the chi-square distribution: the draws are fixed, so it is
    # right or wrong once and for all.
    assert chi < freedom + 6 * math.sqrt(2 * freedom)


def test_banned_and_masked_tokens_are_never_sampled() -> None:
    logits = [1.0, 9.0, -math.inf, 8.0, 1.0]
    for seed in range(300):
        assert one(logits, seed=seed, temperature=2.0, banned=(1, 3)) in {0, 4}
    assert one(logits, temperature=0.0, banned=(1,)) == 3
    # Bias does not bring a banned token back, nor a padded column of the vocabulary.
    assert one(logits, temperature=0.0, banned=(1,), logit_bias={1: 100.0, 2: 100.0}) == 3


def test_logit_bias_forces_and_forbids() -> None:
    logits = [1.0, 2.0, 3.0, 0.0]
    assert {one(logits, seed=s, logit_bias={3: 100.0}) for s in range(100)} == {3}
    assert 2 not in {one(logits, seed=s, logit_bias={2: -100.0}) for s in range(200)}


def test_penalties_follow_vllm() -> None:
    logits = [2.0, 1.9, -1.0, -1.1]
    greedy: dict[str, Any] = {"temperature": 0.0}
    # Repetition: prompt and output, divides what is positive, multiplies what is negative.
    assert one(logits, **greedy, repetition_penalty=1.2, prompt=(0,)) == 1
    assert one(logits, **greedy, repetition_penalty=1.2, output=(0,)) == 1
    low = [-1.0, -1.1, -9.0, -9.0]
    assert one(low, **greedy, repetition_penalty=1.2, prompt=(0,)) == 1
    # Presence and frequency: output only; frequency counts, presence does not.
    assert one(logits, **greedy, presence_penalty=0.2, prompt=(0,)) == 0
    assert one(logits, **greedy, presence_penalty=0.2, output=(0,)) == 1
    assert one(logits, **greedy, presence_penalty=0.06, output=(0, 0)) == 0
    assert one(logits, **greedy, frequency_penalty=0.06, output=(0, 0)) == 1


def test_tiny_temperatures_neither_overflow_nor_differ_from_greedy() -> None:
    logits = normal(1, 50, seed=1) * 1000
    best = one(logits[0], temperature=0.0)
    for temperature in (1e-45, 1e-9, 1.1e-5, 1e-4):
        assert {one(logits[0], seed=s, temperature=temperature) for s in range(20)} == {best}


huge = st.sampled_from([1e-300, 1.0, 1e39, 1e300])


@settings(deadline=None, max_examples=60)
@given(
    temperature=huge,
    repetition=huge,
    presence=huge | huge.map(lambda x: -x),
    bias=huge | huge.map(lambda x: -x),
    seed=st.integers(0, 99),
)
def test_no_parameter_makes_a_masked_token_or_an_error(
    temperature: float, repetition: float, presence: float, bias: float, seed: int
) -> None:
    logits = [1.0, 0.0, -math.inf, -2.0]
    token = one(
        logits,
        seed=seed,
        temperature=temperature,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=presence,
        logit_bias=dict.fromkeys(range(4), bias),
        prompt=(0, 1, 2, 3),
        output=(1, 1, 2),
    )
    assert token in {0, 1, 3}


def test_an_endless_temperature_is_uniform_over_what_is_not_masked() -> None:
    drawn = Counter(one([5.0, 0.0, -math.inf, -5.0], seed=s, temperature=1e300) for s in range(900))
    assert drawn.keys() == {0, 1, 3}
    assert min(drawn.values()) > 240


def test_draws_repeat_and_depend_on_seed_and_position() -> None:
    logits = normal(1, WIDE)[0]
    first = [one(logits, seed=1, position=p) for p in range(40)]
    assert first == [one(logits, seed=1, position=p) for p in range(40)]
    assert first != [one(logits, seed=2, position=p) for p in range(40)]
    assert len(set(first)) > 10


def test_what_rounding_does_to_logits_changes_no_draw() -> None:
    logits = normal(1, WIDE, seed=4).float()
    noise = torch.randn(1, WIDE, generator=torch.Generator().manual_seed(5)) * 5e-6
    batch = [spec(seed=seed) for seed in range(1000)]
    filtered = [spec(seed=seed, top_p=0.95) for seed in range(200)]
    for specs in (batch, filtered):
        rows = [0] * len(specs)
        assert sample(logits, specs, rows) == sample(logits + noise, specs, rows)


def test_gumbel_numbers_are_finite_and_spread_as_they_should() -> None:
    values = gumbel(mix64(1, 2, 3), np.arange(20_000, dtype=np.uint64))
    assert np.isfinite(values).all()
    assert abs(values.mean() - 0.5772) < 0.03
    assert abs(values.std() - math.pi / math.sqrt(6)) < 0.03


def test_a_weight_of_nothing_never_wins() -> None:
    weights = np.zeros(3 * BLOCK)
    weights[[1, 700]] = 1e-300, 1e-290
    assert {race(weights, seed, 0) for seed in range(50)} == {700}


def test_logprobs_come_from_the_raw_logits_most_likely_first() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0]])
    asked = spec(temperature=0.0, logit_bias={0: 100.0}, banned=(1,), logprobs=3)
    got = sample(logits, [asked], [0])[0].logprobs
    assert got is not None
    expected = torch.log_softmax(logits[0].double(), dim=-1)
    assert got.token == 0
    assert got.logprob == pytest.approx(float(expected[0]), abs=1e-6)
    assert [token for token, _ in got.top] == [1, 3, 2]
    assert [value for _, value in got.top] == pytest.approx(expected[[1, 3, 2]].tolist(), abs=1e-6)


def test_logprobs_are_given_to_those_who_ask_only() -> None:
    batch = [spec(logprobs=None), spec(logprobs=0), spec(logprobs=2)]
    none, zero, two = (c.logprobs for c in sample(normal(3, 20), batch, [0, 1, 2]))
    assert none is None
    assert zero is not None
    assert zero.top == ()
    assert two is not None
    assert len(two.top) == 2


def test_choices_that_share_a_row_differ_by_seed_only() -> None:
    logits = normal(2, WIDE)
    batch = [spec(choice=i, seed=i) for i in range(30)]
    tokens = [c.token for c in sample(logits, batch, [1] * 30)]
    assert tokens == [sample(logits[1:], [s], [0])[0].token for s in batch]
    assert len(set(tokens)) > 5


@settings(deadline=None, max_examples=60)
@given(
    values=st.lists(st.integers(0, 6), min_size=1, max_size=40),
    k=st.integers(1, 45),
)
def test_ranked_breaks_ties_by_the_lower_id_at_every_cut(values: list[int], k: int) -> None:
    expected = sorted(range(len(values)), key=lambda t: (-values[t], t))[:k]
    two_rows = torch.tensor([values, values[::-1]], dtype=torch.float32)
    assert ranked(two_rows, k)[0].tolist() == expected


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_an_error_and_never_a_token(poison: float, temperature: float) -> None:
    logits = normal(3, 20)
    logits[1, 5] = poison
    with pytest.raises(InvariantBroken, match=r"NaN or infinite in rows \[1\]"):
        sample(logits, [spec(temperature=temperature, banned=(5,))] * 3, [0, 1, 2])


def test_a_row_with_nothing_to_choose_from_is_an_error() -> None:
    with pytest.raises(InvariantBroken, match="rows"):
        one([-math.inf] * 4)
    with pytest.raises(InvariantBroken, match=r"position 3.*leave nothing"):
        one([1.0, 2.0], banned=(0, 1), position=3)


@pytest.mark.parametrize(
    "fields",
    [
        {"banned": (9,)},
        {"logit_bias": {-1: 1.0}},
        {"prompt": (4,), "repetition_penalty": 2.0},
        {"output": (4,), "presence_penalty": 1.0},
    ],
)
def test_a_token_outside_the_vocabulary_is_named(fields: dict[str, Any]) -> None:
    with pytest.raises(InvariantBroken, match="vocabulary is 0 to 3"):
        one([1.0, 2.0, 3.0, 4.0], **fields)


def test_nothing_to_sample_is_no_work() -> None:
    assert sample(torch.empty(0, 5), [], []) == []


def test_what_other_devices_run_gives_the_same() -> None:
    values = normal(3, WIDE)
    assert np.array_equal(on_device(values, 70).numpy(), ranked(values, 70))
    probs = torch.softmax(values, dim=-1)
    ours = masses(probs)
    assert np.allclose(masses_on_device(probs), ours, rtol=1e-13, atol=0)
    assert ours.shape == (3, -(-WIDE // BLOCK))
