"""The operations of namespace `twin`: importing this package registers every CPU definition.

An op is a file in one of the families; whoever adds one adds no line to this one (docs/new_op.md).
"""

import importlib
import pkgutil

from reference.support import not_offered

for _one in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_one.name)

not_offered.explain(__name__)  # of Transformer Engine's `ops`
