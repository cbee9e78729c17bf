"""Activations, gated and not, forward and backward."""
