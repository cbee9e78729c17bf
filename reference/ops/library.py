"""The namespace `twin`: every operation both sides implement.

`reference.ops.<name>` declares `twin::<name>` by its definition (`define`), which is its CPU implementation;
`optimized.ops.<name>` registers the CUDA one (`on_cuda`). The device of the tensors decides which runs:
through torch's dispatcher as `torch.ops.twin.<name>`, and in the layers past it as `twin.<name>` of this file, because
its two Python levels cost more than most launches (docs/layer.md). Compilers, dispatch modes and everything else that
looks at ops sees both alike.

An op is declared once: the definition's signature is its schema, and one function of the same arguments, `outputs`,
refuses bad ones and makes room for the results, on either device and for a compiler.

Four rules, each the answer to a bug found by trial:

* ops run inside an `autograd.Function` only: called where gradients would be recorded, they raise,
  because a raw library op has no derivative and its result would silently be a constant;
* a mutated argument (the amax history, the scale) gets its version bumped, which
  `Library.impl` does not do by itself, so that autograd notices a stale saved tensor;
* a device that has no implementation is named in a sentence;
* on the CPU they refuse to run where subnormal numbers are flushed to zero, whenever that was turned on.
"""

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar, cast, get_args, get_type_hints

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from reference.denormals import check_denormals

_IMPLEMENTATIONS: dict[str, dict[str, Callable[..., Any]]] = {"CPU": {}, "CUDA": {}}
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # no subclass that wants to see the call


class _Library(torch.library.Library):
    """torch's, which also notes the implementations of both sides."""

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        """Register `fn` as `twin::<op_name>` for a dispatch key."""
        super().impl(op_name, fn, dispatch_key, **options)
        if dispatch_key in _IMPLEMENTATIONS:
            _IMPLEMENTATIONS[dispatch_key][op_name] = fn


LIBRARY = _Library("twin", "DEF")
twin = SimpleNamespace()
"""The ops by name, for the layers: `torch.ops.twin` without the dispatcher, where nothing would look at the call.
`vars(twin)` has them all."""

# What a parameter's annotation is in a schema, without what `mutates` adds. Not `torch.library.infer_schema`: to it, an
# int is one that a compiler may leave unknown.
_TYPES: dict[Any, str] = {
    torch.Tensor: "Tensor",
    torch.Tensor | None: "Tensor?",
    list[torch.Tensor]: "Tensor[]",
    list[int]: "int[]",
    torch.dtype: "ScalarType",
    **{kind: kind.__name__ for kind in (int, float, bool, str)},
}
_Function = TypeVar("_Function", bound=Callable[..., Any])


def schema(function: Callable[..., Any], mutates: Sequence[str] = ()) -> str:
    """The schema of an op with the signature of `function`, which changes the arguments named in `mutates`."""
    parameters = get_type_hints(function)
    returned = parameters.pop("return")
    if unknown := set(mutates) - set(parameters):
        raise ValueError(f"{function.__name__}: mutates names {sorted(unknown)}; {list(parameters)} are accepted.")
    arguments, aliases = [], iter("abcdefgh")
    for name, kind in parameters.items():
        written = _TYPES[kind].replace("Tensor", f"Tensor({next(aliases)}!)") if name in mutates else _TYPES[kind]
        arguments.append(f"{written} {name}")
    tensors = get_args(returned) or (() if returned is type(None) else (returned,))
    results = ", ".join(_TYPES[kind] for kind in tensors)
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
    """The sentence for tensors on devices on which `twin::<name>` does not run."""
    where = ", ".join(sorted(map(str, devices)))
    if {device.type for device in devices} == {"cuda"}:
        return (
            f"twin::{name} got tensors on {where}, and the CUDA kernels are not loaded: "
            f"`import optimized` first (it needs a Hopper GPU and CuPy), or move the tensors to the CPU."
        )
    return f"twin::{name} got tensors on {where}; it runs on one device, 'cpu' (reference) or 'cuda' (optimized)."


def _watched() -> bool:
    """Whether a dispatch mode, of those there are, wants to see ops: one that is not `transparent` for them."""
    return not all(getattr(mode, "transparent", False) for mode in _get_current_dispatch_mode_stack())


def define(outputs: Callable[..., Any], mutates: Sequence[str] = ()) -> Callable[[_Function], _Function]:
    """Declare the op that the decorated function defines: its name, its signature, the CPU's implementation.

    Args:
        outputs: takes the op's arguments, refuses bad ones in a sentence and makes room for what the op returns, if
            anything. It is all that a compiler runs (the op's fake), and what both implementations call before they
            change anything.
        mutates: names of the arguments that the op changes.
    """

    def register(function: _Function) -> _Function:
        name = function.__name__
        _declare(name, schema(function, mutates))
        torch.library.register_fake(f"twin::{name}", outputs, lib=LIBRARY)

        @functools.wraps(function)
        def definition(*args: Any) -> Any:
            check_denormals()
            return function(*args)

        LIBRARY.impl(name, definition, "CPU")
        return cast(_Function, definition)

    return register


def on_cuda(function: _Function) -> _Function:
    """Register the decorated function as the CUDA implementation of the op that has its name."""
    LIBRARY.impl(function.__name__, function, "CUDA")
    return function


def runs_on_cuda(name: str) -> bool:
    """Whether `twin::<name>` has a CUDA implementation in this process: whether `optimized` is imported."""
    return name in _IMPLEMENTATIONS["CUDA"]


def _declare(name: str, written: str) -> None:
    """Declare `twin::<name>` with a schema, its rules, and the way past the dispatcher to its implementations."""
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
            torch.autograd.graph.increment_version(changed)  # passes over inference tensors, which have none

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
        # A compiler takes the first way out. Inside an autograd.Function, as in every layer, grad mode is off.
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
