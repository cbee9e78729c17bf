"""Packed sequences, qkv_format "thd": attention of sequences that lie one after the other in `[t, h, d]`.

With q_starts and kv_starts, int32 `[b + 1]`, a call of `reference.ops.attentions.attention` takes q `[t, h, d]`, k and
v `[s, hkv, d]`, and entry n of the batch is the sequence whose q_lengths[n] queries and kv_lengths[n] keys begin at the
rows q_starts[n] and kv_starts[n]. Starts do not fall, and a sequence ends before the next one starts; the last start is
where the last sequence's place ends. So cu_seqlens are starts, and cu_seqlens_padded where sequences lie apart.

    attention of [t, h, d]   =   to_tokens(attention of to_sequences([t, h, d]) with the lengths)

bit by bit: in `[b, h, longest, d]`, longest_q and longest_kv for queries and keys, a place after a sequence's end has
zeros. A row that is in no sequence has +0 in out, dq, dk and dv. m and inv, a mask and a bias have the shapes of the
padded call, `[b, h, longest_q]` and so on, and dropout its random bits.

Nothing is gathered on a GPU. A kernel's copies begin at a sequence's first row; they may bring rows of the next
sequence, which the kernels treat as they treat padding: NaN and infinities in it do not matter.

In FP8 (`reference.ops.attentions.attention_fp8`) codes lie so, and v's transposed ones as `[hkv, d, s]`. The casts that
make them (`twin::cast`, `twin::cast_transpose`) take lengths and starts, too: what is in no sequence has no part in an
amax.

On a GPU, where nothing waits to look at them, a start or a length outside of its range counts as the nearest number
inside.
"""

from typing import Any, NamedTuple

import torch

from reference.ops.attentions.attention_lengths import check_lengths
from reference.ops.attentions.attention_options import Options


class Maps(NamedTuple):
    """Where the tokens of one side lie.

    Attributes:
        token, vacant: of each place `[b, s]` its token, and whether it has none.
        place, alone: of each token `[t]` its place among b·s, and whether it is in no sequence.
    """

    token: torch.Tensor
    vacant: torch.Tensor
    place: torch.Tensor
    alone: torch.Tensor


def maps_of(lengths: torch.Tensor, starts: torch.Tensor, longest: int, tokens: int) -> Maps:
    """The maps of sequences with `longest` places each, among so many tokens."""
    lengths = lengths.long()
    place = torch.arange(longest, dtype=torch.int64, device=starts.device)
    token = (starts[:-1, None].long() + place).clamp(max=max(tokens - 1, 0))
    batch, position, alone = _positions(lengths, starts, longest, tokens)
    return Maps(token, place >= lengths[:, None], batch * longest + position, alone)


def positions_of(lengths: torch.Tensor, starts: torch.Tensor, longest: int, tokens: int) -> torch.Tensor:
    """Of each token its number in its sequence, int64 `[t]`; some number of the sequence where it is in none."""
    return _positions(lengths, starts, longest, tokens)[1]


def _positions(
    lengths: torch.Tensor, starts: torch.Tensor, longest: int, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each token `[t]`: its sequence, its number there, and whether it is in none."""
    starts, number = starts.long(), torch.arange(tokens, dtype=torch.int64, device=starts.device)
    batch = torch.searchsorted(starts[1:].contiguous(), number, right=True).clamp(max=lengths.numel() - 1)
    position = number - starts[batch]
    alone = (position < 0) | (position >= lengths[batch])
    return batch, position.clamp(min=0, max=max(longest - 1, 0)), alone


def alone_rows(lengths: torch.Tensor, starts: torch.Tensor, rows: int) -> torch.Tensor:
    """Which of so many rows are in no sequence, bool `[rows]`."""
    return _positions(lengths.long(), starts, 1, rows)[2]


def to_sequences(x: torch.Tensor, maps: Maps) -> torch.Tensor:
    """x `[t, h, d]` as `[b, s, h, d]`, zeros after each sequence."""
    return _moved(x, maps.token, maps.vacant)


def to_tokens(x: torch.Tensor, maps: Maps) -> torch.Tensor:
    """x `[b, s, h, d]` as `[t, h, d]`, zeros where a token is in no sequence."""
    return _moved(x.reshape(-1, *x.shape[2:]), maps.place, maps.alone)


def _moved(x: torch.Tensor, source: torch.Tensor, none: torch.Tensor) -> torch.Tensor:
    """The rows `source` of x `[n, h, d]`; zeros where there is none."""
    shape = (*source.shape, *x.shape[1:])
    if not x.numel():
        return x.new_zeros(shape)
    is_fp8 = x.element_size() == 1  # codes, of which 0x00 is +0
    rows = (x.view(torch.uint8) if is_fp8 else x).index_select(0, source.reshape(-1))
    return rows.masked_fill_(none.reshape(-1, 1, 1), 0.0).view(x.dtype).view(shape)


def by_heads(x: torch.Tensor) -> torch.Tensor:
    """`[b, h, s, d]` as it is; packed `[t, h, d]` as `[1, h, t, d]`."""
    return x if x.dim() == 4 else x.transpose(0, 1).unsqueeze(0)


def batch_of(options: Options) -> tuple[int, int, int]:
    """b, sq and skv of a packed call."""
    starts, sq, skv = options.q_starts, options.longest_q, options.longest_kv
    assert starts is not None
    assert sq is not None
    assert skv is not None
    return starts.shape[0] - 1, sq, skv


def sizes(q: torch.Tensor, k: torch.Tensor, options: Options) -> tuple[int, int, int, int, int]:
    """b, h, hkv, sq and skv of a call; packed sequences have the longest ones' sq and skv."""
    if options.q_starts is None:
        return *q.shape[:2], k.shape[1], q.shape[2], k.shape[2]  # type: ignore[return-value]
    b, sq, skv = batch_of(options)
    return b, q.shape[1], k.shape[1], sq, skv


def check_packed(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> None:
    """Refuse a call that is packed by some of its arguments and not by others, and starts that fit no batch."""
    if options.q_starts is options.kv_starts is options.longest_q is options.longest_kv is None:
        return
    names = ("q_starts", "kv_starts", "longest_q", "longest_kv", "q_lengths", "kv_lengths")
    given = {name: getattr(options, name) for name in names}
    if missing := [name for name, x in given.items() if x is None]:
        raise ValueError(f"{op}: {', '.join(missing)} must be given with packed sequences; got None.")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ValueError(
                f"{op}: {name} must be 3-D, [tokens, heads, head_dim], with q_starts; got {list(x.shape)}."
            )
    for name in names[:2]:
        check_starts(op, name, given[name], given["q_starts"], q.device)
    for name in names[2:4]:
        if given[name] < 0:
            raise ValueError(f"{op}: {name}={given[name]}; the longest sequence's tokens, 0 or more, are accepted.")


def check_starts(
    op: str, name: str, x: torch.Tensor, like: torch.Tensor, device: torch.device, data: str = "q"
) -> None:
    """Refuse starts that are not contiguous int32 `[b + 1]`, as many as `like` has."""
    batch = like.shape[0] - 1 if like.dim() == 1 else 0
    if x.dtype != torch.int32 or x.shape != (batch + 1,) or not x.is_contiguous() or batch < 1:
        raise ValueError(
            f"{op}: {name} must be contiguous torch.int32 [{max(batch, 1) + 1}], of each sequence and of the end; "
            f"got {x.dtype} {list(x.shape)}."
        )
    if x.device != device:
        raise ValueError(f"{op}: {name} is on {x.device}, {data} on {device}.")


def check_one_side(
    op: str, grad: torch.Tensor, m: torch.Tensor, q_lengths: torch.Tensor | None, q_starts: torch.Tensor | None
) -> tuple[int, int, int]:
    """[b, h, sq] of a packed grad `[t, h, d]` and m `[b, h, sq]`; refuses what does not fit."""
    if q_lengths is None or q_starts is None:
        raise ValueError(f"{op}: {'q_starts' if q_starts is None else 'q_lengths'}=None; both or none are accepted.")
    if grad.dim() != 3 or m.dim() != 3:
        raise ValueError(
            f"{op}: grad must be 3-D, [tokens, heads, head_dim], with q_starts, and m [b, h, sq]; got "
            f"{list(grad.shape)} and {list(m.shape)}."
        )
    check_starts(op, "q_starts", q_starts, q_starts, grad.device)
    batch = q_starts.shape[0] - 1
    check_lengths(op, batch, grad.device, q_lengths, None)
    return batch, grad.shape[1], m.shape[2]


def check_places(op: str, options: Options, tokens: tuple[int, int]) -> None:
    """Refuse sequences that overlap, or lie outside of the tokens of queries and of keys. It waits for the device."""
    for side, rows in zip(("q", "kv"), tokens, strict=True):
        starts, lengths = getattr(options, f"{side}_starts"), getattr(options, f"{side}_lengths")
        check_rows(op, f"{side}_", starts, lengths, rows)


def check_rows(op: str, side: str, starts: torch.Tensor, lengths: torch.Tensor, rows: int) -> None:
    """`check_places` of one side, whose name is "" or begins that of its starts."""
    starts, lengths = starts.long(), lengths.long()
    apart = (lengths >= 0) & (starts[:-1] + lengths <= starts[1:])
    if not bool((starts[0] >= 0) & (starts[-1] <= rows) & apart.all()):
        raise ValueError(
            f"{op}: {side}starts is {starts.tolist()} with the lengths {lengths.tolist()}; sequences one after "
            f"the other among {rows} tokens are accepted."
        )


def gathered(
    options: Options, queries: tuple[Any, ...], keys: tuple[Any, ...]
) -> tuple[Options, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], tuple[Maps, Maps]]:
    """The padded call of a packed one: its options, tensors of queries and of keys `[b, h, s, d]`, and the maps."""
    o: Any = options
    maps = (
        maps_of(o.q_lengths, o.q_starts, o.longest_q, queries[0].shape[0]),
        maps_of(o.kv_lengths, o.kv_starts, o.longest_kv, keys[0].shape[0]),
    )
    of_q, of_kv = maps
    padded_q = tuple(to_sequences(x, of_q).transpose(1, 2) for x in queries)
    return options.padded(), padded_q, tuple(to_sequences(x, of_kv).transpose(1, 2) for x in keys), maps


def scattered(x: torch.Tensor, maps: Maps) -> torch.Tensor:
    """A result `[b, h, s, d]` of the padded call as `[t, h, d]`."""
    return to_tokens(x.transpose(1, 2), maps)
