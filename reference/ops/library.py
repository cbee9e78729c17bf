"""The namespace `twin`: every operation that both sides implement, and a few that only the CPU has (`CPU_ONLY`).

An op is declared once, in `reference.ops.<name>`, by its definition (`define`), which is the CPU's implementation;
`optimized.ops.<name>` registers the CUDA one (`on_cuda`). The definition's signature is the schema. A function of the
same arguments, `outputs`, refuses bad ones and allocates the results, on either device and for a compiler.

The device of the tensors decides which implementation runs. `torch.ops.twin.<name>` goes through torch's dispatcher.
The layers call `twin.<name>` of this file, which goes past it, because the dispatcher's two Python levels cost more
than most launches (docs/layer.md). Compilers, dispatch modes and whatever else observes ops see both alike.

Four rules, each of which prevents a bug that was found by trial:

* an op raises where gradients would be recorded, that is, outside of an `autograd.Function`: a raw library op has no
  derivative, and its result would silently be a constant;
* the version of each mutated argument (an amax history, a scale) is incremented, which `Library.impl` does not do, so
  that autograd notices a stale saved tensor;
* a device without an implementation is named in the error;
* on the CPU an op refuses to run while subnormal numbers are flushed to zero.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar, cast, get_args, get_type_hints

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from reference.numbers.denormals import check_denormals

_IMPLEMENTATIONS: dict[str, dict[str, Callable[..., Any]]] = {"CPU": {}, "CUDA": {}}
CPU_ONLY: dict[str, str] = {}
"""The ops without a CUDA side → why they have none."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # subclasses may override the call


class _Library(torch.library.Library):
    """torch's, which also keeps the implementations of both sides."""

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        """Register `fn` as `twin::<op_name>` for a dispatch key."""
        super().impl(op_name, fn, dispatch_key, **options)
        if dispatch_key in _IMPLEMENTATIONS:
            _IMPLEMENTATIONS[dispatch_key][op_name] = fn


def _refuse_twice() -> None:
    """Refuse to declare the ops a second time, under another name of this package: each call would run either's."""
    ending = "reference.ops.library"
    for name, other in list(sys.modules.items()):
        if name != __name__ and (name == ending or name.endswith(f".{ending}")) and hasattr(other, "LIBRARY"):
            first, second = name.removesuffix(".ops.library"), __name__.removesuffix(".ops.library")
            raise ImportError(
                f"Twin Engine is imported twice, as {first!r} ({other.__file__}) and as {second!r} ({__file__}): "
                f"in one process import the wheel's `twin_engine` or a clone's `reference` and `optimized`, not both."
            )


_refuse_twice()
LIBRARY = _Library("twin", "DEF")
twin = SimpleNamespace()
"""The ops by name, for the layers: `torch.ops.twin` without the dispatcher, unless something observes the call."""

# Annotations in schemas. `torch.library.infer_schema` would make an int one that a compiler may leave unknown.
_TYPES: dict[Any, str] = {
    torch.Tensor: "Tensor",
    torch.Tensor | None: "Tensor?",
    int | None: "int?",
    list[torch.Tensor]: "Tensor[]",
    list[int]: "int[]",
    torch.dtype: "ScalarType",
    **{hint: hint.__name__ for hint in (int, float, bool, str)},
}
_Function = TypeVar("_Function", bound=Callable[..., Any])


def schema(function: Callable[..., Any], mutates: Sequence[str] = ()) -> str:
    """The schema of an op with the signature of `function`, which changes the arguments named in `mutates`.

    Arguments may have the default None, and no other.
    """
    parameters = get_type_hints(function)
    defaults = inspect.signature(function).parameters
    returned = parameters.pop("return")
    if unknown := set(mutates) - set(parameters):
        raise ValueError(f"{function.__name__}: mutates names {sorted(unknown)}; {list(parameters)} are accepted.")
    arguments, aliases = [], iter("abcdefgh")
    for name, hint in parameters.items():
        written = _TYPES[hint].replace("Tensor", f"Tensor({next(aliases)}!)") if name in mutates else _TYPES[hint]
        default = defaults[name].default
        arguments.append(f"{written} {name}" + ("=None" if default is None else ""))
    tensors = get_args(returned) or (() if returned is type(None) else (returned,))
    results = ", ".join(_TYPES[hint] for hint in tensors)
    return f"({', '.join(arguments)}) -> {results if len(tensors) == 1 else f'({results})'}"


def _tensors(args: Sequence[Any]) -> list[torch.Tensor]:
    """Every tensor among `args`, those inside lists included."""
    found: list[torch.Tensor] = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            found += [t for t in arg if isinstance(t, torch.Tensor)]
    return found


def no_implementation(name: str, devices: set[torch.device]) -> str:
    """The error for tensors on devices without an implementation of `twin::<name>`."""
    where = ", ".join(sorted(map(str, devices)))
    if name in CPU_ONLY:
        return f"twin::{name} got tensors on {where}; it runs on 'cpu' alone: {CPU_ONLY[name]}."
    if {device.type for device in devices} == {"cuda"}:
        return (
            f"twin::{name} got tensors on {where}, and the CUDA kernels are not loaded: "
            f"`import optimized` first (it needs a Hopper GPU and CuPy), or move the tensors to the CPU."
        )
    return f"twin::{name} got tensors on {where}; it runs on one device, 'cpu' (reference) or 'cuda' (optimized)."


def _watched() -> bool:
    """Whether a dispatch mode observes ops: one that is not marked `transparent`."""
    return not all(getattr(mode, "transparent", False) for mode in _get_current_dispatch_mode_stack())


def define(
    outputs: Callable[..., Any], mutates: Sequence[str] = (), cpu_only: str | None = None
) -> Callable[[_Function], _Function]:
    """Declare the op that the decorated function defines: its name, its signature, the CPU's implementation.

    Args:
        outputs: has the op's arguments, refuses bad ones and allocates the results. Both implementations call it before
            they change anything; it is the op's fake, all that a compiler runs.
        mutates: names of the arguments that the op changes.
        cpu_only: why there is no CUDA side, the end of the sentence that refuses a GPU's tensors; None where there is.
    """

    def register(function: _Function) -> _Function:
        name = function.__name__
        if cpu_only is not None:
            CPU_ONLY[name] = cpu_only
        _declare(name, schema(function, mutates))
        torch.library.register_fake(f"twin::{name}", outputs, lib=LIBRARY)

        @functools.wraps(function)
        def definition(*args: Any) -> Any:
            check_denormals()
            if torch.is_autocast_enabled("cpu"):  # which would choose dtypes for what the definition consists of
                with torch.autocast("cpu", enabled=False):
                    return function(*args)
            return function(*args)

        LIBRARY.impl(name, definition, "CPU")
        return cast(_Function, definition)

    return register


def on_cuda(function: _Function) -> _Function:
    """Register the decorated function as the CUDA implementation of the op of the same name."""
    LIBRARY.impl(function.__name__, function, "CUDA")
    return function


def runs_on_cuda(name: str) -> bool:
    """Whether `twin::<name>` has a CUDA implementation, that is, whether `optimized` has been imported."""
    return name in _IMPLEMENTATIONS["CUDA"]


def is_defined(name: str) -> bool:
    """Whether `twin::<name>` has a definition, which runs on the CPU."""
    return name in _IMPLEMENTATIONS["CPU"]


def _declare(name: str, written: str) -> None:
    """Declare `twin::<name>` with a schema, the rules above, and `twin.<name>`, which goes past the dispatcher."""
    LIBRARY.define(name + written)
    overload = getattr(torch.ops.twin, name).default
    on_cpu, on_gpu = _IMPLEMENTATIONS.values()
    mutated = [
        position
        for position, argument in enumerate(overload._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]

    def new_versions(args: Sequence[Any]) -> None:
        changed = _tensors([args[position] for position in mutated])
        if changed:
            torch.autograd.graph.increment_version(changed)  # skips inference tensors, which have no version

    def autograd(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(t.requires_grad for t in _tensors(args)):
            raise RuntimeError(
                f"twin::{name} has no derivative of its own: call it inside an autograd.Function "
                f"or under torch.no_grad(), or use the layer that wraps it."
            )
        with torch._C._AutoDispatchBelowAutograd():
            out = overload(*args)
        if mutated:
            new_versions(args)
        return out

    def missing(*args: Any) -> Any:
        raise RuntimeError(no_implementation(name, {t.device for t in _tensors(args)}))

    def direct(*args: Any) -> Any:
        # Inside an autograd.Function, as in every layer, grad mode is off.
        if torch.compiler.is_dynamo_compiling() or torch.is_grad_enabled():
            return overload(*args)
        if torch._C._len_torch_dispatch_stack() and _watched():
            return overload(*args)
        first = args[0][0] if type(args[0]) is list and args[0] else args[0]
        side = None if type(first) not in _PLAIN else on_gpu if first.is_cuda else on_cpu if first.is_cpu else None
        function = None if side is None else side.get(name)
        if function is None:
            return overload(*args)
        out = function(*args)
        if mutated:
            new_versions(args)
        return out

    LIBRARY.impl(name, autograd, "Autograd")
    LIBRARY.impl(name, missing, "CompositeExplicitAutograd")
    setattr(twin, name, direct)
