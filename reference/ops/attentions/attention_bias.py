"""A bias on attention's scores: a tensor, or ALiBi's.

With S, c and G as in `reference.ops.attentions.attention`, the scores of a call with a bias b become

    t = fma(S, c, b · log2 e)         b · log2 e is rounded, too; log2 e is the nearest fp32 number

and from there on t has the place of S, and 1 the place of c: m' = max(m, floor(max t)), p = 2^((t + (G - m')) - G).
Where b is -inf the weight is +0, as if the pair were hidden. b of query i and key j is

    bias[batch, head, i, j]                        widened to fp32; dimensions of 1 are broadcast
    slope[batch, head] · -|i + shift - j|          ALiBi, one rounding; shift is 0 for "causal", skv - sq otherwise

A bias of zeros is not the same as none in every bit, because then t has been rounded. ALiBi's is the same in every bit
as the tensor of these numbers in fp32.

The gradient of a bias is the sum of ds (fp32, before its rounding; `reference.ops.attentions.attention_backward`) over
the batches and the heads that share an element, rounded once:

    sum = +0;  for batch, for head: sum = sum + ds[batch, head, i, j];  dbias = round(sum)

Source: Transformer Engine's "post_scale_bias" and "alibi" (`UnfusedDotProductAttention`, `get_alibi`); Press et al.,
"Train Short, Test Long", https://arxiv.org/abs/2108.12409.
"""

import math

import numpy as np
import torch

from reference.numbers.elementary import LOG2E
from reference.ops.attentions.attention_heads import Heads
from reference.support.numba_jit import fma, jit


def default_slopes(heads: int) -> torch.Tensor:
    """ALiBi's slopes of `heads` heads, fp32 `[heads]`: Transformer Engine's.

    With n the largest power of two up to `heads`: 2^(-8 / n · (1 .. n)), then 2^(-4 / n · (1, 3, 5, ..)).
    """
    n = 2 ** math.floor(math.log2(heads))
    powers = [(2.0 ** (-8.0 / n)) ** i for i in range(1, n + 1)]
    powers += [(2.0 ** (-4.0 / n)) ** i for i in range(1, 1 + 2 * (heads - n), 2)]
    return torch.tensor(powers, dtype=torch.float32, device="cpu")


def check_bias(
    op: str,
    q: torch.Tensor,
    shape: tuple[int, int, int, int],
    bias: torch.Tensor | None,
    slopes: torch.Tensor | None,
) -> None:
    """Refuse a bias that is not `[1 or b, 1 or h, sq, skv]`, slopes that are not `[h]` or `[b, h]`, and both.

    `shape`: [b, h, sq, skv]; q has the dtype and the device.
    """
    b, h, sq, keys = shape
    if bias is not None and slopes is not None:
        raise ValueError(f"{op}: bias and slopes are both given; one of them is accepted.")
    if bias is not None:
        if bias.dtype not in (torch.float32, q.dtype):
            raise ValueError(f"{op}: bias must be torch.float32 or q's {q.dtype}; got {bias.dtype}.")
        fits = bias.dim() == 4 and bias.shape[0] in (1, b) and bias.shape[1] in (1, h)
        if not fits or bias.shape[2:] != (sq, keys):
            raise ValueError(
                f"{op}: bias must be [1 or {b}, 1 or {h}, {sq}, {keys}], of batch, heads, queries and keys; "
                f"got {list(bias.shape)}."
            )
    if slopes is not None and (slopes.dtype != torch.float32 or slopes.shape not in ((h,), (b, h))):
        raise ValueError(
            f"{op}: slopes must be torch.float32 [{h}] or [{b}, {h}]; got {slopes.dtype} {list(slopes.shape)}."
        )
    for name, x in (("bias", bias), ("slopes", slopes)):
        if x is not None and x.device != q.device:
            raise ValueError(f"{op}: {name} is on {x.device}, q on {q.device}.")


def diagonal(mask_type: str, sq: int, skv: int) -> int:
    """ALiBi's bias is 0 where key = query + this."""
    return 0 if mask_type == "causal" else skv - sq


def bias_tile(heads: Heads, mask_type: str, slopes: torch.Tensor | None, rows: slice, keys: slice) -> np.ndarray | None:
    """b of a tile of these heads, fp32 `[heads · rows, keys]`; None without a bias."""
    if heads.entry.bias is not None:
        return heads.tile(heads.entry.bias, rows, keys).float().flatten(0, 1).numpy()
    if slopes is None:
        return None
    i, j = np.arange(rows.start, rows.stop)[:, None], np.arange(keys.start, keys.stop)[None, :]
    nearness = (-np.abs(i + diagonal(mask_type, *heads.shape[2:]) - j)).astype(np.float32)
    return (heads.of(slopes.expand(heads.shape[:2])).numpy()[:, None, None] * nearness).reshape(-1, j.size)


@jit
def add_bias(s: np.ndarray, c: np.float32, bias: np.ndarray) -> None:
    """The scores s `[rows, keys]` become t, in place."""
    rows, keys = s.shape
    for row in range(rows):
        for j in range(keys):
            s[row, j] = fma(s[row, j], c, bias[row, j] * LOG2E)
