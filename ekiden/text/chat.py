"""Chat templates: messages to the text of a prompt, in a sandbox, in bounded time and size.

The template comes with the model; messages come from anybody. Templates see what they see in
transformers: ``messages``, ``add_generation_prompt``, the special tokens, ``raise_exception``,
``strftime_now``, ``tojson``, loop controls and ``{% generation %}`` blocks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ekiden.core.clock import Clock, MonotonicClock
from ekiden.core.errors import BadRequest, SetupError

MAX_RENDER_S = 5.0
MAX_PROMPT_CHARS = 64 << 20
_SERVED_PARTS = ("text",)


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message. ``content`` is a text, or parts of which only ``{"type": "text"}`` is served."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None


class ChatTemplate:
    """A model's chat template. ``render`` may be called from several threads."""

    def __init__(
        self,
        source: str,
        *,
        special_texts: Mapping[str, str],
        clock: Clock | None = None,
        today: Callable[[], datetime] = datetime.now,
        max_render_s: float = MAX_RENDER_S,
        max_chars: int = MAX_PROMPT_CHARS,
    ) -> None:
        """Compile ``source``.

        Raises:
            SetupError: it is not a valid Jinja2 template.
        """
        self._clock = clock or MonotonicClock()
        self._special_texts = dict(special_texts)
        self._max_render_s = max_render_s
        self._max_chars = max_chars
        environment = _Sandbox(self._clock, max_chars)
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: today().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise SetupError(
                f"the chat template does not compile, line {error.lineno}: {error.message}"
            ) from None

    @classmethod
    def load(
        cls, directory: Path, settings: Mapping[str, Any], special_texts: Mapping[str, str]
    ) -> ChatTemplate | None:
        """The template of a model directory: ``chat_template.jinja``, else that of ``settings``
        (``tokenizer_config.json``); None where the model has none."""
        file = directory / "chat_template.jinja"
        source = file.read_text() if file.is_file() else _default(settings.get("chat_template"))
        return None if source is None else cls(source, special_texts=special_texts)

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> str:
        """The prompt's text; encode it without special tokens.

        Raises:
            BadRequest: a content part is not served, the template refuses the messages, or
                rendering passed its time or size.
        """
        plain = [_plain(message, index) for index, message in enumerate(messages)]
        deadline = self._clock.now() + self._max_render_s
        variables = {
            **self._special_texts,
            "messages": plain,
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
            _DEADLINE: deadline,
        }
        try:
            return self._collect(self._template.generate(variables), deadline)
        except BadRequest:
            raise
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise _refused(str(error), messages) from None

    def _collect(self, pieces: Any, deadline: float) -> str:
        parts: list[str] = []
        size = 0
        for piece in pieces:
            parts.append(piece)
            size += len(piece)
            if size > self._max_chars:
                raise _too_much(f"more than {self._max_chars} characters")
            if self._clock.now() > deadline:
                raise _too_much(f"more than {self._max_render_s:g} s")
        return "".join(parts)


def no_template(model: str) -> BadRequest:
    """What a chat request to a model without a template is answered."""
    return BadRequest(
        f"model {model} has no chat template: send a prompt to /v1/completions, or put a "
        "chat_template.jinja into the model's directory and restart the gateway",
        field="messages",
    )


_DEADLINE = "ekiden_deadline"


class _Sandbox(ImmutableSandboxedEnvironment):
    """Immutable and sandboxed; calls look at the clock, ``*`` and ``**`` at their size."""

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self, clock: Clock, max_chars: int) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        self._clock = clock
        self._max_chars = max_chars

    def call(
        __self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any
    ) -> Any:
        deadline = __context.get(_DEADLINE)
        if deadline is not None and __self._clock.now() > deadline:
            raise _too_much("more than its time")
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        sizes = [len(x) if isinstance(x, str | list | tuple) else None for x in (left, right)]
        counts = [x for x in (left, right) if isinstance(x, int)]
        if operator == "**" and counts and abs(counts[-1]) > 64:
            raise _too_much("a power above 64")
        for size in sizes:
            if size is not None and counts and size * counts[0] > self._max_chars:
                raise _too_much(f"more than {self._max_chars} characters")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's part for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _plain(message: ChatMessage, index: int) -> dict[str, Any]:
    """The message as templates expect it: ``content`` as one text."""
    plain: dict[str, Any] = {"role": message.role, "content": _text(message.content, index)}
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _text(content: str | list[dict[str, Any]] | None, index: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for number, part in enumerate(content):
        field = f"messages[{index}].content[{number}]"
        if part.get("type") not in _SERVED_PARTS:
            raise BadRequest(
                f"{field}.type is {part.get('type')!r}: only {', '.join(_SERVED_PARTS)} is served",
                field=field,
            )
        if not isinstance(part.get("text"), str):
            raise BadRequest(f"{field}.text must be a string", field=field)
        texts.append(part["text"])
    return "\n".join(texts)


def _default(source: object) -> str | None:
    """tokenizer_config.json has one template, or a list of named ones."""
    if isinstance(source, list):
        named = {item.get("name"): item.get("template") for item in source if _is_named(item)}
        source = named.get("default")
    return source if isinstance(source, str) else None


def _is_named(item: object) -> bool:
    return isinstance(item, dict)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    """Unlike Jinja2's own filter, no HTML escapes: the reader is a model."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _refused(reason: str, messages: Sequence[ChatMessage]) -> BadRequest:
    roles = ", ".join(message.role for message in messages)
    hint = ""
    if any(message.role in ("system", "developer") for message in messages):
        hint = "; where a template has no system role, put that text into the first user message"
    return BadRequest(
        f"the model's chat template refuses these messages (roles: {roles}): {reason}{hint}",
        field="messages",
    )


def _too_much(what: str) -> BadRequest:
    return BadRequest(f"rendering the chat template took {what}", field="messages")
