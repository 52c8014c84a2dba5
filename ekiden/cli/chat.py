"""``ekiden chat``: ask a running gateway, stream the answer, show the account."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ekiden.cli.account import account_table
from ekiden.cli.command import add_command
from ekiden.cli.options import at_least
from ekiden.core import env
from ekiden.core.errors import EkidenError, SetupError, Unavailable

if TYPE_CHECKING:
    import httpx

DEFAULT_URL = "http://127.0.0.1:8000"
_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 600.0
"""Between two events; the gateway ends a request sooner by its own limit."""

_EXAMPLES = """examples:
  ekiden chat "What is a relay race?"
  ekiden chat --url http://gateway:8000       a conversation; an empty line ends it

EKIDEN_API_KEY is sent to the gateway where it is set.
"""


def add_parser(commands: Any) -> None:
    parser = add_command(commands, "chat", "talk to a running gateway", _EXAMPLES)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="absent: a conversation")
    parser.add_argument("--url", default=DEFAULT_URL, help=f"default: {DEFAULT_URL}")
    parser.add_argument("--model", default="", help="default: the first that the gateway serves")
    parser.add_argument(
        "--max-tokens", type=at_least(1), default=256, metavar="N",
        help="of an answer (default: 256)",
    )  # fmt: skip
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0: greedy (default: 0)"
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    with open_client(args.url) as client:
        model = args.model or first_model(client)
        options = {"max_tokens": args.max_tokens, "temperature": args.temperature}
        if args.prompt is not None:
            ask(client, model, [{"role": "user", "content": args.prompt}], options)
            return 0
        return _converse(client, model, options)


def _converse(client: httpx.Client, model: str, options: dict[str, Any]) -> int:
    messages: list[dict[str, str]] = []
    print(f"{model}; an empty line or Ctrl-D ends", file=sys.stderr)
    while line := _read_line():
        messages.append({"role": "user", "content": line})
        answer = ask(client, model, messages, options)
        messages.append({"role": "assistant", "content": answer})
    return 0


def _read_line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


@contextmanager
def open_client(url: str) -> Iterator[httpx.Client]:
    """An HTTP client whose failures are one sentence: SetupError or Unavailable."""
    import httpx

    key = env.api_key()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = httpx.Timeout(_READ_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=timeout) as client:
            yield client
    except httpx.ConnectError as error:
        hint = "is `ekiden up` running?"
        raise SetupError(f"no gateway answers at {url} ({error}); {hint}") from None
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise SetupError(f"--url {url} is not an HTTP address: {error}") from None
    except httpx.HTTPError as error:
        what = str(error) or type(error).__name__
        raise Unavailable(f"the gateway at {url} broke off: {what}") from None


def first_model(client: httpx.Client) -> str:
    response = client.get("/v1/models")
    _check(response)
    models = [str(model["id"]) for model in response.json()["data"]]
    if not models:
        raise SetupError("the gateway serves no model yet")
    return models[0]


def ask(
    client: httpx.Client,
    model: str,
    messages: list[dict[str, str]],
    options: dict[str, Any],
    write: Callable[[str], Any] | None = None,
) -> str:
    """Stream one answer through ``write``, then the account; return the answer's text."""
    write = write or _print
    body = {"model": model, "messages": messages, "stream": True, **options}
    body["stream_options"] = {"include_usage": True}
    text, usage = "", None
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        _check(response)
        for event in server_events(response.iter_lines()):
            for choice in event.get("choices", ()):
                piece = choice.get("delta", {}).get("content") or ""
                text += piece
                write(piece)
            usage = event.get("usage") or usage
    write("\n")
    if usage:
        write(f"\n{account_table(usage)}\n")
    return text


def _print(text: str) -> None:
    print(text, end="", flush=True)


def server_events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event up to ``[DONE]``.

    Raises EkidenError for an error event, Unavailable when the stream stops without ``[DONE]``.
    """
    data: list[str] = []
    for line in lines:
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            text, data = "\n".join(data), []
            if text == "[DONE]":
                return
            event = json.loads(text)
            if "error" in event:
                raise EkidenError(_message(event))
            yield event
    raise Unavailable("the answer broke off before its end")


def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    response.read()
    try:
        message = _message(response.json())
    except ValueError:
        message = response.text[:200] or response.reason_phrase
    raise EkidenError(f"HTTP {response.status_code}: {message}")


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message") if isinstance(error, dict) else error or body)
