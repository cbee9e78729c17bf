"""Tensor parallelism: a linear map of which each rank has a part, with the words of one process.

    column    w `[out / t, in]` on each rank: its rows of w, its columns of y and of g = dL/dy
    row       w `[out, in / t]`: its columns of w, and of x

    y  = x·wᵀ + b     column: on each rank, its columns                  row: one chain over `in` of all ranks
    dx = g·w          column: one chain over `out` of all ranks          row: on each rank, its columns
    dw = gᵀ·x         on each rank, its rows or columns of w; K is the tokens, of which it has all

A chain adds as one process does. That of few rows passes through the ranks (`reference.parallel.ordered_reduce`); of
many rows each rank computes its own (`reference.parallel.exchange`). Sequence parallel: outside of the two maps each
rank has its tokens only. A column-parallel map gathers the rows of x, a row-parallel one those of g; what comes out of
a chain goes to the ranks by rows.

Scales are those of whole tensors. Delayed: each rank records the amax of its part, and the histories are reduced over
the group before scales are computed (`reference.state.scaling.update`). Current: a maximum over the ranks before the
cast. Blocks of 128 lie within a rank. Where a tensor has one scale, codes are gathered, a byte each; numbers are in 16
bits, in blocks, whose transposes have scales along the tokens, and where a bias's gradient is summed from them.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from reference.ops.casts.cast_transpose import ceil16
from reference.ops.gemms.gemm_part import CUTS
from reference.ops.library import twin
from reference.parallel import exchange, ordered_reduce
from reference.parallel.ordered_reduce import Band
from reference.recipes.block_scaling import InBlocks
from reference.recipes.current_scaling import Current, scale_of_amaxes, scale_of_ranks
from reference.recipes.delayed_scaling import Delayed
from reference.recipes.quantized import (
    SCALES_OF_ROWS,
    Operand,
    Products,
    Quantized,
    per_tensor,
    pieces_of,
    products,
    rows_of_operand,
)
from reference.recipes.quantizer import (
    ActivationPlan,
    Around,
    Calibrating,
    ForwardOnly,
    HighPrecision,
    Produced,
    Quantizer,
    innermost,
)
from reference.recipes.roles import GemmRoles, Roles
from reference.support import groups


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

    def send_ahead(self, b: Operand, rows: int) -> None:
        """Begin to send what the next `chain` of as many rows reads of b, if it does."""
        if b.codes.numel() and exchange.pays(self.group, rows):
            if b.codes.data_ptr() in groups.under_way.ahead:  # of a call that an error has ended
                groups.abandon()
            groups.under_way.ahead[b.codes.data_ptr()] = _of_ranks(self.group, [b] * self._count, "b")

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
            rows = shape[0] // self._count if self.sequence else shape[0]
            return torch.zeros((rows, shape[1]), dtype=out_dtype, device=device)
        if exchange.pays(self.group, shape[0]):
            return self._exchanged(gemm, a, b, bias, out_dtype, accumulate, meanwhile)
        pieces = self._pieces(a, b)

        def operands(piece: int, band: Band) -> tuple[Operand, Operand]:
            one, other = pieces[piece]
            return rows_of_operand(one, *band), other

        def part(piece: int, band: Band, start: torch.Tensor | None) -> torch.Tensor:
            assert gemm.part is not None
            return gemm.part(*operands(piece, band), start, accumulate)

        def last(piece: int, band: Band, start: torch.Tensor | None) -> torch.Tensor:
            return _last_part(gemm, *operands(piece, band), start, bias, out_dtype, accumulate)

        rest = (len(pieces), out_dtype, self.sequence, device, meanwhile)
        return ordered_reduce.passed_on(self.group, shape, part, last, *rest)

    @property
    def _count(self) -> int:
        return ordered_reduce.ranks_of(self.group)[1]

    def _pieces(self, a: Operand, b: Operand) -> list[tuple[Operand, Operand]]:
        """The pieces of K of one rank."""
        if len(self.sizes) == 1:
            return [(a, b)]
        sizes = list(self.sizes)
        return list(zip(pieces_of(a, sizes, True), pieces_of(b, sizes, True), strict=True))

    def _exchanged(
        self,
        gemm: Products,
        a: Operand,
        b: Operand,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        accumulate: str,
        meanwhile: Callable[[], object] | None,
    ) -> torch.Tensor:
        """`chain` of many rows: this rank computes its own, the parts of all ranks one after the other."""
        count, rows = self._count, a.codes.shape[0] // self._count
        try:
            ahead = groups.under_way.ahead.pop(b.codes.data_ptr(), None)
            of_b = _of_ranks(self.group, [b] * count, "b") if ahead is None else ahead
            given = [rows_of_operand(a, rank * rows, (rank + 1) * rows) for rank in range(count)]
            of_a = _of_ranks(self.group, given, "a")
            if meanwhile is not None:
                meanwhile()
            pieces: list[list[tuple[Operand, Operand]]] = []  # of each rank
            out: torch.Tensor | None = None
            for piece, rank in itertools.product(range(len(self.sizes)), range(count)):
                if not piece:
                    pieces.append(self._pieces(of_a.of(rank), of_b.of(rank)))
                part = pieces[rank][piece]
                if (piece, rank) == (len(self.sizes) - 1, count - 1):
                    out = _last_part(gemm, *part, out, bias, out_dtype, accumulate)
                else:
                    assert gemm.part is not None
                    out = gemm.part(*part, out, accumulate)
            of_a.end()
            of_b.end()
        except BaseException:
            groups.abandon()
            raise
        assert out is not None
        return out if self.sequence else ordered_reduce.gathered_rows(self.group, out)

    def quantizers(self, roles: GemmRoles, found: dict[str, Quantizer]) -> None:
        """Let the quantizers of a map's tensors see those of all ranks."""
        for role in (roles.input, roles.weight, roles.grad):
            whole = role.tensor == ("grad_output" if self.splits_input else "input")
            one = found[role.name]
            if not whole:
                found[role.name] = of_whole(one, self.group)
            elif self.sequence:
                found[role.name] = Gathered(of_whole(one, self.group), self.group)


def _last_part(
    gemm: Products,
    a: Operand,
    b: Operand,
    accumulator: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    accumulate: str,
) -> torch.Tensor:
    """The last part of a sum, and what follows it."""
    if gemm.part_and_end is not None:
        return gemm.part_and_end(a, b, accumulator, bias, out_dtype, accumulate)
    assert gemm.part is not None
    assert gemm.end is not None
    return gemm.end(gemm.part(a, b, accumulator, accumulate), a, b, bias, out_dtype)


class OfRanks(NamedTuple):
    """The parts of an operand that the ranks send each other.

    Attributes:
        own: this rank's.
        codes: of all.
        scales: of all; None where they are the same on all ranks, or there are none.
    """

    own: Operand
    codes: exchange.Arriving
    scales: exchange.Arriving | None

    def of(self, rank: int) -> Operand:
        """A rank's, when it has arrived; asked once for each."""
        scales = self.own.scales if self.scales is None else self.scales.of(rank)
        return self.own._replace(codes=self.codes.of(rank), scales=scales)

    def end(self) -> None:
        """After the last use."""
        for one in (self.codes, self.scales):
            if one is not None:
                one.end()


def _of_ranks(group: str, given: list[Operand], kind: str) -> OfRanks:
    """Begin to send `given[r]` to rank r; the scales too, if they are those of blocks."""
    own = given[ordered_reduce.ranks_of(group)[0]]
    codes = exchange.begin([one.codes for one in given], group, kind)
    scales: exchange.Arriving | None = None
    if own.layout in SCALES_OF_ROWS:
        scales = exchange.begin([one.scales for one in given], group, f"scales of {kind}")  # type: ignore[misc]
    return OfRanks(own, codes, scales)


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
    return CUTS["blocks"] if isinstance(innermost(quantizer), InBlocks) else CUTS[accumulate]


def of_whole(quantizer: Quantizer, group: str) -> Quantizer:
    """The same for a tensor of which each rank of a group has a part: with the scale of all of it."""
    if type(quantizer) is Current:
        return SharedCurrent(quantizer, (group,))
    if isinstance(quantizer, SharedCurrent):
        return SharedCurrent(quantizer, (*quantizer.shared_by, group))
    if isinstance(quantizer, Gathered):
        return Gathered(of_whole(quantizer.inner, group), quantizer.group)
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

    Nothing is fused with the op before it, because the scale waits for the other ranks. `shared_by`: the names of their
    groups; with two of them each rank of one has a part of what the ranks of the other share.
    """

    reads_amax = False

    def __init__(self, one: Current, shared_by: tuple[str, ...]) -> None:
        super().__init__(*one.how)
        self.shared_by = shared_by
        self.key = ("current", *one.how, *shared_by)  # type: ignore[assignment]

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return scale_of_ranks(x, self.shared_by, *self.how)

    def scale_of_activation(self, h: torch.Tensor, kind: str, y: torch.Tensor) -> torch.Tensor:
        amax = torch.zeros(1, 1, dtype=torch.float32, device=h.device)
        one = torch.ones(1, dtype=torch.float32, device=h.device)
        twin.activation_cast_transpose(h, kind, one, amax, 0, self.dtype)  # for the amax of the fp32 activation
        return scale_of_amaxes(amax, self.shared_by, *self.how)

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

    def _codes(self, own: Quantized, transpose: bool) -> Callable[[], Quantized]:
        """Begin to gather rows with one scale from this rank's; the result, called once, is the rows of all.

        They are transposed here: that is faster than to gather transposes, too, and to put them side by side.
        """
        rows, cols = own.row.codes.shape
        count = rows * ordered_reduce.ranks_of(self.group)[1]
        whole = own.row.codes.new_empty(ceil16(count), cols)
        if count % 16:
            whole.view(torch.uint8)[count:].zero_()
        gathering = ordered_reduce.gathering(self.group, own.row.codes, whole[:count])

        def of_all() -> Quantized:
            q, q_t = gathering.rows(), None
            if transpose:
                q_t = whole.new_empty(cols, len(whole))
                twin.multi_transpose([whole], [q_t])
            assert own.row.scales is not None
            return per_tensor(q, q_t, own.row.scales)

        return of_all

    def quantize(self, x: torch.Tensor, transpose: bool) -> Quantized:
        if self.by_codes:
            return self._codes(self.inner.quantize(x, False), transpose)()
        return self.inner.quantize(ordered_reduce.gathered_rows(self.group, x), transpose)

    def norm(self, *given: Any) -> tuple[Quantized, torch.Tensor, torch.Tensor]:
        """The norm of this rank's rows, whose mean and rstd are returned; quantized, that of all rows."""
        return self.begin_norm(*given)() if self.by_codes else super().norm(*given)

    def begin_norm(self, *given: Any) -> Callable[[], tuple[Quantized, torch.Tensor, torch.Tensor]]:
        if not self.by_codes:
            return super().begin_norm(*given)
        x, gamma, beta, plan, dtype, transpose = given
        own, mean, rstd = self.inner.norm(x, gamma, beta, plan, dtype, False)
        of_all = self._codes(own, transpose)
        return lambda: (of_all(), mean, rstd)

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
