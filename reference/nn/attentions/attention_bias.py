"""The bias of attention's scores as layers take it: `core_attention_bias_type`, `core_attention_bias`, `alibi_slopes`.

Arithmetic: `reference.ops.attentions.attention_bias`.
"""

from typing import Any, NamedTuple

import torch

from reference.nn.core.checks import Shape
from reference.ops.attentions.attention_bias import diagonal

TYPES = ("no_bias", "post_scale_bias", "alibi")


class Bias(NamedTuple):
    """A forward's three arguments, by what they are."""

    bias_type: Any = "no_bias"
    values: Any = None
    slopes: Any = None

    @property
    def given(self) -> bool:
        """Whether any of the three says more than "no bias"."""
        return not (type(self.bias_type) is str and self.bias_type == "no_bias" and self.values is self.slopes is None)

    def arguments(self) -> dict[str, Any]:
        """By a forward's names."""
        return dict(zip(NAMES, self, strict=True))


NAMES = ("core_attention_bias_type", "core_attention_bias", "alibi_slopes")
NO_BIAS = Bias()


def check_bias(layer: str, bias: Bias, dtype: torch.dtype, shape: Shape, device: torch.device) -> None:
    """Refuse a bias that attention of `dtype` and `shape` [b, h, sq, skv] does not take."""
    if bias.bias_type not in TYPES:
        raise ValueError(f"{layer}: core_attention_bias_type={bias.bias_type!r}; one of {TYPES} is accepted.")
    named = (("core_attention_bias", bias.values, "post_scale_bias"), ("alibi_slopes", bias.slopes, "alibi"))
    for name, x, wanted in named:
        if x is None:
            continue
        if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or x.is_nested:
            raise TypeError(f"{layer}: {name}={type(x).__name__}; a dense tensor is accepted.")
        if bias.bias_type != wanted:
            raise ValueError(
                f"{layer}: {name} with core_attention_bias_type={bias.bias_type!r}; it goes with {wanted!r} alone."
            )
        if x.device != device:
            raise RuntimeError(
                f"{layer}: {name} is on {x.device}, the activations on {device}; one device is accepted."
            )
    if bias.bias_type == "post_scale_bias":
        _check_values(layer, bias.values, dtype, shape)
    if bias.bias_type == "alibi":
        _check_slopes(layer, bias.slopes, shape)


def check_sinks(layer: str, core: Any, bias: Bias, dtype: torch.dtype) -> None:
    """Refuse what a softmax_type other than "vanilla" does not go with."""
    softmax_type = core.softmax_type
    if softmax_type == "vanilla":
        return
    if bias.given:
        raise NotImplementedError(
            f"{layer}: core_attention_bias_type={bias.bias_type!r} with softmax_type={softmax_type!r} is not offered; "
            f"'no_bias' is accepted."
        )
    if dtype == torch.float32 or core.attention_backend != "exact":
        raise NotImplementedError(
            f"{layer}: softmax_type={softmax_type!r} in {dtype} with attention_backend={core.attention_backend!r} is "
            f"not offered; bfloat16 and float16 are accepted with 'exact'."
        )


def _check_values(layer: str, x: Any, dtype: torch.dtype, shape: Shape) -> None:
    b, h, sq, skv = shape
    accepted = f"float32 or {dtype} [1 or {b}, 1 or {h}, {sq}, {skv}] is accepted"
    if x is None:
        raise ValueError(
            f"{layer}: core_attention_bias=None with core_attention_bias_type='post_scale_bias'; {accepted}."
        )
    fits = x.dim() == 4 and x.shape[0] in (1, b) and x.shape[1] in (1, h) and x.shape[2:] == (sq, skv)
    if x.dtype not in (torch.float32, dtype) or not fits:
        raise ValueError(f"{layer}: core_attention_bias is {x.dtype} {list(x.shape)}; {accepted}.")


def _check_slopes(layer: str, x: Any, shape: Shape) -> None:
    if x is None:
        return
    b, h = shape[:2]
    if x.dtype != torch.float32 or x.shape not in ((h,), (b, h)):
        raise ValueError(
            f"{layer}: alibi_slopes is {x.dtype} {list(x.shape)}; float32 [{h}] or [{b}, {h}] is accepted."
        )
    if x.requires_grad:
        raise NotImplementedError(
            f"{layer}: alibi_slopes with requires_grad=True is not offered; slopes without gradient are accepted, or "
            f"'post_scale_bias'."
        )


def alibi(slopes: torch.Tensor, mask_type: str, sq: int, skv: int) -> torch.Tensor:
    """ALiBi's bias fp32 `[1 or b, h, sq, skv]`; `mask_type` is an op's."""
    i = torch.arange(sq, dtype=torch.int64, device=slopes.device)[:, None]
    j = torch.arange(skv, dtype=torch.int64, device=slopes.device)[None, :]
    nearness = -(i + diagonal(mask_type, sq, skv) - j).abs()
    return slopes.view(-1, slopes.shape[-1], 1, 1) * nearness.float()
