"""The decode service: a gRPC servicer and a policy over the shared engine.

Fetches KV from prefill or computes it locally, then generates. No HTTP and no text: token ids in,
token ids out.
"""
