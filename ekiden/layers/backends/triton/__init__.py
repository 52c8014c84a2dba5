"""Triton kernels for the CUDA path, one file a family; each has a torch reference in its test.

Every function here takes and returns torch tensors and launches on the current stream. Nothing
waits for the device and no shape depends on a value on it, so all of it can be recorded in a CUDA
graph. With TRITON_INTERPRET=1 in the environment before ``triton`` is imported, the same
functions run on CPU tensors: that is how they are tested where there is no GPU.
"""

from ekiden.core import env

env.let_triton_fuse()
