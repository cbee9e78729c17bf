"""Lengths of attention's batch entries: how many queries and keys of a padded batch there are.

With q_lengths and kv_lengths, int32 `[b]`, entry n of a call on q `[b, h, sq, d]` and k, v `[b, hkv, skv, d]` is
attention of its first q_lengths[n] queries and kv_lengths[n] keys alone. In `reference.ops.attentions.attention` and
`attention_backward` these two numbers have the places of sq and skv: in the blocks, in which of them are visited, in
shift, which aligns the diagonal at the bottom right, and in ALiBi's. Two things stay those of the whole tensors: where
a mask and a bias have a pair's element, and which random bits dropout has for it.

    out, dq [.., i, :] = +0,  m = -2^100,  inv = 0      queries i >= q_lengths[n]
    dk, dv  [.., j, :] = +0                             keys j >= kv_lengths[n]
    dbias   [.., i, j]                                  adds nothing for such an entry

None is all of sq, or all of skv. A length may be 0.

A mask that hides all other pairs gives the same bits, if q, k, v and grad are finite: a pair that is hidden adds +0 to
everything, and a sum that starts with +0 is +0 or not zero. So the order in which the mask's blocks are visited is that
of the blocks which lengths leave. Beyond lengths numbers must be finite, because kernels multiply some of them by 0.
On a GPU, where nothing waits to look at them, a length outside of its range counts as the nearest number inside.
"""

from typing import NamedTuple

import torch


class Entry(NamedTuple):
    """What one entry of a batch has: its numbers of queries and keys, and its mask and bias, cut to them."""

    sq: int
    skv: int
    mask: torch.Tensor | None
    bias: torch.Tensor | None


def check_lengths(
    op: str, batch: int, device: torch.device, q_lengths: torch.Tensor | None, kv_lengths: torch.Tensor | None
) -> None:
    """Refuse lengths that are not contiguous int32 `[batch]` on q's device."""
    for name, x in (("q_lengths", q_lengths), ("kv_lengths", kv_lengths)):
        if x is not None:
            check_one(op, name, x, batch, device, "q")


def check_one(op: str, name: str, x: torch.Tensor, batch: int, device: torch.device, data: str) -> None:
    """Refuse lengths that are not contiguous int32 `[batch]` on the device of what is called `data`."""
    if x.dtype != torch.int32 or x.shape != (batch,) or not x.is_contiguous():
        raise ValueError(
            f"{op}: {name} must be contiguous torch.int32 [{batch}], one number for each entry of the batch; "
            f"got {x.dtype} {list(x.shape)}."
        )
    if x.device != device:
        raise ValueError(f"{op}: {name} is on {x.device}, {data} on {device}.")


def _numbers(op: str, name: str, x: torch.Tensor | None, batch: int, most: int) -> list[int]:
    numbers = [most] * batch if x is None else [int(n) for n in x.tolist()]
    if any(not 0 <= n <= most for n in numbers):
        raise ValueError(f"{op}: {name} is {numbers}; lengths from 0 to {most} are accepted.")
    return numbers


def entries(
    op: str,
    shape: tuple[int, int, int, int],
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    q_lengths: torch.Tensor | None,
    kv_lengths: torch.Tensor | None,
) -> list[Entry]:
    """Each entry of a batch of `shape` [b, h, sq, skv]; refuses lengths that it does not have."""
    b, _, sq, skv = shape
    queries, keys = _numbers(op, "q_lengths", q_lengths, b, sq), _numbers(op, "kv_lengths", kv_lengths, b, skv)

    def cut(x: torch.Tensor | None, rows: int, columns: int) -> torch.Tensor | None:
        return None if x is None else x[:, :, :rows, :columns]

    return [Entry(m, n, cut(mask, m, n), cut(bias, m, n)) for m, n in zip(queries, keys, strict=True)]


def _clamped(x: torch.Tensor | None, batch: int, most: int) -> torch.Tensor | None:
    return None if x is None else x.clamp(0, most).view(batch, 1, 1, 1)


def hidden_by_lengths(
    mask_type: str,
    left: int,
    right: int,
    shape: tuple[int, int, int, int],
    q_lengths: torch.Tensor | None,
    kv_lengths: torch.Tensor | None,
) -> tuple[str, int, int, torch.Tensor]:
    """The mask type, left and right that are left, and a mask `[b, 1, sq, skv]` that hides all else.

    `shape`: [b, h, sq, skv]. One of the lengths is needed; nothing waits for their device.
    """
    given = q_lengths if q_lengths is not None else kv_lengths
    assert given is not None
    i, j, diagonal, hidden = _places(shape, q_lengths, kv_lengths, given.device)
    if mask_type == "causal":
        return mask_type, left, right, hidden
    if mask_type != "none":
        hidden = hidden | (j > i + diagonal)
    elif right >= 0:
        hidden = hidden | (j > i + diagonal + right)
    if left >= 0:
        hidden = hidden | (j < i + diagonal - left)
    return "none", -1, -1, hidden


def _places(
    shape: tuple[int, int, int, int],
    q_lengths: torch.Tensor | None,
    kv_lengths: torch.Tensor | None,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | int, torch.Tensor]:
    """i `[1, 1, sq, 1]`, j `[1, 1, 1, skv]`, what the diagonal is moved by, and which pairs do not exist."""
    batch, _, sq, skv = shape
    i = torch.arange(sq, dtype=torch.int64, device=device).view(1, 1, sq, 1)
    j = torch.arange(skv, dtype=torch.int64, device=device).view(1, 1, 1, skv)
    queries, keys = _clamped(q_lengths, batch, sq), _clamped(kv_lengths, batch, skv)
    of_queries, of_keys = sq if queries is None else queries, skv if keys is None else keys
    return i, j, of_keys - of_queries, (i >= of_queries) | (j >= of_keys)


def alibi_by_lengths(
    slopes: torch.Tensor,
    shape: tuple[int, int, int, int],
    q_lengths: torch.Tensor | None,
    kv_lengths: torch.Tensor | None,
) -> torch.Tensor:
    """ALiBi's numbers, fp32 `[b, h, sq, skv]`, with the diagonal of each entry at its own bottom right."""
    i, j, diagonal, _ = _places(shape, q_lengths, kv_lengths, slopes.device)
    return (slopes.view(-1, shape[1], 1, 1) * -(i + diagonal - j).abs().float()).expand(shape).contiguous()
