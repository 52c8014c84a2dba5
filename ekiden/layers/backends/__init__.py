"""Attention kernels, one file a kind of device, behind one signature.

No weights, no mesh, no books: tensors in, tensors out.
"""
