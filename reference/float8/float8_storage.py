"""What a `Float8Tensor` and its aliases keep in common, and how it is written."""

from dataclasses import dataclass, replace

import torch

from reference.float8.float8_quantizer import Quantizer, rows_of_16
from reference.ops.library import twin
from reference.state.scaling import FP8TensorMeta


@dataclass
class Kept:
    """The memory of a Float8Tensor.

    Attributes:
        codes: E4M3 or E5M2, of any shape.
        scale_inv: fp32 `[1]`.
        transposed: codes `[last, *others]`, or None.
        scales: what says the scale: a quantizer, or a module's state; None inside a compiled graph, which writes
            nothing.
        column: of a module's state.
    """

    codes: torch.Tensor
    scale_inv: torch.Tensor
    transposed: torch.Tensor | None
    scales: FP8TensorMeta | Quantizer | None
    column: int = 0

    def state(self) -> FP8TensorMeta | Quantizer:
        """Who says the scale."""
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
            scale_inv = torch.ones(1, dtype=torch.float32, device=device)
            return replace(self, codes=codes, scale_inv=scale_inv, transposed=None)
        transposed = None if self.transposed is None else self.transposed.to(device, copy=copied)
        codes, scale_inv = self.codes.to(device, copy=copied), self.scale_inv.to(device, copy=copied)
        return replace(self, codes=codes, scale_inv=scale_inv, transposed=transposed)

    def transpose(self) -> torch.Tensor:
        """The transposed codes, made now."""
        codes = self.codes.view(torch.uint8)
        turned = codes.clone() if codes.dim() == 0 else codes.movedim(-1, 0).contiguous()
        return turned.view(self.codes.dtype)

    def write(self, values: torch.Tensor, by: FP8TensorMeta | Quantizer) -> None:
        """Cast contiguous `values`, of the codes' shape, with the scale that `by` says."""
        rows = rows_of_16(values)
        scales = (by.scale, by.amax_history, self.column) if isinstance(by, FP8TensorMeta) else (*by.scaling(rows), 0)
        codes, scale_inv = twin.cast(rows, *scales, self.codes.dtype)
        if codes.shape != self.codes.shape:
            codes = codes.view(-1)[: self.codes.numel()].view(self.codes.shape)
        self.codes.copy_(codes)
        self.scale_inv.copy_(scale_inv)
        if self.transposed is not None:
            self.transposed.copy_(self.transpose())

    def count_write(self) -> None:
        """Let a backward that saved these tensors notice: ops on subclasses run below autograd, which would."""
        tensors = (self.codes, self.scale_inv, self.transposed)
        torch.autograd.graph.increment_version([x for x in tensors if x is not None])
