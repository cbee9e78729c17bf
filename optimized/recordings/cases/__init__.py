"""The cases of every op, a file each, named as in `reference.ops`; and those of the layers.

A file of an op may have

    cases()              what `twin parity` compares with recordings, by name (`optimized.recordings.case.Case`)
    calls(c)             calls of all kinds of arguments (`optimized.recordings.calls`), `lists` for `twin parity`
    large(c)             calls that would take a CPU too long; their launches are looked at
    sized(c, rows, cols) calls with matrices of any size, none included

The files are found by their names: whoever adds an op adds one.
"""

import importlib
import pkgutil
from collections.abc import Iterator
from functools import partial
from types import ModuleType

from optimized.recordings.calls import compared
from optimized.recordings.case import Case

MODULES: dict[str, ModuleType] = {
    one.name: importlib.import_module(f"{__name__}.{one.name}") for one in pkgutil.iter_modules(__path__)
}
"""By name, in alphabetical order."""


def having(function: str) -> dict[str, ModuleType]:
    """The files that have such a function."""
    return {name: module for name, module in MODULES.items() if hasattr(module, function)}


def cases() -> Iterator[Case]:
    """Every case: of the ops, then of the layers."""
    named = having("cases")
    for name in sorted(named, key=lambda one: one == "layers"):
        yield from named[name].cases()


def lists() -> Iterator[Case]:
    """The calls of each file, as one case: what only two sides that both run can compare."""
    for name, module in having("calls").items():
        yield Case(name, "the calls in its list", partial(compared, module.calls), live=True)
