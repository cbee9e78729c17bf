"""`twin::attention_amax` and `twin::attention_backward_amax` on the GPU: kernels/attentions/attention.cu,
attention_backward.cu and attention_backward_ends.cu with AMAX.

The kernels raise one word, which the launch before them clears. Where they have no such form (`in_passing`), the
results are read for it.

Semantics: `reference.ops.attentions.attention_amax`.
"""

import itertools
from typing import Any

import torch

from optimized.cuda import launch
from optimized.ops.attentions import attention, attention_backward, attention_decode
from optimized.ops.casts import amax as amaxes
from reference.ops.attentions.attention_amax import Four, backward_outputs, in_passing, outputs
from reference.ops.attentions.attention_options import Options
from reference.ops.library import on_cuda

_PLAIN = attention.Entries(False)
_NARROW = [d for d in attention.CAPACITIES if d != attention.WIDE]
CONFIGURATIONS = []
for _dtype, _d, _either in itertools.product(attention.FORMATS, _NARROW, attention.EITHER):
    _kernels = attention.kernels(_dtype, _d, _either, False, False, _PLAIN, amax=True)
    CONFIGURATIONS.append(_kernels[0].configuration)
    for _apart in attention.EITHER:
        CONFIGURATIONS.append(
            attention_backward.main_kernel(_dtype, _d, _either, False, _PLAIN, _apart, True).configuration
        )
    CONFIGURATIONS.append(attention_backward.end_kernel(_dtype, _d, _PLAIN, "dots", _either, True).configuration)


def _read(xs: tuple[torch.Tensor, ...], amax: torch.Tensor) -> None:
    """Write the amax of several tensors' numbers to `amax`."""
    amax.zero_()
    for x in xs:
        if x.numel():
            amaxes.amax(x.contiguous().view(1, -1), amax, 0)


@on_cuda
def attention_amax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any) -> Four:
    """-> (out, m, inv, amax of out, fp32 `[1, 1]`)."""
    out, m, inv, amax = outputs(q, k, v, *given)
    options = Options(*given)
    if in_passing(q, k, v, options) and not attention_decode.takes(q, k, options, launch.processors(q.device.index)):
        attention.attend("twin::attention_amax", q, k, v, (out, m, inv), options, amax=amax)
    else:
        attention.attend("twin::attention_amax", q, k, v, (out, m, inv), options)
        _read((out,), amax)
    return out, m, inv, amax


@on_cuda
def attention_backward_amax(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    m: torch.Tensor,
    inv: torch.Tensor,
    *given: Any,
) -> Four:
    """-> (dq, dk, dv, amax of all three, fp32 `[1, 1]`)."""
    *results, amax = backward_outputs(grad, q, k, v, out, m, inv, *given)
    dq, dk, dv = results
    options, tensors = Options(*given), (grad, q, k, v, out)
    finds = in_passing(q, k, v, options)
    found = amax if finds else None
    attention_backward.differentiate("twin::attention_backward_amax", tensors, m, inv, (dq, dk, dv), options, found)
    if not finds:
        _read((dq, dk, dv), amax)
    return dq, dk, dv, amax
