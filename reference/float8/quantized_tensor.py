"""`QuantizedTensor`: a tensor that holds its numbers in another form, and views of it.

An op reads the numbers in the tensor's dtype T and gives a plain tensor. An op that changes the tensor reads it, works
in T, and writes the result in the form that the tensor holds. A view of a part reads and writes the whole.

Source: Transformer Engine's `pytorch/quantized_tensor.py`.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from reference.support import not_offered

aten = torch.ops.aten
_SHARED = (aten.detach.default, aten.alias.default)
_COPIES = (aten.clone.default, aten._to_copy.default)
_PARTS = (
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.as_strided.default,
)


@not_offered.without_methods
class QuantizedTensor(torch.Tensor):
    """The base of `te.Float8Tensor` and of views of it.

    It has no memory of its own. What hands memory out, such as `to_dlpack`, raises an error, not address 0.
    """

    def numbers(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Its numbers in `dtype` (None: its own), as a plain tensor without history."""
        raise NotImplementedError

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Its numbers in `dtype` (None: its own), as a plain tensor; the gradient passes as it is."""
        if torch.is_grad_enabled() and self.requires_grad:
            return _Dequantize.apply(self, dtype)  # type: ignore[no-any-return, no-untyped-call]
        return self.numbers(dtype)

    def quantize_(self, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None) -> "QuantizedTensor":
        """Write `tensor`, broadcast to its shape, unless `noop_flag` (a tensor of one number, which is read) is 1.

        The numbers of a quantized tensor are cast anew; `copy_` copies the codes of a Float8Tensor.
        """
        if noop_flag is None or noop_flag.item() != 1:
            write([(self, tensor.numbers() if isinstance(tensor, QuantizedTensor) else tensor)])
        return self

    @classmethod
    def write_all(cls, pairs: list[tuple[Any, torch.Tensor]]) -> None:
        """Write values to tensors of this class."""
        raise NotImplementedError

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Refused."""
        raise BufferError(
            f"{type(self).__name__}: it has no memory of its own; `dequantize()` gives a tensor that has."
        )

    def data_ptr(self) -> int:
        """0, by which torch's `deepcopy` knows a tensor without memory."""
        return 0

    def _shared(self) -> "QuantizedTensor":
        """Another tensor of the same memory, as `detach` gives it."""
        raise NotImplementedError

    def _reshaped(self, shape: torch.Size) -> "QuantizedTensor | None":
        """The same memory in another shape, if it can be had."""
        return None

    def _parts(self, make: Callable[[torch.Tensor], Any]) -> Any:
        """Parts of the same memory, as `make` cuts them out of a plain tensor, if they can be had."""
        return None

    def _zeros(self, size: Sequence[int]) -> "QuantizedTensor | None":
        """Zeros of the same kind, where `fully_shard` asks for a place for a rank's rows."""
        return None

    def _is_itself(self, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> bool:
        """Whether `as_strided` of these arguments is the whole tensor."""
        return not isinstance(self, View) and (tuple(size), tuple(stride)) == (self.shape, self.stride()) and not offset

    def _copied(self, device: torch.device) -> "QuantizedTensor | None":
        """A copy of the same kind, if there is one."""
        return None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and _composite(func):  # elsewhere autograd has decomposed it
            return func.decompose(*args, **kwargs)
        x: Any = args[0] if args else None
        found = None
        if func in _SHARED:
            return x._shared()
        if func is aten.copy_.default and isinstance(x, QuantizedTensor):
            write([(x, args[1])])
            return x
        if func is torch.ops.twin.float8_operand.default:
            return x._operand(args[1])
        if func is aten.new_zeros.default and isinstance(x, QuantizedTensor):
            found = x._zeros(args[1])
        elif func is aten.as_strided.default and isinstance(x, QuantizedTensor) and x._is_itself(*args[1:]):
            found = x._shared()
        elif func in _COPIES and isinstance(x, QuantizedTensor) and kwargs.get("dtype") in (None, x.dtype):
            found = x._copied(kwargs.get("device") or x.device)
        elif func is aten.view.default and isinstance(x, QuantizedTensor):
            found = x._reshaped(torch.empty(x.shape, dtype=torch.uint8, device="meta").view(args[1]).shape)
        elif func in _PARTS and isinstance(x, QuantizedTensor):
            found = x._parts(lambda whole: func(whole, *args[1:], **kwargs))
        return _dispatch_plain(func, args, kwargs) if found is None else found

    def _set_values(self, values: torch.Tensor) -> None:
        """What `data = values` does."""
        if values.shape == self.shape:
            write([(self, values)])
        else:
            self._replace(values)

    def _replace(self, values: torch.Tensor) -> None:
        """Take values of another shape."""
        raise NotImplementedError

    # `weight.data = values` writes plain values; torch itself accepts another tensor of the same class only.
    data = property(lambda self: self.detach(), _set_values)  # type: ignore


def _composite(func: Any) -> bool:
    """Whether an op consists of others."""
    found: bool = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return found


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: QuantizedTensor, dtype: torch.dtype | None) -> torch.Tensor:
        return x.numbers(dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _dispatch_plain(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an op on plain numbers, write back what it changed, and wrap the views that it returns."""
    read: dict[int, torch.Tensor] = {}
    owners: dict[int, QuantizedTensor] = {}

    def plain(x: Any) -> Any:
        if not isinstance(x, QuantizedTensor):
            return x
        if id(x) not in read:
            read[id(x)] = x.numbers()
            owners[id(read[id(x)])] = x
        return read[id(x)]

    out = func(*tree_map(plain, args), **tree_map(plain, kwargs))
    if func._schema.is_mutable:
        given = zip(func._schema.arguments, args, strict=False)
        named = ((argument, kwargs.get(argument.name)) for argument in func._schema.arguments)
        written = [x for argument, x in (*given, *named) if argument.alias_info and argument.alias_info.is_write]
        write([(x, read[id(x)]) for x in tree_leaves(written) if isinstance(x, QuantizedTensor)])
    elif func.is_view:

        def make(i: int | None, whole: torch.Tensor) -> Any:
            made = func(whole, *args[1:], **kwargs)
            return made if i is None else made[i]

        if isinstance(out, torch.Tensor):
            return View(out, args[0], functools.partial(make, None))
        return [View(like, args[0], functools.partial(make, i)) for i, like in enumerate(out)]
    return tree_map(lambda x: owners.get(id(x), x), out)


def wrapper(
    cls: Any,
    of: torch.Tensor,
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    strides: Sequence[int] | None = None,
) -> Any:
    """A tensor of class `cls` without memory; in inference mode it is what a view of `of` is."""
    if torch.is_inference_mode_enabled() and not of.is_inference():
        with torch.inference_mode(False):
            return wrapper(cls, of, shape, dtype, device, strides)
    made = torch.Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=dtype, device=device)  # type: ignore
    torch._C._set_throw_on_mutable_data_ptr(made)
    return made


class View(QuantizedTensor):
    """A view of a part of a quantized tensor, or of such a view; `make` computes it from the source's numbers."""

    _source: QuantizedTensor
    _make: Callable[[torch.Tensor], torch.Tensor]

    @staticmethod
    def __new__(
        cls: Any, like: torch.Tensor, source: QuantizedTensor, make: Callable[[torch.Tensor], torch.Tensor]
    ) -> "View":
        self: View = wrapper(cls, source, like.shape, like.dtype, like.device, like.stride())
        self._source, self._make = source, make
        return self

    def numbers(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._make(self._source.numbers(dtype))

    @classmethod
    def write_all(cls, pairs: list[tuple[Any, torch.Tensor]]) -> None:
        for view, values in pairs:
            whole = view._source.numbers()
            view._make(whole).copy_(values)
            view._source.quantize_(whole)

    def _replace(self, values: torch.Tensor) -> None:
        raise ValueError(
            f"{type(self).__name__}: data has shape {list(values.shape)}; that of the view, {list(self.shape)}, is "
            f"accepted."
        )

    def _shared(self) -> "View":
        return View(self, self._source, self._make)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{self.numbers()}, a view of a quantized tensor"


@torch.no_grad()
def write(pairs: Iterable[tuple[Any, torch.Tensor]]) -> None:
    """Write values, each broadcast to the shape of its tensor; tensors of one class together."""
    by_class: dict[type[QuantizedTensor], list[tuple[QuantizedTensor, torch.Tensor]]] = {}
    for target, values in pairs:
        by_class.setdefault(type(target), []).append((target, values))
    for cls, found in by_class.items():
        cls.write_all(found)
