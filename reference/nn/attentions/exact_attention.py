"""Exact attention by heads, forward and backward: out `[b, h, sq, d]` of q `[b, h, sq, d]`, k, v `[b, hkv, skv, d]`.

Arithmetic: `reference.ops.attentions.attention`. `reference.nn.attentions.dot_product_pair` calls it.
"""

import math
from typing import Any, NamedTuple

import torch

from reference.arguments import MASK_TYPES
from reference.nn.attentions.heads import dense_rows
from reference.nn.core.compiled import before
from reference.ops.attentions.attention import LOWEST
from reference.ops.attentions.attention_amax import in_passing
from reference.ops.attentions.attention_options import Options
from reference.ops.library import twin

Qkv = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Mask = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None


class Equation(NamedTuple):
    """How to attend: scale, Transformer Engine's mask type, the window, dropout's p, the backend, the bias's type.

    `fp8_kv`: keys and values go through FP8 codes first (`fp8_keys_values.py`). `key_segment`: of the ops.
    """

    scale: float
    mask_type: str
    window: tuple[int, int]
    p: float
    backend: str
    bias: str = "no_bias"
    softmax: str = "vanilla"
    fp8_kv: bool = False
    key_segment: int | None = None

    def options(
        self,
        mask: torch.Tensor | None,
        state: torch.Tensor | None,
        more: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
        q_lengths: torch.Tensor | None = None,
        kv_lengths: torch.Tensor | None = None,
    ) -> Options:
        """What the ops take after q, k and v; `state` is the random one, `more` a bias, or sinks."""
        mask_type, (left, right) = MASK_TYPES[self.mask_type][0], self.window
        sinks = more if self.softmax != "vanilla" else None
        bias, slopes = (None, None) if self.bias == "no_bias" or sinks is not None else (more, slopes)
        others = (bias, slopes, sinks, q_lengths, kv_lengths)
        return Options(self.scale, mask_type, left, right, mask, self.p, state, *others, key_segment=self.key_segment)


class Attended(NamedTuple):
    """What `attend_backward` reads: `twin::attention`'s results, and the random state from before it."""

    out: torch.Tensor
    m: torch.Tensor
    inv: torch.Tensor
    state: torch.Tensor | None


def attend(
    options: Options, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, wants_amax: bool = False
) -> tuple[torch.Tensor, Attended, torch.Tensor | None]:
    """out `[b, h, sq, d]` of q `[b, h, sq, d]`, k and v `[b, hkv, skv, d]`, and what `attend_backward` reads.

    With `wants_amax` also out's amax, fp32 `[1, 1]`, where it is found in passing.
    """
    state_before, amax = before(options.rng_state), None
    if wants_amax and in_passing(q, k, v, options):
        out, m, inv, amax = twin.attention_amax(q, k, v, *options)
    else:
        out, m, inv = twin.attention(q, k, v, *options)
    return out, Attended(out, m, inv, state_before), amax


def attend_backward(
    options: Options, qkv: Qkv, attended: Attended, grad: torch.Tensor, wants_amax: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """dq, dk, dv, and their amax as in `attend`; the random state of `options` is that of `attended`."""
    out, m, inv, _ = attended
    given = (dense_rows(grad), *qkv, out, m, inv, *options)
    if wants_amax and in_passing(*qkv, options):
        return twin.attention_backward_amax(*given)  # type: ignore[no-any-return]
    return *twin.attention_backward(*given), None


def max_logit(m: torch.Tensor, inv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Each head's largest score `[h]` in `dtype`, of `twin::attention`'s m and inv, fp32 `[b, h, sq]`.

        round(fp32( max m · fp32(ln 2) ))         -inf where no query of a head sees a key

    A score that is NaN or infinite makes it NaN, as it does its row's inv. m counts in powers of two and in steps of
    2^-15, so the score is right to some 1e-5 before the rounding.
    """
    if not m.numel():
        return torch.full(m.shape[1:2], -torch.inf, dtype=dtype, device=m.device)
    largest = (m.detach() + inv.detach() * 0).amax((0, 2))
    return (largest * math.log(2)).masked_fill(largest == float(LOWEST), -torch.inf).to(dtype)


def full_mask(mask_type: str, mask: Any) -> torch.Tensor | None:
    """The mask over pairs, broadcastable to `[b, h, sq, skv]`; a padded query's whole row is hidden."""
    if not MASK_TYPES[mask_type][1]:
        return None
    if mask_type == "arbitrary":
        return mask
    queries, keys = mask if isinstance(mask, tuple) else (mask, mask)
    return queries.transpose(2, 3) | keys
