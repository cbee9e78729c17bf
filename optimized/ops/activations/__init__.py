"""Activations, gated and not, forward and backward: on the GPU."""
