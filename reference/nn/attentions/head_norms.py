"""qk-norm as a part of the attention block: each head of q and of k normalised, with the functions of the norms."""

from typing import Any, NamedTuple

import torch

from reference.nn.layers import layernorm
from reference.nn.layers.layernorm import L2Normalization, norm_backward, norm_plan, parameters
from reference.ops.library import twin
from reference.recipes.quantized import rows_of
from reference.recipes.quantizer import NormPlan
from reference.support.nested import Tensors


class HeadNorms(NamedTuple):
    """How to normalise.

    Attributes:
        q, k: the norms.
        dtype: T.
        learns: whether γ and β are parameters; otherwise γ is a constant in fp32.
        before_rope: whether it happens before the rotary embedding, or after it.
    """

    q: NormPlan
    k: NormPlan
    dtype: torch.dtype
    learns: bool
    before_rope: bool


class Saved(NamedTuple):
    """What backward reads of both norms."""

    q: layernorm.Saved
    k: layernorm.Saved


def norms_of(module: Any, dtype: torch.dtype, device: torch.device) -> tuple[HeadNorms, Tensors, torch.Tensor | None]:
    """Those of a `MultiheadAttention` that has them; γ and β of q and of k, or the constant γ."""
    q, k = module.q_norm, module.k_norm
    if isinstance(q, L2Normalization):
        plan = HeadNorms(q.norm(), q.norm(), dtype, False, module.qk_norm_before_rope)
        return plan, (None,) * 4, q.gamma(device)
    plan = HeadNorms(norm_plan(q), norm_plan(k), dtype, True, module.qk_norm_before_rope)
    return plan, (q.weight, q.bias, k.weight, k.bias), None


def forward(
    norms: HeadNorms, given: Tensors, constant: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Saved]:
    """q and k `[.., h, d]` normalised; `given`: γ and β of q, then of k."""
    q_gamma, q_beta, k_gamma, k_beta = given if norms.learns else (constant, None, constant, None)
    q, saved_q = _normed(norms, norms.q, q, q_gamma, q_beta)
    k, saved_k = _normed(norms, norms.k, k, k_gamma, k_beta)
    return q, k, Saved(saved_q, saved_k)


def _normed(norms: HeadNorms, norm: NormPlan, x: torch.Tensor, gamma: Any, beta: Any) -> Any:
    rows = rows_of(x)
    if norms.learns:
        gamma, beta = parameters(gamma, beta, norms.dtype)
    y, mean, rstd = twin.norm(rows, gamma, beta, *norm, norms.dtype)
    return y.view(x.shape), layernorm.Saved(rows, gamma, mean, rstd)


def backward(norms: HeadNorms, saved: Saved, dq: torch.Tensor, dk: torch.Tensor) -> Tensors:
    """The gradients of q and k from those of the normalised ones, then those of γ and β of q, and of k."""
    of_q, *q_grads = norm_backward(norms.q, rows_of(dq), saved.q)
    of_k, *k_grads = norm_backward(norms.k, rows_of(dk), saved.k)
    assert of_q is not None
    assert of_k is not None
    grads = (*q_grads, *k_grads) if norms.learns else (None,) * 4
    return of_q.view(dq.shape), of_k.view(dk.shape), *grads
