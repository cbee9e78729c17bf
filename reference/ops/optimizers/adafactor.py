"""`twin::adafactor`: one step of Adafactor for one tensor.

The tensor is `[batch, rows, cols]`, the leading dimensions of more than three being one batch; one of less than two
dimensions is a vector. Each operation is one fp32 rounding, IEEE division and square root, no fma, unless it says
float64. g is the widened gradient, p the widened parameter; every scalar is rounded to fp32 first.

    a            = max(eps2, rms(p)) · rho                                     of p before the step
    row_var[b,r] = lerp(row_var, fp32(Σ_c g² / cols), w)                       float64 sum and quotient, one rounding
    col_var[b,c] = lerp(col_var, fp32(Σ_r g² / rows), w)                       the same
    f[b]         = max(fp32(Σ_r row_var / rows), eps1)                         the same
    v            = (row_var[b,r] · col_var[b,c]) / f[b]                        of a matrix
    v = variance = lerp(variance, g · g, w)                                    of a vector
    u            = (1 / sqrt(max(v, eps1²))) · g
    p            = p · decay                                                   where decay is not 1
    p            = p − (a / max(1, rms(u) / d)) · u                            plus, to maximise

    lerp(x, y, w) = x + w · (y − x) where w < 1/2, otherwise y − (y − x) · (1 − w)
    rms(x)        = fp32(sqrt(Σ x² / count))                                   float64; Σ as in `twin::grad_norm`

p is rounded once to the parameter's dtype. Sums are float64, from +0.0, in this order:

    Σ_c, and Σ_r of row_var   lane l = Σ_i x[256 i + l], i in order; of the lanes halves of neighbours, 32 and then 8
    Σ_r g²                    rows in blocks of 64, in order; then the blocks, in order

A maximum gives NaN where x is NaN.

Source: `torch.optim.Adafactor`, whose sums have no order and whose 1/sqrt is the device's.
"""

import numpy as np
import torch

from reference.numbers import formats
from reference.ops.checks import check_like
from reference.ops.library import define
from reference.ops.optimizers.grad_norm import chunk_sums, halves, total

OP = "twin::adafactor"
LANES, BLOCK = 256, 64
_ONE = np.float32(1)


def extents(x: torch.Tensor) -> tuple[int, int, int]:
    """batch, rows and cols; a vector has one row."""
    if x.dim() < 2:
        return 1, 1, x.numel()
    rows, cols = x.shape[-2:]
    return (x.numel() // (rows * cols) if rows and cols else 0), rows, cols


def outputs(
    grad: torch.Tensor,
    param: torch.Tensor,
    row_var: torch.Tensor,
    col_var: torch.Tensor | None,
    *scalars: float,
) -> None:
    """Refuse what `twin::adafactor` does not accept; any scalars are accepted."""
    if grad.dtype not in formats.WIDE_DTYPES:
        raise TypeError(f"{OP}: grad is {grad.dtype}; float32, bfloat16 and float16 are accepted.")
    if param.dtype not in (torch.float32, grad.dtype):
        raise TypeError(f"{OP}: param is {param.dtype}; {grad.dtype} and float32 are accepted.")
    shape, device = tuple(grad.shape), grad.device
    check_like(OP, "grad", grad, grad.dtype, shape, device)
    check_like(OP, "param", param, param.dtype, shape, device)
    if (col_var is None) != (grad.dim() < 2):
        given = "None" if col_var is None else "given"
        raise ValueError(f"{OP}: col_var is {given} for a grad of {grad.dim()} dimensions; matrices have one.")
    if col_var is None:
        check_like(OP, "row_var", row_var, torch.float32, shape, device)
        return
    check_like(OP, "row_var", row_var, torch.float32, (*shape[:-1], 1), device)
    check_like(OP, "col_var", col_var, torch.float32, (*shape[:-2], 1, shape[-1]), device)


def _lerp(x: np.ndarray, y: np.ndarray, w: np.float32) -> np.ndarray:
    return x + w * (y - x) if w < np.float32(0.5) else y - (y - x) * (_ONE - w)


def _lanes(x: np.ndarray) -> np.ndarray:
    """Sums over the last axis, float64."""
    padded = np.zeros((*x.shape[:-1], -(-x.shape[-1] // LANES) * LANES))
    padded[..., : x.shape[-1]] = x
    lanes = np.zeros((*x.shape[:-1], LANES))
    for i in range(0, padded.shape[-1], LANES):
        lanes = lanes + padded[..., i : i + LANES]
    return halves(halves(lanes, 32), 8)[..., 0]


def _blocks(x: np.ndarray) -> np.ndarray:
    """Sums over the last axis but one, float64."""
    found = np.zeros((x.shape[0], x.shape[2]))
    for start in range(0, x.shape[1], BLOCK):
        part = np.zeros_like(found)
        for row in range(start, min(start + BLOCK, x.shape[1])):
            part = part + x[:, row]
        found = found + part
    return found


def _rms(x: np.ndarray) -> np.float32:
    return np.float32(np.sqrt(total(chunk_sums(x.reshape(-1))) / np.float64(x.size)))


@define(outputs, mutates=("param", "row_var", "col_var"))
def adafactor(
    grad: torch.Tensor,
    param: torch.Tensor,
    row_var: torch.Tensor,
    col_var: torch.Tensor | None,
    rho: float,
    weight: float,
    decay: float,
    eps1: float,
    eps1_squared: float,
    eps2: float,
    d: float,
    maximize: bool,
) -> None:
    """Change `param`, `row_var` and `col_var` in place.

    Args:
        grad: contiguous fp32, bf16 or fp16, of any shape.
        param: like it, or fp32.
        row_var, col_var: fp32 `[..., rows, 1]` and `[..., 1, cols]`; of a vector its variance, and None.
        rho: the relative step.
        weight: w, of the new squares in their running mean.
        decay: the factor of p, 1 without weight decay.
        eps1, eps1_squared, eps2, d: Adafactor's.
        maximize: step up.
    """
    outputs(grad, param, row_var, col_var)
    if not grad.numel():
        return
    r, w, keep, e1, e1s, e2, most = (np.float32(x) for x in (rho, weight, decay, eps1, eps1_squared, eps2, d))
    g, p = (formats.widen(x.detach()).numpy().reshape(extents(grad)) for x in (grad, param))
    batch, rows, cols = g.shape
    with np.errstate(all="ignore"):
        a = np.maximum(e2, _rms(p)) * r
        if col_var is None:
            v = _lerp(row_var.numpy().reshape(g.shape), g * g, w)
            row_var.copy_(torch.from_numpy(v.reshape(row_var.shape)))
        else:
            squares = g.astype(np.float64) ** 2
            mean = (_lanes(squares) / cols).astype(np.float32)
            new_rows = _lerp(row_var.numpy().reshape(batch, rows), mean, w)
            mean = (_blocks(squares) / rows).astype(np.float32)
            new_cols = _lerp(col_var.numpy().reshape(batch, cols), mean, w)
            row_var.copy_(torch.from_numpy(new_rows.reshape(row_var.shape)))
            col_var.copy_(torch.from_numpy(new_cols.reshape(col_var.shape)))
            f = np.maximum((_lanes(new_rows) / rows).astype(np.float32), e1)
            v = (new_rows[:, :, None] * new_cols[:, None, :]) / f[:, None, None]
        u = (_ONE / np.sqrt(np.maximum(v, e1s))) * g
        c = a / np.maximum(_ONE, _rms(u) / most)
        p = p * keep if keep != _ONE else p
        p = p + c * u if maximize else p - c * u
    param.copy_(torch.from_numpy(np.asarray(p).reshape(tuple(param.shape))))
