"""The operations of namespace `twin`: importing this package registers every CPU definition.

An op is a file here; whoever adds one adds no line to this one (docs/new_op.md).
"""

import importlib
import pkgutil

from reference import not_offered

for _one in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_one.name}")

not_offered.explain(__name__)  # of Transformer Engine's `ops`
