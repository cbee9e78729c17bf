"""LayerNorm and RMSNorm, forward and backward: on the GPU."""
