"""FP8 state in files: its format, Transformer Engine's, pickles read as data, checked safetensors."""
