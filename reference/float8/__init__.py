"""Tensors that are kept in FP8 only, and the quantizers that make them."""
