"""A process that is stopped closes no connection; its peers notice all the same."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import grpc
import pytest

from ekiden.rpc.channel import CHANNEL_OPTIONS, keepalive

SERVER = Path(__file__).with_name("stopped_server.py")


async def test_a_call_to_a_stopped_process_ends() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(SERVER), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    address = f"127.0.0.1:{int(await process.stdout.readline())}"
    try:
        async with grpc.aio.insecure_channel(address, options=keepalive(500, 500)) as channel:
            call = channel.stream_stream("/Test/Echo")()
            await call.write(b"a")
            assert await call.read() == b"a"
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(call.read(), 20)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    finally:
        process.kill()
        await process.wait()


def test_every_channel_pings() -> None:
    assert set(keepalive()) <= set(CHANNEL_OPTIONS)
