"""What a step of training hands to the next, parameters apart: scales, kept casts, seeds. And open contexts."""
