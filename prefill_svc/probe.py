"""Prefill's side of measuring a wire: one ``Prefill.Probe`` call."""

from __future__ import annotations

from ekiden.core.errors import EkidenError, ReplicaFailed
from ekiden.core.ids import new_request_id
from ekiden.rpc import prefill_pb2 as pb
from kv_transfer.session import Failed, SealedOut

from .core import PrefillCore


async def probe(core: PrefillCore, request: pb.ProbeRequest) -> pb.Sealed:
    """Send what the offer asks for out of whatever the cache holds.

    The wait is bounded by the deadlines of the session, and by the caller, who cancels the call.

    Raises:
        EkidenError: the caller is not who it should be, or the transfer failed.
    """
    peer = core.caller(request.prefill_epoch, request.decode_replica, request.decode_epoch)
    local_id, inbox = core.open_run(new_request_id())
    session, sealed = 0, None
    try:
        session = core.open_session(local_id, request.offer, peer)
        core.send_anything(session)
        while sealed is None:
            happening = await inbox.get()
            if isinstance(happening, EkidenError):
                raise happening
            if isinstance(happening, Failed):
                raise ReplicaFailed(happening.reason)
            if isinstance(happening, SealedOut):
                sealed = pb.Sealed(seal=happening.seal)
        return sealed
    finally:
        if session and sealed is None:
            core.fail_session(session, "decode ended the call")
        core.close_run(local_id)
