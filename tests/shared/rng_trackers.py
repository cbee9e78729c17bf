"""A `CudaRNGStatesTracker` for tests."""

import reference as te

RNG = "model-parallel-rng"


def tracker_of(seed: int = 7) -> te.CudaRNGStatesTracker:
    made = te.CudaRNGStatesTracker()
    made.add(RNG, seed)
    return made
