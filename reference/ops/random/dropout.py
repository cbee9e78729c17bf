"""`twin::bias_dropout_add` and `twin::dropout_backward`: dropout between a bias and a residual connection.

    t = round(x + bias)                       where there is a bias
    t = keep ? round(t · scale) : +0          where p > 0
    t = round(m · t)                          with stochastic depth
    out = round(t + residual)                 where there is a residual

Each addition and multiplication is one of fp32; `round` rounds once to x's dtype. Separate modules would compute the
same bits. The backward is the third line and then the second, of the gradient, with |t|·0 in place of +0: NaN where a
gradient that is dropped is infinite or NaN, as PyTorch's product with the mask, so that a gradient scaler sees it.

Stochastic depth. `kept` has m, an fp32 number for each of n entries, which are equal parts of x's rows, in their order:
0 where an entry is dropped as a whole (`reference.nn.core.dropout.DropPath`).

The mask. p counts in steps of 2^-16: threshold = p · 2^16 rounded to an integer, and scale =
2^16 / (2^16 - threshold), so that the mean is kept exactly for the p that is used (p = 0.1 becomes 0.100006).
One Philox counter serves eight consecutive elements, as many as a thread holds of a 16-bit row:

    words = philox4x32(counter = (low, high) half of element // 8, (low, high) half of offset; key = seed)
    u(element) = half element % 8 of those four words, 16 bits, low half first
    keep = u >= threshold

`rng_state` is int64 `[2]`, (seed, offset), on the device of x (`reference.numbers.philox.new_state`). The op advances
the offset by one. The backward takes a clone of the state from before that. Where x is a part of a tensor, rows that
lie on this rank, a third number is that of x's first element in the whole (`[3]`): it has the mask of its place.
"""

import numpy as np
import torch

from reference.numbers import philox
from reference.ops.checks import check_input, check_like
from reference.ops.library import define

STEPS = 1 << 16
"""p is a multiple of 1 / STEPS."""


def threshold(p: float) -> int:
    """How many of the 2^16 values of u are dropped."""
    return round(p * STEPS)


def keep_scale(p: float) -> float:
    """The fp32 number that a kept value is multiplied by; 0 where nothing is kept."""
    kept = STEPS - threshold(p)
    return float(np.float32(STEPS / kept)) if kept else 0.0


def check_dropout(
    op: str, name: str, x: torch.Tensor, p: float, rng_state: torch.Tensor | None, place: tuple[int, ...] = ()
) -> None:
    """Refuse a probability outside [0, 1], and a state that is missing or is not int64 `[2]` on x's device.

    `place`: how many numbers may follow, one of these, which say where x lies in a larger tensor.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{op}: the dropout probability must be from 0 to 1; got {p}.")
    if threshold(p) == 0:
        return
    if rng_state is None:
        raise ValueError(
            f"{op}: a dropout probability of {p} needs rng_state, an int64 [2] tensor (seed, offset) "
            f"(reference.numbers.philox.new_state makes one); got None."
        )
    shapes = ((2,), *[(2 + more,) for more in place])
    if rng_state.dtype != torch.int64 or tuple(rng_state.shape) not in shapes or not rng_state.is_contiguous():
        raise ValueError(
            f"{op}: rng_state must be a contiguous int64 [2] tensor (seed, offset); "
            f"got {rng_state.dtype} {tuple(rng_state.shape)}."
        )
    if rng_state.device != x.device:
        raise ValueError(f"{op}: rng_state is on {rng_state.device}, {name} on {x.device}.")


def check_addends(op: str, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None) -> None:
    """Refuse a bias that is not `[hidden]` and a residual that is not `[rows, hidden]`, of x's dtype and device."""
    if bias is not None:
        check_like(op, "bias", bias, x.dtype, x.shape[1:], x.device)
    if residual is not None:
        check_like(op, "residual", residual, x.dtype, x.shape, x.device)


def check_kept(op: str, name: str, x: torch.Tensor, kept: torch.Tensor | None) -> None:
    """Refuse numbers of entries that are not fp32 `[n]` on x's device, where x's rows are no multiple of n."""
    if kept is None:
        return
    if kept.dtype != torch.float32 or kept.dim() != 1 or not kept.is_contiguous() or kept.device != x.device:
        raise ValueError(
            f"{op}: kept must be contiguous torch.float32 [entries] on {x.device}; "
            f"got {kept.dtype} {list(kept.shape)} on {kept.device}."
        )
    rows, entries = x.shape[0], kept.shape[0]
    if rows % entries if entries else rows:
        raise ValueError(f"{op}: {name} has {rows} rows, which are no multiple of kept's {entries} entries.")


def times_kept(t: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """round(m · t) of t `[rows, hidden]`; t itself without m."""
    if kept is None or not t.numel():
        return t
    entries = t.view(kept.shape[0], -1)
    return (entries.float() * kept[:, None]).to(t.dtype).view(t.shape)


def state_values(rng_state: torch.Tensor) -> tuple[int, int]:
    """(seed, offset) as unsigned 64-bit numbers."""
    seed, offset = rng_state[:2].tolist()
    return seed % (1 << 64), offset % (1 << 64)


def dropped(t: torch.Tensor, p: float, rng_state: torch.Tensor, backward: bool = False) -> torch.Tensor:
    """keep ? round(t · scale) : +0, in the backward |t|·0, of t's dtype. The state is not advanced."""
    seed, offset = state_values(rng_state)
    first = int(rng_state[2]) if len(rng_state) > 2 else 0
    skipped = first % 8  # of the first group of eight
    words = np.stack(philox.element_words(seed, first // 8, -(-(skipped + t.numel()) // 8), offset), axis=1)
    halves = np.stack([words & np.uint64(0xFFFF), words >> np.uint64(16)], axis=2)  # [groups, 4, 2]
    keep = torch.from_numpy(halves.reshape(-1)[skipped : skipped + t.numel()] >= threshold(p)).view(t.shape)
    scaled = (t.float() * torch.tensor(keep_scale(p), dtype=torch.float32, device="cpu")).to(t.dtype)
    return torch.where(keep, scaled, t.abs() * 0 if backward else torch.zeros((), dtype=t.dtype, device="cpu"))


def bias_dropout_add_outputs(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    p: float,
    rng_state: torch.Tensor | None,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    check_input("twin::bias_dropout_add", "x", x)
    check_addends("twin::bias_dropout_add", x, bias, residual)
    check_dropout("twin::bias_dropout_add", "x", x, p, rng_state, place=(1,))
    check_kept("twin::bias_dropout_add", "x", x, kept)
    return torch.empty_like(x)


def dropout_backward_outputs(
    grad: torch.Tensor, p: float, rng_state: torch.Tensor | None, kept: torch.Tensor | None = None
) -> torch.Tensor:
    check_input("twin::dropout_backward", "grad", grad)
    check_dropout("twin::dropout_backward", "grad", grad, p, rng_state, place=(1,))
    check_kept("twin::dropout_backward", "grad", grad, kept)
    return torch.empty_like(grad)


def state_or_none(state: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    """The random state for an op with one result: None, in eager mode, where nothing is dropped.

    In a compiled graph it is a tensor, which the op ignores: inductor (torch 2.11 and 2.13) cannot compile an op with
    one result if all the arguments that it may change are None.
    """
    return x.new_empty(2, dtype=torch.int64) if state is None and torch.compiler.is_compiling() else state


@define(bias_dropout_add_outputs, mutates=("rng_state",))
def bias_dropout_add(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    p: float,
    rng_state: torch.Tensor | None,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x`, `residual` `[rows, hidden]`, `bias` `[hidden]` -> `[rows, hidden]`, all of one dtype.

    Args:
        p: probability of dropping an element, rounded to a multiple of 2^-16.
        rng_state: int64 `[2]`, needed where p > 0, and advanced.
        kept: fp32 `[entries]`, m of each of as many equal parts of the rows; none for None.
    """
    out = bias_dropout_add_outputs(x, bias, residual, p, rng_state, kept)
    t = x if bias is None else (x.float() + bias.float()).to(x.dtype)
    if threshold(p):
        assert rng_state is not None
        t = dropped(t, p, rng_state)
        rng_state[1] += 1
    t = times_kept(t, kept)
    return out.copy_(t if residual is None else t.float() + residual.float())


@define(dropout_backward_outputs)
def dropout_backward(
    grad: torch.Tensor, p: float, rng_state: torch.Tensor | None, kept: torch.Tensor | None = None
) -> torch.Tensor:
    """The gradient of dropout's input from `grad` `[rows, hidden]`, that of the output; p and kept as in the forward.

    `rng_state` is the state from before the forward; it is not advanced.
    """
    out = dropout_backward_outputs(grad, p, rng_state, kept)
    t = times_kept(grad, kept)
    if not threshold(p):
        return out.copy_(t)
    assert rng_state is not None
    return out.copy_(dropped(t, p, rng_state, backward=True))
