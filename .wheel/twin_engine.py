"""Twin Engine: FP8 training of transformers, with the same bits on a CPU and on a Hopper GPU.

    import twin_engine as te               # the layers are made on "cuda"
    import twin_engine.reference as te     # the layers are made on the CPU; the same names, the same bits

`twin_engine` has the names of `twin_engine.optimized`, and importing it loads both sides.
"""

import sys

from twin_engine.optimized import *  # noqa: F403  (.wheel/hook.py writes the names here, for type checkers)
from twin_engine.optimized import __all__ as __all__
from twin_engine.optimized import __version__ as __version__
from twin_engine.optimized import ops, optimizers, recipe
from twin_engine.reference.support import not_offered

# For `from twin_engine.recipe import DelayedScaling`: the modules themselves, under this name too.
sys.modules.update(
    {f"{__name__}.{name}": module for name, module in (("ops", ops), ("optimizers", optimizers), ("recipe", recipe))}
)
not_offered.explain(__name__)
