"""What a model takes of which devices, how fast it is there, and which layout it should have.

No torch, no network, no process: pure arithmetic over a ``config.json`` and two shipped tables.
"""
