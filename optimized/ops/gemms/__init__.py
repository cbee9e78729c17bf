"""Matrix products in 16 bits and in FP8, and FP8 products with the next operation in them: on the GPU."""
