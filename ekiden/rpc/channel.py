"""Client channels between services: one set of options and one way to show the secret."""

from __future__ import annotations

import grpc

MAX_MESSAGE_BYTES = 64 << 20
"""Of one gRPC message. A prompt of a million tokens is about 5 MB; gRPC's own default is 4."""

Options = tuple[tuple[str, int], ...]

PING_EVERY_MS = 10_000
PING_LOST_MS = 10_000
"""A stopped process closes no connection: it is noticed this long after an unanswered ping."""


def keepalive(every_ms: int = PING_EVERY_MS, lost_ms: int = PING_LOST_MS) -> Options:
    """Pings while calls are open. Both ends use them, so that each notices the other's loss."""
    return (
        ("grpc.keepalive_time_ms", every_ms),
        ("grpc.keepalive_timeout_ms", lost_ms),
        # Without it an unanswered ping has a minute, whatever the line above says.
        ("grpc.http2.ping_timeout_ms", lost_ms),
        ("grpc.http2.max_pings_without_data", 0),
    )


CHANNEL_OPTIONS: Options = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    *keepalive(),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

Metadata = tuple[tuple[str, str], ...]


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to ``HOST:PORT``. Dials on first use and again after a break."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def auth_metadata(secret: str) -> Metadata:
    """What every call carries: the shared secret, or nothing where none is set."""
    return (("authorization", f"Bearer {secret}"),) if secret else ()
