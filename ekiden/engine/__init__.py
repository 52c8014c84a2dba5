"""The scheduler, one rank's step, the sampler, and the executors that run ranks.

Never imports grpc or kv_transfer: a transport plugs in through ``port.KvPort``.
"""
