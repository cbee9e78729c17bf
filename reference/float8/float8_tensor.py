"""`Float8Tensor`: a tensor that is kept in FP8 only, with one scale for all of it.

It holds codes q of its shape (E4M3 or E5M2), scale_inv fp32 `[1]` and, where a GEMM will read them, transposed codes
`[last, *others]`. `reference.float8.kept_tensor` says what it does; this is how it is written. A quantizer
(`reference.float8.float8_quantizer`) says its scale, or for a weight of `quantized_model_init` its recipe does.

    write x' q = cast(fp32(x') · scale)                     the scale as it is now; the cast of `twin::cast`
             scale_inv = 1 / scale                          IEEE division
             amax = max(itself, max |x'|)                   where an amax is kept

    a weight under     scale
    delayed scaling    that of its column of the module's FP8 state
    current scaling    `twin::current_scale` of what is written, in its dtype

* `view` gives a tensor of the same class and memory, slices and chunks a Float8Tensor with the scale of the whole.
* Delayed scaling's are updated when the outermost autocast ends (`reference.ops.casts.scale_update`), and the next
  write uses the new scale. 16-bit weights that are cast in each forward follow the same rule, so with master weights
  both train with the same bits. Transposed codes of weights are rewritten in the same launch.

Source: Transformer Engine's `pytorch/tensor/float8_tensor.py` (whose first scale is 1, too).
"""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch

from reference.arguments import check_arguments
from reference.float8.float8_like import Alike
from reference.float8.float8_quantizer import (
    TE_DTYPES,
    DType,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Quantizer,
)
from reference.float8.float8_storage import Kept
from reference.float8.kept_tensor import FP8, KeptTensor, checked_codes, rebuilt, wrapped
from reference.recipes.current_scaling import Current
from reference.recipes.quantized import PER_TENSOR
from reference.state.scaling import FP8TensorMeta
from reference.support import not_offered

__all__ = ["Float8Tensor"]


@not_offered.without_methods
class Float8Tensor(Alike, KeptTensor):
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
        codes = checked_codes("Float8Tensor", "data", data, te_dtype, shape)
        turned = shape if not shape else torch.Size((shape[-1], *shape[:-1]))
        codes_t = None
        if data_transpose is not None:
            codes_t = checked_codes("Float8Tensor", "data_transpose", data_transpose, te_dtype, turned)
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
        made: Float8Tensor = wrapped(Kept(codes, inverse.view(1), codes_t, quantizer.copy()), dtype, None, cls)
        made.requires_grad = requires_grad
        return made

    # Transformer Engine's names.
    _data = property(lambda self: self.codes.view(torch.uint8), KeptTensor._set_data)
    _transpose = property(lambda self: None if self.codes_t is None else self.codes_t.view(torch.uint8))

    @property
    def _quantizer(self) -> Quantizer | None:
        """Its quantizer; of a weight, one over what its recipe says, None for one that Transformer Engine has not."""
        by, column = self._kept.state(), self._kept.column
        if isinstance(by, FP8TensorMeta):
            scale, amax = by.scale[column : column + 1], by.amax_history[0, column : column + 1]
            return Float8Quantizer(scale, amax, TE_DTYPES[FP8])
        if type(by) is Current:
            _, power_of_two, epsilon = by.how
            return Float8CurrentScalingQuantizer(
                TE_DTYPES[by.dtype], self.device, force_pow_2_scales=power_of_two, amax_epsilon=epsilon
            )
        return by if isinstance(by, Quantizer) else None

    def numbers(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        return dequantized(torch.atleast_1d(self.codes), self._scale_inv, dtype or self.dtype).view(self.shape)

    def _reshaped(self, shape: torch.Size) -> Any:
        return self.sharing(self.dtype, shape)

    def _parts(self, make: Callable[[torch.Tensor], Any]) -> Any:
        return self._cut(self, make)


KeptTensor.classes[PER_TENSOR] = Float8Tensor
Quantizer._makes = Float8Tensor


def _rebuilt(*args: Any) -> torch.Tensor:
    """`rebuilt`, as pickles of before name it."""
    return rebuilt(*args)


# For torch.load(weights_only=True).
torch.serialization.add_safe_globals(
    [_rebuilt, rebuilt, FP8TensorMeta, DType, Float8Quantizer, Float8CurrentScalingQuantizer, Current]
)


def dequantized(codes: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """round_dtype( fp32(code) · scale_inv ), a plain tensor, without a temporary in fp32."""
    wide = codes.to(dtype)  # exact: bf16 and fp16 hold every E4M3 number
    return torch.mul(wide, scale_inv, out=torch.empty_like(wide))
