"""What a model takes, what a device has, and whether the one fits on the other.

No torch, no network, no process: pure arithmetic over a ``config.json`` and two shipped tables.
"""
