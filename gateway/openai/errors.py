"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import math

import orjson

from ekiden.core.errors import EkidenError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


def body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """The JSON of one error; ``param`` is the field at fault, if one is."""
    kind = _TYPES.get(status, "server_error")
    error = {"message": message, "type": kind, "param": param, "code": code or kind}
    return orjson.dumps({"error": error})


def body_of(error: EkidenError) -> bytes:
    return body(error.status, error.message, param=getattr(error, "field", None), code=error.code)


def headers_of(error: EkidenError) -> dict[str, str]:
    """``Retry-After``, in whole seconds, where trying again makes sense."""
    wait = getattr(error, "retry_after_s", None)
    return {} if wait is None else {"retry-after": str(max(1, math.ceil(wait)))}
