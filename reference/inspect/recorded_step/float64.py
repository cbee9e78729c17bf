"""The ops of `twin::` in float64, from the tensors that they read: what their results are compared with for SQNR.

Each function has the op's arguments and returns what its results stand for, in their order; None where a result is a
transpose, or no number of its own; nothing for attention with more than 2^27 scores. Codes stand for the numbers before
the cast, so SQNR of codes contains the rounding to FP8 and, where an op is fused, what it computed before. A mask of
dropout is the op's own.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import gelu, silu

from reference.numbers import formats
from reference.ops.activations.activation import clamp_of, is_gated
from reference.ops.attentions.attention import NO_LIMIT, keep_pairs, limits
from reference.ops.attentions.attention_lengths import entries
from reference.ops.attentions.attention_options import Options
from reference.ops.attentions.attention_packed import alone_rows, gathered, scattered
from reference.ops.casts.cast_blocks import of_each
from reference.ops.casts.cat_cast_transpose import side_by_side
from reference.ops.random.dropout import dropped, keep_scale, threshold

T = torch.Tensor
Results = list[T | None]
_FUNCTIONS: dict[str, Callable[[T], T]] = {
    "gelu": lambda x: gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "silu": silu,
    "geglu": lambda x: gelu(x, approximate="tanh"),
    "swiglu": silu,
    "reglu": torch.relu,
    "srelu": lambda x: torch.relu(x).square(),
    "sreglu": lambda x: torch.relu(x).square(),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "qgeglu": lambda x: x * torch.sigmoid(1.702 * x),
    "glu": torch.sigmoid,
}


def _numbers(codes: T, scale_inv: T) -> T:
    return formats.decode(codes).double() * scale_inv.double()


def _gemm(a: T, b: T, bias: T | None) -> T:
    out = a.double() @ b.double().t()
    return out if bias is None else out + bias.double()


def _gemm_fp8(a: T, b: T, a_scale_inv: T, b_scale_inv: T, bias: T | None) -> T:
    return _gemm(_numbers(a, a_scale_inv), _numbers(b, b_scale_inv), bias)


def _gemm_fp8_blocks(a: T, b: T, sa: T, sb: T, a_square: bool, b_square: bool, bias: T | None) -> T:
    one = _numbers(a, of_each(sa, a.shape[0], a.shape[1], a_square))
    return _gemm(one, _numbers(b, of_each(sb, b.shape[0], b.shape[1], b_square)), bias)


def _act(x: T, kind: str) -> T:
    x = x.double()
    if not is_gated(kind):
        return _FUNCTIONS[kind](x)
    first, second = x.chunk(2, dim=1)
    clamp = clamp_of(kind)
    if clamp is not None:
        limit, alpha, offset = clamp
        first = first.clamp(max=limit)
        return first * torch.sigmoid(alpha * first) * (second.clamp(-limit, limit) + offset)
    return _FUNCTIONS[kind](first) * second


def _gradients(function: Callable[..., T], xs: list[T], grad: T) -> list[T]:
    """Of float64 copies of `xs`."""
    with torch.enable_grad():
        wide = [x.double().requires_grad_() for x in xs]
        return list(torch.autograd.grad(function(*wide), wide, grad.double()))


def _act_grad(grad: T, x: T, kind: str) -> T:
    return _gradients(lambda x: _act(x, kind), [x], grad)[0]


def _norm(x: T, weight: T, bias: T | None, eps: float, zero_centered: bool, kind: str) -> T:
    x, gamma = x.double(), weight.double() + zero_centered
    x = x - x.mean(1, keepdim=True) if kind == "layernorm" else x
    y = x / (x.square().mean(1, keepdim=True) + eps).sqrt() * gamma
    return y if bias is None else y + bias.double()


def _norm_backward(
    grad: T, x: T, weight: T, mean: T, rstd: T, zero_centered: bool, kind: str, residual_grad: T | None
) -> Results:
    """eps is not an argument; it follows from rstd."""

    def normed(x: T, weight: T) -> T:
        centred = x - x.mean(1, keepdim=True) if kind == "layernorm" else x
        eps = (rstd.double().reciprocal().square() - centred.detach().square().mean(1)).clamp(min=0)[:, None]
        return centred / (centred.square().mean(1, keepdim=True) + eps).sqrt() * (weight + zero_centered)

    dx, dweight = _gradients(normed, [x, weight], grad)
    dx = dx if residual_grad is None else dx + residual_grad.double()
    return [dx, dweight, grad.double().sum(0)]


def _dropped(x: T, p: float, rng_state: T | None) -> T:
    if not threshold(p) or rng_state is None:
        return x
    return x * dropped(torch.ones(x.shape, dtype=torch.float32, device="cpu"), p, rng_state).double()


def _added(x: T, residual: T | None, p: float, rng_state: T | None) -> Results:
    x = _dropped(x, p, rng_state)
    return [x if residual is None else x + residual.double()]


def _times_kept(x: T, kept: T | None) -> T:
    return x if kept is None or not x.numel() else (x.view(kept.shape[0], -1) * kept.double()[:, None]).view(x.shape)


def _bias_dropout_add(
    x: T, bias: T | None, residual: T | None, p: float, rng_state: T | None, kept: T | None = None
) -> Results:
    x = x.double() if bias is None else x.double() + bias.double()
    return _added(_times_kept(_dropped(x, p, rng_state), kept), residual, 0.0, None)


def _cast(
    x: T, scale: T, history: T | None, column: int, dtype: Any, lengths: Any = None, starts: Any = None
) -> Results:
    if lengths is not None:
        x = x.masked_fill(alone_rows(lengths, starts, x.shape[0])[:, None], 0.0)
    return [x.double()]


def _hidden(shape: tuple[int, int, int, int], options: Options) -> T:
    mask = options.mask
    if options.has_lengths:
        hidden = torch.ones(shape, dtype=torch.bool, device="cpu")
        alone = options._replace(mask=None, q_lengths=None, kv_lengths=None)
        lengths = (options.q_lengths, options.kv_lengths)
        for one, entry in zip(hidden, entries("attention", shape, None, None, *lengths), strict=True):
            one[:, : entry.sq, : entry.skv] = _hidden((1, shape[1], entry.sq, entry.skv), alone)[0]
        return hidden if mask is None else hidden | mask
    _, _, sq, skv = shape
    lower, upper = limits(options.mask_type, options.left, options.right, sq, skv)
    distance = torch.arange(skv, device="cpu")[None, :] - torch.arange(sq, device="cpu")[:, None]
    hidden = (distance < max(lower, -NO_LIMIT)) | (distance > upper)
    return hidden.expand(shape) if mask is None else hidden | mask.expand(shape)


def _attend(q: T, k: T, v: T, scale: float, hidden: T, keep: T | None) -> T:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(2, 3) * scale).masked_fill(hidden, -math.inf)
    weights = scores.softmax(-1).masked_fill(hidden.all(-1, keepdim=True), 0.0)
    return (weights if keep is None else weights * keep) @ v


def _kept(q: T, k: T, dropout: float, rng_state: T | None) -> T | None:
    if not threshold(dropout) or rng_state is None:
        return None
    b, h, sq, _ = q.shape
    masks: list[Any] = [keep_pairs(i, 1, sq, k.shape[2], dropout, rng_state) for i in range(b * h)]
    return torch.cat(masks).view(b, h, sq, -1).double() * keep_scale(dropout)


def _pairs(q: T, k: T, options: Options) -> tuple[T, T | None] | None:
    """Which pairs are hidden, and dropout's factors; None where they are too many, or where scores are biased."""
    if options.biased or options.sinks is not None or q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] > 1 << 27:
        return None  # scores of more than a gigabyte
    b, h, sq, _ = q.shape
    return _hidden((b, h, sq, k.shape[2]), options), _kept(q, k, options.dropout, options.rng_state)


def _attention(q: T, k: T, v: T, *given: Any) -> Results:
    options = Options(*given)
    if options.packed:
        padded, (q,), (k, v), (of_q, _) = gathered(options, (q,), (k, v))
        return [None if x is None else scattered(x, of_q) for x in _attention(q, k, v, *padded)]
    pairs = _pairs(q, k, options)
    return [] if pairs is None else [_attend(q.double(), k.double(), v.double(), options.scale, *pairs)]


def _attention_backward(grad: T, q: T, k: T, v: T, out: T, m: T, inv: T, *given: Any) -> Results:
    options = Options(*given)
    if options.packed:
        padded, (grad, q, out), (k, v), (of_q, of_kv) = gathered(options, (grad, q, out), (k, v))
        both = zip(_attention_backward(grad, q, k, v, out, m, inv, *padded), (of_q, of_kv, of_kv), strict=False)
        return [None if x is None else scattered(x, maps) for x, maps in both]
    pairs = _pairs(q, k, options)
    if pairs is None:
        return []
    return [*_gradients(lambda q, k, v: _attend(q, k, v, options.scale, *pairs), [q, k, v], grad)]


def _joined(xs: list[T], groups: int, *scaling: Any) -> Results:
    x = side_by_side(xs, groups)
    return [x.double(), None, None, x.double().sum(0)]


def _joined_in_blocks(xs: list[T], groups: int, *how: Any) -> Results:
    x = side_by_side(xs, groups)
    return [x.double(), None, None, None, x.double().sum(0)]


def _activation_backward_in_blocks(grad: T, x: T, kind: str) -> Results:
    dx = _act_grad(grad, x, kind)
    return [dx, None, None, None, dx.sum(0)]


def _activation_backward(grad: T, x: T, kind: str) -> Results:
    dx = _act_grad(grad, x, kind)
    return [dx, None, None, dx.sum(0)]


OPS: dict[str, Callable[..., Results]] = {
    "cast": _cast,
    "cast_transpose": _cast,
    "cast_blocks": lambda x, *_: [x.double()],
    "cast_blocks_transpose": lambda x, *_: [x.double()],
    "cast_rowwise": lambda x, *_: [x.double()],
    "cast_rowwise_transpose": lambda x, *_: [x.double()],
    "dequantize": lambda q, scale_inv, square, _: [
        _numbers(q, scale_inv[:, None] if scale_inv.dim() == 1 else of_each(scale_inv, q.shape[0], q.shape[1], square))
    ],
    "cast_transpose_dbias": lambda x, *_: [x.double(), None, None, x.double().sum(0)],
    "cat_cast_transpose_dbias": _joined,
    "cat_cast_blocks_transpose_dbias": _joined_in_blocks,
    "dbias": lambda grad: [grad.double().sum(0)],
    "activation": lambda x, kind: [_act(x, kind)],
    "activation_scale": lambda x, kind, *_: [_act(x, kind)],
    "activation_backward": lambda grad, x, kind: [_act_grad(grad, x, kind)],
    "activation_cast_blocks_transpose": lambda x, kind, *_: [_act(x, kind)],
    "activation_backward_cast_blocks_transpose_dbias": lambda grad, x, kind, *_: _activation_backward_in_blocks(
        grad, x, kind
    ),
    "activation_scale_cast_transpose": lambda x, kind, *_: [_act(x, kind)],
    "activation_backward_scale": lambda grad, x, kind, *_: [_act_grad(grad, x, kind)],
    "activation_cast_transpose": lambda x, kind, *_: [_act(x, kind)],
    "activation_backward_cast_transpose_dbias": lambda grad, x, kind, *_: _activation_backward(grad, x, kind),
    "norm": lambda x, weight, bias, eps, zero, kind, *_: [_norm(x, weight, bias, eps, zero, kind)],
    "norm_scale": lambda x, weight, bias, eps, zero, kind, *_: [_norm(x, weight, bias, eps, zero, kind)],
    # The scale is that of the rounded y.
    "norm_scale_cast_transpose": lambda x, weight, bias, eps, zero, kind, *_: [
        _norm(x, weight, bias, eps, zero, kind).to(x.dtype).double()
    ],
    "norm_cast": lambda x, weight, bias, eps, zero, kind, *_: [_norm(x, weight, bias, eps, zero, kind)],
    "norm_cast_transpose": lambda x, weight, bias, eps, zero, kind, *_: [_norm(x, weight, bias, eps, zero, kind)],
    "norm_cast_blocks_transpose": lambda x, weight, bias, eps, zero, kind, *_: [
        _norm(x, weight, bias, eps, zero, kind)
    ],
    "norm_backward": _norm_backward,
    "gemm": lambda a, b, bias, _: [_gemm(a, b, bias)],
    "gemm_fp8": lambda a, b, sa, sb, bias, *_: [_gemm_fp8(a, b, sa, sb, bias)],
    "gemm_fp8_blocks": lambda a, b, sa, sb, a_square, b_square, bias, _: [
        _gemm_fp8_blocks(a, b, sa, sb, a_square, b_square, bias)
    ],
    "gemm_fp8_rowwise": lambda a, b, sa, sb, bias, *_: [_gemm_fp8(a, b, sa[:, None], sb[:, None], bias)],
    "gemm_fp8_activation": lambda a, b, sa, sb, bias, _, kind, *more: [
        h := _gemm_fp8(a, b, sa, sb, bias),
        _act(h, kind),
    ],
    # The scale is that of the activation of h as it is kept.
    "gemm_fp8_activation_scale": lambda a, b, sa, sb, bias, dtype, kind, *more: [
        h := _gemm_fp8(a, b, sa, sb, bias),
        _act(h.to(dtype), kind),
    ],
    "gemm_fp8_activation_backward": lambda a, b, sa, sb, x, kind, *_: _activation_backward(
        _gemm_fp8(a, b, sa, sb, None), x, kind
    ),
    "gemm_fp8_bias_dropout_add": lambda a, b, sa, sb, bias, residual, _, p, state: _added(
        _gemm_fp8(a, b, sa, sb, bias), residual, p, state
    ),
    "gemm_fp8_blocks_bias_dropout_add": lambda a, b, sa, sb, a_square, b_square, bias, residual, _, p, state: _added(
        _gemm_fp8_blocks(a, b, sa, sb, a_square, b_square, bias), residual, p, state
    ),
    "bias_dropout_add": _bias_dropout_add,
    "dropout_backward": lambda grad, p, state, kept=None: [_dropped(_times_kept(grad.double(), kept), p, state)],
    "attention": _attention,
    "attention_amax": _attention,
    "attention_backward": _attention_backward,
    "attention_backward_amax": _attention_backward,
}


def evaluated(op: str, args: list[Any]) -> Results:
    """What the results of `twin::<op>` stand for, in float64; [] for an op that is not here."""
    return OPS[op](*args) if op in OPS else []
