"""Sequences of different lengths, as attention's layers take them: `cu_seqlens_*`, `max_seqlen_*`, qkv_format "thd".

Sequence n of a batch has cu_seqlens[n + 1] - cu_seqlens[n] tokens. In "sbhd" and "bshd" they come first, and padding
follows. In "thd" the sequences lie one after the other; sequence n starts at cu_seqlens_padded[n], and tokens between
its end and the next one's start belong to none: their outputs and gradients are +0.

The ops of attention take lengths (`reference.ops.attentions.attention_lengths`), so that a sequence has the bits that
it has alone, without dropout. In fp32, where attention is PyTorch's, lengths become a mask. Two masks have lengths,
too, where a diagonal ends at each sequence's last query and key. `reference.nn.attentions.packing` is about "thd".
Lengths stay on their device: nothing waits for them, if max_seqlen_q and max_seqlen_kv are given.
"""

from typing import Any, NamedTuple

import torch

from reference.arguments import MASK_TYPES
from reference.nn.core.checks import Shape, ends_once, has_diagonals, has_numbers, is_fake
from reference.ops.attentions.attention_lengths import alibi_by_lengths, hidden_by_lengths


class Lengths(NamedTuple):
    """A forward's six arguments."""

    q: Any = None
    kv: Any = None
    q_padded: Any = None
    kv_padded: Any = None
    max_q: Any = None
    max_kv: Any = None

    @property
    def given(self) -> bool:
        """Whether any of them is."""
        q, kv, q_padded, kv_padded, max_q, max_kv = self
        return not (q is kv is q_padded is kv_padded is max_q is max_kv is None)

    def read_by(self, mask_type: str) -> bool:
        """Whether a mask type takes them: a padding type, if more than the longest ones are given."""
        return MASK_TYPES[mask_type][1] and mask_type != "arbitrary" and not (self.q is self.kv is None)

    def counts(self) -> "Counts":
        """How many queries and keys each sequence has: one tensor where they are alike."""
        q = self.q.diff()
        return q, q if self.kv is self.q else self.kv.diff()

    def starts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where each sequence of queries and of keys starts in "thd", and where the last one's place ends."""
        q = self.q if self.q_padded is None else self.q_padded
        kv = self.kv if self.kv_padded is None else self.kv_padded
        dense = q.contiguous()
        return dense, dense if kv is q else kv.contiguous()

    def arguments(self) -> dict[str, Any]:
        """By a forward's names."""
        return dict(zip(NAMES, self, strict=True))

    def for_self(self) -> "Lengths":
        """Of self-attention, whose keys are as long as its queries."""
        return self._replace(kv=self.q, kv_padded=self.q_padded, max_kv=self.max_q)


NAMES = (
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded",
    "max_seqlen_q",
    "max_seqlen_kv",
)
NO_LENGTHS = Lengths()


def sizes_of(layout: str, lengths: Lengths, heads: int, q: Shape, kv: Shape) -> tuple[int, int, int, int]:
    """[b, h, sq, skv] of queries and of keys with these shapes; packed ones of a cache have no lengths, and are one."""
    if layout == "thd":
        if lengths.q is None:
            return 1, heads, q[0], kv[0]
        return lengths.q.shape[0] - 1, heads, lengths.max_q, lengths.max_kv
    batch, sequence = (1, 0) if layout == "sbhd" else (0, 1)
    return q[batch], heads, q[sequence], kv[sequence]


def check_lengths(
    layer: str, given: Lengths, mask_type: str, shape: Shape, tokens: tuple[int, int] | None, device: torch.device
) -> None:
    """Refuse lengths that do not fit attention of `shape` [b, h, sq, skv], whether `mask_type` reads them or not.

    `tokens`: of queries and of keys in "thd", else None. On a GPU numbers are checked there: an assertion ends the
    program.
    """
    batch, _, *longest = shape
    reads = given.read_by(mask_type)
    if tokens is not None and not reads:
        raise ValueError(f"{layer}: qkv_format='thd' with the mask type {mask_type!r}; a padding type is accepted.")
    for n, name in enumerate(NAMES[:4]):
        if given[n] is not None or (n < 2 and reads):
            _check_one(layer, name, given[n], batch, device)
    for n, side in enumerate(["q", "kv"]):
        padded, most = given[2 + n], given[4 + n]
        if tokens is None and most is not None and most != longest[n]:
            raise ValueError(f"{layer}: max_seqlen_{side}={most}; None or {longest[n]}, the sequence's, is accepted.")
        limit = longest[n] * batch if tokens is None else tokens[n]
        known = n and given.kv is given.q and given.kv_padded is given.q_padded and longest[1] == longest[0]
        if reads and not (known and tokens is not None and tokens[1] == tokens[0]):
            starts = given[n] if padded is None or tokens is None else padded
            _check_numbers(layer, given[n], starts, longest[n], limit, side)


def check_padding(layer: str, given: Lengths, pads: bool | None, layout: str) -> None:
    """Refuse what contradicts `pads`, a call's pad_between_seqs; other checks look at what is no vector of ints.

    On a GPU numbers are compared there: an assertion ends the program.
    """
    if pads is None or (not pads and layout != "thd"):
        return
    if layout != "thd":
        raise ValueError(
            f"{layer}: pad_between_seqs=True with the layout {layout!r}; it goes with 'thd', where "
            f"cu_seqlens_q_padded and cu_seqlens_kv_padded say where sequences begin."
        )
    if pads and given.q_padded is given.kv_padded is None:
        raise ValueError(
            f"{layer}: pad_between_seqs=True without cu_seqlens_q_padded and cu_seqlens_kv_padded, which say where "
            f"sequences begin; None is accepted, or one of these."
        )
    for n, name in enumerate(NAMES[:2]):
        ends, starts = given[n], given[n + 2]
        tensors = isinstance(ends, torch.Tensor) and isinstance(starts, torch.Tensor)
        if pads or not tensors or ends.shape != starts.shape or ends.device != starts.device or ends.is_meta:
            continue
        sentence = (
            f"{layer}: pad_between_seqs=False with a {name}_padded that lets sequences begin elsewhere than {name}; "
            f"None or True is accepted, or None in place of {name}_padded."
        )
        same = (ends[:-1] == starts[:-1]).all()
        if not has_numbers(ends):
            torch._assert_async(same, sentence)
        elif not bool(same):
            raise ValueError(sentence)


def check_alike(layer: str, given: Lengths) -> None:
    """Refuse lengths of keys that are not those of the queries, for an encoder, whose attention has one of each.

    On a GPU numbers are compared there: an assertion ends the program.
    """
    for n in (0, 2, 4):
        q, kv = given[n], given[n + 1]
        if kv is None or kv is q:
            continue
        sentence = f"{layer}: {NAMES[n + 1]} differs from {NAMES[n]}, and an encoder has one length; None is accepted."
        tensors = isinstance(q, torch.Tensor) and isinstance(kv, torch.Tensor)
        if n == 4 or not tensors or q.shape != kv.shape or q.dtype != kv.dtype or q.device != kv.device:
            if n == 4 and q == kv:
                continue
            raise ValueError(sentence)
        if has_numbers(q):
            if not torch.equal(q, kv):
                raise ValueError(sentence)
        elif q.device.type != "meta":
            torch._assert_async((q == kv).all(), sentence)


def packed(layer: str, qkv: tuple[Any, Any, Any], given: Lengths) -> tuple[Lengths, tuple[int, int]]:
    """The lengths of a call in "thd", with the longest ones, and the numbers of tokens; refuses as `check_packed`."""
    check_packed(layer, qkv)
    return with_longest(layer, given), (qkv[0].shape[0], qkv[1].shape[0])


def check_packed(layer: str, qkv: tuple[Any, Any, Any]) -> None:
    """Refuse what is not `[t, h, d]`."""
    for name, x in zip(("query_layer", "key_layer", "value_layer"), qkv, strict=True):
        if not isinstance(x, torch.Tensor) or x.is_nested or x.dim() != 3:
            shown = f"is {list(x.shape)}" if isinstance(x, torch.Tensor) and not x.is_nested else type(x).__name__
            raise ValueError(f"{layer}: {name} {shown}; a tensor [t, h, d] is accepted with qkv_format='thd'.")


def with_longest(layer: str, given: Lengths, sides: int = 2) -> Lengths:
    """The lengths of a call in "thd", with the longest ones: of queries, and of keys if there are two `sides`.

    Refuses a call without them. Finding the longest lengths waits for the device.
    """
    longest: list[Any] = list(given[4:])
    for n in range(sides):
        x = given[n]
        if not isinstance(x, torch.Tensor) or x.dim() != 1 or x.shape[0] < 2:
            shown = list(x.shape) if isinstance(x, torch.Tensor) else x
            raise ValueError(f"{layer}: {NAMES[n]}={shown}; qkv_format='thd' needs an int32 tensor [batch + 1].")
        if longest[n] is None and (where := _without_numbers(x)) is not None:
            raise NotImplementedError(
                f"{layer}: {NAMES[4 + n]}=None with qkv_format='thd' {where} is not offered: sizes would depend on "
                f"numbers of {NAMES[n]}; an int is accepted."
            )
        longest[n] = int(x.diff().max()) if longest[n] is None else int(longest[n])
    return given._replace(max_q=longest[0], max_kv=longest[1])


def _without_numbers(x: torch.Tensor) -> str | None:
    """Where x is, if it has no numbers there."""
    if torch.compiler.is_compiling():
        return "under torch.compile"
    return "on the meta device" if x.is_meta else "in a fake mode" if is_fake(x) else None


def _check_one(layer: str, name: str, x: Any, batch: int, device: torch.device) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{layer}: {name}={x!r}; an int32 tensor [{batch + 1}] is accepted.")
    if x.dtype != torch.int32 or x.layout is not torch.strided or x.shape != (batch + 1,):
        raise ValueError(f"{layer}: {name} is {x.dtype} {list(x.shape)}; torch.int32 [{batch + 1}] is accepted.")
    if x.device != device:
        raise RuntimeError(f"{layer}: {name} is on {x.device}, the activations on {device}; one device is accepted.")


def _check_numbers(layer: str, x: torch.Tensor, padded: torch.Tensor, longest: int, limit: int, side: str) -> None:
    lengths, places = x.diff(), padded.diff()
    fits = (lengths >= 0).all() & (lengths <= longest).all() & (lengths <= places).all()
    fits &= (x[0] == 0) & (padded[0] >= 0) & (padded[-1] <= limit)
    sentence = (
        f"{layer}: cu_seqlens_{side} must start with 0 and not fall, with lengths of at most {longest} and of what "
        f"cu_seqlens_{side}_padded leaves, and at most {limit} tokens in all."
    )
    if has_numbers(x):
        if not bool(fits):
            raise ValueError(sentence)
    elif x.device.type != "meta":
        torch._assert_async(fits, sentence)


Counts = tuple[torch.Tensor, torch.Tensor]
"""How many queries and keys each sequence has, int32 `[b]`."""


def lengths_of_masks(
    mask_type: str, window: tuple[int, int], mask: Any, batch: int, bias: Any = "no_bias"
) -> Counts | None:
    """Those of two padding masks, if each sequence has a diagonal of its own; otherwise None: masks say all.

    One mask is of queries and keys alike, whose diagonal is that of the whole batch.
    """
    if not isinstance(mask, tuple) or len(mask) != 2 or not all(isinstance(one, torch.Tensor) for one in mask):
        return None  # what is no pair of masks is refused elsewhere
    if mask[0] is mask[1] or not has_diagonals(mask_type, window, bias):
        return None
    for whose, one in zip(("queries", "keys"), mask, strict=True):
        if one.device.type != "meta" and (one.device.type != "cpu" or torch.compiler.is_compiling()):
            torch._assert_async(ends_once(one), f"the mask of the {whose} must hide the end of each sequence alone")
    q, kv = (one[:, 0, 0].logical_not().sum(-1, dtype=torch.int32).expand(batch).contiguous() for one in mask)
    return q, kv


def lengths_mask(
    mask_type: str, window: tuple[int, int], counts: Counts, shape: Shape
) -> tuple[str, tuple[int, int], torch.Tensor]:
    """The mask type and the window that are left, and a mask `[b, 1, sq, skv]` that hides all else.

    Without top-left alignment a sequence's diagonal ends at its own last query and key.
    """
    b, h, sq, skv = shape
    rule, left, right, hidden = hidden_by_lengths(MASK_TYPES[mask_type][0], *window, (b, h, sq, skv), *counts)
    return mask_type if rule == "causal" else "padding", (left, right), hidden


def lengths_alibi(slopes: torch.Tensor, mask_type: str, counts: Counts, shape: Shape) -> torch.Tensor | None:
    """ALiBi's numbers `[b, h, sq, skv]` where each sequence has a diagonal of its own, otherwise None."""
    b, h, sq, skv = shape
    return alibi_by_lengths(slopes, (b, h, sq, skv), *counts) if has_diagonals(mask_type, (-1, -1), "alibi") else None
