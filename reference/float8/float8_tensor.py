"""`Float8Tensor`: a tensor that is kept in FP8 only and behaves as a tensor of the dtype that it stands for.

It holds codes q of its shape (E4M3 or E5M2), scale_inv fp32 `[1]` and, where a GEMM will read them, transposed codes
`[last, *others]`, but no 16-bit copy. T is its dtype: fp32, bf16 or fp16. A quantizer
(`reference.float8.float8_quantizer`) says its scale; for a weight of `quantized_model_init` a column of its module's
FP8 state does.

    read     x = round_T( fp32(q) · scale_inv )             two roundings: of the product to fp32, then to T
    write x' q = cast(fp32(x') · scale)                     the scale as it is now; the cast of `twin::cast`
             scale_inv = 1 / scale                          IEEE division
             amax = max(itself, max |x'|)                   where an amax is kept

* `copy_` of plain numbers writes them from their own dtype (fp32, bf16, fp16; others are rounded to T first), so an
  optimizer's fp32 master weights do not pass through T. `copy_` of another Float8Tensor of the same format copies codes
  and scale_inv: it casts nothing and records no amax. Any other op that changes the tensor reads it, works in T, and
  writes the result: AdamW's two in-place ops are two writes.
* `detach` and `view` give a tensor of the same class and memory; slices and chunks a Float8Tensor with the scale of the
  whole. Other views are `QuantizedTensor`s. A write to a part or to another view reads and writes the whole.
* `data = values` writes values of its shape. Those of another shape replace its memory.
* A write leaves the scale alone. A weight's scales are updated when the outermost autocast ends
  (`reference.ops.casts.scale_update`), and the next write uses the new scale. 16-bit weights that are cast in each
  forward follow the same rule, so with master weights both train with the same bits.
* Transposed codes that exist are rewritten by each write; a weight's in the same launch.
* `clone`, `to(device)` and `deepcopy` give a Float8Tensor with a quantizer of its own; `to(dtype)` gives plain numbers.
  A module's `to(dtype)` changes T and leaves the codes alone.
* A layer that gets one as its input reads it, and casts what it read by its own recipe. Transformer Engine's layers use
  the codes as they are.

Source: Transformer Engine's `pytorch/tensor/float8_tensor.py` (whose first scale is 1, too).
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch

from reference.arguments import check_arguments
from reference.float8.float8_like import Alike
from reference.float8.float8_quantizer import (
    FORMATS,
    TE_DTYPES,
    DType,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Quantizer,
)
from reference.float8.float8_storage import Kept
from reference.float8.quantized_tensor import QuantizedTensor, wrapper
from reference.numbers.formats import WIDE_DTYPES
from reference.ops.library import LIBRARY, twin
from reference.state.scaling import FP8TensorMeta
from reference.support import not_offered

__all__ = ["Float8Tensor"]

# A compiled layer reads a weight through this op: with the inner tensors its graph would have no gradient for it.
LIBRARY.define("float8_operand(Tensor weight, bool transpose) -> Tensor[]")

FP8 = torch.float8_e4m3fn


@not_offered.without_methods
class Float8Tensor(Alike, QuantizedTensor):
    """A tensor that is kept in FP8; the module's docstring says what it does.

    Args:
        shape, dtype: of the numbers that it stands for; dtype is fp32, bf16 or fp16.
        data: the codes, uint8 or FP8, of that shape.
        fp8_scale_inv: fp32 `[1]`; a code's number is multiplied by it.
        fp8_dtype: `te.DType.kFloat8E4M3` or `te.DType.kFloat8E5M2`.
        requires_grad: whether a gradient is wanted.
        data_transpose: the transposed codes, uint8 or FP8, `[last, *others]`.
        quantizer: what a write uses; None writes with the scale 1 / fp8_scale_inv.
        device: None or that of `data`.
    """

    _cut: ClassVar[Callable[..., Any]]  # `reference.float8.float8_part` sets it
    _kept: Kept
    _high_precision_init_val: torch.Tensor | None

    @staticmethod
    def __new__(
        cls: Any,
        shape: Iterable[int],
        dtype: torch.dtype,
        *,
        data: torch.Tensor,
        fp8_scale_inv: torch.Tensor,
        fp8_dtype: DType = DType.kFloat8E4M3,
        requires_grad: bool = False,
        data_transpose: torch.Tensor | None = None,
        quantizer: Quantizer | None = None,
        device: torch.device | str | None = None,
    ) -> "Float8Tensor":
        shape = torch.Size([shape] if isinstance(shape, int) else shape)
        check_arguments("Float8Tensor", {"dtype": dtype, "fp8_dtype": fp8_dtype, "requires_grad": requires_grad})
        te_dtype = DType(fp8_dtype)
        codes = _codes("data", data, te_dtype, shape)
        turned = shape if not shape else torch.Size((shape[-1], *shape[:-1]))
        codes_t = None if data_transpose is None else _codes("data_transpose", data_transpose, te_dtype, turned)
        inverse = fp8_scale_inv
        if inverse.dtype != torch.float32 or inverse.numel() != 1 or inverse.device != codes.device:
            raise ValueError(
                f"Float8Tensor: fp8_scale_inv is {inverse.dtype} {list(inverse.shape)} on {inverse.device}; a "
                f"torch.float32 tensor [1] on the device of data, {codes.device}, is accepted."
            )
        if device is not None and torch.empty(0, dtype=torch.uint8, device=device).device != codes.device:
            raise ValueError(f"Float8Tensor: device={device!r}; that of data, {codes.device}, or None is accepted.")
        if quantizer is None:
            unused = torch.zeros(1, dtype=torch.float32, device=codes.device)
            quantizer = Float8Quantizer(1.0 / inverse.view(1), unused, te_dtype, columnwise=codes_t is not None)
        elif not isinstance(quantizer, Quantizer) or quantizer.dtype != te_dtype:
            raise ValueError(f"Float8Tensor: quantizer={quantizer!r}; a te.Quantizer of {te_dtype.name} is accepted.")
        made = _wrapped(cls, Kept(codes, inverse.view(1), codes_t, quantizer.copy()), dtype)
        made.requires_grad = requires_grad
        return made

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
        return _wrapped(Float8Tensor, Kept(codes, scale_inv, None, meta, column), dtype)

    @property
    def is_weight(self) -> bool:
        """Whether its scale is that of a module's state."""
        return not isinstance(self._kept.scales, Quantizer)

    @property
    def codes(self) -> torch.Tensor:
        """The codes, with an FP8 dtype."""
        codes = self._kept.codes
        return codes if codes.shape == self.shape else codes.view(self.shape)

    @property
    def codes_t(self) -> torch.Tensor | None:
        """The transposed codes, with an FP8 dtype, if they are kept and the tensor has the shape of its memory."""
        return self._kept.transposed if self.shape == self._kept.codes.shape else None

    def numbers(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        return dequantized(torch.atleast_1d(self.codes), self._scale_inv, dtype or self.dtype).view(self.shape)

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Make the transposed codes, or drop them; None changes nothing. The codes stay: rowwise False is refused."""
        if rowwise_usage is False:
            raise NotImplementedError("update_usage: rowwise_usage=False is not offered; True and None are accepted.")
        if columnwise_usage is False:
            self._kept.transposed = None
        elif columnwise_usage and self._kept.transposed is None:
            self._kept.transposed = self._kept.transpose()

    def remove_caches(self) -> None:
        """Drop the transposed codes."""
        self._kept.transposed = None

    def get_usages(self) -> dict[str, bool]:
        """Which codes are kept."""
        return {"rowwise": True, "columnwise": self.codes_t is not None}

    def update_quantizer(self, quantizer: Quantizer) -> None:
        """Let writes use another quantizer of the same format from now on."""
        if not isinstance(quantizer, Quantizer) or quantizer.dtype != self._fp8_dtype:
            raise ValueError(
                f"update_quantizer: quantizer={quantizer!r}; a te.Quantizer of {self._fp8_dtype.name} is accepted."
            )
        if isinstance(self._kept.scales, FP8TensorMeta):
            raise NotImplementedError("update_quantizer: a layer's weight has the scales of its layer.")
        self._kept.scales = quantizer

    def operand(self, transpose: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Codes, transposed codes if `transpose` (they are kept from then on), and scale_inv, for GEMMs."""
        codes, transposed, scale_inv = self._operand(transpose)
        self._kept.transposed = self._kept.transposed if transposed is None else transposed
        return codes, transposed, scale_inv

    def _operand(self, transpose: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        kept = self._kept
        turned = kept.transpose() if transpose and kept.transposed is None else kept.transposed
        return kept.codes, turned if transpose else None, kept.scale_inv

    def bind(self, meta: FP8TensorMeta) -> None:
        """Use the scales of `meta` from now on."""
        self._kept.scales = meta

    def on(self, device: torch.device) -> "Float8Tensor":
        """The same state on another device; zeros where it comes from the meta device."""
        return _wrapped(Float8Tensor, self._kept.moved(device), self.dtype)

    def follow(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply the device and dtype of `nn.Module._apply`'s function; the codes stay as they are."""
        like = fn(torch.empty(1, dtype=self.dtype, device=self.device))
        if like.device.type == "cpu" and like.is_shared():
            self.share_memory_()
        if (like.device, like.dtype) == (self.device, self.dtype):
            return
        moved: Any = _wrapped(Float8Tensor, self._kept.moved(like.device), like.dtype)
        moved = torch.nn.Parameter(moved, self.requires_grad)
        vars(moved).update((name, value) for name, value in vars(self).items() if name not in vars(moved))
        grad, self.grad = self.grad, None
        torch.utils.swap_tensors(self, moved)
        self.grad = None if grad is None else fn(grad)

    def share_memory_(self) -> "Float8Tensor":
        """Move codes and scale_inv into memory that processes share, as torch's tensors do; drop transposed codes."""
        self._kept.codes = self._data.share_memory_().view(self.codes.dtype)
        self._kept.scale_inv.share_memory_()
        self._kept.transposed = None
        return self

    def is_shared(self) -> bool:
        """Whether processes share its codes' memory; always true on CUDA."""
        return self.codes.is_shared()

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

    def _set_data(self, data: torch.Tensor) -> None:
        """Use other memory for the codes; programs that keep all codes in one buffer do so."""
        kept = self._kept
        kept.codes = _codes("_data", data, self._fp8_dtype, kept.codes.shape)
        kept.transposed = None if kept.transposed is None else kept.transpose()

    # Transformer Engine's names.
    _data = property(lambda self: self.codes.view(torch.uint8), _set_data)
    _transpose = property(lambda self: None if self.codes_t is None else self.codes_t.view(torch.uint8))
    _scale_inv = property(lambda self: self._kept.scale_inv)
    _fp8_dtype = property(lambda self: TE_DTYPES[self._kept.codes.dtype])

    @property
    def _quantizer(self) -> Quantizer:
        """Its quantizer; of a weight, one over its column of the module's state."""
        state, column = self._kept.state(), self._kept.column
        if isinstance(state, Quantizer):
            return state
        return Float8Quantizer(
            state.scale[column : column + 1], state.amax_history[0, column : column + 1], TE_DTYPES[FP8]
        )

    def sharing(self, dtype: torch.dtype, shape: torch.Size) -> "Float8Tensor":
        """Another tensor of the same class and memory, which stands for numbers of `dtype`."""
        return _wrapped(type(self), self._kept, dtype, shape)

    def _shared(self) -> "Float8Tensor":
        return self.sharing(self.dtype, self.shape)

    def _reshaped(self, shape: torch.Size) -> "Float8Tensor":
        return self.sharing(self.dtype, shape)

    def _copied(self, device: torch.device) -> "Float8Tensor":
        """A copy on `device` with state of its own."""
        kept = self._kept.moved(device, copied=True)
        kept.scales = copy.deepcopy(kept.state())
        kept.scales.apply(lambda x: x.to(device))
        return _wrapped(type(self), kept, self.dtype, self.shape)

    def _parts(self, make: Callable[[torch.Tensor], Any]) -> Any:
        return self._cut(self, make)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As bytes: torch's storages of float8 do not survive plain pickle.
        kept = self._kept
        rest = (kept.scale_inv, self.dtype, kept.scales, kept.column)
        return _rebuilt, (self._data, *rest, self.requires_grad, isinstance(self, torch.nn.Parameter), self._fp8_dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Float8Tensor({self.numbers()}, scale_inv={self._scale_inv})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.dtype, int]]:
        names = ["codes", "_scale_inv"] if self.codes_t is None else ["codes", "_scale_inv", "codes_t"]
        return names, (self.dtype, self._kept.column)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], metadata: Any, size: Any, stride: Any) -> "Float8Tensor":
        dtype, column = metadata
        kept = Kept(inner["codes"], inner["_scale_inv"], inner.get("codes_t"), None, column)
        return _wrapped(Float8Tensor, kept, dtype)

    def write_by(self, quantizer: Quantizer, values: torch.Tensor) -> None:
        """Cast `values`, of its shape, by a quantizer that need not be its own."""
        self._kept.count_write()
        self._kept.write(values.reshape(self._kept.codes.shape).contiguous(), quantizer)

    @classmethod
    def write_all(cls, pairs: list[tuple[Any, torch.Tensor]]) -> None:
        """Write values; one launch per device and dtype writes the weights with transposed codes."""
        together: dict[tuple[torch.device, torch.dtype], list[tuple[Kept, torch.Tensor]]] = {}
        for target, values in pairs:
            kept = target._kept
            kept.count_write()
            if isinstance(values, Float8Tensor) and values.codes.dtype == kept.codes.dtype:
                kept.codes.copy_(values.codes.expand(target.shape).reshape(kept.codes.shape))
                kept.scale_inv.copy_(values._scale_inv)
                if kept.transposed is not None:
                    kept.transposed.copy_(kept.transpose())
                continue
            values = values.numbers() if isinstance(values, QuantizedTensor) else values.detach()
            dtype = values.dtype if values.dtype in WIDE_DTYPES else target.dtype
            values = values.to(target.device, dtype).expand(target.shape).reshape(kept.codes.shape).contiguous()
            if kept.transposed is not None and isinstance(kept.state(), FP8TensorMeta):
                together.setdefault((target.device, dtype), []).append((kept, values))
            else:
                kept.write(values, kept.state())
        for found in together.values():
            weights: list[Any] = [kept for kept, _ in found]
            twin.multi_cast_transpose(
                [values for _, values in found],
                [kept.scales.scale for kept in weights],
                [kept.scales.amax_history for kept in weights],
                [kept.column for kept in weights],
                [kept.codes for kept in weights],
                [kept.transposed for kept in weights],
                [kept.scale_inv for kept in weights],
            )


def _wrapped(cls: Any, kept: Kept, dtype: torch.dtype, shape: torch.Size | None = None) -> Float8Tensor:
    """A tensor of what is kept; `dtype` is T, and `shape` another shape of the same memory."""
    made: Float8Tensor = wrapper(
        cls, kept.codes, kept.codes.shape if shape is None else shape, dtype, kept.codes.device
    )
    made._kept = kept
    return made


def _codes(name: str, data: Any, te_dtype: DType, shape: torch.Size) -> torch.Tensor:
    """`data` with the FP8 dtype; refuse what does not hold codes of that format and shape."""
    fp8 = FORMATS[te_dtype].dtype
    if not isinstance(data, torch.Tensor) or data.dtype not in (torch.uint8, fp8) or data.shape != shape:
        shown = f"{data.dtype} {list(data.shape)}" if isinstance(data, torch.Tensor) else repr(data)
        raise ValueError(f"Float8Tensor: {name} is {shown}; torch.uint8 or {fp8} {list(shape)} is accepted.")
    return data.detach().contiguous().view(fp8)


def _rebuilt(
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    dtype: torch.dtype,
    scales: FP8TensorMeta | Quantizer,
    column: int,
    requires_grad: bool,
    parameter: bool,
    te_dtype: DType = DType.kFloat8E4M3,
) -> torch.Tensor:
    kept = Kept(data.view(FORMATS[te_dtype].dtype), scale_inv, None, scales, column)
    made = _wrapped(Float8Tensor, kept, dtype)
    return torch.nn.Parameter(made, requires_grad) if parameter else made.requires_grad_(requires_grad)


# For torch.load(weights_only=True).
Quantizer._makes = Float8Tensor
torch.serialization.add_safe_globals([_rebuilt, FP8TensorMeta, DType, Float8Quantizer, Float8CurrentScalingQuantizer])


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
