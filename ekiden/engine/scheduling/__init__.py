"""The scheduler, its policies and a sequence's life. Never reaches torch: the simulator runs it.

Pure bookkeeping over the block pool: what to compute next, never how.
"""
