"""In an editable install `twin_engine` is another name of the repository's `reference` and `optimized`.

`twin_engine.reference.ops` is the module `reference.ops`, not a copy of it: programs that are written for a wheel run
with a checkout, too, and may mix both names.
"""

import sys

from reference.support.aliases import Aliases

_PREFIX = f"{__name__}."


def _short(name: str) -> str | None:
    """`<name>` of `twin_engine.<name>`, if it is one of the two packages or in them."""
    short = name.removeprefix(_PREFIX)
    return None if short == name or short.partition(".")[0] not in ("reference", "optimized") else short


sys.meta_path.insert(0, Aliases(_short))

from optimized import *  # noqa: E402, F403
from optimized import __all__ as __all__  # noqa: E402
from optimized import __version__ as __version__  # noqa: E402
from optimized import ops, optimizers, recipe  # noqa: E402
from reference.support import not_offered  # noqa: E402

_MODULES = {"ops": ops, "optimizers": optimizers, "recipe": recipe}
sys.modules.update({f"{_PREFIX}{name}": module for name, module in _MODULES.items()})
not_offered.explain(__name__)
