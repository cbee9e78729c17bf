"""`twin::rotary_append`: new tokens' queries rotated, their keys rotated and put into a cache with their values.

    q  [t, g, p, d]    k  [t, g, d]    v  [t, g, e]    freqs  fp32 [positions, d2]    keys, values  [.., .., g, d or e]

Token n has the angles freqs[positions[n]], and row rows[n] of the caches, whose first two dimensions are counted as
one:

    keys[rows[n], h] = turn(k[n, h])      values[rows[n], h] = v[n, h]      out[n, i, h] = turn(q[n, h, i])

`turn` is `twin::rotary` word for word (`reference.ops.attentions.rotary`); nothing is computed here that it does not
compute, and values are copied. The p queries that share a head of keys are rows of one head in the result, `[t, p, g,
d]`, as attention of one token reads them; it is contiguous, or with one token by groups in memory. Rows that two tokens
share hold the last one's.

A position or a row that there is not is refused here. On a GPU such a position has the nearest angles, and such a row
is not written.
"""

import torch

from reference.ops.attentions.rotary import rotary
from reference.ops.checks import check_wide
from reference.ops.library import define

OP = "twin::rotary_append"


def outputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    freqs: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:
    if q.dim() != 4 or (q.stride(3) != 1 and q.numel()):
        raise ValueError(
            f"{OP}: q must be 4-D, [t, groups, queries of a group, d], and contiguous in d; got shape {list(q.shape)}, "
            f"strides {q.stride()}."
        )
    check_wide(OP, "q", q.dtype)
    t, groups, together, d = q.shape
    e = v.shape[-1] if v.dim() else 0
    for name, x, shape in (("k", k, (t, groups, d)), ("v", v, (t, groups, e))):
        if x.shape != shape or x.dtype != q.dtype or x.device != q.device or (x.stride(2) != 1 and x.numel()):
            raise ValueError(
                f"{OP}: {name} must be {q.dtype} {list(shape)} on {q.device}, contiguous in its last dimension; got "
                f"{x.dtype} {list(x.shape)} on {x.device}, strides {x.stride()}."
            )
    pages = keys.shape[:2]
    for name, x, size in (("keys", keys, d), ("values", values, e)):
        fits = x.dim() == 4 and x.shape == (*pages, groups, size)
        if not fits or x.dtype != q.dtype or x.device != q.device or not x.is_contiguous():
            raise ValueError(
                f"{OP}: {name} must be contiguous {q.dtype} [pages, page_size, {groups}, {size}] on {q.device}; got "
                f"{x.dtype} {list(x.shape)} on {x.device}."
            )
    for name, x, dtype in (("positions", positions, torch.int32), ("rows", rows, torch.int64)):
        if x.dtype != dtype or x.shape != (t,) or x.device != q.device or not x.is_contiguous():
            raise ValueError(
                f"{OP}: {name} must be contiguous {dtype} [{t}] on {q.device}; got {x.dtype} {list(x.shape)} on "
                f"{x.device}."
            )
    if freqs.dim() != 2 or freqs.dtype != torch.float32 or not freqs.is_contiguous() or freqs.device != q.device:
        raise ValueError(
            f"{OP}: freqs must be contiguous torch.float32 [positions, dimensions] on {q.device}; got {freqs.dtype} "
            f"{list(freqs.shape)} on {freqs.device}."
        )
    if not freqs.shape[0] or freqs.shape[1] % 2 or freqs.shape[1] > d:
        raise ValueError(
            f"{OP}: freqs must have a position at least and an even number of dimensions up to {d}; got "
            f"{list(freqs.shape)}."
        )
    if t == 1:  # by groups in memory, as q: so is attention's result, of which no copy is made then
        return q.new_empty(t, groups, together, d).transpose(1, 2)
    return q.new_empty(t, together, groups, d)


def check_places(name: str, x: torch.Tensor, count: int) -> None:
    """Refuse a position or a row that there is not."""
    wrong = (x < 0) | (x >= count)
    if bool(wrong.any()):
        n = int(wrong.nonzero()[0])
        raise IndexError(f"{OP}: {name}[{n}] is {int(x[n])}; 0 to {count - 1} are accepted.")


@define(outputs, mutates=("keys", "values"))
def rotary_append(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    freqs: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:
    """q `[t, g, p, d]`, k `[t, g, d]`, v `[t, g, e]` -> q rotated `[t, p, g, d]`; keys and values have k and v.

    Args:
        q, k, v: of one dtype, fp32, bf16 or fp16; any strides with the last dimension contiguous.
        freqs: fp32 `[positions, d2]`, angles in radians; d2 even and at most d.
        positions: int32 `[t]`, each token's row of freqs. rows: int64 `[t]`, its row of keys and values.
        keys, values: contiguous `[pages, page_size, g, d]` and `[pages, page_size, g, e]`; changed.
        interleaved: pair neighbours, instead of j with j + d2 / 2.

    Raises:
        IndexError: a position or a row that there is not.
    """
    out = outputs(q, k, v, freqs, positions, rows, keys, values, interleaved)
    at, into = keys.flatten(0, 1), values.flatten(0, 1)
    check_places("positions", positions, freqs.shape[0])
    check_places("rows", rows, at.shape[0])
    angles = freqs.index_select(0, positions)
    out.copy_(rotary(q.flatten(1, 2)[:, None], angles, interleaved, False).view(q.shape).transpose(1, 2))
    at[rows] = rotary(k[:, None], angles, interleaved, False)[:, 0]
    into[rows] = v
    return out
