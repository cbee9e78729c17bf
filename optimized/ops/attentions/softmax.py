"""`twin::softmax` and `twin::softmax_backward` on the GPU: kernels/attentions/softmax.cu. Semantics:
`reference.ops.attentions.softmax`."""

import functools
import itertools

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts.amax import WIDE
from reference.ops.attentions.attention import causal_shift
from reference.ops.attentions.softmax import softmax_backward_outputs, softmax_outputs
from reference.ops.library import on_cuda

_WARPS = 4  # of a block, each with a row
_GROUPS = (
    1,
    2,
    4,
    8,
)  # a warp keeps a row of up to 256 · groups elements in registers; with 0 groups it reads it again
_NO_SHIFT = 1 << 30
_MASK = np.dtype([("pointer", "u8"), ("strides", "i8", 4)])


@functools.cache
def _configured(name: str, x: torch.dtype, groups: int, vector: int, masked: int) -> launch.Kernel:
    return launch.function("softmax", name, {"WIDE": WIDE[x], "GROUPS": groups, "VECTOR": vector, "MASKED": masked})


_CASES = itertools.product(WIDE, (0, *_GROUPS), (0, 1), (0, 1))
CONFIGURATIONS = [_configured("softmax", *case).configuration for case in _CASES]


def _kernel(name: str, *tensors: torch.Tensor, masked: bool = False) -> launch.Kernel:
    """The kernel for rows of these tensors, which have one shape and dtype."""
    cols = tensors[0].shape[-1]
    groups = next((groups for groups in _GROUPS if cols <= 256 * groups), 0)
    vector = cols % 8 == 0 and all(x.data_ptr() % 16 == 0 for x in tensors)
    return _configured(name, tensors[0].dtype, groups, int(vector), int(masked))


@on_cuda
def softmax(x: torch.Tensor, scale: float, mask_type: str, mask: torch.Tensor | None) -> torch.Tensor:
    """`x` `[b, h, sq, skv]` -> y of x's dtype and shape."""
    y = softmax_outputs(x, scale, mask_type, mask)
    if not x.numel():
        return y
    b, h, sq, skv = x.shape
    shift = causal_shift(mask_type, sq, skv)
    masked = np.zeros((), _MASK)
    if mask is not None:
        masked["pointer"], masked["strides"] = mask.data_ptr(), mask.expand(b, h, sq, skv).stride()
    rows = b * h * sq
    sizes = (np.int64(rows), np.int32(skv), np.int32(sq), np.int32(h), np.int32(_NO_SHIFT if shift is None else shift))
    args = (x.data_ptr(), y.data_ptr(), *sizes, np.float32(scale), launch.by_value(masked))
    kernel = _kernel("softmax", x, y, masked=mask is not None)
    launch.launch(kernel, (-(-rows // _WARPS),), (32 * _WARPS,), args, device=x.device.index)
    return y


@on_cuda
def softmax_backward(grad: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    """The gradient of x, from y and the gradient of y."""
    dx = softmax_backward_outputs(grad, y, scale)
    if not y.numel():
        return dx
    cols = y.shape[-1]
    rows = y.numel() // cols
    args = [grad.data_ptr(), y.data_ptr(), dx.data_ptr(), np.int64(rows), np.int32(cols), np.float32(scale)]
    kernel = _kernel("softmax_backward", grad, y, dx)
    launch.launch(kernel, (-(-rows // _WARPS),), (32 * _WARPS,), args, device=y.device.index)
    return dx
