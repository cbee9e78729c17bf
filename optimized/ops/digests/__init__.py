"""Digests of tensors: on the GPU."""
