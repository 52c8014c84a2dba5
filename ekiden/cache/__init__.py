"""The KV layout, the block pool's books, the prefix index and the cache tensor.

The books (pool, index, layout) never import torch; only ``tensors`` does.
"""
