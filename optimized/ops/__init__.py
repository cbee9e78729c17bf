"""The CUDA implementations of the ops of namespace `twin`: host glue, one file per op, in the families and by the
names of `reference.ops`.

Importing registers them, whose files are found (docs/new_op.md); nothing is compiled, loaded or looked for before the
first call with a CUDA tensor.
Each module lists its kernels' `CONFIGURATIONS` (kernel file, macros), which the CPU suite compiles for sm_90a.
"""

import importlib
import pkgutil

import reference.ops  # noqa: F401  (declares the ops)
from reference.support import not_offered

_FOUND = [importlib.import_module(one.name) for one in pkgutil.walk_packages(__path__, f"{__name__}.")]
MODULES = tuple(module for module in _FOUND if hasattr(module, "CONFIGURATIONS"))

__all__ = ["MODULES"]

not_offered.explain(__name__)  # of Transformer Engine's `ops`
