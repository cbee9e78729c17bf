"""A small GPT and its text: what the walkthrough trains, and what was trained on an H200 for the record."""
