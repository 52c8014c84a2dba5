"""One file a model family, a lazy registry, and configuration and weight loading.

No scheduling and no process handling.
"""
