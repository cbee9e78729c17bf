"""Attention over heads, forward and backward, with softmax, bias, sinks and rotation: on the GPU."""
