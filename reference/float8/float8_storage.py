"""What a tensor that is kept in codes, and its aliases, have in common, and how it is written."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from reference.float8.float8_quantizer import Quantizer, rows_of_16
from reference.ops.library import twin
from reference.recipes.quantized import KEEPING, PER_TENSOR, Operand, Quantized
from reference.recipes.quantizer import Quantizer as OfRecipe
from reference.state.scaling import FP8TensorMeta

Scales = FP8TensorMeta | Quantizer | OfRecipe
"""What says the scales of a tensor that is written: a layer's state, a quantizer, or a recipe's for a weight."""


def layout_of(scales: Scales) -> str:
    """The layout of what these scales cast."""
    layout = scales.layout if isinstance(scales, OfRecipe) else PER_TENSOR
    assert layout is not None
    return layout


@dataclass
class Kept:
    """The memory of a tensor.

    Attributes:
        codes: E4M3 or E5M2, of any shape where there is one scale.
        scale_inv: fp32, `[1]` or as the layout says (`KEEPING`).
        transposed: codes `[last, *others]`, or None.
        scales: what says the scales of a write; None inside a compiled graph, which writes nothing.
        column: of a module's state.
        layout: of codes and scales.
        scale_inv_t: of the transposed codes, where it is not `scale_inv`.
        stale: whether the transposed codes are those of earlier codes; who reads them calls `fresh`.
    """

    codes: torch.Tensor
    scale_inv: torch.Tensor
    transposed: torch.Tensor | None
    scales: Scales | None
    column: int = 0
    layout: str = PER_TENSOR
    scale_inv_t: torch.Tensor | None = None
    stale: bool = False

    @staticmethod
    def empty(shape: torch.Size, dtype: torch.dtype, device: torch.device, scales: Scales, column: int) -> "Kept":
        """Memory whose numbers are not set."""
        layout = layout_of(scales)
        codes = torch.empty(shape, dtype=dtype, device=device)
        scale_inv = torch.empty(KEEPING[layout].scales(codes.shape), dtype=torch.float32, device=device)
        return Kept(codes, scale_inv, None, scales, column, layout)

    def state(self) -> Scales:
        """Who says the scales."""
        if self.scales is None:
            raise RuntimeError(
                "Float8Tensor: a weight kept in FP8 is written or copied inside torch.compile, where it has no scale; "
                "an optimizer that does not compile its step is accepted: te.optimizers.FusedAdam or torch.optim's, "
                "not torchao's AdamW8bit."
            )
        return self.scales

    def moved(self, device: torch.device, copied: bool = False) -> "Kept":
        """The same on another device, with the same state; zeros where it comes from the meta device."""
        if self.codes.is_meta and device.type != "meta":
            codes = torch.zeros(self.codes.shape, dtype=torch.uint8, device=device).view(self.codes.dtype)
            scale_inv = torch.ones(self.scale_inv.shape, dtype=torch.float32, device=device)
            return replace(self, codes=codes, scale_inv=scale_inv, transposed=None, scale_inv_t=None)
        names = ("codes", "scale_inv", "transposed", "scale_inv_t")
        tensors = {name: x for name in names if (x := getattr(self, name)) is not None}
        return replace(self, **{name: x.to(device, copy=copied) for name, x in tensors.items()})

    def transpose(self) -> torch.Tensor:
        """The transposed codes, made now."""
        codes = self.codes.view(torch.uint8)
        turned = codes.clone() if codes.dim() == 0 else codes.movedim(-1, 0).contiguous()
        return turned.view(self.codes.dtype)

    def keep_transposed(self, on: bool) -> None:
        """Make the transposed codes and their scales unless they are kept; or drop them."""
        if not on:
            self.transposed = self.scale_inv_t = None
        elif self.transposed is None:
            self.stale = False
            self.transposed, turned = self.transpose(), KEEPING[self.layout].turned
            self.scale_inv_t = None if turned is None else turned(self.scale_inv, self.codes.shape)

    def turn(self) -> None:
        """Write the transposed codes anew, where they are kept, from the codes."""
        turn([self])

    def quantized(self) -> Quantized:
        """What a GEMM reads: the codes, and the transposed ones if they are kept, stale or not."""
        column = None
        if self.transposed is not None:
            scale_inv = self.scale_inv if self.scale_inv_t is None else self.scale_inv_t
            column = Operand(self.transposed, scale_inv, self.layout)
        return Quantized(Operand(self.codes, self.scale_inv, self.layout), column)

    def write(self, values: torch.Tensor, by: Scales) -> None:
        """Cast contiguous `values`, of the codes' shape, with the scales that `by` says."""
        rows, column = rows_of_16(values), None
        if isinstance(by, OfRecipe):
            (codes, scale_inv, *_), column = by.quantize(rows, self.transposed is not None)
        else:
            state = isinstance(by, FP8TensorMeta)
            scales = (by.scale, by.amax_history, self.column) if state else (*by.scaling(rows), 0)  # type: ignore
            codes, scale_inv = twin.cast(rows, *scales, self.codes.dtype)
        whole = codes.shape == self.codes.shape
        self.codes.copy_(codes if whole else codes.view(-1)[: self.codes.numel()].view(self.codes.shape))
        self.scale_inv.copy_(scale_inv)  # type: ignore[arg-type]
        if self.transposed is None:
            return
        if column is None or not whole:
            self.turn()
            return
        self.stale = False
        self.transposed.copy_(column.codes[:, : len(codes)])  # without the zeros that fill it up
        if self.scale_inv_t is not None:
            self.scale_inv_t.copy_(column.scales)  # type: ignore[arg-type]

    def count_write(self) -> None:
        """Let a backward that saved these tensors notice: ops on subclasses run below autograd, which would."""
        tensors = (self.codes, self.scale_inv, self.transposed, self.scale_inv_t)
        torch.autograd.graph.increment_version([x for x in tensors if x is not None])


def turn(kept: Sequence[Kept]) -> None:
    """Write transposed codes anew, where they are kept, from the codes: those of matrices of one dtype together."""
    together: dict[tuple[torch.device, torch.dtype], list[Kept]] = {}
    for one in kept:
        one.stale = False
        if one.transposed is None:
            continue
        if _in_runs_of_16(one.codes) and _in_runs_of_16(one.transposed):
            together.setdefault((one.codes.device, one.codes.dtype), []).append(one)
        else:
            one.transposed.copy_(one.transpose())
        turned = KEEPING[one.layout].turned
        if one.scale_inv_t is not None and turned is not None:
            one.scale_inv_t.copy_(turned(one.scale_inv, one.codes.shape))
    for some in together.values():
        twin.multi_transpose([one.codes for one in some], [one.transposed for one in some])


def _in_runs_of_16(codes: torch.Tensor) -> bool:
    """Whether they are a matrix that `twin::multi_transpose` takes."""
    sizes = codes.dim() == 2 and not any(n % 16 for n in codes.shape)
    return sizes and codes.is_contiguous() and codes.data_ptr() % 16 == 0


def freshen(kept: Sequence[Kept]) -> None:
    """Write stale transposed codes anew.

    A backward may have saved them: they become the codes that it expects, so it is not told of the write.
    """
    stale = [one for one in kept if one.stale]
    if not stale:
        return
    written = tuple([x for one in stale for x in (one.transposed, one.scale_inv_t) if x is not None])
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(written):
        turn(stale)
