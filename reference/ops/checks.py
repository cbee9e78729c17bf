"""Checks of tensors that several ops share; `op` names the caller in the error."""

from collections.abc import Mapping, Sequence

import torch

from reference.numbers import formats


def check_wide(op: str, name: str, dtype: torch.dtype) -> None:
    """Refuse a dtype that is not fp32, bf16 or fp16."""
    if dtype not in formats.WIDE_DTYPES:
        raise ValueError(f"{op}: {name} must be torch.float32, torch.bfloat16 or torch.float16; got {dtype}.")


def check_fp8(op: str, name: str, dtype: torch.dtype) -> None:
    """Refuse a dtype that is not E4M3 or E5M2."""
    if dtype not in (formats.E4M3.dtype, formats.E5M2.dtype):
        raise ValueError(f"{op}: {name} must be torch.float8_e4m3fn or torch.float8_e5m2; got {dtype}.")


def check_input(op: str, name: str, x: torch.Tensor) -> None:
    """Refuse an activation or gradient that is not `[rows, cols]`, row-major, in fp32, bf16 or fp16."""
    if x.dim() != 2:
        raise ValueError(f"{op}: {name} must be 2-D, [rows, cols]; got shape {tuple(x.shape)}.")
    check_wide(op, name, x.dtype)
    if not x.is_contiguous():
        raise ValueError(
            f"{op}: {name} must be contiguous (row-major); got strides {tuple(x.stride())} for shape "
            f"{tuple(x.shape)}: call .contiguous() first."
        )


def check_columns(op: str, name: str, cols: int, shown: str = "") -> None:
    """Refuse a matrix to be cast to FP8 whose columns are no multiple of 16; the error ends with what is `shown`."""
    if cols % 16:
        raise ValueError(
            f"{op}: the columns of {name} must be a multiple of 16, which FP8 tensor cores need; got {cols}{shown}."
        )


def check_like(
    op: str, name: str, x: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    """Refuse a tensor that is not contiguous, or of another dtype, shape or device."""
    if x.dtype is not dtype or x.shape != shape or x.device != device or not x.is_contiguous():
        raise ValueError(
            f"{op}: {name} must be contiguous {dtype} {list(shape)} on {device}; got {x.dtype} {list(x.shape)} on "
            f"{x.device}, strides {x.stride()}."
        )


def check_scale_inv(op: str, scale_inv: torch.Tensor, rows: int, device: torch.device) -> None:
    """Refuse a scale_inv that is neither one fp32 number nor one for each row."""
    fits = scale_inv.dim() == 1 and len(scale_inv) in (1, rows) and scale_inv.is_contiguous()
    if not fits or scale_inv.dtype is not torch.float32 or scale_inv.device != device:
        raise ValueError(
            f"{op}: scale_inv must be contiguous torch.float32 [1] or [{rows}] on {device}; got {scale_inv.dtype} "
            f"{list(scale_inv.shape)} on {scale_inv.device}, strides {scale_inv.stride()}."
        )


def check_each(
    op: str,
    name: str,
    xs: Sequence[torch.Tensor],
    dtype: torch.dtype,
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
) -> None:
    """`check_like` of every tensor of a list."""
    for i, (x, shape) in enumerate(zip(xs, shapes, strict=True)):
        if x.dtype is not dtype or x.shape != shape or x.device != device or not x.is_contiguous():
            check_like(op, f"{name}[{i}]", x, dtype, shape, device)


def check_lengths(op: str, of: str, count: int, lists: Mapping[str, Sequence[object]]) -> None:
    """Refuse lists that do not have `count` entries, one for each entry of the argument `of`."""
    for name, values in lists.items():
        if len(values) != count:
            raise ValueError(f"{op}: {name} must have {count} entries, one for each of {of}; got {len(values)}.")


def check_history(op: str, x: torch.Tensor, amax_history: torch.Tensor, column: int) -> None:
    """Refuse an amax history that is not fp32 `[length, columns]` on x's device, or has no such column."""
    if amax_history.dim() != 2 or amax_history.shape[0] == 0:
        raise ValueError(f"{op}: amax_history must be [length >= 1, columns]; got shape {tuple(amax_history.shape)}.")
    if amax_history.dtype != torch.float32:
        raise ValueError(f"{op}: amax_history must be torch.float32; got {amax_history.dtype}.")
    if amax_history.device != x.device:
        raise ValueError(f"{op}: amax_history is on {amax_history.device}, the data on {x.device}.")
    check_column(op, "amax_history", amax_history.shape[1], column)


def check_column(op: str, name: str, columns: int, column: int) -> None:
    """Refuse a column that `name` does not have."""
    if not 0 <= column < columns:
        raise ValueError(f"{op}: column must be from 0 to {columns - 1}, the columns of {name}; got {column}.")
