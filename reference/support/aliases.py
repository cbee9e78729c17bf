"""Another name for a module: imported by it, it is the same module, not a copy."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class Aliases(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """For `sys.meta_path`: finds a module by its other name.

    Args:
        name_of: from the name that is imported to the module's own; None if it is no other name.
    """

    def __init__(self, name_of: Callable[[str], str | None]) -> None:
        self._name_of = name_of

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return None if self._name_of(name) is None else importlib.util.spec_from_loader(name, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        own = self._name_of(spec.name)
        assert own is not None
        module = importlib.import_module(own)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run; Python has given it the spec of its other name.

        What has been imported below it gets its other name here: after an import Python sets the package's attribute to
        the module, and some packages have a function of that name.
        """
        assert module.__spec__ is not None
        other, module.__spec__ = module.__spec__.name, module.__spec__.loader_state
        own = module.__spec__.name
        below = [name for name in sys.modules if name.startswith(f"{own}.")]
        for name in below:
            sys.modules.setdefault(other + name.removeprefix(own), sys.modules[name])
