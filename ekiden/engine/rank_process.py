"""One rank in a process of its own: ``python -m ekiden.engine.rank_process FD``.

FD is this rank's end of a socket pair. The life of a rank:

1. It ties its life to the driver's: the kernel kills it when the driver dies, and it ends by
   itself when the socket closes. SIGINT and SIGTERM are the driver's to act on.
2. ``Setup`` arrives; a thread begins to beat, so that a rank at work differs from a stopped one.
3. Model, cache and port are opened; ``Ready`` goes up.
4. Steps and port messages are taken in the order sent, one at a time, until ``Close``.
5. Whatever it raises goes up as ``Broken``, its peers are told not to wait, and it ends.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import traceback
from contextlib import ExitStack, closing
from threading import Thread
from typing import TYPE_CHECKING, NoReturn

import msgspec

from ekiden.core.errors import EkidenError, InvariantBroken, SetupError
from ekiden.core.logging import setup_logging
from ekiden.engine.tables import TableReader
from ekiden.engine.wire import (
    Beat,
    Broken,
    Close,
    Done,
    DriverGone,
    FromPort,
    Loading,
    RankWire,
    Ready,
    Setup,
    Step,
    Tokens,
    ToPort,
)

if TYPE_CHECKING:
    from ekiden.engine.rank import Rank
    from ekiden.parallel.mesh import Mesh

BEAT_S = 0.5
_PR_SET_PDEATHSIG = 1


def main() -> NoReturn:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _die_with_driver()
    code = 1
    try:
        code = _live(RankWire(socket.socket(fileno=int(sys.argv[1]))))
    except DriverGone:
        code = 1  # There is nobody left to tell.
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Transports leave threads that a normal exit would wait for.
        os._exit(code)


def _live(wire: RankWire) -> int:
    setup = wire.receive()
    if not isinstance(setup, Setup):
        raise InvariantBroken(f"a rank's first message is Setup, not {type(setup).__name__}")
    if os.getppid() != setup.parent:
        return 1  # The driver died before this process could tie its life to it.
    setup_logging(f"{setup.name} rank {setup.rank}")
    Thread(target=_beat, args=(wire,), name="ekiden-beat", daemon=True).start()
    return _work(wire, setup)


def _die_with_driver() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _beat(wire: RankWire) -> None:
    """Say every BEAT_S that this process is alive; end it when the driver hangs up."""
    poller = select.poll()
    poller.register(wire.fileno(), 0)  # Hang-up and error are reported unasked.
    try:
        while not poller.poll(BEAT_S * 1000):
            wire.send(Beat())
    finally:
        os._exit(1)


def _work(wire: RankWire, setup: Setup) -> int:
    mesh: Mesh | None = None
    with ExitStack() as held:
        try:
            mesh = held.enter_context(closing(_open_mesh(setup)))
            rank = held.enter_context(closing(_open_rank(wire, setup, mesh)))
            wire.send(Ready(rank.endpoint))
            _serve(wire, rank)
        except DriverGone:
            raise
        except Exception as error:
            # The driver first: it takes the first cause it hears of for the cause.
            wire.send(_broken(error))
            if mesh is not None:
                mesh.abort(str(error))
            return 1
    return 0


# What needs torch is imported late: a rank beats, and notices that it is orphaned, before.


def _open_mesh(setup: Setup) -> Mesh:
    import torch

    from ekiden.parallel.rendezvous import MeshSpec, open_mesh

    torch.set_num_threads(setup.threads)
    return open_mesh(msgspec.msgpack.decode(setup.mesh, type=MeshSpec), setup.rank)


def _open_rank(wire: RankWire, setup: Setup, mesh: Mesh) -> Rank:
    from ekiden.core.cores import usable_cores
    from ekiden.engine.rank import load_port_factory, open_rank
    from ekiden.layers.backends.choose import Threads

    most = usable_cores() if setup.config.core_sharing else 0
    return open_rank(
        setup.config,
        setup.model,
        mesh=mesh,
        layout=setup.layout,
        num_blocks=setup.num_blocks,
        threads=Threads(share=setup.threads, most=most),
        port_factory=load_port_factory(setup.port) if setup.port else None,
        port_options=setup.port_options,
        epoch=setup.epoch,
        emit=lambda message: wire.send(FromPort(message)),
        progress=lambda done, total: wire.send(Loading(done, total)),
    )


def _serve(wire: RankWire, rank: Rank) -> None:
    tables = TableReader()
    while True:
        match wire.receive():
            case Step(plan, kept):
                rank.feed.put(tables.unpack(plan, kept))
            case ToPort(message):
                rank.feed.put(message)
            case Tokens(step, tokens):
                rank.feed.tell(step, tokens)
            case Close():
                return
            case Setup():
                raise InvariantBroken("a rank is set up once")
        rank.work(lambda result: wire.send(Done(result)))


def _broken(error: Exception) -> Broken:
    if isinstance(error, EkidenError):
        return Broken(error.message, setup=isinstance(error, SetupError))
    detail = "".join(traceback.format_exception(error))
    return Broken(f"{type(error).__name__}: {error}", setup=False, detail=detail)


if __name__ == "__main__":
    main()
