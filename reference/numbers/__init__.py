"""Numbers: FP8 formats, elementary functions, random words, and what a tensor core adds in which order."""
