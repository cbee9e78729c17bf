"""Attention's layers and their parts: options, masks, packing, rotation, cache, FP8, the core."""
