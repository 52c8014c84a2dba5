"""Every field that a body may have, with values that are served and values that are not."""

from __future__ import annotations

from typing import Any

from gateway.openai.fields import LABELS, NEUTRAL
from gateway.openai.schema import ChatBody, CompletionBody

OFF_RANGE: list[Any] = [-3, 1e9, "much"]

SERVED: dict[str, list[Any]] = {
    "model": ["another", 5],
    "messages": [[], [{"role": "user", "content": "hi"}], "hi"],
    "prompt": ["hi", [5, 6, 7], "", [5] * 9000, {}],
    "stream": [True, "yes"],
    "stream_options": [{"include_usage": True}, {"unknown": 1}],
    "n": [2, 0, 1000],
    "max_tokens": [1, 0, "ten"],
    "max_completion_tokens": [1, 0],
    "temperature": [0.5, *OFF_RANGE],
    "top_p": [0.5, *OFF_RANGE],
    "presence_penalty": [0.5, *OFF_RANGE],
    "frequency_penalty": [-0.5, *OFF_RANGE],
    "stop": ["x", ["x", "y"], "", [""] * 17],
    "seed": [5, -5, "five"],
    "logit_bias": [{"5": 3}, {"five": 3}, {"5": 101}, {"400": 1}, {"99999999": 1}],
    "top_k": [5, -1, -2],
    "min_p": [0.5, *OFF_RANGE],
    "repetition_penalty": [1.5, 0, 3],
    "min_tokens": [1, 2, 3, -1],
    "stop_token_ids": [[5], [-5], [99999999]],
    "ignore_eos": [True, 1],
    "logprobs": [True, False, 3, 21],
    "top_logprobs": [0, 3],
}
PROBES: dict[str, list[Any]] = {
    **SERVED,
    **{name: ["anything"] for name in LABELS},
    **{name: [*values, "what nobody serves", 17] for name, values in NEUTRAL.items()},
    "temprature": [1],
}


def not_probed() -> set[str]:
    """Fields that a body may have and that nothing here asks for."""
    known = {*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__, *NEUTRAL, *LABELS}
    return known - PROBES.keys()


def bodies(kind: str, model: str) -> list[tuple[str, dict[str, Any]]]:
    """One for each field and value: the path, and a request for two tokens."""
    path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    plain: dict[str, Any] = {"model": model, "max_tokens": 2, "seed": 1}
    if kind == "chat":
        plain["messages"] = [{"role": "user", "content": "Who runs last?"}]
    else:
        plain["prompt"] = "Who runs last?"
    return [(path, {**plain, name: value}) for name, values in PROBES.items() for value in values]
