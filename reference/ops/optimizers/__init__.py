"""Optimizers' steps over many tensors at once; the norm of gradients, and clipping."""
