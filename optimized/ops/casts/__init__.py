"""Casts to FP8 and what they measure: amax, scales, transposes, column sums: on the GPU."""
