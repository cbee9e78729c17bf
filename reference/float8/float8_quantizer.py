"""`Float8Quantizer` and `Float8CurrentScalingQuantizer`: they make `Float8Tensor`s of plain tensors.

    q, scale_inv = twin::cast(x)          each number times a scale, rounded to E4M3 or E5M2
    delayed   the scale is `scale`; amax = max(itself, max |x|), where NaN does not count
    current   the scale is `twin::current_scale` of x, amax_epsilon and force_pow_2_scales; with_amax_reduction: that of
              the largest of the ranks' amaxes, which is that of their tensors as one

x is fp32, bf16 or fp16, of any shape. It is cast as rows of 16 numbers, filled up with zeros, which change no amax. The
gradient passes as it is.

Source: Transformer Engine's `pytorch/tensor/float8_tensor.py`, `pytorch/quantized_tensor.py`, `pytorch/constants.py`.
"""

import copy
import enum
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from reference.arguments import check_arguments, check_unread
from reference.float8.quantized_tensor import QuantizedTensor
from reference.numbers.formats import E4M3, E5M2, WIDE_DTYPES
from reference.ops.library import twin
from reference.recipes.current_scaling import scale_of_ranks
from reference.support import groups, not_offered

__all__ = ["DType", "Float8CurrentScalingQuantizer", "Float8Quantizer", "Quantizer"]


class DType(enum.IntEnum):
    """Transformer Engine's numbers for dtypes. Quantizers take the two of FP8."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10

    @classmethod
    def cast(cls, dtype: int) -> "DType":
        """A number of Transformer Engine's as a DType."""
        return cls(dtype)


FORMATS = {DType.kFloat8E4M3: E4M3, DType.kFloat8E5M2: E5M2}
TE_DTYPES = {form.dtype: te_dtype for te_dtype, form in FORMATS.items()}
"""torch's dtype → DType."""


@not_offered.without_methods
class Quantizer:
    """The base of quantizers.

    Attributes:
        rowwise_usage: True; tensors always keep their codes.
        columnwise_usage: whether tensors keep the transposed codes, too.
        dtype: a `DType`, the format of the codes.
        internal, optimize_for_gemm: False; Transformer Engine's hints for its own kernels.
    """

    dtype: DType
    internal = optimize_for_gemm = False
    _makes: ClassVar[Any]  # Float8Tensor; its file, which imports this one, sets it

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage = self.columnwise_usage = True
        self.set_usage(rowwise=rowwise, columnwise=columnwise)

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Say what the next tensors keep; None changes nothing."""
        given = {"rowwise": rowwise, "columnwise": columnwise}
        check_arguments(type(self).__name__, {name: value for name, value in given.items() if value is not None})
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise

    def get_usages(self) -> dict[str, bool]:
        """What tensors keep."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    def scaling(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The scale, fp32 `[1]`, for `rows` `[n, 16]`, and where their amax is recorded, fp32 `[1, 1]`."""
        raise NotImplementedError

    def apply(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace its tensors by what `fn` makes of them."""

    def copy(self) -> "Quantizer":
        """A quantizer with usages of its own and the same tensors."""
        return copy.copy(self)

    def calibrate(self, tensor: torch.Tensor) -> None:
        """Record the amax of `tensor`, where there is a place for it, and quantize nothing."""

    def quantize(
        self, tensor: torch.Tensor, *, out: QuantizedTensor | None = None, dtype: torch.dtype | None = None
    ) -> QuantizedTensor:
        """`tensor` as a Float8Tensor of its dtype; or written to `out`, which is returned.

        Raises:
            TypeError: `tensor` is not fp32, bf16 or fp16, or `dtype` is neither None nor its dtype.
        """
        check_values(self, tensor)
        if dtype is not None and dtype != tensor.dtype:
            raise TypeError(f"{type(self).__name__}: dtype={dtype}; the tensor's, {tensor.dtype}, or None is accepted.")
        if out is not None:
            return self.update_quantized(tensor, out)
        if torch.is_grad_enabled() and tensor.requires_grad:
            return _Quantize.apply(tensor, self)  # type: ignore[no-any-return, no-untyped-call]
        return _quantized(tensor, self)

    __call__ = quantize

    def multi_quantize(self, list_of_tensors: Iterable[torch.Tensor]) -> list[QuantizedTensor]:
        """`quantize` of each."""
        return [self.quantize(tensor) for tensor in list_of_tensors]

    def update_quantized(
        self, src: torch.Tensor, dst: Any, *, noop_flag: torch.Tensor | None = None
    ) -> QuantizedTensor:
        """Write `src` to `dst` by this quantizer, unless `noop_flag` (a tensor of one number, which is read) is 1."""
        check_values(self, src)
        _check_out(self, src, dst)
        if noop_flag is None or noop_flag.item() != 1:
            with torch.no_grad():
                dst.write_by(self, src.to(dst.device))
        return dst

    def make_empty(
        self,
        shape: Iterable[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> QuantizedTensor:
        """A Float8Tensor whose numbers are not set, with what the usages say; `device` None is the quantizer's."""
        check_arguments("Quantizer.make_empty", {"dtype": dtype, "device": device, "pin_memory": pin_memory})
        data = torch.empty(tuple(shape), dtype=torch.uint8, device=self._device() if device is None else device)
        made: Any = self.create_tensor_from_data(data, dtype, requires_grad)
        made.update_usage(columnwise_usage=self.columnwise_usage)
        return made

    def create_tensor_from_data(
        self,
        data: torch.Tensor,
        fake_dtype: torch.dtype = torch.float32,
        requires_grad: bool = False,
        internal: bool = False,
    ) -> QuantizedTensor:
        """A Float8Tensor of codes (uint8 or FP8), with the scale as it is now; 1 where the quantizer has none."""
        given = {"fake_dtype": fake_dtype, "requires_grad": requires_grad, "internal": internal}
        check_arguments("Quantizer.create_tensor_from_data", given)
        return self._makes(
            data.shape,
            fake_dtype,
            data=data,
            fp8_scale_inv=self._scale_inv(data.device),
            fp8_dtype=self.dtype,
            requires_grad=requires_grad,
            quantizer=self,
        )

    def _device(self) -> torch.device:
        raise NotImplementedError

    def _scale_inv(self, device: torch.device) -> torch.Tensor:
        return torch.ones(1, dtype=torch.float32, device=device)


class Float8Quantizer(Quantizer):
    """Quantizes with a scale that is given, and records amaxes.

    Args:
        scale: fp32 `[1]`; numbers are multiplied by it.
        amax: fp32 `[1]`; the largest magnitude is recorded here if it is larger. The caller computes scales from it
            and sets it to 0.
        fp8_dtype: `te.DType.kFloat8E4M3` or `te.DType.kFloat8E5M2`.
        rowwise: only True.
        columnwise: whether tensors keep the transposed codes.
    """

    def __init__(
        self,
        scale: torch.Tensor,
        amax: torch.Tensor,
        fp8_dtype: DType,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        for name, tensor in (("scale", scale), ("amax", amax)):
            if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32 or tensor.numel() != 1:
                shown = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, torch.Tensor) else repr(tensor)
                raise ValueError(f"Float8Quantizer: {name} is {shown}; a torch.float32 tensor [1] is accepted.")
        if scale.device != amax.device:
            raise ValueError(f"Float8Quantizer: scale is on {scale.device}, amax on {amax.device}; one is accepted.")
        check_arguments("Float8Quantizer", {"fp8_dtype": fp8_dtype})
        self.dtype = DType(fp8_dtype)
        self.scale, self.amax = scale, amax
        super().__init__(rowwise=rowwise, columnwise=columnwise)

    def scaling(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.scale.view(1), self.amax.view(1, 1)

    def apply(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.scale, self.amax = fn(self.scale), fn(self.amax)

    def calibrate(self, tensor: torch.Tensor) -> None:
        """Set the amax to that of `tensor`, and quantize nothing."""
        check_values(self, tensor)
        with torch.no_grad():
            self.amax.zero_()
            twin.amax(rows_of_16(tensor), self.amax.view(1, 1), 0)

    def _device(self) -> torch.device:
        return self.scale.device

    def _scale_inv(self, device: torch.device) -> torch.Tensor:
        return (1.0 / self.scale.view(1)).to(device)


class Float8CurrentScalingQuantizer(Quantizer):
    """Quantizes each tensor with the scale of its own amax.

    Args:
        fp8_dtype: `te.DType.kFloat8E4M3` or `te.DType.kFloat8E5M2`.
        device: where `make_empty` makes tensors.
        rowwise: only True.
        columnwise: whether tensors keep the transposed codes.
        use_existing_amax, scale, amax: only their defaults; they have no effect in Transformer Engine either.
        with_amax_reduction: take the largest of the amaxes that the ranks of a group find, NaN not counting. Then each
            rank quantizes as many tensors, in the same order, also those without numbers; writing to a Float8Tensor
            quantizes it, too.
        amax_reduction_group: that process group; None is the default one.
        force_pow_2_scales: round scales down to a power of two.
        amax_epsilon: the least amax, a finite number of at least 0.

    Raises:
        ValueError: `amax_reduction_group` without `with_amax_reduction`, this process is none of its ranks, or no
            process group has been initialized.
        TypeError: `amax_reduction_group` is no process group.
    """

    def __init__(
        self,
        fp8_dtype: DType,
        device: torch.device | str | int,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        use_existing_amax: bool = False,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        scale: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
    ) -> None:
        name = "Float8CurrentScalingQuantizer"
        check_arguments(name, locals())
        if not with_amax_reduction:
            given = {"amax_reduction_group": amax_reduction_group}
            check_unread(
                name, given, {"amax_reduction_group": None}, "with_amax_reduction=False", "with_amax_reduction=True"
            )
        elif not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                f"{name}: with_amax_reduction=True before torch.distributed.init_process_group; False is accepted."
            )
        # By its name, because quantizers are copied and pickled with their tensors.
        self._group = groups.name_of(amax_reduction_group) if with_amax_reduction else None
        self.dtype = DType(fp8_dtype)
        self.device = torch.device(device)
        self.force_pow_2_scales, self.amax_epsilon = force_pow_2_scales, float(amax_epsilon)
        super().__init__(rowwise=rowwise, columnwise=columnwise)

    def scaling(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        how = (FORMATS[self.dtype].dtype, self.force_pow_2_scales, self.amax_epsilon)
        if self._group is not None:
            return scale_of_ranks(rows, (self._group,), *how), None
        return twin.current_scale(rows, *how), None

    @property
    def with_amax_reduction(self) -> bool:
        """Whether amaxes are the largest of a group's."""
        return self._group is not None

    @property
    def amax_reduction_group(self) -> Any:
        """The process group over which amaxes are reduced; None is none."""
        return None if self._group is None else groups.group_of(self._group)

    def _device(self) -> torch.device:
        return self.device


def rows_of_16(x: torch.Tensor) -> torch.Tensor:
    """x as contiguous `[rows, 16]`, filled up with zeros; a matrix of whole 16s as it is."""
    if x.dim() == 2 and x.shape[1] % 16 == 0:
        return x.contiguous()
    flat = x.detach().reshape(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % 16)).view(-1, 16)


def check_values(quantizer: Quantizer, tensor: Any) -> None:
    """Refuse what cannot be cast."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in WIDE_DTYPES:
        shown = tensor.dtype if isinstance(tensor, torch.Tensor) else repr(tensor)
        raise TypeError(
            f"{type(quantizer).__name__}: the tensor to quantize is {shown}; torch.float32, torch.bfloat16 and "
            f"torch.float16 are accepted."
        )


def _check_out(quantizer: Quantizer, src: torch.Tensor, dst: Any) -> None:
    name = type(quantizer).__name__
    if not isinstance(dst, quantizer._makes):
        raise TypeError(f"{name}: the tensor to write to is a {type(dst).__name__}; a Float8Tensor is accepted.")
    if src.shape != dst.shape:
        raise ValueError(f"{name}: shape {list(src.shape)} is written to {list(dst.shape)}; the same is accepted.")
    if TE_DTYPES[dst.codes.dtype] != quantizer.dtype:
        raise ValueError(
            f"{name}: the quantizer's format is {quantizer.dtype.name}, "
            f"the tensor's {TE_DTYPES[dst.codes.dtype].name}; the same is accepted."
        )


def _quantized(x: torch.Tensor, quantizer: Quantizer) -> QuantizedTensor:
    with torch.no_grad():
        made: Any = quantizer.make_empty(x.shape, dtype=x.dtype, device=x.device)
        made.write_by(quantizer, x.detach())
    return made


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, quantizer: Quantizer) -> QuantizedTensor:
        return _quantized(x, quantizer)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None
