"""The truth that ``ekiden verify`` compares with is itself the truth: it equals transformers."""

from __future__ import annotations

import pytest

from ekiden.core.config import EngineConfig
from ekiden.models.hub import resolve_model
from ekiden.text.tokenizer import Tokenizer
from ekiden.verify.compare import TIE, first_difference
from ekiden.verify.prompts import make_prompts
from ekiden.verify.reference import reference_tokens

TOKENS = 32


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_process_gives_the_tokens_of_transformers_on_the_real_model() -> None:
    """20 prompts around every block border, 32 greedy tokens each, fp32, no tie needed."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # two would wait for each other on a busy machine
    directory = resolve_model("smollm2-135m-instruct")
    prompts = make_prompts(Tokenizer.load(directory), 16, 20)
    config = EngineConfig(
        model_dir=directory,
        model_name="smollm2",
        dtype="float32",
        max_model_len=1024,
        num_gpu_blocks_override=640,
    )
    ours = reference_tokens(config, prompts, TOKENS, lambda done, total: None)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    for reference in ours:
        ids = torch.tensor([reference.prompt])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=TOKENS,
                min_new_tokens=TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
        theirs = out[0, ids.shape[1] :].tolist()
        difference = first_difference(reference, theirs)
        assert difference is None, f"{len(reference.prompt)} tokens: {difference} (tie < {TIE})"
