"""What a request must be before the engine takes it. One bad request must not fail a batch."""

from __future__ import annotations

import math

from ekiden.core.errors import BadRequest
from ekiden.core.types import Request, SamplingParams

MAX_LOGPROBS = 20
"""As OpenAI allows; more would make messages of a whole vocabulary a token."""

MAX_STOP_IDS = 256
"""Before min_tokens they may not be sampled: they must never cover the vocabulary."""


def check_request(
    request: Request, *, vocab_size: int, max_num_seqs: int, max_model_len: int, answer: int
) -> None:
    """Raise BadRequest naming the field, its value and what is valid.

    ``answer`` is how many of the request's output tokens this replica must have room for.
    """
    prompt, sampling = request.prompt, request.sampling
    if not prompt:
        raise BadRequest("prompt is empty: it needs at least one token", field="prompt")
    bad = next((token for token in prompt if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise BadRequest(f"prompt holds token {bad}: use 0 to {vocab_size - 1}", field="prompt")
    _check_counts(sampling, max_num_seqs)
    _check_stops(sampling, vocab_size)
    _check_numbers(sampling, vocab_size)
    if len(prompt) + answer > max_model_len:
        raise BadRequest(
            f"prompt ({len(prompt)} tokens) + max_tokens ({sampling.max_tokens}) is "
            f"{len(prompt) + sampling.max_tokens}, over the model's length of {max_model_len}",
            field="max_tokens" if len(prompt) < max_model_len else "prompt",
        )


def check_fits(request: Request, answer: int, *, blocks: int, block_size: int) -> None:
    """Raise BadRequest if prompt and ``answer`` tokens can never fit into ``blocks``."""
    prompt, room = len(request.prompt), blocks * block_size
    if prompt + answer > room:
        raise BadRequest(
            f"prompt ({prompt} tokens) + max_tokens ({request.sampling.max_tokens}) needs KV for "
            f"{prompt + answer} tokens, over the {room} that this replica's cache can hold "
            f"({blocks} blocks of {block_size})",
            field="max_tokens" if prompt < room else "prompt",
        )


def _check_counts(sampling: SamplingParams, max_num_seqs: int) -> None:
    if sampling.max_tokens < 1:
        raise BadRequest(
            f"max_tokens is {sampling.max_tokens}: it must be at least 1", field="max_tokens"
        )
    if not 1 <= sampling.n <= max_num_seqs:
        raise BadRequest(f"n is {sampling.n}: use 1 to {max_num_seqs}", field="n")
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise BadRequest(
            f"min_tokens is {sampling.min_tokens}: use 0 to max_tokens ({sampling.max_tokens})",
            field="min_tokens",
        )
    logprobs = sampling.logprobs
    if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
        raise BadRequest(f"logprobs is {logprobs}: use 0 to {MAX_LOGPROBS}", field="logprobs")


def _check_stops(sampling: SamplingParams, vocab_size: int) -> None:
    if len(sampling.stop_token_ids) > MAX_STOP_IDS:
        raise BadRequest(
            f"stop_token_ids holds {len(sampling.stop_token_ids)} ids: use at most {MAX_STOP_IDS}",
            field="stop_token_ids",
        )
    bad = next((t for t in sampling.stop_token_ids if not 0 <= t < vocab_size), None)
    if bad is not None:
        raise BadRequest(
            f"stop_token_ids holds {bad}: use 0 to {vocab_size - 1}", field="stop_token_ids"
        )
    if "" in sampling.stop:
        raise BadRequest("stop holds an empty string, which ends nothing", field="stop")


def _check_numbers(sampling: SamplingParams, vocab_size: int) -> None:
    """Bounds of the sampler's own definitions; NaN is in none of them."""
    for field, low, high in (
        ("temperature", 0.0, math.inf),
        ("top_p", 0.0, 1.0),
        ("top_k", 0, math.inf),
        ("min_p", 0.0, 1.0),
        ("repetition_penalty", 0.0, math.inf),
    ):
        value = getattr(sampling, field)
        if not (low <= value <= high and math.isfinite(value)):
            upper = f" to {high:g}" if math.isfinite(high) else " or more"
            raise BadRequest(f"{field} is {value}: use {low:g}{upper}", field=field)
    if not sampling.top_p or not sampling.repetition_penalty:
        field = "repetition_penalty" if sampling.top_p else "top_p"
        raise BadRequest(f"{field} is 0: it must be more", field=field)
    for field in ("presence_penalty", "frequency_penalty"):
        if not math.isfinite(getattr(sampling, field)):
            raise BadRequest(f"{field} must be a finite number", field=field)
    for token, bias in sampling.logit_bias.items():
        if not 0 <= token < vocab_size or not math.isfinite(bias):
            raise BadRequest(
                f"logit_bias {token}: {bias}: use token ids 0 to {vocab_size - 1} and finite "
                "numbers",
                field="logit_bias",
            )
