"""Which modules are read by attribute: their owner's code takes their weight and computes with it itself.

Examples: `torch.nn.TransformerEncoderLayer` in its fast path, Bloom's attention, Mamba's `dt_proj`. Such a module stays
as it is, because a layer of ours in its place would not be called. Where the owner's source is not at hand, nothing is
found.
"""

import ast
import functools
import inspect
import textwrap
from typing import Any

import torch

_HARMLESS = ("dtype", "device", "shape", "ndim", "requires_grad")
_NO_FORWARD = ("init", "reset", "tie", "set_")  # parts of the names of methods that compute no output


def reads_weight(owner: torch.nn.Module, attribute: str) -> str | None:
    """The method of `owner` that reads the weight or bias of its module `attribute`, as `Class.method`."""
    for cls in type(owner).__mro__:
        if cls is torch.nn.Module:
            return None
        if attribute in _read_by(cls):
            return f"{cls.__name__}.{_read_by(cls)[attribute]}"
    return None


@functools.cache
def _read_by(cls: type) -> dict[str, str]:
    """Attribute → method, for every `self.<attribute>.weight` or `.bias` in the source of a class."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return {}
    found: dict[str, str] = {}
    for method in ast.walk(tree):
        if isinstance(method, ast.FunctionDef) and not any(part in method.name for part in _NO_FORWARD):
            owners = {child: node for node in ast.walk(method) for child in ast.iter_child_nodes(node)}
            for node in ast.walk(method):
                attribute = _weight_of(node)
                if attribute is not None and not _is_harmless(owners[node]):
                    found.setdefault(attribute, method.name)
    return found


def _weight_of(node: Any) -> str | None:
    """`name` of a node `self.name.weight` or `self.name.bias` that is read."""
    match node:
        case ast.Attribute(
            value=ast.Attribute(value=ast.Name(id="self"), attr=name), attr="weight" | "bias", ctx=ast.Load()
        ):
            return str(name)
    return None


def _is_harmless(owner: Any) -> bool:
    """Whether no number is read: a dtype, a device, a question about its type."""
    match owner:
        case ast.Attribute(attr=name):
            return name in _HARMLESS
        case ast.Call(func=ast.Name(id="isinstance" | "hasattr" | "getattr" | "id")):
            return True
        case ast.Compare(ops=[ast.Is() | ast.IsNot()]):
            return True
    return False
