"""LayerNorm and RMSNorm, forward and backward."""
