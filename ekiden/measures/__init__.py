"""How times of requests, and loads of experts, are summed up and shown, measured or simulated.

docs/bench.md has each definition in words. Pure: no clock, no file, no network, no other room.
"""
