"""Layers without attention: linear layers, norms, embedding, losses."""
