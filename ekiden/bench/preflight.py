"""Before the load: which model, which fields the server takes, and how it counts tokens.

Four short questions at most. A server that cannot be measured is refused here, with what it said.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ekiden.bench.asking import ENDPOINTS, Dialect
from ekiden.bench.events import BadStream
from ekiden.bench.http import Address, Hangup, NoConnection, Server, Status
from ekiden.bench.reading import Reading
from ekiden.bench.wording import UNITS, Wording
from ekiden.core.errors import SetupError

_REFUSED = (400, 422)


class Found(NamedTuple):
    """What there is to know of a server."""

    dialect: Dialect
    wording: Wording
    notes: list[str]


async def find(
    server: Server, dialect: Dialect, *, model: str, timeout_s: float, tokenizer: Path | None
) -> Found:
    """Ask until an answer comes, then count.

    Raises:
        SetupError: the server refuses every form of a request, or does not stream; says why.
    """
    probe = _Probe(server, model, timeout_s)
    dialect, counts, notes = await _dialect(probe, dialect)
    if tokenizer is not None and not counts:
        wording = _by_tokenizer(tokenizer)
    elif counts:
        wording = await _by_server(probe, dialect)
    else:
        wording = Wording()
    return Found(dialect, wording, notes)


async def first_model(address: Address, api_key: str) -> str:
    """The first that the server lists. Raises SetupError when it lists none."""
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    url = f"{address.root}/v1/models"
    try:
        async with httpx.AsyncClient(timeout=10.0, headers=headers, trust_env=False) as client:
            response = await client.get(url)
            response.raise_for_status()
            return str(response.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise SetupError(f"no server answers {url} ({error}); is it running?") from None
    except (ValueError, LookupError, TypeError):
        raise SetupError(f"{url} lists no model: give --model NAME") from None


class _Probe:
    def __init__(self, server: Server, model: str, timeout_s: float) -> None:
        self._server, self._model, self._timeout_s = server, model, timeout_s

    async def __call__(self, dialect: Dialect, text: str) -> Reading:
        """One token after ``text``. Raises Status, or SetupError for what no other form mends."""
        reading, path = Reading(), ENDPOINTS[dialect.endpoint]
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._server.post(path, dialect.body(self._model, text, 1), reading)
        except TimeoutError:
            raise SetupError(
                f"the server did not answer a short prompt within {self._timeout_s:g} s (--timeout)"
            ) from None
        except NoConnection as error:
            raise SetupError(f"no server answers at --base-url: {error}") from None
        except (BadStream, Hangup) as error:
            raise _no_stream(path, str(error)) from None
        if not reading.finished:
            raise _no_stream(path, "what came has no event that finishes")
        return reading

    async def count(self, dialect: Dialect, text: str) -> int:
        """Tokens of ``text``. Raises SetupError, for a refusal too: this form was taken before."""
        try:
            usage = (await self(dialect, text)).usage
        except Status as error:
            raise SetupError(f"the server took one short prompt and no other: {error}") from None
        return usage.prompt_tokens if usage else 0


def _no_stream(path: str, why: str) -> SetupError:
    return SetupError(f"{path} does not answer with a stream of events: {why}")


async def _dialect(probe: _Probe, asked: Dialect) -> tuple[Dialect, bool, list[str]]:
    """The first form of a request that is taken, whether it tells usage, what was given up."""
    refusal = ""
    for dialect, note in _forms(asked):
        try:
            reading = await probe(dialect, "time")
        except Status as error:
            refusal = refusal or str(error)
            if error.code not in _REFUSED:
                break
            continue
        told = reading.usage is not None and reading.usage.prompt_tokens > 0
        return dialect, told, [note] if note else []
    raise SetupError(f"the server refuses to complete a short prompt: {refusal}")


def _forms(asked: Dialect) -> list[tuple[Dialect, str]]:
    replace: Any = msgspec.structs.replace
    plain = replace(asked, ignore_eos=False)
    renamed = replace(plain, limit_field="max_completion_tokens", extra={"temperature": None})
    forms = [(asked, "")]
    if asked.ignore_eos:
        forms.append((plain, "the server does not know ignore_eos: answers may end early"))
    forms.append((replace(plain, usage=False), "the server tells no usage: tokens are events"))
    if asked.endpoint == "chat":
        forms.append((renamed, "max_completion_tokens is sent, and no temperature"))
    return forms


async def _by_server(probe: _Probe, dialect: Dialect) -> Wording:
    """Units of which each is a token, if there are such; else words at their average."""
    found: list[Wording] = []
    for units, (choices, joint) in UNITS.items():
        one = await probe.count(dialect, choices[0])
        many = await probe.count(dialect, joint.join([choices[0], *choices]))
        per_unit = (many - one) / len(choices)
        if per_unit == 1:
            how = f"exact by the server's count ({units}, {one - 1} tokens added by it)"
            return Wording(units=units, added=one - 1, exact=True, how=how)
        found.append(
            Wording(
                units=units,
                per_unit=max(per_unit, 1e-3),
                added=max(0, round(one - per_unit)),
                how=f"about right: the server counts {per_unit:.2f} tokens for one of our {units}",
            )
        )
    return found[0]


def _by_tokenizer(directory: Path) -> Wording:
    """As the server would be asked, for one that does not count."""
    from ekiden.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(directory)
    choices, joint = UNITS["words"]
    one = len(tokenizer.encode(choices[0]))
    many = len(tokenizer.encode(joint.join([choices[0], *choices])))
    per_unit = (many - one) / len(choices)
    return Wording(
        per_unit=max(per_unit, 1e-3),
        added=max(0, round(one - per_unit)),
        exact=per_unit == 1,
        how=f"by --tokenizer {directory.name}: {per_unit:.2f} tokens a word; a chat template, "
        "which it does not count, comes on top",
    )
