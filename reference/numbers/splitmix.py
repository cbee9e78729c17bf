"""SplitMix64: 64-bit constants that digests multiply words by."""

import numpy as np


def splitmix64(j: np.ndarray) -> np.ndarray:
    """The j-th number of Steele, Lea and Flood's generator SplitMix64 with seed 0: uint64, any shape."""
    with np.errstate(over="ignore"):
        z = (j.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
