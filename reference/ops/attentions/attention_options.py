"""What attention takes besides q, k and v: one frozen object from a layer's plan to a kernel's arguments."""

from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor | None

KEY_SEGMENTS: tuple[int, ...] = (4096,)
"""Keys of a segment that are accepted: `reference.ops.attentions.attention_segments`."""


class Options(NamedTuple):
    """The arguments of `twin::attention` after q, k and v, in their order; `reference.ops.attentions.attention`
    explains them."""

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
    q_starts: Tensor = None
    kv_starts: Tensor = None
    longest_q: int | None = None
    longest_kv: int | None = None
    key_segment: int | None = None

    @property
    def biased(self) -> bool:
        """Whether numbers are added to the scores."""
        return not self.bias is self.slopes is None

    @property
    def has_lengths(self) -> bool:
        """Whether the batch's entries have lengths of their own."""
        return not self.q_lengths is self.kv_lengths is None

    @property
    def packed(self) -> bool:
        """Whether sequences lie one after the other: `reference.ops.attentions.attention_packed`."""
        return self.q_starts is not None

    def padded(self) -> "Options":
        """Of the call on the padded sequences."""
        return self._replace(q_starts=None, kv_starts=None, longest_q=None, longest_kv=None)

    def of_rows(self) -> "Options":
        """What statistics of a query depend on: not on lengths, unless they say where it lies."""
        found = self.unbiased()
        return found if self.packed else found._replace(q_lengths=None, kv_lengths=None)

    @property
    def of_pairs(self) -> tuple[float, str, int, int, Tensor, float, Tensor]:
        """The first ones, as far as `twin::attention_fp8` takes them, too, in its order."""
        return self.scale, self.mask_type, self.left, self.right, self.mask, self.dropout, self.rng_state

    @property
    def of_entries(self) -> tuple[Tensor, Tensor, Tensor, Tensor, int | None, int | None]:
        """Where entries of a batch lie, and how long they are: the last ones of `twin::attention_fp8`, in its order."""
        return self.q_lengths, self.kv_lengths, self.q_starts, self.kv_starts, self.longest_q, self.longest_kv

    @staticmethod
    def of_fp8(
        scale: float, mask_type: str, left: int, right: int, mask: Tensor, dropout: float, rng_state: Tensor, *more: Any
    ) -> "Options":
        """Of a call of `twin::attention_fp8_backward`, or of the forward without its dtype: the two above."""
        return Options(scale, mask_type, left, right, mask, dropout, rng_state, None, None, None, *more)

    def unbiased(self) -> "Options":
        """Without what is added to the scores or to their sums."""
        return self._replace(bias=None, slopes=None, sinks=None)
