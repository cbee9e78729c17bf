"""Text from a model: `generator.py`, `sampling.py`, `drafts.py`."""
