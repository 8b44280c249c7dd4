"""Kernels for accelerators, in Triton."""
