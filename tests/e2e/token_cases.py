"""What may be asked of the hand-off token, the first of an answer, and how many tokens come of it.

The requests are sampled, their end-of-text ignored, and twelve tokens long, unless a case says
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec


class Free(msgspec.Struct):
    """The first two tokens that come where nothing ends the answer, and with which seed."""

    seed: int
    eos: int
    ids: list[int]
    texts: list[str]

    @property
    def both(self) -> str:
        return "".join(self.texts)

    @property
    def first_is_eos(self) -> dict[str, Any]:
        return {"logit_bias": {str(self.eos): 100}, "ignore_eos": False}

    def bias(self, value: float) -> dict[str, Any]:
        """For the first token that would come."""
        return {"logit_bias": {str(self.ids[0]): value}}


class Asked(msgspec.Struct, frozen=True):
    """Fields of a request, and how many tokens of each choice must come of them."""

    fields: dict[str, Any]
    tokens: int
    finish: str = "length"
    """``any``: not all choices end in the same way, nor at the same place."""


CASES: dict[str, Callable[[Free], Asked]] = {
    "greedy": lambda f: Asked({"temperature": 0}, 12),
    "sampled": lambda f: Asked({}, 12),
    "another seed": lambda f: Asked({"seed": f.seed + 1}, 12),
    "top k, top p, min p": lambda f: Asked({"top_k": 40, "top_p": 0.9, "min_p": 0.01}, 12),
    "a budget of one": lambda f: Asked({"max_tokens": 1}, 1),
    "a budget of one, three times": lambda f: Asked({"max_tokens": 1, "n": 3}, 1),
    "a budget of two": lambda f: Asked({"max_tokens": 2}, 2),
    "EOS first": lambda f: Asked({**f.first_is_eos}, 1, "stop"),
    "EOS first, three times": lambda f: Asked({**f.first_is_eos, "n": 3}, 1, "stop"),
    "EOS first, ignored": lambda f: Asked({**f.first_is_eos, "ignore_eos": True}, 12),
    "EOS second": lambda f: Asked({**f.first_is_eos, "min_tokens": 1}, 2, "stop"),
    "EOS after four tokens": lambda f: Asked({**f.first_is_eos, "min_tokens": 4}, 5, "stop"),
    "min_tokens that are all": lambda f: Asked({**f.first_is_eos, "min_tokens": 12}, 12),
    "a stop id first": lambda f: Asked({"stop_token_ids": f.ids[:1]}, 1, "stop"),
    "a stop id second": lambda f: Asked({"stop_token_ids": f.ids[1:]}, 2, "stop"),
    "a stop id that is banned first": lambda f: Asked(
        {"stop_token_ids": f.ids[:1], **f.bias(100), "min_tokens": 1}, 2, "stop"
    ),
    "a stop string in the first token": lambda f: Asked({"stop": f.texts[0]}, 1, "stop"),
    "a stop string of two tokens": lambda f: Asked({"stop": ["never", f.both]}, 2, "stop"),
    "a stop string and a budget at once": lambda f: Asked(
        {"stop": [f.both], "max_tokens": 2}, 2, "stop"
    ),
    "a stop string that is only begun": lambda f: Asked(
        {"stop": [f.texts[0] + "never"], "max_tokens": 1}, 1
    ),
    "a stop string before min_tokens": lambda f: Asked({"stop": [f.both], "min_tokens": 2}, 12),
    "presence penalty": lambda f: Asked({"presence_penalty": 2, **f.bias(6)}, 12),
    "frequency penalty": lambda f: Asked({"frequency_penalty": 2, **f.bias(6)}, 12),
    "repetition penalty": lambda f: Asked({"repetition_penalty": 1.5, "temperature": 0}, 12),
    "another first token": lambda f: Asked(f.bias(-100), 12),
    "one token over and over": lambda f: Asked(f.bias(100), 12),
    "three choices": lambda f: Asked({"n": 3}, 12),
    "three choices that are the same": lambda f: Asked({"n": 3, "temperature": 0}, 12),
    "choices that end at other places": lambda f: Asked(
        {"n": 3, "stop": [f.both], "logprobs": 2}, 0, "any"
    ),
    "logprobs": lambda f: Asked({"logprobs": 3}, 12),
    "logprobs of the chosen tokens only": lambda f: Asked({"logprobs": 0, "n": 2}, 12),
    "logprobs of the only token": lambda f: Asked({"logprobs": 5, "max_tokens": 1}, 1),
    "logprobs under penalties": lambda f: Asked(
        {"logprobs": 2, "presence_penalty": 1, **f.bias(5)}, 12
    ),
    "logprobs of an EOS": lambda f: Asked({**f.first_is_eos, "logprobs": 1}, 1, "stop"),
}
