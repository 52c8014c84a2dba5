"""The memory sums of R25-R31, and the refusals around them."""

import msgspec
import pytest

from ekiden.core.errors import SetupError
from ekiden.planner.catalogue import by_name
from ekiden.planner.fit import fit, fits
from ekiden.planner.hardware import GIB, gpu, gpus
from ekiden.planner.layout import Layout
from ekiden.planner.limits import Limits
from ekiden.planner.memory import Replica, card_of, memory
from ekiden.planner.precision import weight_format
from ekiden.planner.profiles import PROFILES, profile

ONE = Layout()


def replica(model: str, card: str, weights: str = "bf16", layout: Layout = ONE, **limits):
    return Replica(
        geometry=by_name(model),
        card=card_of(gpu(card)),
        layout=layout,
        weights=weight_format(weights),
        limits=Limits(**limits),
        profile=profile("vllm"),
    )


def tokens(model: str, card: str, weights: str = "bf16", tp: int = 1, **limits) -> int:
    return memory(replica(model, card, weights, Layout(tp=tp), **limits)).tokens


def near(value: float) -> object:
    return pytest.approx(value, rel=0.05)


def test_r25_sampler_buffers_decide_on_two_cards():
    assert tokens("Llama-3.1-70B", "H100", tp=2, max_num_seqs=256) == near(25_000)
    assert 0 < tokens("Llama-3.1-70B", "H100", tp=2, max_num_seqs=1024) < 2000
    few, many = (
        memory(replica("Llama-3.1-70B", "H100", layout=Layout(tp=2), max_num_seqs=n)).ranks[0]
        for n in (256, 1024)
    )
    assert many.sampler == 4 * few.sampler > 4 * GIB


def test_r26_70b_on_four_and_in_eight_bits():
    four = memory(replica("Llama-3.1-70B", "H100", layout=Layout(tp=4)))
    assert four.ranks[0].weights / 1e9 == near(35.3)
    assert four.tokens > 200_000
    two = memory(replica("Llama-3.1-70B", "H100", "fp8", Layout(tp=2)))
    assert sum(rank.weights for rank in two.ranks) / 1e9 == near(72.7)
    assert two.tokens > 200_000
    assert not fits(replica("Llama-3.1-70B", "H100", "fp8"))


def test_r27_8b_leaves_400k_tokens_on_80_gb():
    assert memory(replica("Llama-3.1-8B", "H100")).ranks[0].weights / 1e9 == near(16.1)
    assert tokens("Llama-3.1-8B", "H100") > 400_000


@pytest.mark.parametrize(
    ("model", "weights", "tp", "expected"),
    [
        ("Qwen2.5-7B", "bf16", 1, 500_000),
        ("Qwen2.5-14B", "bf16", 1, 75_000),
        ("Qwen2.5-32B", "int8", 1, 38_000),
        ("Qwen2.5-32B", "awq", 1, 95_000),
        ("Qwen2.5-32B", "bf16", 2, 84_000),
        ("Llama-3.1-70B", "bf16", 4, 107_000),
    ],
)
def test_r30_tokens_on_a6000(model: str, weights: str, tp: int, expected: int):
    assert tokens(model, "A6000", weights, tp, max_num_seqs=256) == near(expected)


@pytest.mark.parametrize(
    ("model", "tp"), [("Qwen2.5-32B", 1), ("Llama-3.1-70B", 2), ("Mixtral-8x7B", 2)]
)
def test_r30_what_never_fits_on_a6000(model: str, tp: int):
    found = fit(replica(model, "A6000", layout=Layout(tp=tp), max_model_len=4096))
    assert (found.fits, found.breaks) == (False, "weights")
    assert found.nearest == Layout(tp=4 if tp == 2 else 2)
    assert fits(msgspec.structs.replace(found.replica, layout=found.nearest))
    assert str(found.nearest) in found.advice


def test_r30_70b_fits_two_a6000_quantised():
    assert fit(replica("Llama-3.1-70B", "A6000", layout=Layout(tp=2), max_model_len=4096)).smaller


def test_f149_70b_on_one_card_says_what_it_takes():
    found = fit(replica("Llama-3.1-70B", "H100"))
    assert not found.fits
    assert "131.45 GiB weights" in found.reason


def test_r31_a_long_context_breaks_on_kv_and_the_longest_that_fits_does_fit():
    found = fit(replica("Qwen3-32B", "H100", max_model_len=32_000))
    assert found.breaks == "kv"
    limits = {"max_model_len": found.longest}
    assert fits(replica("Qwen3-32B", "H100", **limits))
    assert not fits(replica("Qwen3-32B", "H100", max_model_len=found.longest + 17))


def test_r31_windows_are_counted():
    model = memory(replica("gpt-oss-20b", "H100", "mxfp4-moe"))
    assert model.tokens > 1.8 * model.pool_tokens


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_the_sum_adds_up_to_the_byte(name: str):
    asked = msgspec.structs.replace(replica("Llama-3.1-8B", "H100"), profile=profile(name))
    for rank in memory(asked).ranks:
        assert sum(size for _, size in rank.terms()) + rank.kv == rank.usable
        assert rank.usable == int(rank.total * 0.9)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (Layout(tp=0), "tp 0 is not a number of GPUs: choose 1 or more"),
        (Layout(tp=65), "TP 65 is more than the 64 query heads.*choose 1 to 64"),
        (Layout(tp=3), "TP 3 does not divide the 64 query heads.*choose 2 or 4"),
        (Layout(pp=81), "PP 81 is more than the 80 layers"),
        (Layout(tp=2, ep=2), "EP 2 needs experts"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(layout: Layout, says: str):
    with pytest.raises(SetupError, match=says):
        memory(replica("Llama-3.1-70B", "H100", layout=layout))


def test_more_ep_ranks_than_there_are_is_refused_with_those_that_go():
    with pytest.raises(
        SetupError, match=r"EP 3 does not go with TP 4 x DP 1: choose one of 1, 2, 4"
    ):
        memory(replica("Mixtral-8x7B", "H100", layout=Layout(tp=4, ep=3)))


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"utilization": 1.2}, "utilization 1.2 is not a share"),
        ({"max_num_seqs": 0}, "max_num_seqs 0 is too small"),
    ],
)
def test_limits_are_checked(limits: dict, says: str):
    with pytest.raises(SetupError, match=says):
        memory(replica("Llama-3.1-8B", "H100", **limits))


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: gpu("H1000"), "GPU 'H1000'.*h100_sxm"),
        (lambda: weight_format("fp9"), "'fp9' is not known: nearest is fp"),
        (lambda: profile("vlm"), "'vlm' is not known: nearest is vllm"),
    ],
)
def test_unknown_names_get_the_nearest(ask, says: str):
    with pytest.raises(SetupError, match=says):
        ask()


def test_gpus_go_by_their_usual_names():
    names = {
        "A6000": "rtx_a6000",
        "NVIDIA H100": "h100_sxm",
        "h200": "h200_sxm",
        "RTX 4090": "rtx_4090",
    }
    assert {name: gpu(name).name for name in names} == names
    assert all(card.memory_bytes <= 1.03 * card.memory_gib * GIB for card in gpus())


def test_a_context_beyond_the_models_positions_is_refused():
    with pytest.raises(SetupError, match="max_model_len 1000000 is more than the 131072 positions"):
        fit(replica("Llama-3.1-8B", "H100", max_model_len=1_000_000))


def test_links_without_nvlink_take_less_and_one_card_takes_none():
    def links(card: str, tp: int) -> int:
        return memory(replica("Llama-3.1-8B", card, layout=Layout(tp=tp))).ranks[0].communication

    assert 0 < links("L40S", 2) < links("H100", 2)
    assert links("L40S", 1) == links("H100", 1) == 0


def test_ranks_that_differ_have_peaks_of_their_own():
    asked = replica(
        "Llama-3.1-8B", "H100", layout=Layout(tp=2, pp=2), max_num_seqs=1024, chunk=1024
    )
    found = memory(msgspec.structs.replace(asked, profile=PROFILES["ekiden"]))
    first, second, sampling, other = (rank.activations + rank.sampler for rank in found.ranks)
    assert first == second, "of the first stage, which does not sample"
    assert sampling > other >= first, "one rank joins the columns of all"


def test_a_cache_of_8_bits_is_advised_only_where_it_fits():
    tight = fit(replica("Qwen3-32B", "H100", max_model_len=32_000))
    short = fit(replica("Qwen3-32B", "H100", max_model_len=int(1.5 * tight.longest)))
    assert short.cache == "fp8"
    assert "a KV cache in fp8 (--kv-cache-dtype)" in short.advice
    assert fits(msgspec.structs.replace(short.replica, kv_dtype=short.cache))
    for other in (
        fit(replica("Llama-3.1-70B", "H100")),
        fit(msgspec.structs.replace(short.replica, kv_dtype="fp8"), sequences=100),
    ):
        assert not other.fits
        assert not other.cache
