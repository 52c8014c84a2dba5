"""Fields that are not served: refused by name, unless their value asks for nothing.

A field that OpenAI or vLLM defines is accepted when it has the value that means "not used", so
that clients which always send it work; any other value would change the answer, and an answer
that ignores what was asked is worse than a 400. Names nobody defines are refused as OpenAI does.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection
from typing import Any

from ekiden.core.errors import BadRequest

LABELS = frozenset(
    ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
)
"""For the provider's books; they never change an answer, so any value is accepted."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "moderation": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "prompt_logprobs": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "priority": (0,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
}
"""Known, not served: the values under which they are accepted. ``null`` always is."""


def served(raw: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The part of a body that is served; ``null`` means the default.

    Raises:
        BadRequest: another field is there with a value that would have to change the answer, or a
            field that nobody defines.
    """
    kept: dict[str, Any] = {}
    for name, value in raw.items():
        if value is None or name in LABELS:
            continue
        if name in known:
            kept[name] = value
        elif name in NEUTRAL:
            _refuse_unless_neutral(name, value)
        else:
            raise _unrecognized(name, known)
    return kept


def _refuse_unless_neutral(name: str, value: Any) -> None:
    for neutral in NEUTRAL[name]:
        if type(value) is type(neutral) and value == neutral:
            return
    choices = " or ".join(json.dumps(choice) for choice in NEUTRAL[name])
    hint = f"leave it out or send {choices}" if choices else "leave it out"
    raise BadRequest(f"{name} is not served: {hint}", field=name)


def _unrecognized(name: str, known: Collection[str]) -> BadRequest:
    close = difflib.get_close_matches(name, [*known, *NEUTRAL], n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return BadRequest(f"Unrecognized request argument supplied: {name[:80]}{hint}", field=name[:80])
