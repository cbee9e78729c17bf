"""`Float8Tensor`: a weight that is kept in FP8 only and behaves as a tensor of the dtype that it stands for.

It holds codes q `[out, in]` (E4M3), scale_inv fp32 `[1]` and, from the first forward that needs a gradient on, the
transposed codes `[in, out]`, but no 16-bit copy. Its scale and amax history are a column of a module's FP8 state. T is
its dtype: fp32, bf16 or fp16.

    read     w = round_T( fp32(q) · scale_inv )             two roundings: of the product to fp32, then to T
    write w' q = cast(fp32(w') · scale[column])             the scale as it is now; the cast of `twin::cast`
             scale_inv = 1 / scale[column]                  IEEE division
             amax_history[0, column] = max(itself, max |w'|)

* `copy_` of plain numbers writes them from their own dtype (fp32, bf16, fp16; others are rounded to T first), so an
  optimizer's fp32 master weights do not pass through T. `copy_` of another Float8Tensor copies codes and scale_inv: it
  casts nothing and records no amax. Any other op that changes the weight reads it, works in T, and writes the result:
  AdamW's two in-place ops are two writes. A write to a view reads and writes the whole weight.
* A write leaves the scale alone. When the outermost autocast ends, the module's scales are updated
  (`reference.ops.scale_update`) with the amax, and the next write uses the new scale. 16-bit weights that are cast in
  each forward follow the same rule, so with master weights both train with the same bits.
* Transposed codes that exist are rewritten by each write, in the same launch.
* `clone`, `to(device)` and `deepcopy` give a Float8Tensor with state of its own; `to(dtype)` gives plain numbers. A
  module's `to(dtype)` changes T and leaves the codes alone.

Source: Transformer Engine's `pytorch/tensor/float8_tensor.py` (whose first scale is 1, too).
"""

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from reference.ops.library import LIBRARY, twin
from reference.scaling import FP8TensorMeta

__all__ = ["Float8Tensor"]

# A compiled layer reads a weight through this op: with the inner tensors its graph would have no gradient for it.
LIBRARY.define("float8_operand(Tensor weight, bool transpose) -> Tensor[]")

aten = torch.ops.aten
_SHARED = (aten.detach.default, aten.alias.default)
_COPIES = (aten.clone.default, aten._to_copy.default)
_CAST_FROM = (torch.float32, torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
NO_MEMORY = "Float8Tensor: it has no memory of its own; `dequantize()` gives a tensor that has."


class _Readable(torch.Tensor):
    """A tensor whose ops read `dequantize()` and write in-place changes by `quantize_`.

    It has no memory of its own. What hands memory out, such as `to_dlpack`, raises an error, not address 0.
    """

    def dequantize(self) -> torch.Tensor:
        """Its numbers, as a plain tensor without history."""
        raise NotImplementedError

    def quantize_(self, values: torch.Tensor) -> "_Readable":
        """Write `values`, broadcast to its shape."""
        write([(self, values)])
        return self

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Refused."""
        raise BufferError(NO_MEMORY)

    def data_ptr(self) -> int:
        """0, by which torch's `deepcopy` knows a tensor without memory."""
        return 0

    def _shared(self) -> "_Readable":
        """Another tensor of the same memory, as `detach` gives it."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in _SHARED:
            return args[0]._shared()
        if func is aten.copy_.default and isinstance(args[0], _Readable):
            return args[0].quantize_(args[1])
        if func is torch.ops.twin.float8_operand.default:
            codes, transposed, scale_inv = args[0]._operand(args[1])
            return [codes, scale_inv, *([] if transposed is None else [transposed])]
        if func in _COPIES and isinstance(args[0], Float8Tensor) and kwargs.get("dtype") in (None, args[0].dtype):
            return args[0]._copied(kwargs.get("device") or args[0].device)
        return _dispatch_plain(func, args, kwargs)

    # `weight.data = values` writes plain values; torch itself accepts another Float8Tensor only.
    data = property(lambda self: self.detach(), lambda self, values: self.quantize_(values))  # type: ignore[assignment]


def _dispatch_plain(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an op on plain numbers, write back what it changed, and wrap the views that it returns."""
    read: dict[int, torch.Tensor] = {}
    owners: dict[int, _Readable] = {}

    def plain(x: Any) -> Any:
        if not isinstance(x, _Readable):
            return x
        if id(x) not in read:
            read[id(x)] = x.dequantize()
            owners[id(read[id(x)])] = x
        return read[id(x)]

    out = func(*tree_map(plain, args), **tree_map(plain, kwargs))
    if func._schema.is_mutable:
        given = zip(func._schema.arguments, args, strict=False)
        named = ((argument, kwargs.get(argument.name)) for argument in func._schema.arguments)
        written = [x for argument, x in (*given, *named) if argument.alias_info and argument.alias_info.is_write]
        write([(x, read[id(x)]) for x in tree_leaves(written) if isinstance(x, _Readable)])
    elif func.is_view:

        def make(i: int | None, whole: torch.Tensor) -> Any:
            made = func(whole, *args[1:], **kwargs)
            return made if i is None else made[i]

        if isinstance(out, torch.Tensor):
            return _View(out, args[0], functools.partial(make, None))
        return [_View(like, args[0], functools.partial(make, i)) for i, like in enumerate(out)]
    return tree_map(lambda x: owners.get(id(x), x), out)


@dataclass
class _Kept:
    """What a weight and its aliases have in common."""

    codes: torch.Tensor
    scale_inv: torch.Tensor
    transposed: torch.Tensor | None
    meta: FP8TensorMeta | None  # None inside a compiled graph, which writes no weight

    def state(self) -> FP8TensorMeta:
        """Scale and amax history."""
        if self.meta is None:
            raise RuntimeError(
                "Float8Tensor: a weight kept in FP8 is written or copied inside torch.compile, where it has no scale; "
                "an optimizer that does not compile its step is accepted: te.optimizers.FusedAdam or torch.optim's, "
                "not torchao's AdamW8bit."
            )
        return self.meta

    def moved(self, device: torch.device, copied: bool = False) -> "_Kept":
        """The same on another device, with the same state; zeros where it comes from the meta device."""
        if self.codes.is_meta and device.type != "meta":
            codes = torch.zeros(self.codes.shape, dtype=torch.uint8, device=device).view(FP8)
            return _Kept(codes, torch.ones(1, dtype=torch.float32, device=device), None, self.meta)
        transposed = None if self.transposed is None else self.transposed.to(device, copy=copied)
        return _Kept(self.codes.to(device, copy=copied), self.scale_inv.to(device, copy=copied), transposed, self.meta)


class Float8Tensor(_Readable):
    """See the module's docstring. `Float8Tensor.of(values, meta, column)` casts a plain tensor."""

    _kept: _Kept
    _column: int
    _high_precision_init_val: torch.Tensor | None

    @staticmethod
    def __new__(cls: Any, kept: _Kept, dtype: torch.dtype, column: int) -> "Float8Tensor":
        """Wrap codes; `dtype` is T."""
        shape, device = kept.codes.shape, kept.codes.device
        self: Float8Tensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        torch._C._set_throw_on_mutable_data_ptr(self)
        self._kept, self._column = kept, column
        return self

    @staticmethod
    def of(values: torch.Tensor, meta: FP8TensorMeta, column: int) -> "Float8Tensor":
        """A new weight of the dtype of `values` `[out, in]`, which are written to it."""
        codes = torch.empty(values.shape, dtype=FP8, device=values.device)
        scale_inv = torch.empty(1, dtype=torch.float32, device=values.device)
        weight = Float8Tensor.of_codes(codes, scale_inv, values.dtype, meta, column)
        weight.quantize_(values)
        return weight

    @staticmethod
    def of_codes(
        codes: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype, meta: FP8TensorMeta, column: int
    ) -> "Float8Tensor":
        """A weight of codes that exist already."""
        return Float8Tensor(_Kept(codes, scale_inv, None, meta), dtype, column)

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Its numbers in `dtype` (None: its own), as a plain tensor without history."""
        return dequantized(self._data, self._scale_inv, dtype or self.dtype)

    def operand(self, transpose: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Codes, transposed codes if `transpose` (they are kept from then on), and scale_inv, for GEMMs."""
        codes, transposed, scale_inv = self._operand(transpose)
        self._kept.transposed = self._kept.transposed if transposed is None else transposed
        return codes, transposed, scale_inv

    def _operand(self, transpose: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        transposed = self._transpose
        if transpose and transposed is None:
            transposed = self._data.view(torch.uint8).t().contiguous().view(FP8)
        return self._data, transposed if transpose else None, self._scale_inv

    def bind(self, meta: FP8TensorMeta) -> None:
        """Use the scales of `meta` from now on."""
        self._kept.meta = meta

    def follow(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply the device and dtype of `nn.Module._apply`'s function; the codes stay as they are."""
        like = fn(torch.empty(1, dtype=self.dtype, device=self.device))
        if like.device.type == "cpu" and like.is_shared():
            self.share_memory_()
        if (like.device, like.dtype) == (self.device, self.dtype):
            return
        moved: Any = Float8Tensor(self._kept.moved(like.device), like.dtype, self._column)
        moved = torch.nn.Parameter(moved, self.requires_grad)
        vars(moved).update((name, value) for name, value in vars(self).items() if name not in vars(moved))
        grad, self.grad = self.grad, None
        torch.utils.swap_tensors(self, moved)
        self.grad = None if grad is None else fn(grad)

    def share_memory_(self) -> "Float8Tensor":
        """Move codes and scale_inv into memory that processes share, as torch's tensors do; drop transposed codes."""
        self._kept.codes = self._data.view(torch.uint8).share_memory_().view(FP8)
        self._kept.scale_inv.share_memory_()
        self._kept.transposed = None
        return self

    def is_shared(self) -> bool:
        """Whether processes share its codes' memory; always true on CUDA."""
        return self._data.is_shared()

    @property
    def get_high_precision_init_val(self) -> Callable[[], torch.Tensor | None]:
        """A method that returns the weight's initial values, if `quantized_model_init` preserved them."""
        if "_high_precision_init_val" not in vars(self):
            raise AttributeError("this weight was not made with preserve_high_precision_init_val=True.")
        return lambda: self._high_precision_init_val

    @property
    def clear_high_precision_init_val(self) -> Callable[[], None]:
        """A method that frees what `get_high_precision_init_val` returns."""
        self.get_high_precision_init_val  # noqa: B018  (raises where nothing was preserved)
        return lambda: setattr(self, "_high_precision_init_val", None)

    # Transformer Engine's names.
    _data = property(lambda self: self._kept.codes)
    _scale_inv = property(lambda self: self._kept.scale_inv)
    _transpose = property(lambda self: self._kept.transposed)

    def _shared(self) -> "Float8Tensor":
        return Float8Tensor(self._kept, self.dtype, self._column)

    def _copied(self, device: torch.device) -> "Float8Tensor":
        """A copy on `device` with state of its own."""
        kept = self._kept.moved(device, copied=True)
        kept.meta = copy.deepcopy(kept.state())
        kept.meta.apply(lambda x: x.to(device))
        return Float8Tensor(kept, self.dtype, self._column)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As bytes: torch's storages of float8 do not survive plain pickle.
        kept = (self._data.view(torch.uint8), self._scale_inv, self.dtype, self._kept.meta, self._column)
        return _rebuilt, (*kept, self.requires_grad, isinstance(self, torch.nn.Parameter))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Float8Tensor({self.dequantize()}, scale_inv={self._scale_inv})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.dtype, int]]:
        names = ["_data", "_scale_inv"] if self._transpose is None else ["_data", "_scale_inv", "_transpose"]
        return names, (self.dtype, self._column)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> "Float8Tensor":
        return Float8Tensor(_Kept(inner["_data"], inner["_scale_inv"], inner.get("_transpose"), None), *context)


def _rebuilt(codes: torch.Tensor, *rest: Any) -> torch.Tensor:
    *arguments, requires_grad, parameter = rest
    weight = Float8Tensor.of_codes(codes.view(FP8), *arguments)
    return torch.nn.Parameter(weight, requires_grad) if parameter else weight.requires_grad_(requires_grad)


class _View(_Readable):
    """A view of a Float8Tensor, or of such a view; `make` computes it from the source's numbers."""

    _source: _Readable
    _make: Callable[[torch.Tensor], torch.Tensor]

    @staticmethod
    def __new__(
        cls: Any, like: torch.Tensor, source: _Readable, make: Callable[[torch.Tensor], torch.Tensor]
    ) -> "_View":
        self: _View = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        torch._C._set_throw_on_mutable_data_ptr(self)
        self._source, self._make = source, make
        return self

    def dequantize(self) -> torch.Tensor:
        return self._make(self._source.dequantize())

    def _shared(self) -> "_View":
        return _View(self, self._source, self._make)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{self.dequantize()}, a view of a Float8Tensor"


def operand(weight: Float8Tensor, transpose: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """`weight.operand(transpose)`, in a form that a compiler can trace; compiled, it keeps no transposed codes."""
    if not torch.compiler.is_compiling():
        return weight.operand(transpose)
    codes, scale_inv, *transposed = torch.ops.twin.float8_operand(weight, transpose)
    return codes, transposed[0] if transpose else None, scale_inv


def dequantized(codes: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """round_dtype( fp32(code) · scale_inv ), a plain tensor, without a temporary in fp32."""
    wide = codes.to(dtype)  # exact: bf16 and fp16 hold every E4M3 number
    return torch.mul(wide, scale_inv, out=torch.empty_like(wide))


@torch.no_grad()
def write(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write values to Float8Tensors and views; one launch per device and dtype writes those with transposed codes."""
    together: dict[tuple[torch.device, torch.dtype], list[tuple[Float8Tensor, torch.Tensor]]] = {}
    for target, values in pairs:
        if isinstance(target, _View):
            whole = target._source.dequantize()
            target._make(whole).copy_(values)
            target._source.quantize_(whole)
        elif isinstance(target, Float8Tensor):
            kept = target._kept
            tensors = (kept.codes, kept.scale_inv, kept.transposed)
            # Ops on subclasses run below autograd, which increments no version: a backward that saved them must notice.
            torch.autograd.graph.increment_version([x for x in tensors if x is not None])
            if isinstance(values, Float8Tensor):
                kept.codes.copy_(values._data)
                kept.scale_inv.copy_(values._scale_inv)
                if kept.transposed is not None:
                    kept.transposed.copy_(kept.codes.view(torch.uint8).t().view(FP8))
                continue
            values = values.dequantize() if isinstance(values, _Readable) else values.detach()
            dtype = values.dtype if values.dtype in _CAST_FROM else target.dtype
            values = values.to(target.device, dtype).expand(target.shape).contiguous()
            if kept.transposed is not None:
                together.setdefault((target.device, dtype), []).append((target, values))
                continue
            meta = kept.state()
            codes, scale_inv = twin.cast(values, meta.scale, meta.amax_history, target._column, FP8)
            kept.codes.copy_(codes)
            kept.scale_inv.copy_(scale_inv)
    for found in together.values():
        weights = [weight._kept for weight, _ in found]
        twin.multi_cast_transpose(
            [values for _, values in found],
            [kept.state().scale for kept in weights],
            [kept.state().amax_history for kept in weights],
            [weight._column for weight, _ in found],
            [kept.codes for kept in weights],
            [kept.transposed for kept in weights],
            [kept.scale_inv for kept in weights],
        )
