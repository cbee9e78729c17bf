"""Packed sequences, qkv_format "thd": tokens `[t, h, d]` and the sequences `[b, s, h, d]` that attention reads.

The ops of attention read sequences that lie at equal distances, so packed ones are gathered, inside of attention's pair
of functions: a place after a sequence's end has zeros, and so has a token that is in no sequence. A gradient goes the
other way; each number has one place at most. `reference.nn.attention_lengths` says where sequences lie.
"""

from typing import NamedTuple

import torch

from reference.nested import Tensors
from reference.nn.attention_lengths import Lengths
from reference.nn.autograd import differentiable, wanted
from reference.nn.context import BlockContext


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

    def position(self) -> torch.Tensor:
        """Of each token its number in its sequence, int64 `[t]`."""
        return self.place % max(self.token.shape[1], 1)


def maps_of(given: Lengths, tokens: tuple[int, int]) -> tuple[Maps, Maps]:
    """Of queries and of keys, among so many tokens; `with_longest` has completed the lengths."""
    q = _maps_of_one(given.q, given.q_padded, given.max_q, tokens[0])
    same = given.kv is given.q and given.kv_padded is given.q_padded
    if same and (given.max_kv, tokens[1]) == (given.max_q, tokens[0]):
        return q, q
    return q, _maps_of_one(given.kv, given.kv_padded, given.max_kv, tokens[1])


def _maps_of_one(cu_seqlens: torch.Tensor, padded: torch.Tensor | None, longest: int, tokens: int) -> Maps:
    """Of sequences with `longest` places each."""
    lengths, starts = cu_seqlens.diff().long(), (cu_seqlens if padded is None else padded).long()
    place = torch.arange(longest, dtype=torch.int64, device=cu_seqlens.device)
    token = (starts[:-1, None] + place).clamp(max=max(tokens - 1, 0))
    number = torch.arange(tokens, dtype=torch.int64, device=cu_seqlens.device)
    batch = torch.searchsorted(starts[1:].contiguous(), number, right=True).clamp(max=lengths.numel() - 1)
    position = number - starts[batch]
    alone = (position < 0) | (position >= lengths[batch])
    position = position.clamp(min=0, max=max(longest - 1, 0))
    return Maps(token, place >= lengths[:, None], batch * longest + position, alone)


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
    rows = x.index_select(0, source.reshape(-1))
    return rows.masked_fill_(none.reshape(-1, 1, 1), 0.0).view(shape)


class Plan(NamedTuple):
    """Whether the gradient is wanted, and which way."""

    needs: tuple[bool, ...]
    to_sequences: bool


def forward(plan: Plan, context: BlockContext, x: torch.Tensor) -> tuple[torch.Tensor, tuple[()]]:
    """x `[t, h, d]` as `[b, s, h, d]`, or the other way round."""
    maps = Maps(*context.reads)  # type: ignore[arg-type]
    return (to_sequences if plan.to_sequences else to_tokens)(x, maps), ()


def backward(plan: Plan, context: BlockContext, saved: tuple[()], grad: torch.Tensor) -> Tensors:
    """The gradient goes the other way."""
    return (forward(plan._replace(to_sequences=not plan.to_sequences), context, grad)[0],)


def moved(x: torch.Tensor, maps: Maps, to_sequences: bool) -> torch.Tensor:
    """x gathered one way or the other; differentiable. For attention that is PyTorch's own."""
    return differentiable(forward, backward, Plan(wanted(x), to_sequences), BlockContext(reads=maps), x)
