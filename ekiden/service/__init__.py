"""What the prefill and the decode service share: start, meet, audit, register, drain.

Joins the engine, the hand-off sessions, gRPC and the registry for one replica. Holds no policy of
either role: what happens to a request is decided in ``prefill_svc`` and ``decode_svc``.
"""
