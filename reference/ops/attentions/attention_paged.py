"""`twin::attention_paged`: attention of packed queries with keys and values that lie in pages of a cache.

    k, v  [pages, page_size, hkv, d]      page_table  int32 [b, n]

Key j of sequence s lies in row j mod page_size of page page_table[s, j div page_size]. With those rows one after the
other this is `reference.ops.attentions.attention` of packed sequences (`attention_packed.py`), word for word: a page
says where a key lies, and nothing about the order in which keys are read, which is that of blocks of 128 from key 0.
Sequences may share pages. Rows that no key of a sequence lies in change nothing, even where they hold NaN.

On a GPU pages of a multiple of 128 keys are read where they lie. Of other sizes the sequences' rows are copied
together first, by two `index_select`. A page that the cache does not have is refused here; there it is the nearest one,
or zeros.
"""

from typing import Any

import torch

from reference.ops.attentions import attention as packed
from reference.ops.attentions.attention import BLOCK
from reference.ops.attentions.attention_options import Options
from reference.ops.library import define

OP = "twin::attention_paged"


def options_of(
    scale: float,
    mask_type: str,
    left: int,
    right: int,
    q_lengths: torch.Tensor,
    kv_lengths: torch.Tensor,
    q_starts: torch.Tensor,
    longest_q: int,
    longest_kv: int,
    sinks: torch.Tensor | None = None,
    key_segment: int | None = None,
) -> Options:
    """Of the packed call. Where its sequences of keys begin is nothing that pages have: `kv_starts` is `q_starts`, and
    `of_gathered` has those of keys that were gathered.
    """
    where = (q_lengths, kv_lengths, q_starts, q_starts, longest_q, longest_kv)
    return Options(scale, mask_type, left, right, None, 0.0, None, None, None, sinks, *where, key_segment)


def of_gathered(options: Options) -> Options:
    """The options of keys of which each sequence has `longest_kv` rows."""
    starts, longest = q_starts_of(options), options.longest_kv or 0
    kv_starts = torch.arange(starts.numel(), dtype=torch.int32, device=starts.device) * longest
    return options._replace(kv_starts=kv_starts)


def reads_in_place(page_size: int) -> bool:
    """Whether a kernel reads pages of this size where they lie: a block of keys is then in one page."""
    return page_size % BLOCK == 0


def gathered(x: torch.Tensor, page_table: torch.Tensor, longest: int) -> torch.Tensor:
    """x `[pages, page_size, h, d]` as `[b · longest, h, d]`: of each sequence the rows of its first `longest` keys."""
    pages, size = x.shape[:2]
    j = torch.arange(longest, dtype=torch.int64, device=x.device)
    rows = page_table.long().clamp(0, max(pages - 1, 0))[:, j // size] * size + j % size
    return x.flatten(0, 1).index_select(0, rows.flatten())


def outputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, page_table: torch.Tensor, *rest: Any, op: str = OP
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    for name, x in (("k", k), ("v", v)):
        if x.dim() != 4 or not x.is_contiguous() or 0 in x.shape[:2]:
            raise ValueError(
                f"{op}: {name} must be contiguous [pages, page_size, key heads, head_dim] with a page at least; got "
                f"{list(x.shape)}."
            )
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(
            f"{op}: k and v must have the same pages and page_size; got {list(k.shape[:2])} and {list(v.shape[:2])}."
        )
    options = options_of(*rest)
    found = packed.outputs(q, k.flatten(0, 1), v.flatten(0, 1), *options)
    b, longest = q_starts_of(options).numel() - 1, options.longest_kv or 0
    least = -(-longest // k.shape[1])
    if (
        page_table.dtype != torch.int32
        or page_table.dim() != 2
        or page_table.shape[0] != b
        or page_table.shape[1] < least
        or not page_table.is_contiguous()
        or page_table.device != q.device
    ):
        raise ValueError(
            f"{op}: page_table must be contiguous torch.int32 [{b}, {least} or more] on {q.device}, with pages for "
            f"longest_kv={longest}; got {page_table.dtype} {list(page_table.shape)} on {page_table.device}."
        )
    return found


def q_starts_of(options: Options) -> torch.Tensor:
    """They are always given here."""
    assert options.q_starts is not None
    return options.q_starts


def check_pages(op: str, page_table: torch.Tensor, lengths: torch.Tensor, size: int, pages: int) -> None:
    """Refuse a page that a key lies in and the cache does not have."""
    used = torch.arange(page_table.shape[1], device=page_table.device) * size < lengths[:, None]
    wrong = used & ((page_table < 0) | (page_table >= pages))
    if bool(wrong.any()):
        s, n = wrong.nonzero()[0].tolist()
        raise IndexError(f"{op}: page_table[{s}, {n}] is {int(page_table[s, n])}; 0 to {pages - 1} are accepted.")


@define(outputs)
def attention_paged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    page_table: torch.Tensor,
    scale: float,
    mask_type: str,
    left: int,
    right: int,
    q_lengths: torch.Tensor,
    kv_lengths: torch.Tensor,
    q_starts: torch.Tensor,
    longest_q: int,
    longest_kv: int,
    sinks: torch.Tensor | None = None,
    key_segment: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """softmax(q kᵀ · scale) v -> (out `[t, h, e]` of q's dtype, m fp32 `[b, h, longest_q]`, inv fp32 the same).

    Args:
        q: `[t, h, d]` bf16 or fp16, as in `twin::attention`; sequence s has q_lengths[s] rows from row q_starts[s] on.
        k, v: contiguous `[pages, page_size, hkv, d]` and `[pages, page_size, hkv, e]`.
        page_table: int32 `[b, n]`, n · page_size of at least longest_kv; entries after a sequence's keys are not read.
        scale, mask_type, left, right, sinks, key_segment: as in `twin::attention`; segments count from key 0 of a
            sequence, wherever it lies.
        q_lengths, kv_lengths: int32 `[b]`. q_starts: int32 `[b + 1]`.
        longest_q, longest_kv: no length is above them.

    Raises:
        IndexError: a key lies in a page that there is not.
    """
    rest = (scale, mask_type, left, right, q_lengths, kv_lengths, q_starts, longest_q, longest_kv, sinks, key_segment)
    outputs(q, k, v, page_table, *rest)
    check_pages(OP, page_table, kv_lengths, k.shape[1], k.shape[0])
    keys, values = (gathered(x, page_table, longest_kv) for x in (k, v))
    return packed.attention(q, keys, values, *of_gathered(options_of(*rest)))
