"""Digests of tensors."""
