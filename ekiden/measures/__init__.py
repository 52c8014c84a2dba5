"""How times of requests are summed up and shown, whether they were measured or simulated.

docs/bench.md has each definition in words. Pure: no clock, no file, no network, no other room.
"""
