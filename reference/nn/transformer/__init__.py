"""`TransformerLayer`, and its halves as pairs of functions."""
