"""Asks two deployments the same prompts: how often their most likely next token is the same.

Each prompt is a beginning of a passage and is answered with one token, so an early difference does
not spoil what comes after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx

from ekiden.core.errors import SetupError
from ekiden.doctor.evidence import SamePrompts

ASK_S = 60.0
AT_ONCE = 4
PASSAGES = """\
A relay race is run by four runners, each of whom covers one part of the distance and hands the
baton to the next within a marked zone of the track.
Water boils at a lower temperature on a mountain than at the sea, because the pressure of the air
above it is lower there, and so cooking takes longer.
The first railway between the two towns was opened in the spring of 1851, and within ten years the
canal that had carried their goods was hardly used.
Whoever measures a server should ask it at moments that were fixed beforehand, since a client which
waits for each answer asks a slow server less.
"""
_LEAST_WORDS = 6


def prompts() -> Iterator[str]:
    """Every beginning of each passage, from some words on."""
    for passage in PASSAGES.replace(".\n", ".\n\n").split("\n\n"):
        words = passage.split()
        for count in range(_LEAST_WORDS, len(words) + 1):
            yield " ".join(words[:count])


async def compare(url: str, reference: str, api_key: str) -> SamePrompts:
    """Raises SetupError: one of the two does not answer; says which and how."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with httpx.AsyncClient(timeout=ASK_S, headers=headers, trust_env=False) as http:
        ours, theirs = await _answers(http, url), await _answers(http, reference)
    equal = sum(one == other for one, other in zip(ours, theirs, strict=True))
    return SamePrompts(asked=len(ours), equal=equal, against=reference)


async def _answers(http: httpx.AsyncClient, url: str) -> list[str]:
    model = await _model(http, url)
    room = asyncio.Semaphore(AT_ONCE)

    async def ask(prompt: str) -> str:
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        async with room:
            answer = await _ask(http, "POST", f"{url}/v1/completions", json=body)
        return str(answer["choices"][0]["text"])

    try:
        async with asyncio.TaskGroup() as asking:
            tasks = [asking.create_task(ask(prompt)) for prompt in prompts()]
    except ExceptionGroup as failed:  # the first that fails ends the others
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def _model(http: httpx.AsyncClient, url: str) -> str:
    return str((await _ask(http, "GET", f"{url}/v1/models"))["data"][0]["id"])


async def _ask(http: httpx.AsyncClient, method: str, url: str, **more: Any) -> Any:
    try:
        response = await http.request(method, url, **more)
        response.raise_for_status()
        return response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        why = str(error).partition("\n")[0] or type(error).__name__
        raise SetupError(f"the same prompts cannot be asked: {url}: {why}") from None
