#!/opt/ekiden/bin/python
"""The containers' health check: exit 0 when the service answers as it should, else 1.

    probe grpc HOST:PORT     the standard health service says SERVING
    probe http URL           GET gives 200
    probe redis HOST:PORT    PING gives PONG

One probe costs no more than it must: grpc is imported only where it is spoken.
"""

from __future__ import annotations

import socket
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 4.0


def probe_grpc(target: str) -> str:
    """Empty when ``target`` serves, else what is wrong."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(target) as channel:
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
    return "" if name == "SERVING" else name


def probe_http(target: str) -> str:
    """Empty when a GET of ``target`` gives 200, else what is wrong."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(target, timeout=TIMEOUT_S) as reply:
            return "" if reply.status == 200 else f"HTTP {reply.status}"
    except (OSError, ValueError) as error:  # HTTPError and URLError are OSErrors
        return str(error)


def probe_redis(target: str) -> str:
    """Empty when ``target`` answers PING, else what is wrong."""
    host, _, port = target.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
            connection.sendall(b"PING\r\n")
            reply = connection.recv(64)
    except OSError as error:
        return str(error)
    return "" if reply.startswith(b"+PONG") else repr(reply)


PROBES = {"grpc": probe_grpc, "http": probe_http, "redis": probe_redis}


def main(argv: list[str]) -> int:
    if len(argv) != 2 or argv[0] not in PROBES:
        print(__doc__, file=sys.stderr)
        return 1
    trouble = PROBES[argv[0]](argv[1])
    print(trouble or "ok")
    return 1 if trouble else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
