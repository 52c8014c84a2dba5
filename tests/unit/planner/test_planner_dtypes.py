"""Which floats a GPU computes a model in, and which formats it has units for."""

import pytest
from plans import plan, question

from ekiden.core.errors import SetupError
from ekiden.models.registry import MODELS
from ekiden.planner.catalogue import by_name, servable
from ekiden.planner.dtypes import dtype_option, own_format
from ekiden.planner.flags import blocked, options
from ekiden.planner.hardware import gpu, gpus
from ekiden.planner.precision import weight_format
from ekiden.planner.why import why

OLD = [card.name for card in gpus() if not card.has_bf16]


def test_cards_before_capability_8_have_no_bf16_and_those_before_8_9_no_fp8():
    assert OLD == ["t4", "v100_sxm2_32gb"]
    nvidia = [card for card in gpus() if card.compute_capability is not None]
    assert {card.name for card in gpus()} - {card.name for card in nvidia} == {"b60", "mi300x"}
    assert all(bool(card.fp8_tflops) == (card.compute_capability >= 8.9) for card in nvidia)


@pytest.mark.parametrize("card", OLD)
def test_a_model_of_bf16_is_planned_in_fp16_where_there_is_no_bf16(card: str):
    decision = plan("Qwen2.5-1.5B", card, 1)
    assert decision.chosen.form.name == "fp16"
    assert f"{card} has no bf16" in " ".join(why(decision))
    said = options(decision, decision.chosen.layouts[0])
    assert said[said.index("--dtype") + 1] == "float16"


def test_no_dtype_is_given_where_the_config_says_it():
    decision = plan("Qwen2.5-1.5B", "l4", 1)
    assert decision.chosen.form.name == "bf16"
    assert "--dtype" not in options(decision, decision.chosen.layouts[0])
    assert "no bf16" not in " ".join(why(decision))


@pytest.mark.parametrize(
    ("card", "form", "value"),
    [
        ("t4", "int8", "float16"),
        ("t4", "awq", "float16"),
        ("l4", "int8", ""),
        ("l4", "fp16", "float16"),
        ("l4", "fp32", "float32"),
    ],
)
def test_the_floats_beside_small_weights_follow_the_card_too(card: str, form: str, value: str):
    model = by_name("Llama-3.1-8B")
    assert dtype_option(weight_format(form), model, gpu(card)) == value


def test_bf16_asked_for_where_there_is_none_is_refused():
    with pytest.raises(SetupError, match=r"weights bf16: t4 has .* 7\.5.*choose fp16"):
        own_format("bf16", by_name("Llama-3.1-8B"), gpu("t4"))


def test_fp8_on_a_card_without_it_says_whose_memory_it_is_and_has_no_flags():
    decision = plan("Llama-3.1-8B", "A6000", 1, weights="fp8")
    assert "rtx_a6000 has no FP8" in " ".join(why(decision))
    assert "holds FP8 as 16 bits" in blocked(decision.asked, decision.chosen, MODELS)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("Qwen2.5-7B-Instruct-AWQ", "awq"),
        ("owner/Llama-3.1-8B-Instruct-GPTQ", "gptq"),
        ("Llama-3.1-70B-FP8", "fp8"),
        ("Llama-3.1-70B-Instruct", "bf16"),
    ],
)
def test_a_name_says_how_a_model_is_stored(name: str, form: str):
    assert own_format("auto", by_name(name), gpu("H100")).name == form


def test_another_model_of_the_same_shape_is_not_served_as_the_one_of_the_table():
    assert servable("qwen2.5-7b") == "Qwen/Qwen2.5-7B"
    assert servable("Qwen2.5-7B-Instruct") == "Qwen2.5-7B-Instruct"
    assert servable("DeepSeek-R1-Distill-Llama-8B") == "DeepSeek-R1-Distill-Llama-8B"
    assert servable("Qwen2.5-7B-Instruct-AWQ") == "Qwen2.5-7B-Instruct-AWQ"


def test_a_quantised_checkpoint_is_offered_smaller_ones_as_other_checkpoints_only():
    asked = question("Llama-3.1-70B-FP8", "H100", 4)
    assert [form.name for form in asked.formats] == ["int4"]
    decision = plan("Llama-3.1-70B-FP8", "H100", 4)
    (four,) = {one.form for one in decision.lost if one.form.name == "int4"}
    small = next(one for one in decision.lost if one.form == four and one.works)
    assert "take a checkpoint of their own" in blocked(decision.asked, small, MODELS)
    assert not blocked(decision.asked, decision.chosen, MODELS)
