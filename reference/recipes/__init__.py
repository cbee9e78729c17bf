"""One file a recipe: its arguments, its quantizers, and what is updated when."""
