"""Client channels between services: one set of options and one way to show the secret."""

from __future__ import annotations

import grpc

MAX_MESSAGE_BYTES = 64 << 20
"""Of one gRPC message. A prompt of a million tokens is about 5 MB; gRPC's own default is 4."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A stopped machine closes no connection: pings notice it within 15 s while calls are open.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
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
