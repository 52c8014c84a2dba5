"""Tokenizers, chat templates, the stop matcher and the incremental detokeniser.

The engine and the gateway share it, so both see the same text. No torch, no grpc, no HTTP.
"""
