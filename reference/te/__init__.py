"""Standing in for Transformer Engine: `install_as_transformer_engine`, and its modules and names."""
