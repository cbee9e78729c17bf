"""Tensors in nested tuples, and the same tensors as one flat tuple.

What a forward saves for its backward has names (NamedTuples, which may contain others). autograd keeps one flat tuple
of tensors. A form says how the nested tuples are put together again.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

Tensors = tuple[torch.Tensor | None, ...]


class Form(NamedTuple):
    """A tuple of `cls`, whose parts are None (the next tensor of the flat tuple), another form, or a constant."""

    cls: type
    parts: tuple[Any, ...]


def flatten(nested: Any) -> tuple[Tensors, Any]:
    """The tensors of nested tuples in their order, and the form; None counts as a tensor, all else as a constant."""
    found: list[torch.Tensor | None] = []
    form = _collect(nested, found)
    return tuple(found), form


def _collect(x: Any, found: list[torch.Tensor | None]) -> Any:
    if x is None or isinstance(x, torch.Tensor):
        found.append(x)
        return None
    if isinstance(x, tuple):
        return Form(type(x), tuple([_collect(one, found) for one in x]))
    return x


def rebuild(form: Any, tensors: Tensors) -> Any:
    """The nested tuples of a form and the tensors of `flatten`."""
    return _rebuilt(form, iter(tensors))


def _rebuilt(form: Any, tensors: Iterator[torch.Tensor | None]) -> Any:
    if form is None:
        return next(tensors)
    if not isinstance(form, Form):
        return form
    parts = [_rebuilt(one, tensors) for one in form.parts]
    return tuple(parts) if form.cls is tuple else form.cls(*parts)


def tensors_of(nested: Any) -> list[torch.Tensor]:
    """The tensors of nested tuples, without what is None."""
    return [t for t in flatten(nested)[0] if t is not None]
