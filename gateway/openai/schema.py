"""Request bodies of ``/v1/chat/completions`` and ``/v1/completions``, checked field by field."""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from ekiden.core.errors import BadRequest
from ekiden.core.types import SamplingParams
from ekiden.text.chat import ChatMessage
from gateway.openai import fields

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of ``max_tokens`` for completions; a chat answers as long as it fits."""

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=1, le=1 << 31)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
StopText = Annotated[str, Meta(min_length=1, max_length=1000)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False
    """Accepted; nothing is added either way."""


class CommonBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both endpoints understand, with OpenAI's names, then vLLM's."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] = []
    seed: int | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] = {}
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] = 1.0
    min_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] = []
    ignore_eos: bool = False

    @property
    def biased_tokens(self) -> list[int]:
        """The token ids of ``logit_bias``.

        Raises:
            BadRequest: a key is none.
        """
        return [_token_id(name) for name in self.logit_bias]

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )


class ChatBody(CommonBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=65536)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] = 0

    @property
    def asked_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def logprobs_k(self) -> int | None:
        """How many top logprobs, None for no logprobs at all.

        Raises:
            BadRequest: top logprobs are asked for without logprobs.
        """
        if self.top_logprobs and not self.logprobs:
            raise BadRequest(
                f"top_logprobs is {self.top_logprobs} and logprobs is not true: set "
                '"logprobs": true as well',
                field="top_logprobs",
            )
        return self.top_logprobs if self.logprobs else None


class CompletionBody(CommonBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``prompt``: one text or one list of token ids; a list that holds one of these is the same."""

    prompt: Any
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens or DEFAULT_COMPLETION_TOKENS

    @property
    def logprobs_k(self) -> int | None:
        return self.logprobs

    def single_prompt(self) -> str | list[int]:
        """The one prompt.

        Raises:
            BadRequest: it is empty, of another type, or there are several.
        """
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            if len(prompt) > 1:
                raise BadRequest(
                    f"prompt holds {len(prompt)} prompts: send one a request", field="prompt"
                )
            prompt = prompt[0]
        return _text_or_ids(prompt)


Body = TypeVar("Body", ChatBody, CompletionBody)


def parse(data: bytes, kind: type[Body]) -> Body:
    """A body of this kind.

    Raises:
        BadRequest: it is not JSON, a field is wrong, not served or unknown; ``field`` names it.
    """
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise BadRequest("the body must be a JSON object")
    if raw.get("best_of") == raw.get("n", 1):
        raw.pop("best_of", None)  # choosing n of n asks for nothing
    plain = fields.served(raw, kind.__struct_fields__)
    if isinstance(plain.get("messages"), list):
        plain["messages"] = [_served_message(item, i) for i, item in enumerate(plain["messages"])]
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        raise _bad_field(error, plain) from None


def sampling(body: ChatBody | CompletionBody, *, seed: int, max_tokens: int) -> SamplingParams:
    """The body's sampling parameters; ``seed`` is used where the client gave none.

    Raises:
        BadRequest: fields contradict each other, or a key of ``logit_bias`` is no token id.
    """
    if body.min_tokens > max_tokens:
        raise BadRequest(
            f"min_tokens {body.min_tokens} is over the {max_tokens} tokens the answer may have",
            field="min_tokens",
        )
    return SamplingParams(
        seed=(seed if body.seed is None else body.seed) & ((1 << 64) - 1),
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(body.top_k, 0),
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=dict(zip(body.biased_tokens, body.logit_bias.values(), strict=True)),
        min_tokens=body.min_tokens,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop),
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        logprobs=body.logprobs_k,
        n=body.n,
    )


_MESSAGE_NEUTRAL = ("refusal", "annotations", "audio", "function_call", "tool_calls", "reasoning")


def _served_message(item: Any, index: int) -> Any:
    """A message without what an answer sent back carries but asks nothing of us."""
    if not isinstance(item, dict):
        return item
    kept = {name: value for name, value in item.items() if value is not None}
    for name in _MESSAGE_NEUTRAL:
        if kept.get(name) in ([], ""):
            del kept[name]
    for name in kept:
        if name not in ChatMessage.__struct_fields__:
            field = f"messages[{index}].{name[:80]}"
            raise BadRequest(f"{field} is not served: leave it out", field=field)
    if kept.get("content") is None and kept.get("role") != "assistant":
        field = f"messages[{index}].content"
        raise BadRequest(f"{field} must be a text or a list of text parts", field=field)
    return kept


def _text_or_ids(prompt: Any) -> str | list[int]:
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt:
        try:
            return msgspec.convert(prompt, list[TokenId])
        except msgspec.ValidationError:
            pass
    raise BadRequest("prompt must be a text or a list of token ids, and not empty", field="prompt")


def _token_id(name: str) -> int:
    if name.isascii() and name.isdigit() and len(name) < 10:
        return int(name)
    raise BadRequest(
        f"logit_bias has the key {name[:40]!r}: keys are token ids", field="logit_bias"
    )


_AT = re.compile(r"(?P<reason>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)


def _bad_field(error: msgspec.ValidationError, raw: dict[str, Any]) -> BadRequest:
    """msgspec's sentence in JSON's words, with the field in front and its value behind."""
    match = _AT.fullmatch(str(error))
    reason, path = (match["reason"], match["path"] or "") if match else (str(error), "")
    if missing := re.search(r"missing required field `(\w+)`", reason):
        field = f"{path}.{missing[1]}" if path else missing[1]
        return BadRequest(f"{field} is missing", field=field)
    value = _lookup(raw, path)
    got = "" if value is None else f", not {_short(value)}"
    return BadRequest(f"{path}: {_plain(reason)}{got}", field=path or None)


_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}


def _plain(reason: str) -> str:
    """Without the type that was found: the value says it."""
    reason = re.sub(r", got `\w+`", "", reason[:1].lower() + reason[1:])
    return re.sub(r"`([\w |]+)`", lambda types: _in_words(types[1]), reason)


def _in_words(types: str) -> str:
    return " or ".join(_TYPES.get(name, name) for name in types.split(" | ") if name != "null")


def _lookup(raw: Any, path: str) -> Any:
    for part in re.findall(r"[^.\[\]]+", path):
        if isinstance(raw, dict):
            raw = raw.get(part)
        elif isinstance(raw, list) and part.isdigit() and int(part) < len(raw):
            raw = raw[int(part)]
        else:
            return None
    return raw


def _short(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else f"{text[:60]}..."
