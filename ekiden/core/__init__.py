"""Types, configuration, errors, ids, clocks, logging and block hashes that every room shares.

Standard library and msgspec only: nothing here may import another room, torch, grpc or redis.
"""
