"""Chat templates: equal to transformers, refused in words, bounded."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from ekiden.core.clock import Clock, ManualClock
from ekiden.core.errors import BadRequest, SetupError
from ekiden.text.chat import ChatMessage, ChatTemplate

CHATML = """{%- for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + eos_token + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{% generation %}
<|im_start|>assistant
{% endgeneration %}{% endif %}
{{ {"a": "<é>"} | tojson }}{{ strftime_now("%Y") }}"""

GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for m in messages %}{{ m.role }}:{{ m.content | trim }}{% endfor %}"""

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def user(content: str | list[dict[str, object]] = "Hi") -> ChatMessage:
    return ChatMessage(role="user", content=content)


def template(source: str, clock: Clock | None = None, **limits: int) -> ChatTemplate:
    return ChatTemplate(
        source,
        special_texts=TOKENS,
        clock=clock,
        today=lambda: datetime(2031, 5, 6),
        **limits,  # type: ignore[arg-type]
    )


def test_renders_what_transformers_renders() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": "user", "content": "Hé\n"}, {"role": "assistant", "content": "<b>"}]
    source = CHATML.replace('strftime_now("%Y")', '"2031"')
    (theirs,), _ = render_jinja_template(
        conversations=[messages], chat_template=source, add_generation_prompt=True, **TOKENS
    )
    ours = template(source).render([ChatMessage(**message) for message in messages])
    assert ours == theirs
    assert template(CHATML).render([ChatMessage(**message) for message in messages]) == theirs


def test_text_parts_are_joined() -> None:
    parts: list[dict[str, object]] = [
        {"type": "text", "text": "one"},
        {"type": "text", "text": "two"},
    ]
    assert "one\ntwo</s>" in template(CHATML).render([user(parts)])


@pytest.mark.parametrize(
    ("part", "says"),
    [({"type": "image_url"}, "image_url"), ({"type": "text"}, "must be a string"), ({}, "None")],
)
def test_other_parts_are_refused_by_name(part: dict[str, object], says: str) -> None:
    with pytest.raises(BadRequest, match=says) as caught:
        template(CHATML).render([user([part])])
    assert caught.value.field == "messages[0].content[0]"


def test_a_refusal_of_the_template_says_why_and_what_to_pass() -> None:
    system = ChatMessage(role="system", content="")
    with pytest.raises(BadRequest, match=r"System role not supported.*first user message"):
        template(GEMMA).render([system, user()])


def test_an_error_inside_the_template_is_a_bad_request() -> None:
    with pytest.raises(BadRequest, match="refuses"):
        template("{{ messages[9].content.x }}").render([user()])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(BadRequest):
        template(source).render([user()])


def test_a_huge_text_is_refused_before_it_is_made() -> None:
    with pytest.raises(BadRequest, match="characters"):
        template("{{ 'a' * 10 ** 12 }}").render([user()])


def test_output_is_bounded() -> None:
    with pytest.raises(BadRequest, match="100 characters"):
        template("{% for i in range(99) %}xx{{ i }}{% endfor %}", max_chars=100).render([user()])


class Ticking(ManualClock):
    def now(self) -> float:
        self.advance(0.01)
        return super().now()


@pytest.mark.parametrize("body", ["x{{ i }}", "{% for j in range(9) %}{% endfor %}"])
def test_time_is_bounded_with_and_without_output(body: str) -> None:
    source = "{% for i in range(99999) %}" + body + "{% endfor %}"
    with pytest.raises(BadRequest, match="took more than"):
        template(source, Ticking()).render([user()])


def test_a_template_that_does_not_compile_is_a_setup_error() -> None:
    with pytest.raises(SetupError, match="line 2"):
        template("ok\n{% for %}")


def test_a_template_file_comes_before_the_settings(tmp_path: Path) -> None:
    settings = {"chat_template": [{"name": "default", "template": "settings"}]}
    load = ChatTemplate.load
    assert load(tmp_path, {}, {}) is None
    found = load(tmp_path, json.loads(json.dumps(settings)), {})
    assert found is not None
    assert found.render([user()]) == "settings"
    (tmp_path / "chat_template.jinja").write_text("file")
    found = load(tmp_path, settings, {})
    assert found is not None
    assert found.render([user()]) == "file"
