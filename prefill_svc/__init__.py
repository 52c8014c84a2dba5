"""The prefill service: a gRPC servicer and a policy over the shared engine.

Computes a prompt's KV, samples the hand-off token and sends the KV away. No HTTP, no text, and no
choice of where a request goes: decode calls, prefill answers.
"""
