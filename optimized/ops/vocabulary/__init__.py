"""The two ends of a language model: embedding, and cross-entropy: on the GPU."""
