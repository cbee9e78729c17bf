"""Packed sequences, qkv_format "thd": tokens `[t, h, d]` gathered for PyTorch's own attention.

`reference.ops.attentions.attention_packed` says where sequences lie, and the ops of attention read them there.
PyTorch's own, in fp32, reads sequences `[b, s, h, d]` that lie at equal distances. For it, packed ones are gathered: a
place after a sequence's end has zeros, and so has a token that is in no sequence. A gradient goes the other way; each
number has one place at most.
"""

from typing import NamedTuple

import torch

from reference.nn.attentions.attention_lengths import Lengths
from reference.nn.core.autograd import differentiable, wanted
from reference.nn.core.context import BlockContext
from reference.ops.attentions import attention_packed
from reference.ops.attentions.attention_packed import Maps, to_sequences, to_tokens
from reference.support.nested import Tensors


class _Side(NamedTuple):
    """What says where the tokens of queries, or of keys, lie."""

    lengths: torch.Tensor
    starts: torch.Tensor
    longest: int
    tokens: int


def _sides(given: Lengths, tokens: tuple[int, int]) -> tuple[_Side, _Side]:
    """Of queries and of keys, among so many tokens: one object where they are alike. `with_longest` completed them."""
    (of_q, of_kv), (starts_q, starts_kv) = given.counts(), given.starts()
    q = _Side(of_q, starts_q, given.max_q, tokens[0])
    if of_kv is of_q and starts_kv is starts_q and (given.max_kv, tokens[1]) == q[2:]:
        return q, q
    return q, _Side(of_kv, starts_kv, given.max_kv, tokens[1])


def maps_of(given: Lengths, tokens: tuple[int, int]) -> tuple[Maps, Maps]:
    """Of queries and of keys, among so many tokens."""
    q, kv = _sides(given, tokens)
    of_q = attention_packed.maps_of(*q)
    return of_q, of_q if kv is q else attention_packed.maps_of(*kv)


def positions_of(given: Lengths, tokens: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each query and of each key its number in its sequence, int64 `[t]`."""
    q, kv = _sides(given, tokens)
    of_q = attention_packed.positions_of(*q)
    return of_q, of_q if kv is q else attention_packed.positions_of(*kv)


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
