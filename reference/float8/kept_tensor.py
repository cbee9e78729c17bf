"""`KeptTensor`: a tensor that is kept in FP8 only and behaves as a tensor of the dtype that it stands for.

It holds codes q (E4M3 or E5M2), scales and, where a GEMM will read them, transposed codes, but no 16-bit copy. T is its
dtype: fp32, bf16 or fp16. `Float8Tensor` has one scale, `Float8BlockwiseQTensor` one for each 128 × 128; a weight under
a recipe of one's own, whose layout is in `KEEPING`, is a KeptTensor.

    read     x = round_T( fp32(q) · scale_inv )             two roundings: of the product to fp32, then to T
    write x' q, scale_inv = the cast of its quantizer, of x' in its own dtype

What casts a weight of `quantized_model_init` is the recipe's answer to the weight's role: the same cast as that of a
16-bit weight in each forward, so with fp32 master weights both train with the same bits. A scale that depends on what
is cast is that of the fp32 masters, not of their rounding to T: Transformer Engine's `quantize_`, which its `FusedAdam`
calls with a weight's master, casts them, too. A recipe with state says scales by a column of the layer's state; a write
leaves them alone and records the amax.

* `copy_` of plain numbers writes them from their own dtype (fp32, bf16, fp16; others are rounded to T first), so an
  optimizer's fp32 master weights do not pass through T. `copy_` of another tensor of the same format and layout copies
  codes and scales: it casts nothing and records no amax. Any other op that changes the tensor reads it, works in T, and
  writes the result: AdamW's two in-place ops are two writes.
* `detach` gives a tensor of the same class and memory. Views are `QuantizedTensor`s. A write to one reads and writes
  the whole.
* `data = values` writes values of its shape. Those of another shape replace its memory.
* Transposed codes that exist are rewritten by each write.
* `clone`, `to(device)` and `deepcopy` give a tensor with a quantizer of its own; `to(dtype)` gives plain numbers. A
  module's `to(dtype)` changes T and leaves the codes alone.
* A layer that gets one as its input reads it, and casts what it read by its own recipe. Transformer Engine's layers use
  the codes as they are.

Source: Transformer Engine's `pytorch/quantized_tensor.py`.
"""

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from reference.float8.float8_quantizer import FORMATS, TE_DTYPES, DType, Quantizer
from reference.float8.float8_storage import Kept, Scales, freshen, layout_of
from reference.float8.quantized_tensor import QuantizedTensor, wrapper
from reference.numbers.formats import WIDE_DTYPES
from reference.ops.library import LIBRARY, twin
from reference.recipes.quantized import PER_TENSOR, Operand, Quantized, dequantize
from reference.recipes.quantizer import Quantizer as OfRecipe
from reference.state.scaling import FP8TensorMeta
from reference.support.dtensor import is_dtensor

# A compiled layer reads a weight through this op: with the inner tensors its graph would have no gradient for it.
LIBRARY.define("float8_operand(Tensor weight, bool transpose) -> Tensor[]")

FP8 = torch.float8_e4m3fn
_PARTS = {"codes": "codes", "scale_inv": "_scale_inv", "transposed": "codes_t", "scale_inv_t": "_scale_inv_t"}


class KeptTensor(QuantizedTensor):
    """A tensor that is kept in FP8; the module's docstring says what it does."""

    classes: ClassVar[dict[str, Any]] = {}
    """Layout → the class of tensors that have it."""

    _room_of: ClassVar[Callable[..., Any]]  # `reference.float8.float8_shard` sets it
    _kept: Kept
    _high_precision_init_val: torch.Tensor | None

    @staticmethod
    def of(values: torch.Tensor, scales: Scales, column: int, dtype: torch.dtype | None = None) -> "KeptTensor":
        """A new weight of `dtype` (None: that of the values) and of `values` `[out, in]`, which are written to it."""
        weight = KeptTensor.empty(values.shape, dtype or values.dtype, values.device, scales, column)
        weight.quantize_(values)
        return weight

    @staticmethod
    def empty(shape: torch.Size, dtype: torch.dtype, device: torch.device, scales: Scales, column: int) -> "KeptTensor":
        """A weight whose numbers are not set."""
        return wrapped(Kept.empty(shape, FP8, device, scales, column), dtype)

    @staticmethod
    def of_codes(
        codes: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype, scales: Scales, column: int
    ) -> "KeptTensor":
        """A weight of codes that exist already."""
        return wrapped(Kept(codes, scale_inv, None, scales, column, layout_of(scales)), dtype)

    @property
    def is_weight(self) -> bool:
        """Whether its scales are those of a layer's recipe."""
        return not isinstance(self._kept.scales, Quantizer)

    @property
    def codes(self) -> torch.Tensor:
        """The codes, with an FP8 dtype."""
        codes = self._kept.codes
        return codes if codes.shape == self.shape else codes.view(self.shape)

    @property
    def codes_t(self) -> torch.Tensor | None:
        """The transposed codes, with an FP8 dtype, if they are kept and the tensor has the shape of its memory."""
        freshen((self._kept,))
        return self._kept.transposed if self.shape == self._kept.codes.shape else None

    def numbers(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        return dequantize(self._kept.quantized().row, self.shape[-1], dtype or self.dtype)

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Make the transposed codes, or drop them; None changes nothing. The codes stay: rowwise False is refused."""
        if rowwise_usage is False:
            raise NotImplementedError("update_usage: rowwise_usage=False is not offered; True and None are accepted.")
        if columnwise_usage is not None:
            self._kept.keep_transposed(columnwise_usage)

    def remove_caches(self) -> None:
        """Drop the transposed codes."""
        self._kept.keep_transposed(False)

    def get_usages(self) -> dict[str, bool]:
        """Which codes are kept."""
        return {"rowwise": True, "columnwise": self.codes_t is not None}

    def update_quantizer(self, quantizer: Quantizer) -> None:
        """Let writes use another quantizer of the same format from now on."""
        if not isinstance(quantizer, Quantizer) or quantizer.dtype != self._fp8_dtype:
            raise ValueError(
                f"update_quantizer: quantizer={quantizer!r}; a te.Quantizer of {self._fp8_dtype.name} is accepted."
            )
        if self.is_weight:
            raise NotImplementedError("update_quantizer: a layer's weight has the scales of its layer.")
        self._kept.scales = quantizer

    def operand(self, transpose: bool) -> Quantized:
        """For GEMMs; with `transpose` the transposed codes are kept from then on. They may be stale: a forward hands
        them to its backward, which calls `freshen`."""
        if transpose:
            self._kept.keep_transposed(True)
        found = self._kept.quantized()
        return found if transpose else found._replace(column=None)

    def _operand(self, transpose: bool) -> list[torch.Tensor]:
        """The tensors of `operand`, for the op; it keeps nothing."""
        kept = replace(self._kept)
        if kept.stale:
            kept.keep_transposed(False)
        if transpose:
            kept.keep_transposed(True)
        found = [kept.codes, kept.scale_inv, *([kept.transposed, kept.scale_inv_t] if transpose else [])]
        return [x for x in found if x is not None]

    def bind(self, scales: Scales) -> None:
        """Use these scales from now on."""
        self._kept.scales = scales

    def on(self, device: torch.device) -> "KeptTensor":
        """The same state on another device; zeros where it comes from the meta device."""
        return wrapped(self._kept.moved(device), self.dtype)

    def follow(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply the device and dtype of `nn.Module._apply`'s function; the codes stay as they are."""
        like = fn(torch.empty(1, dtype=self.dtype, device=self.device))
        if like.device.type == "cpu" and like.is_shared():
            self.share_memory_()
        if (like.device, like.dtype) == (self.device, self.dtype):
            return
        moved: Any = wrapped(self._kept.moved(like.device), like.dtype)
        moved = torch.nn.Parameter(moved, self.requires_grad)
        vars(moved).update((name, value) for name, value in vars(self).items() if name not in vars(moved))
        grad, self.grad = self.grad, None
        torch.utils.swap_tensors(self, moved)
        self.grad = None if grad is None else fn(grad)

    def share_memory_(self) -> "KeptTensor":
        """Move codes and scales into memory that processes share, as torch's tensors do; drop transposed codes."""
        self._kept.codes = self._kept.codes.view(torch.uint8).share_memory_().view(self._kept.codes.dtype)
        self._kept.scale_inv.share_memory_()
        self._kept.keep_transposed(False)
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

    def is_cast_of(self, values: torch.Tensor) -> bool:
        """Whether it holds what a write of `values` would write; records nothing."""
        kept = self._kept
        by, values = kept.state(), values.to(self.device)
        if isinstance(by, OfRecipe):
            codes, scale_inv, *_ = by.quantize(values, False).row
            if not torch.equal(scale_inv, kept.scale_inv):  # type: ignore[arg-type]
                return False
        else:
            codes, _ = twin.cast(values, 1 / kept.scale_inv, None, 0, kept.codes.dtype)
        return torch.equal(codes.view(torch.uint8), kept.codes.view(torch.uint8))

    def _set_data(self, data: torch.Tensor) -> None:
        """Use other memory for the codes; programs that keep all codes in one buffer do so."""
        kept = self._kept
        kept.codes = checked_codes(type(self).__name__, "_data", data, self._fp8_dtype, kept.codes.shape)
        if kept.transposed is not None:
            kept.keep_transposed(False)
            kept.keep_transposed(True)

    _scale_inv = property(lambda self: self._kept.scale_inv)
    _scale_inv_t = property(lambda self: self._kept.scale_inv_t)
    _fp8_dtype = property(lambda self: TE_DTYPES[self._kept.codes.dtype])

    def sharing(self, dtype: torch.dtype, shape: torch.Size) -> "KeptTensor":
        """Another tensor of the same class and memory, which stands for numbers of `dtype`."""
        return wrapped(self._kept, dtype, shape, type(self))

    def _shared(self) -> "KeptTensor":
        return self.sharing(self.dtype, self.shape)

    def _reshaped(self, shape: torch.Size) -> "KeptTensor | None":
        return self._shared() if shape == self.shape else None

    def _zeros(self, size: Sequence[int]) -> "KeptTensor | None":
        found: KeptTensor | None = self._room_of(self, size)
        return found

    def _copied(self, device: torch.device) -> "KeptTensor":
        """A copy on `device` with state of its own."""
        kept = self._kept.moved(device, copied=True)
        kept.scales = copy.deepcopy(kept.state())
        if not isinstance(kept.scales, OfRecipe):  # which has no tensors
            kept.scales.apply(lambda x: x.to(device))
        return wrapped(kept, self.dtype, self.shape, type(self))

    def _replace(self, values: torch.Tensor) -> None:
        """Take values of another shape: those of the same format with their scales, others cast by its own."""
        before, by = self._kept, self._kept.state()
        if before.layout != PER_TENSOR and (values.dim() != 2 or values.shape[1] % 16):
            raise ValueError(
                f"{type(self).__name__}: data has shape {list(values.shape)}; [rows, a multiple of 16] is accepted."
            )
        new = Kept.empty(values.shape, before.codes.dtype, self.device, by, before.column)
        if _same_form(self, values):
            new.codes.copy_(values.codes)  # type: ignore[attr-defined]
            new.scale_inv.copy_(values._scale_inv)  # type: ignore[attr-defined]
        else:
            new.write(values.detach().to(self.device).contiguous(), by)
        made = self.sharing(self.dtype, values.shape)
        torch.Tensor.data.__set__(self, made)  # type: ignore[attr-defined]  # its shape
        self._kept = new
        new.keep_transposed(before.transposed is not None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As bytes: torch's storages of float8 do not survive plain pickle.
        kept, data = self._kept, self.codes.view(torch.uint8)
        rest = (kept.scale_inv, self.dtype, kept.scales, kept.column)
        parameter = isinstance(self, torch.nn.Parameter)
        return rebuilt, (data, *rest, self.requires_grad, parameter, self._fp8_dtype, kept.layout)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.numbers()}, scale_inv={self._scale_inv})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.dtype, int, str]]:
        kept = self._kept
        whole = kept.transposed is None or self.codes_t is not None
        names = [own for part, own in _PARTS.items() if getattr(kept, part) is not None]
        return names if whole else names[:2], (self.dtype, kept.column, kept.layout)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], metadata: Any, size: Any, stride: Any) -> "KeptTensor":
        dtype, column, layout = metadata
        parts: dict[str, Any] = {part: inner.get(own) for part, own in _PARTS.items()}
        return wrapped(Kept(**parts, scales=None, column=column, layout=layout), dtype)  # type: ignore[no-any-return]

    def write_by(self, quantizer: Quantizer, values: torch.Tensor) -> None:
        """Cast `values`, of its shape, by a quantizer that need not be its own."""
        self._kept.count_write()
        self._kept.write(values.reshape(self._kept.codes.shape).contiguous(), quantizer)

    @classmethod
    def write_all(cls, pairs: list[tuple[Any, torch.Tensor]]) -> None:
        """Write values; weights with one scale and transposed codes together, by quantizer and dtype."""
        together: dict[tuple[torch.device, torch.dtype, Hashable], list[tuple[Kept, torch.Tensor]]] = {}
        for target, values in pairs:
            kept = target._kept
            kept.count_write()
            if _same_form(target, values) and (kept.layout == PER_TENSOR or values.shape == target.shape):
                kept.codes.copy_(values.codes.expand(target.shape).reshape(kept.codes.shape))  # type: ignore
                kept.scale_inv.copy_(values._scale_inv)  # type: ignore[attr-defined]
                kept.turn()
                continue
            values = values.numbers() if isinstance(values, QuantizedTensor) else values.detach()
            dtype = values.dtype if values.dtype in WIDE_DTYPES else target.dtype
            values = values.to(target.device, dtype).expand(target.shape).reshape(kept.codes.shape).contiguous()
            by = kept.state()
            if _has_one_scale(kept, values):
                key = by.key if isinstance(by, OfRecipe) else None
                together.setdefault((target.device, dtype, key), []).append((kept, values))
            else:
                kept.write(values, by)
        for writes in together.values():
            _write_together([kept for kept, _ in writes], [values for _, values in writes])


def _has_one_scale(kept: Kept, values: torch.Tensor) -> bool:
    """Whether it may be written beside others: not with scales of blocks or without transposed codes, or no weight."""
    by = kept.state()
    if kept.transposed is None or kept.layout != PER_TENSOR or isinstance(by, Quantizer):
        return False
    return isinstance(by, FP8TensorMeta) or (values.dim() == 2 and values.shape[1] % 16 == 0)


def _write_together(weights: list[Any], values: list[torch.Tensor]) -> None:
    """Write weights of one device, dtype and quantizer, or all of a state."""
    states = [kept.state() for kept in weights]
    if isinstance(states[0], FP8TensorMeta):
        scales, histories = [by.scale for by in states], [by.amax_history for by in states]
        columns = [kept.column for kept in weights]
    else:
        found = states[0].scales(values)
        if found is None:
            for kept, one in zip(weights, values, strict=True):
                kept.write(one, kept.state())
            return
        scales, histories, columns = [found] * len(weights), [], list(range(len(weights)))
    for kept in weights:
        kept.stale = False
    codes, turned, scale_invs = zip(*[(kept.codes, kept.transposed, kept.scale_inv) for kept in weights], strict=True)
    twin.multi_cast_transpose(values, scales, histories, columns, list(codes), list(turned), list(scale_invs))


def _same_form(target: KeptTensor, values: Any) -> bool:
    """Whether `values` are kept in codes of the same format and layout."""
    if not isinstance(values, KeptTensor):
        return False
    one, other = target._kept, values._kept
    return one.codes.dtype == other.codes.dtype and one.layout == other.layout


def wrapped(kept: Kept, dtype: torch.dtype, shape: torch.Size | None = None, cls: Any = None) -> Any:
    """A tensor of what is kept; `dtype` is T, and `shape` another shape of the same memory."""
    cls = KeptTensor.classes.get(kept.layout, KeptTensor) if cls is None else cls
    made = wrapper(cls, kept.codes, kept.codes.shape if shape is None else shape, dtype, kept.codes.device)
    made._kept = kept
    return made


def kept_in(parameter: Any) -> Any:
    """The tensor kept in FP8 that a parameter is, or of which it has this rank's rows as a DTensor; else None."""
    found = parameter._local_tensor if is_dtensor(parameter) else parameter
    return found if isinstance(found, KeptTensor) else None


def checked_codes(cls: str, name: str, data: Any, te_dtype: DType, shape: torch.Size) -> torch.Tensor:
    """`data` with the FP8 dtype; refuse what does not hold codes of that format and shape."""
    fp8 = FORMATS[te_dtype].dtype
    if not isinstance(data, torch.Tensor) or data.dtype not in (torch.uint8, fp8) or data.shape != shape:
        shown = f"{data.dtype} {list(data.shape)}" if isinstance(data, torch.Tensor) else repr(data)
        raise ValueError(f"{cls}: {name} is {shown}; torch.uint8 or {fp8} {list(shape)} is accepted.")
    return data.detach().contiguous().view(fp8)


def rebuilt(
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    dtype: torch.dtype,
    scales: Scales,
    column: int,
    requires_grad: bool,
    parameter: bool,
    te_dtype: DType = DType.kFloat8E4M3,
    layout: str = PER_TENSOR,
) -> torch.Tensor:
    """The tensor of a pickle."""
    kept = Kept(data.view(FORMATS[te_dtype].dtype), scale_inv, None, scales, column, layout)
    made = wrapped(kept, dtype)
    return torch.nn.Parameter(made, requires_grad) if parameter else made.requires_grad_(requires_grad)


def operand(weight: KeptTensor, transpose: bool) -> Quantized:
    """`weight.operand(transpose)`, in a form that a compiler can trace; compiled, it keeps no transposed codes."""
    if not torch.compiler.is_compiling():
        return weight.operand(transpose)
    codes, scale_inv, *turned = torch.ops.twin.float8_operand(weight, transpose)
    layout = weight._kept.layout
    column = Operand(turned[0], turned[1] if len(turned) > 1 else scale_inv, layout) if transpose else None
    return Quantized(Operand(codes, scale_inv, layout), column)
