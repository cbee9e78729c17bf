"""Tensor parallelism: a linear map of which each rank has a part, with the words of one process.

    column    w `[out / t, in]` on each rank: its rows of w, its columns of y and of g = dL/dy
    row       w `[out, in / t]`: its columns of w, and of x

    y  = x·wᵀ + b     column: on each rank, its columns                  row: one chain over `in` through the ranks
    dx = g·w          column: one chain over `out` through the ranks     row: on each rank, its columns
    dw = gᵀ·x         on each rank, its rows or columns of w; K is the tokens, of which it has all

A chain adds as one process does (`reference.parallel.ordered_reduce`). Sequence parallel: outside of the two maps each
rank has its tokens only. A column-parallel map gathers the rows of x, a row-parallel one those of g; what comes out of
a chain goes to the ranks by rows.

Scales are those of whole tensors. Delayed: each rank records the amax of its part, and the histories are reduced over
the group before scales are computed (`reference.state.scaling.update`). Current: a maximum over the ranks before the
cast. Blocks of 128 lie within a rank. Where a tensor has one scale, codes are gathered, a byte each; numbers are in 16
bits, in blocks, whose transposes have scales along the tokens, and where a bias's gradient is summed from them.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from reference.ops.casts.cast_transpose import ceil16
from reference.ops.gemms.gemm_part import CUTS
from reference.ops.library import twin
from reference.parallel import ordered_reduce
from reference.parallel.ordered_reduce import Band
from reference.recipes.block_scaling import InBlocks
from reference.recipes.current_scaling import Current, scale_of_amaxes, scale_of_ranks
from reference.recipes.delayed_scaling import Delayed
from reference.recipes.quantized import Operand, Quantized, per_tensor, pieces_of, products, rows_of_operand
from reference.recipes.quantizer import (
    ActivationPlan,
    Around,
    Calibrating,
    ForwardOnly,
    HighPrecision,
    NormPlan,
    Produced,
    Quantizer,
)
from reference.recipes.roles import GemmRoles, Roles


class Shared(NamedTuple):
    """How the ranks of a group share a linear map.

    Attributes:
        group: its name.
        splits_input: row-parallel: a rank has columns of w; False is column-parallel, where it has rows.
        sequence: sequence parallel.
        sizes: of the pieces of K that a rank has, each a part of one of as many pieces of the whole K.
    """

    group: str
    splits_input: bool
    sequence: bool
    sizes: tuple[int, ...]

    def chain(
        self,
        a: Operand,
        b: Operand,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        accumulate: str,
        meanwhile: Callable[[], object] | None = None,
    ) -> torch.Tensor:
        """T(a·bᵀ + bias) over the K of all ranks; `[m, n]`, with `sequence` this rank's rows.

        `meanwhile` is what a rank may compute while it waits for others; it is called at most once.
        """
        gemm, shape, device = products(a, b), (a.codes.shape[0], b.codes.shape[0]), a.codes.device
        if not shape[0] * shape[1]:  # on every rank
            rows = shape[0] // ordered_reduce.ranks_of(self.group)[1] if self.sequence else shape[0]
            return torch.zeros((rows, shape[1]), dtype=out_dtype, device=device)
        pieces = [(a, b)]
        if len(self.sizes) > 1:
            sizes = list(self.sizes)
            pieces = list(zip(pieces_of(a, sizes, True), pieces_of(b, sizes, True), strict=True))

        def part(piece: int, band: Band, start: torch.Tensor | None) -> torch.Tensor:
            assert gemm.part is not None
            rows, other = rows_of_operand(pieces[piece][0], *band), pieces[piece][1]
            return gemm.part(rows, other, start, accumulate)

        def last(piece: int, band: Band, start: torch.Tensor | None) -> torch.Tensor:
            if gemm.part_and_end is not None:
                rows, other = rows_of_operand(pieces[piece][0], *band), pieces[piece][1]
                return gemm.part_and_end(rows, other, start, bias, out_dtype, accumulate)
            assert gemm.end is not None
            return gemm.end(part(piece, band, start), a, b, bias, out_dtype)

        rest = (len(pieces), out_dtype, self.sequence, device, meanwhile)
        return ordered_reduce.passed_on(self.group, shape, part, last, *rest)

    def quantizers(self, roles: GemmRoles, found: dict[str, Quantizer]) -> None:
        """Let the quantizers of a map's tensors see those of all ranks."""
        for role in (roles.input, roles.weight, roles.grad):
            whole = role.tensor == ("grad_output" if self.splits_input else "input")
            one = found[role.name]
            if not whole:
                found[role.name] = of_whole(one, self.group)
            elif self.sequence:
                found[role.name] = Gathered(of_whole(one, self.group), self.group)


def part_of(whole: torch.Tensor, dim: int, sizes: tuple[int, ...], rank: int, count: int) -> torch.Tensor:
    """A rank's part of a weight: of each piece along `dim`, whose parts have these sizes, the rank-th of `count`."""
    pieces = whole.split([size * count for size in sizes], dim)
    return torch.cat([one.narrow(dim, rank * size, size) for one, size in zip(pieces, sizes, strict=True)], dim)


def shared_quantizers(roles: Roles, quantizers: dict[str, Quantizer]) -> dict[str, Quantizer]:
    """A recipe's quantizers, as they are where ranks share linear maps."""
    for one in roles.gemms:
        if one.shared is not None:
            one.shared.quantizers(one, quantizers)
    return quantizers


def cut_of(quantizer: Quantizer, accumulate: str) -> int:
    """At multiples of how many numbers K may be cut between ranks; `accumulate` is that of FP8 with one scale."""
    if not quantizer.fp8:
        return CUTS["16 bits"]
    inner = quantizer.inner if isinstance(quantizer, Around) else quantizer
    return CUTS["blocks"] if isinstance(inner, InBlocks) else CUTS[accumulate]


def of_whole(quantizer: Quantizer, group: str) -> Quantizer:
    """The same for a tensor of which each rank has a part: with the scale of all of it."""
    if type(quantizer) is Current:
        return SharedCurrent(quantizer, group)
    if isinstance(quantizer, ForwardOnly) and quantizer.dtype_t is not None:
        return type(quantizer)(of_whole(quantizer.inner, group), quantizer.dtype_t)
    if type(quantizer) not in (Delayed, InBlocks, HighPrecision, Calibrating):
        raise NotImplementedError(
            f"ranks that share tensors with quantizers of {type(quantizer).__name__} are not offered; DelayedScaling, "
            f"Float8CurrentScaling and Float8BlockScaling are accepted."
        )
    return quantizer


class SharedCurrent(Current):
    """Current scaling of a tensor of which each rank has a part: the amax is the largest of theirs.

    Nothing is fused with the op before it, because the scale waits for the other ranks.
    """

    reads_amax = False

    def __init__(self, one: Current, group: str) -> None:
        super().__init__(*one.how)
        self.group = group
        self.key = (*one.key, group)  # type: ignore[misc]

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return scale_of_ranks(x, self.group, *self.how)

    def scale_of_activation(self, h: torch.Tensor, kind: str, y: torch.Tensor) -> torch.Tensor:
        amax = torch.zeros(1, 1, dtype=torch.float32, device=h.device)
        one = torch.ones(1, dtype=torch.float32, device=h.device)
        twin.activation_cast_transpose(h, kind, one, amax, 0, self.dtype)  # for the amax of the fp32 activation
        return scale_of_amaxes(amax, self.group, *self.how)

    quantize_together = Quantizer.quantize_together
    norm = Quantizer.norm
    activation = Quantizer.activation
    activation_grad = Quantizer.activation_grad
    joined_grad = Quantizer.joined_grad

    def activated(self, h: torch.Tensor, kind: str, transpose: bool) -> tuple[torch.Tensor, Quantized]:
        y = twin.activation(h, kind)
        return y, self._cast(y, self.scale_of_activation(h, kind, y), transpose)


class Gathered(Around):
    """A tensor of which each rank has some rows: all of them, quantized by `inner`."""

    def __init__(self, inner: Quantizer, group: str) -> None:
        self.inner, self.group = inner, group
        self.dtype, self.dtype_t, self.fp8 = inner.dtype, inner.dtype_t, inner.fp8
        self.key = ("gathered", inner.key, group)
        self.by_codes = isinstance(inner, (Delayed, Current))

    def _codes(self, own: Quantized, transpose: bool) -> Quantized:
        """This rank's rows with one scale, and those of the others.

        They are transposed here: that is faster than to gather transposes, too, and to put them side by side.
        """
        rows, cols = own.row.codes.shape
        count = rows * ordered_reduce.ranks_of(self.group)[1]
        whole = own.row.codes.new_empty(ceil16(count), cols)
        if count % 16:
            whole.view(torch.uint8)[count:].zero_()
        q, q_t = ordered_reduce.gathered_rows(self.group, own.row.codes, whole[:count]), None
        if transpose:
            q_t = whole.new_empty(cols, len(whole))
            twin.multi_transpose([whole], [q_t])
        assert own.row.scales is not None
        return per_tensor(q, q_t, own.row.scales)

    def quantize(self, x: torch.Tensor, transpose: bool) -> Quantized:
        if self.by_codes:
            return self._codes(self.inner.quantize(x, False), transpose)
        return self.inner.quantize(ordered_reduce.gathered_rows(self.group, x), transpose)

    def norm(
        self,
        x: torch.Tensor,
        gamma: torch.Tensor,
        beta: torch.Tensor | None,
        plan: NormPlan,
        dtype: torch.dtype,
        transpose: bool,
    ) -> tuple[Quantized, torch.Tensor, torch.Tensor]:
        """The norm of this rank's rows, whose mean and rstd are returned; quantized, that of all rows."""
        if not self.by_codes:
            return super().norm(x, gamma, beta, plan, dtype, transpose)
        own, mean, rstd = self.inner.norm(x, gamma, beta, plan, dtype, False)
        return self._codes(own, transpose), mean, rstd

    def grad(self, g: torch.Tensor, transpose: bool, dbias: bool) -> Produced:
        if self.by_codes and not dbias:
            return self.quantize(g, transpose), None
        return self.inner.grad(ordered_reduce.gathered_rows(self.group, g), transpose, dbias)

    def joined_grad(self, parts: list[torch.Tensor], groups: int, transpose: bool, dbias: bool) -> Produced:
        raise NotImplementedError("a gradient in parts belongs to a column-parallel map, whose rows are all there")

    def activation(
        self, x: Quantized, w: Quantized, bias: torch.Tensor | None, plan: ActivationPlan, transpose: bool
    ) -> tuple[torch.Tensor, Quantized]:
        raise NotImplementedError("an activation is the input of a row-parallel map, whose rows are all there")

    activation_grad = joined_grad  # type: ignore[assignment]
