"""``ekiden bench``: load on any OpenAI-compatible endpoint, and what its users would have felt.

Sees a server from outside, over HTTP: nothing of the services is imported, and never torch. The
load comes from processes of its own (``worker``), which the parent (``sweep``) tells what to send.
"""
