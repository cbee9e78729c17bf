"""In an editable install `twin_engine` is another name of the repository's `reference` and `optimized`.

`twin_engine.reference.ops` is the module `reference.ops`, not a copy of it: programs that are written for a wheel run
with a checkout, too, and may mix both names.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

_PREFIX = f"{__name__}."


class _Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `twin_engine.<name>` as the module `<name>`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        short = name.removeprefix(_PREFIX)
        if short == name or short.partition(".")[0] not in ("reference", "optimized"):
            return None
        return importlib.util.spec_from_loader(name, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(spec.name.removeprefix(_PREFIX))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run; Python has given it the spec of its other name."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.insert(0, _Alias())

from optimized import *  # noqa: E402, F403
from optimized import __all__ as __all__  # noqa: E402
from optimized import __version__ as __version__  # noqa: E402
from optimized import ops, optimizers, recipe  # noqa: E402
from reference.support import not_offered  # noqa: E402

_MODULES = {"ops": ops, "optimizers": optimizers, "recipe": recipe}
sys.modules.update({f"{_PREFIX}{name}": module for name, module in _MODULES.items()})
not_offered.explain(__name__)
