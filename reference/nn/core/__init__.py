"""What every layer has: construction, checks, its context, FP8 state, and its pair of functions under autograd."""
