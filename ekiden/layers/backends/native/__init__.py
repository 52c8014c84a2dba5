"""Kernels for x86-64 CPUs with AVX-512 in a small C++ library, built when first wanted.

Optional: nothing here may be needed for a right answer, only for a fast one.
"""
