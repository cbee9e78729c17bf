"""Layers around context-parallel attention: each rank has some tokens and all weights, with the words of one process.

A rank's tokens are the two chunks of `reference.parallel.context`; they come first in a tensor, `[s / t, b, ...]`.

    y, dx             of a token: its rank computes them
    dw = gᵀ·x         K is the tokens of all ranks, in their order. Ranks gather the transposes of g and x, which are
                      what a step saved; each multiplies some rows of dw, and they gather these
    db, dγ, dβ        ranks gather what is summed, and each sums all of it, in the order of one process
    scales            of a tensor's own amax: a maximum over the ranks before the cast. Delayed: histories are reduced
                      over the group before scales are computed (`reference.state.scaling.update`). Blocks of 128 tokens
                      lie in a chunk
    dropout           by an element's index in the whole tensor: a chunk is a call of its own

So every rank has the whole gradient of every parameter, and nobody adds them again.

Where ranks share the weights, too (`reference.parallel.tensor`), a rank is in a group of each kind. The ranks of one
tensor-parallel group have the same two chunks; sequence parallel, each has some rows of them, one rank's after the
other's. What is summed over tokens is gathered in both groups: first those rows, then the chunks.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from reference.ops.gemms.gemm_part import CUTS
from reference.ops.library import twin
from reference.parallel.context import chunks_of, gathered, with_place
from reference.parallel.ordered_reduce import gathered_rows, ranks_of
from reference.parallel.tensor import Gathered, of_whole
from reference.recipes.block_scaling import InBlocks
from reference.recipes.delayed_scaling import Delayed
from reference.recipes.quantized import (
    PER_TENSOR,
    PLAIN,
    Accumulation,
    Operand,
    Quantized,
    as_dtype,
    dgrad,
    gemm,
    per_tensor,
    products,
    rows_of_operand,
)
from reference.recipes.quantizer import ActivationPlan, Around, HighPrecision, Produced, Quantizer, innermost
from reference.recipes.roles import Roles
from reference.support import groups

BLOCK = CUTS["blocks"]
"""Rows of dw that stay together, and what divides a chunk's rows."""


class Tokens(NamedTuple):
    """Which ranks share the tokens of a layer's rows.

    Attributes:
        group: the name of their group.
        rows: the name of the group among whose ranks the rows of the two chunks are divided (sequence parallel); None
            where a rank has all of them.
    """

    group: str
    rows: str | None = None

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks in their order, from this rank's x."""
        rows = x.view(torch.uint8) if x.dtype.itemsize == 1 else x  # PyTorch puts no FP8 together
        if self.rows is not None:
            rows = gathered_rows(self.rows, rows)
        return gathered(self.group, rows).view(x.dtype)

    def angles(self, of_all: torch.Tensor, tokens: int) -> torch.Tensor:
        """Those of this rank's so many tokens, from the angles of all positions, or of more."""
        chunks = of_all[: tokens * ranks_of(self.group)[1]].split(tokens // 2)
        return torch.cat([chunks[i] for i in chunks_of(self.group)])

    def columns(self, a: Operand) -> Operand:
        """A transposed operand `[features, tokens]` with the tokens of all ranks, from this rank's."""
        codes = self.gathered(a.codes.t()).t()
        if a.layout == PLAIN:
            return a._replace(codes=codes)
        if a.layout == PER_TENSOR:  # whose scale all ranks have
            return a._replace(codes=codes.contiguous())
        assert a.scales is not None
        return a._replace(codes=codes.contiguous(), scales=self.gathered(a.scales))

    def wgrad(
        self, g: Operand, x: Operand, out_dtype: torch.dtype, how: Accumulation, main_grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        """`reference.recipes.quantized.wgrad` of the tokens of all ranks."""
        g, x = self.columns(g), self.columns(x)
        (rank, count), rows = ranks_of(self.group), len(g.codes)
        each = BLOCK * -(-rows // (BLOCK * count))  # rows of dw that a rank multiplies
        first, end = min(rank * each, rows), min((rank + 1) * each, rows)
        dtype = out_dtype if main_grad is None else main_grad.dtype
        part = torch.zeros((each, len(x.codes)), dtype=dtype, device=x.codes.device)
        if end > first:
            some = rows_of_operand(g, first, end)
            some = some._replace(codes=some.codes.contiguous())
            if main_grad is None:
                part[: end - first] = gemm(some, x, None, out_dtype, how.wgrad)
            else:
                part[: end - first] = main_grad[first:end]
                products(some, x).add(some, x, part[: end - first])
        found = gathered_rows(self.group, part)[:rows]
        if main_grad is None:
            return found
        main_grad.copy_(found)
        return None

    def pieces(self, rows: int) -> list[tuple[int, int]]:
        """Of this rank's so many rows those that follow each other in the whole: how many, and the first one's number.

        Two chunks; where the rows of those are divided, what is here of each.
        """
        rank, count = (0, 1) if self.rows is None else ranks_of(self.rows)
        half, first, end = rows * count // 2, rank * rows, (rank + 1) * rows
        found = []
        for which, chunk in enumerate(chunks_of(self.group)):
            begin, stop = max(first, which * half), min(end, (which + 1) * half)
            if begin < stop:
                found.append((stop - begin, chunk * half + begin - which * half))
        return found

    def places(self, state: torch.Tensor, x: torch.Tensor) -> tuple[list[int], list[torch.Tensor]]:
        """The rows of each piece of this rank's x, and a random state for it: with the index of its first element."""
        pieces, width = self.pieces(len(x)), x.numel() // max(len(x), 1)
        return [rows for rows, _ in pieces], [with_place(state, first * width) for _, first in pieces]

    def dropped(
        self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, p: float, state: torch.Tensor
    ) -> torch.Tensor:
        """`twin::bias_dropout_add` of x `[tokens, hidden]`, with the masks of its places; the state is advanced."""
        sizes, places = self.places(state, x)
        others = [None] * len(sizes) if residual is None else residual.split(sizes)
        pieces = zip(x.split(sizes), others, places, strict=True)
        found = torch.cat([twin.bias_dropout_add(one, bias, other, p, place) for one, other, place in pieces])
        state[1] += 1
        return found

    def dropped_backward(self, grad: torch.Tensor, p: float, state: torch.Tensor) -> torch.Tensor:
        """`twin::dropout_backward` of it; the state from before."""
        sizes, places = self.places(state, grad)
        pieces = zip(grad.split(sizes), places, strict=True)
        return torch.cat([twin.dropout_backward(one, p, place, None) for one, place in pieces])


def quantizers_of_tokens(roles: Roles, quantizers: dict[str, Quantizer]) -> dict[str, Quantizer]:
    """A recipe's quantizers, as they are where ranks share the tokens of linear maps."""
    for one in roles.gemms:
        if one.tokens is not None:
            group = one.tokens.group
            quantizers[one.input.name] = of_whole(quantizers[one.input.name], group)
            quantizers[one.grad.name] = GradOfTokens(of_whole(quantizers[one.grad.name], group), one.tokens)
    return quantizers


class GradOfTokens(Around):
    """The gradient of a linear map's output on a rank that has some tokens: its column sums are those of all tokens."""

    def __init__(self, inner: Quantizer, tokens: Tokens) -> None:
        self.inner, self.tokens = inner, tokens
        # Those of the gradient as it comes, of which `Gathered` then has all rows of the two chunks.
        self.of_given = tokens._replace(rows=inner.group) if isinstance(inner, Gathered) else tokens
        self.dtype, self.dtype_t, self.fp8 = inner.dtype, inner.dtype_t, inner.fp8
        self.key = ("of tokens", inner.key, tokens)

    def quantize(self, x: torch.Tensor, transpose: bool) -> Quantized:
        return self.inner.quantize(x, transpose)

    def grad(self, g: torch.Tensor, transpose: bool, dbias: bool) -> Produced:
        if isinstance(innermost(self.inner), HighPrecision):
            g = as_dtype(g, self.inner.dtype)
        return self.inner.grad(g, transpose, False)[0], twin.dbias(self.of_given.gathered(g)) if dbias else None

    def activation_grad(
        self, g: Quantized, w: Operand, h: torch.Tensor, plan: ActivationPlan, transpose: bool, dbias: bool
    ) -> Produced:
        dy = dgrad(g, w, plan.dtype, plan.how)
        if not (isinstance(self.inner, Delayed) and g.row.layout == w.layout == PER_TENSOR):
            return self.grad(twin.activation_backward(dy, h, plan.kind), transpose, dbias)
        # dh is cast, and summed, from fp32.
        rest: Any = (plan.kind, *self.inner._state())
        q, q_t, scale_inv, db = twin.activation_backward_cast_transpose_dbias(dy, h, *rest)
        if dbias:
            whole = (self.tokens.gathered(dy), self.tokens.gathered(h))
            *_, db = twin.activation_backward_cast_transpose_dbias(*whole, *rest)
        return per_tensor(q, q_t if transpose else None, scale_inv), db if dbias else None


def can_be_gathered(quantizer: Quantizer) -> bool:
    """Whether ranks can put the tokens of an input, or of a gradient, together: it has no square blocks."""
    inner = innermost(quantizer)
    return not (isinstance(inner, InBlocks) and inner.square)


def share_tokens(model: torch.nn.Module, group: Any) -> None:
    """Let the ranks of a group have some of the tokens each, in every layer of a model: context parallelism.

    Attention's layers get the group as by `set_context_parallel_group`, with "all_gather"; linear layers, norms and
    `Embedding` sum their gradients over the tokens of all ranks. Every rank then has the gradients of one process.
    A rank's tensors are `[sequence / ranks, ...]`: `te.parallel.tokens_of_rank` says which tokens.

    Args:
        model: its layers of other libraries are left as they are: their gradients are those of a rank's tokens.
        group: a process group; None, or one of one rank, ends it.

    Raises:
        NotImplementedError: a layer that cannot share its tokens. The layers before it have the group, unless it is an
            operation of `te.ops` that never can (`Bias`, `Dropout`, `Quantize`): then none has.
    """
    every: list[Any] = list(model.modules())
    if group is not None and dist.get_world_size(group) > 1:
        for module in every:
            if getattr(module, "one_rank_has_all_tokens", False):
                raise NotImplementedError(
                    f"share_tokens: ops.{type(module).__name__} with a group of {dist.get_world_size(group)} ranks is "
                    f"not offered; a model without it is accepted."
                )
    for module in every:
        if hasattr(module, "set_context_parallel_group"):
            module.set_context_parallel_group(group, None, None, "all_gather")
        elif hasattr(module, "take_tokens"):
            module.take_tokens(group)


def tokens_of_rank(x: torch.Tensor, group: Any) -> torch.Tensor:
    """This rank's tokens of a whole sequence x `[s, ...]`, in the order in which its layers take them.

    Transformer Engine's and Megatron-LM's: of 2·t chunks those with the numbers r and 2·t - 1 - r.

    Raises:
        ValueError: s is no multiple of 2·t.
    """
    if group is None or dist.get_world_size(group) == 1:
        return x
    count = 2 * dist.get_world_size(group)
    if x.dim() == 0 or x.shape[0] % count:
        raise ValueError(
            f"tokens_of_rank: x has shape {list(x.shape)}, for a group of {count // 2} ranks; [sequence, ...] is "
            f"accepted, the sequence a multiple of {count}."
        )
    chunks = x.chunk(count)
    return torch.cat([chunks[i] for i in chunks_of(groups.name_of(group))])
