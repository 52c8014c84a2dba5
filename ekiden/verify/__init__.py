"""``ekiden verify``: proof that a grid of prefill and decode layouts gives one process's tokens.

Runs real engines and the real hand-off; knows no HTTP.
"""
