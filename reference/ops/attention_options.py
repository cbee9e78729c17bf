"""What attention takes besides q, k and v: one frozen object from a layer's plan to a kernel's arguments."""

from typing import NamedTuple

import torch

Tensor = torch.Tensor | None


class Options(NamedTuple):
    """The arguments of `twin::attention` after q, k and v, in their order; `reference.ops.attention` explains them."""

    scale: float
    mask_type: str
    left: int
    right: int
    mask: Tensor = None
    dropout: float = 0.0
    rng_state: Tensor = None
    bias: Tensor = None
    slopes: Tensor = None
    sinks: Tensor = None
    q_lengths: Tensor = None
    kv_lengths: Tensor = None

    @property
    def biased(self) -> bool:
        """Whether numbers are added to the scores."""
        return not self.bias is self.slopes is None

    @property
    def has_lengths(self) -> bool:
        """Whether the batch's entries have lengths of their own."""
        return not self.q_lengths is self.kv_lengths is None

    @property
    def of_fp8(self) -> tuple[float, str, int, int, Tensor, float, Tensor]:
        """Those that `twin::attention_fp8` takes, too, in its order."""
        return self.scale, self.mask_type, self.left, self.right, self.mask, self.dropout, self.rng_state

    def unbiased(self) -> "Options":
        """Without what is added to the scores or to their sums."""
        return self._replace(bias=None, slopes=None, sinks=None)
