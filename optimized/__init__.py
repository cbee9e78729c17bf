"""Twin Engine's optimized side: the layers of `reference` on Hopper tensor cores, with the same bits.

    import optimized as te

    layer = te.Linear(768, 3072, params_dtype=torch.bfloat16)   # on "cuda"
    with te.autocast(recipe=te.DelayedScaling()):
        y = layer(x)

The names are those of `reference`; only the default device differs. Importing registers the CUDA
implementations and needs neither CuPy nor a GPU: what is missing is said, in a sentence, by the first kernel.
"""

import optimized.ops  # noqa: F401  (registers the CUDA implementations)
import reference
from reference import DelayedScaling, Format, autocast, checkpoint, formats, fp8_autocast, philox, recipe

__all__ = [
    "DelayedScaling",
    "Format",
    "Linear",
    "autocast",
    "checkpoint",
    "formats",
    "fp8_autocast",
    "philox",
    "recipe",
]


class Linear(reference.Linear):
    """`reference.Linear` with "cuda" as its default device."""

    default_device = "cuda"
