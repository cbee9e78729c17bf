"""`install_as_transformer_engine`: afterwards `import transformer_engine.pytorch as te` gives Twin Engine.

    import twin_engine
    twin_engine.install_as_transformer_engine()               # on a CPU: twin_engine.reference

    import transformer_engine.pytorch as te                   # unmodified programs from here on
    from transformer_engine.common.recipe import DelayedScaling, Format

So Accelerate's `mixed_precision="fp8"`, Lightning's `TransformerEnginePrecision` and a model's own subclasses of
`te.Linear` run as they are, on a CPU too. Every module of Transformer Engine's Python source can be imported, and every
name from it; what Twin Engine has not is a placeholder, which refuses to be made, called or read
(`reference.te.placeholders`). Classes say that they are Transformer Engine's (`__module__`), by which programs
recognise layers that draw their own weights; pickles go on naming this package. Package metadata name
"transformer-engine", in the release whose API this is, as these libraries ask for.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch

from reference.float8.float8_quantizer import DType
from reference.memory.recompute import activation_recompute_forward
from reference.nn.core.module import TransformerEngineBaseModule
from reference.nn.layers.layernorm import L2Normalization
from reference.support import not_offered
from reference.te import placeholders

VERSION = "2.20.2"
"""The release of Transformer Engine whose names and arguments Twin Engine has (tests/transformer_engine_api.json)."""
ROOT = "transformer_engine"
START = f"{ROOT}.pytorch"
_PACKAGE = "twin_engine"  # a name of `reference` and `optimized` in a clone and in a wheel


def _unchanged(function: Any) -> Any:
    return function


def _not_compiled(recursive: bool = True) -> Callable[[Any], Any]:
    return lambda function: torch.compiler.disable(function, recursive=recursive)


# What is no attribute of the package, by the beginning of the modules that have it.
KINDS: dict[str, dict[str, Any]] = {
    "module": {"TransformerEngineBaseModule": TransformerEngineBaseModule},
    "distributed": {"activation_recompute_forward": activation_recompute_forward},
    "ops": {"L2Normalization": L2Normalization},
    # A compiler may fuse what these decorate; here it does not.
    "jit": {"jit_fuser": _unchanged, "dropout_fuser": _unchanged, "no_torch_dynamo": _not_compiled},
    f"{ROOT}_torch": {"DType": DType},  # programs import it as `tex`
    "constants": {"dist_group_type": torch.distributed.ProcessGroup},
}


MOVED = {f"{START}.tensor.quantized_tensor": f"{START}.quantized_tensor"}
"""Modules of older releases, and where they are now."""


class _Distribution(importlib.metadata.Distribution):
    """The metadata of a package that is not there."""

    def read_text(self, filename: str) -> str | None:
        return f"Metadata-Version: 2.1\nName: {ROOT}\nVersion: {VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: {ROOT} is Twin Engine, which has no files of that name.")


class _Finder(importlib.abc.MetaPathFinder):
    """Gives Transformer Engine's metadata."""

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        asked = getattr(context, "name", None)
        same = asked is None or asked.lower().replace("-", "_") == ROOT
        return [_Distribution()] if same else []


_finder = _Finder()


def _module(name: str, offered: Mapping[str, Any], package: str = _PACKAGE) -> ModuleType:
    """A module of that name, whose other names are placeholders; `package` is ours in its place."""
    made = ModuleType(name, f"Twin Engine in the place of {name}.")
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    made.__path__ = []

    def missing(attribute: str) -> Any:
        kind = placeholders.kind_of(name, attribute)
        if kind is None and not_offered.sentence(package, attribute) and name in _PLACES.values():
            kind = "class" if attribute[0].isupper() else "function"
        if kind is not None:
            text = placeholders.sentence(name, attribute, package)
            vars(made)[attribute] = placeholder = placeholders.make(name, attribute, kind, text)
            return placeholder
        text = f"module {name!r} has no attribute {attribute!r}"
        if not attribute.startswith("_"):
            text = (
                f"{name}.{attribute} is not offered by Twin Engine, which stands in for Transformer Engine {VERSION}."
            )
        raise AttributeError(text, name=attribute, obj=made)

    made.__dict__.update(offered, __getattr__=missing)
    return made


# Our modules, and Transformer Engine's in whose place they stand.
_PLACES = {
    "": START,
    "ops": f"{START}.ops",
    "optimizers": f"{START}.optimizers",
    "quantization": f"{START}.quantization",
    "fp8": f"{START}.fp8",
    "recipe": f"{ROOT}.common.recipe",
}


def _public(module: ModuleType) -> dict[str, Any]:
    """A module's public names, submodules left out."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }


def _modules(package: ModuleType) -> dict[str, ModuleType]:
    """Every module of Transformer Engine's, by full name."""
    table = placeholders.table()
    own = {part: getattr(package, part) for part in _PLACES if part}
    offered = {START: {name: getattr(package, name) for name in package.__all__}}
    offered |= {_PLACES[part]: _public(module) for part, module in own.items()}
    names: dict[str, Any] = {}  # of all modules but te.ops's, which has layers of the same names
    for part in ("", "quantization", "optimizers", "recipe"):
        names |= {name: value for name, value in offered[_PLACES[part]].items() if not isinstance(value, ModuleType)}
    found: dict[str, ModuleType] = {}
    for name, groups in table.items():
        below = name.removeprefix(f"{START}.")
        known = dict(names)
        for beginning, kinds in KINDS.items():
            known |= kinds if below.split(".")[0] == beginning else {}
        known |= offered[_PLACES["ops"]] if below.split(".")[0] == "ops" else {}
        theirs = [one for what in ("class", "function", "value") for one in groups.get(what, ())]
        here = {one: known[one] for one in theirs if one in known}
        here |= {one: value for one, value in known.items() if below in KINDS and one in KINDS[below]}
        part = next((one for one, place in _PLACES.items() if place == name), "")
        ours = f"{_PACKAGE}.{part}" if part else _PACKAGE
        found[name] = _module(name, here | offered.get(name, {}), ours)
    vars(found[ROOT])["__version__"] = VERSION
    found |= {older: found[newer] for older, newer in MOVED.items()}
    for name, module in found.items():
        owner, _, last = name.rpartition(".")
        if owner:
            if isinstance(vars(found[owner]).get(last), ModuleType):  # ours, which tells nothing of what is missing
                del vars(found[owner])[last]
            vars(found[owner]).setdefault(last, module)  # te.cross_entropy is a function here
    return found


# --- classes that say that they are Transformer Engine's --------------------------------------------------


class _Renamed(NamedTuple):
    """A class, by its own name, in a pickle."""

    module: str
    name: str

    def find(self) -> Any:
        return functools.reduce(getattr, self.name.split("."), importlib.import_module(self.module))


_own_names: dict[type, str] = {}
"""Class → its own `__module__`."""
_pickled_before: dict[type, Any] = {}


def _rebuilt(function: Any, *args: Any) -> Any:
    """`function(*args)` of a pickle or copy; classes came by their own names."""
    parts: list[Any] = [one.find() if isinstance(one, _Renamed) else one for one in (function, *args)]
    return parts[0](*parts[1:])


def _named(one: Any) -> Any:
    renamed = isinstance(one, type) and one in _own_names
    return _Renamed(_own_names[one], one.__qualname__) if renamed else one


def _rename(cls: type, module: str) -> None:
    """Let `cls.__module__` be Transformer Engine's; pickles and copies of its objects go on naming its own."""
    if cls in _own_names:
        return
    _own_names[cls] = cls.__module__
    before: Any = cls.__reduce_ex__

    def reduce_ex(self: Any, protocol: Any) -> Any:
        reduced = before(self, protocol)
        if not isinstance(reduced, tuple) or reduced[0] is _rebuilt:
            return reduced
        function, args, *rest = reduced
        return (_rebuilt, tuple(map(_named, (function, *args))), *rest)

    cls.__module__ = module
    if not issubclass(cls, torch.Tensor):  # these have functions that make them
        _pickled_before[cls] = vars(cls).get("__reduce_ex__")
        cls.__reduce_ex__ = reduce_ex  # type: ignore[method-assign, assignment]


def _rename_all(modules: Mapping[str, ModuleType]) -> None:
    for name, groups in placeholders.table().items():
        for one in groups.get("defines", ()):
            cls = vars(modules[name]).get(one)
            if isinstance(cls, type):
                _rename(cls, name)


# --- installing ---------------------------------------------------------------------------------------------


def install(package: ModuleType) -> None:
    """Let `transformer_engine` mean `package`; a second call with the same package changes nothing."""
    present: Any = sys.modules.get(ROOT)
    if present is not None and _finder in sys.meta_path:
        if present.pytorch.Linear is package.Linear:
            return
        raise RuntimeError(
            f"install_as_transformer_engine: {ROOT} means the other side of Twin Engine in this process; one of "
            f"`reference` and `optimized` is accepted."
        )
    if present is not None or importlib.util.find_spec(ROOT) is not None or _installed():
        raise RuntimeError(
            f"install_as_transformer_engine: the real {ROOT} is installed here; an environment without it is accepted "
            f"(pip uninstall transformer-engine)."
        )
    modules = _modules(package)
    sys.modules.update(modules)
    sys.meta_path.insert(0, _finder)  # type: ignore[arg-type]
    _rename_all(modules)


def uninstall() -> None:
    """Undo `install`, for tests."""
    for name in [one for one in sys.modules if one.partition(".")[0] in (ROOT, f"{ROOT}_torch")]:
        del sys.modules[name]
    sys.meta_path[:] = [one for one in sys.meta_path if one is not _finder]
    for cls, own in _own_names.items():
        cls.__module__ = own
    for cls, before in _pickled_before.items():
        if before is None:
            del cls.__reduce_ex__  # type: ignore[misc]
        else:
            cls.__reduce_ex__ = before  # type: ignore[method-assign]
    _own_names.clear()
    _pickled_before.clear()


def _installed() -> bool:
    try:
        importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
