"""`fused_linear_cross_entropy`: the loss of a language model's head without its logits `[tokens, V]` in memory.

Shapes: h `[tokens, hidden]`, w `[V, hidden]`; T is h's dtype, or torch.autocast's. Tokens are taken in chunks, in
order. Of each chunk, rounded to T where it says so:

    x    = T( h·wᵀ )                                logits of the chunk, `twin::gemm`
    loss, m, 1/S of its rows                        `twin::cross_entropy`
    d    = T( softmax(x) - weights of classes )     `twin::cross_entropy_backward` with a gradient of 1
    dh   = d·w                                      fp32
    dw   = dᵀ·h of the first chunk; + dᵀ·h          fp32; `twin::gemm_accumulate` of the others, in order

The loss is `twin::cross_entropy_mean` of all rows. With its gradient g, backward gives round(dh · s) and round(dw · s),
s = g / divisor, each operation rounded once to fp32 and then to the dtype of h and of w. Where no token
counts, the mean is NaN, and s is +0: so are the gradients, as those of `cross_entropy`. A scale of the loss thus acts
on fp32 sums, and an fp16 gradient does not underflow before it.

So a step has the head's three products and no fourth. What is kept for backward is dh and dw in fp32. Where no gradient
is wanted, neither is computed.
"""

from typing import Any, NamedTuple

import torch

from reference.arguments import check_arguments
from reference.float8.kept_tensor import KeptTensor
from reference.nn.core.autograd import differentiable, wanted
from reference.nn.core.checks import activation_dtype, check_tensor
from reference.nn.core.context import BlockContext
from reference.nn.layers.cross_entropy import Loss, check_loss, check_targets
from reference.ops.library import twin
from reference.recipes.quantized import Operand, as_dtype, gemm, rows_of
from reference.support.nested import Tensors

NAME = "fused_linear_cross_entropy"
CHUNK = 2048


class Plan(NamedTuple):
    """T, which gradients are wanted (h, w, target), the loss, and the tokens of a chunk."""

    dtype: torch.dtype
    needs: tuple[bool, ...]
    loss: Loss
    chunk: int
    dtypes: tuple[torch.dtype, torch.dtype]


class Saved(NamedTuple):
    """What backward reads: by what the loss was divided, and the gradients for a loss's gradient of 1, in fp32."""

    divisor: torch.Tensor
    dh: torch.Tensor | None
    dw: torch.Tensor | None


def _product(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """a·bᵀ; in fp32 PyTorch's own, outside the contract."""
    return gemm(Operand(a), Operand(b), None, out_dtype, "fast")


def _add_product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Add a·bᵀ to `out`, fp32."""
    if a.dtype == torch.float32:
        out.copy_(out + torch.nn.functional.linear(a, b))
    else:
        twin.gemm_accumulate(a, b, out)


def forward(
    plan: Plan, context: BlockContext, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, Saved]:
    """The loss `[]`; and dh, dw, which wait for its gradient."""
    ignored, kind, smoothing = plan.loss
    h, w = as_dtype(hidden, plan.dtype), as_dtype(weight, plan.dtype).contiguous()
    fp32 = torch.float32
    needs_dh, needs_dw, _ = plan.needs
    loss = hidden.new_empty(len(h), dtype=fp32)
    one = hidden.new_ones((), dtype=fp32)
    dh = hidden.new_empty(h.shape, dtype=fp32) if needs_dh else None
    dw = hidden.new_zeros(w.shape, dtype=fp32) if needs_dw and not len(h) else None
    for first in range(0, len(h), plan.chunk):
        rows = slice(first, first + plan.chunk)
        part, classes = h[rows], target[rows]
        logits = _product(part, w, plan.dtype)
        found, *stats = twin.cross_entropy(logits, classes, ignored, smoothing)
        loss[rows].copy_(found)
        if not (needs_dh or needs_dw):
            continue
        d = twin.cross_entropy_backward(one, None, logits, classes, *stats, ignored, smoothing)
        if dh is not None:
            dh[rows].copy_(_product(d, w.t(), fp32))
        if needs_dw and dw is None:
            dw = _product(d.t(), part.t(), fp32)
        elif dw is not None:
            _add_product(d.t(), part.t(), dw)
    mean, divisor = twin.cross_entropy_mean(loss, target, ignored, kind)
    return mean, Saved(divisor, dh, dw)


def backward(plan: Plan, context: BlockContext, saved: Saved, grad: torch.Tensor) -> Tensors:
    """dh and dw of the loss's gradient."""
    scale = (grad / saved.divisor).masked_fill_(saved.divisor == 0, 0.0)
    sums = zip((saved.dh, saved.dw), plan.dtypes, strict=True)
    found = (None if x is None else _scaled(x, scale, dtype) for x, dtype in sums)
    return (*found, None)


def _scaled(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """round(x · scale), without a tensor of products in fp32."""
    return torch.mul(x, scale, out=torch.empty_like(x, dtype=dtype))


def fused_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    chunk_size: int = CHUNK,
) -> torch.Tensor:
    """`cross_entropy` of the logits hidden·weightᵀ, chunk by chunk.

    It knows no FP8: under `autocast` its products have 16 bits (or 32).

    Args:
        hidden: `[..., hidden]`, fp32, bf16 or fp16.
        weight: `[V, hidden]`, of the same device; a vocabulary that is a multiple of 8 spares copies on a GPU.
        target: int64 or int32 `[...]`, a class of each row, or `ignore_index`.
        ignore_index, label_smoothing: as `cross_entropy`'s.
        reduction: "mean" or "sum"; losses row by row ("none") have gradients of their own and are not offered.
        chunk_size: tokens whose logits are in memory at a time; the weight's gradient is added in these chunks.

    Returns:
        fp32 `[]`.
    """
    check_loss(NAME, ignore_index, reduction, label_smoothing)
    if reduction == "none":
        raise NotImplementedError(f"{NAME}: reduction='none' is not offered; 'mean' and 'sum' are accepted.")
    if type(chunk_size) is not int or chunk_size < 1:
        check_arguments(NAME, {"chunk_size": chunk_size})
    _check_matrices(hidden, weight)
    target = check_targets(NAME, target, hidden.shape[:-1], hidden.device)
    rows = rows_of(hidden)
    loss = Loss(int(ignore_index), reduction, float(label_smoothing))
    dtypes = rows.dtype, weight.dtype
    plan = Plan(activation_dtype(hidden), wanted(rows, weight, target), loss, int(chunk_size), dtypes)
    out: torch.Tensor = differentiable(forward, backward, plan, BlockContext(), rows, weight, target)
    return out


def _check_matrices(hidden: Any, weight: Any) -> None:
    check_tensor(NAME, "hidden", hidden)
    check_tensor(NAME, "weight", weight)
    if isinstance(weight, KeptTensor):
        raise TypeError(f"{NAME}: weight is kept in FP8; a plain tensor is accepted.")
    if weight.dim() != 2 or not weight.numel() or hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{NAME}: hidden has shape {list(hidden.shape)} and weight {list(weight.shape)}; [..., hidden] and "
            f"[classes, hidden] are accepted."
        )
    if weight.device != hidden.device:
        raise RuntimeError(f"{NAME}: weight is on {weight.device}, hidden on {hidden.device}; one device is accepted.")
