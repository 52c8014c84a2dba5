"""The tree of errors. Which root an error hangs from decides its status code.

EkidenError
├── ClientError            the caller can mend it          HTTP 4xx
│   ├── BadRequest         a field is wrong                400
│   ├── NotFound           no such model                   404
│   ├── TooLarge           body over the limit             413
│   └── Unauthenticated    secret or key missing or wrong  401
├── Overloaded             refused before any work         429, Retry-After
├── Unavailable            no replica can serve it now     503, Retry-After
├── DeadlineExceeded       a wait ran out; names the state 504
├── ReplicaFailed          a peer died or broke            502
├── SetupError             the operator can mend it        exit code 2, one sentence
└── InvariantBroken        a bug: stop rather than lie     500
"""

from __future__ import annotations


class EkidenError(Exception):
    """Root of every error that a user may see. The message says what to do next."""

    status = 500
    code = "internal_error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ClientError(EkidenError):
    status = 400
    code = "invalid_request_error"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class BadRequest(ClientError):
    """A field of the request is wrong; ``field`` names it."""


class NotFound(ClientError):
    status = 404
    code = "not_found_error"


class TooLarge(ClientError):
    status = 413
    code = "request_too_large"


class Unauthenticated(ClientError):
    status = 401
    code = "authentication_error"


class Overloaded(EkidenError):
    """Refused at once because it could not be served in time; try again after ``retry_after_s``."""

    status = 429
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(Overloaded):
    status = 503
    code = "unavailable"


class DeadlineExceeded(EkidenError):
    """A wait ran out. ``state`` names what was waited for and ``peer`` who it was waited on."""

    status = 504
    code = "deadline_exceeded"

    def __init__(self, message: str, *, state: str = "", peer: str = "") -> None:
        super().__init__(message)
        self.state = state
        self.peer = peer


class ReplicaFailed(EkidenError):
    """A rank, a replica or its connection broke while it held the request."""

    status = 502
    code = "replica_failed"


class SetupError(EkidenError):
    """What the operator asked for cannot work; shown as one sentence, without a traceback."""

    code = "setup_error"


class InvariantBroken(EkidenError):
    """The program caught itself in a state that must never happen."""

    code = "invariant_broken"
