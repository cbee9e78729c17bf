"""`twin::scale_update`: from the amaxes of a step to the scales of the next one.

Per module i and column j, with H = amax_histories[i] `[L, n]` fp32, in whose row 0 the casts collect their amax, and
s = scales[i] `[n]` fp32, everything in fp32:

1. last = H[0, j]. If last == 0 (nothing was cast), the column stays as it is: no roll, same scale.
2. a[r] = H[r + 1, j] for r < L - 1, a[L - 1] = last. H[:, j] becomes a with its first entry set to 0.
3. amax = max(a) with NaN and infinities ignored ("max"), or last ("most_recent").
4. If amax is finite and > 0: s[j] = (2^-margin · fp8_max) / amax, one IEEE division;
   an infinite quotient becomes the largest finite fp32. Otherwise s[j] stays.

An overflowed step, which a gradient scaler skips, leaves an infinite amax. It must not hold the scale for the L steps
that it stays in the history: the scaler halves its own scale, and gradients change by that.

Source: Transformer Engine's `delayed_scaling.cu`, bulk update; six training steps recorded on an H200 agree
in every bit. There an infinity in the history holds the scale.
"""

import torch

from reference.ops.checks import check_lengths
from reference.ops.library import define

OP = "twin::scale_update"
FP32_MAX = torch.finfo(torch.float32).max
ALGORITHMS = ("max", "most_recent")


def outputs(
    scales: list[torch.Tensor], amax_histories: list[torch.Tensor], fp8_max: float, margin: int, algorithm: str
) -> None:
    """Refuse what `twin::scale_update` does not accept; any fp8_max is accepted."""
    if margin < -1023:
        raise ValueError(f"{OP}: margin={margin}; an int from -1023 on is accepted, whose power of two is a number.")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"{OP}: algorithm={algorithm!r}; one of {ALGORITHMS} is accepted.")
    check_lengths(OP, "scales", len(scales), {"amax_histories": amax_histories})
    for i, (scale, history) in enumerate(zip(scales, amax_histories, strict=True)):
        if scale.dtype != torch.float32 or history.dtype != torch.float32:
            raise TypeError(
                f"{OP}: scales[{i}] is {scale.dtype}, amax_histories[{i}] {history.dtype}; float32 is accepted."
            )
        if scale.dim() != 1 or history.dim() != 2 or history.shape[0] < 1 or history.shape[1] != scale.shape[0]:
            raise ValueError(
                f"{OP}: scales[{i}] has shape {list(scale.shape)} and amax_histories[{i}] {list(history.shape)}; "
                f"[n] and [L >= 1, n] are accepted."
            )
        if not (scale.is_contiguous() and history.is_contiguous()):
            raise ValueError(f"{OP}: scales[{i}] or amax_histories[{i}] is strided; contiguous is accepted.")


@define(outputs, mutates=("scales", "amax_histories"))
def scale_update(
    scales: list[torch.Tensor], amax_histories: list[torch.Tensor], fp8_max: float, margin: int, algorithm: str
) -> None:
    """Update every module's scale and amax history in place."""
    outputs(scales, amax_histories, fp8_max, margin, algorithm)
    scaled_max = torch.tensor(fp8_max * 2.0**-margin, dtype=torch.float32, device="cpu")
    for scale, history in zip(scales, amax_histories, strict=True):
        last = history[0].clone()
        rolled = torch.cat([history[1:], last[None]])
        if algorithm == "max":
            amax = torch.where(rolled.isfinite(), rolled, 0.0).amax(dim=0)
        else:
            amax = last
        usable = amax.isfinite() & (amax > 0) & (last != 0)
        quotient = scaled_max / torch.where(usable, amax, 1.0)
        quotient = torch.where(quotient.isinf(), FP32_MAX, quotient)
        scale.copy_(torch.where(usable, quotient, scale))
        rolled[0] = 0.0
        history.copy_(torch.where(last != 0, rolled, history))
