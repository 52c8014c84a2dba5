"""Kernels, one file or folder a kind of device, behind ``ekiden.layers.ops.Ops``.

No mesh, no books, no model names: tensors in, tensors out.
"""
