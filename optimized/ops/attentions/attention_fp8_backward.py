"""`twin::attention_fp8_backward` on the GPU: kernels/attentions/attention_fp8_backward.cu, then those of
`attention_backward`.

Semantics: `reference.ops.attentions.attention_fp8_backward`.
"""

import functools
from typing import Any

import torch

from optimized.cuda import launch
from optimized.ops.attentions.attention import FORMATS
from optimized.ops.attentions.attention_backward import attention_backward
from reference.ops.attentions.attention_fp8_backward import outputs
from reference.ops.attentions.attention_options import Options
from reference.ops.library import on_cuda

_THREADS = 256
_CODES = 16  # of a thread


@functools.cache
def _kernel(dtype: torch.dtype) -> launch.Kernel:
    return launch.function("attention_fp8_backward", "attention_dequantize", {"FORMAT": FORMATS[dtype]})


CONFIGURATIONS = [_kernel(dtype).configuration for dtype in FORMATS]


def dense(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy, whose elements are neighbours in memory, in any order of dimensions, 16-byte aligned."""
    step, fits = 1, x.data_ptr() % 16 == 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        fits = fits and (size == 1 or stride == step)
        step *= size
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _dequantized(tensors: list[torch.Tensor], scale_invs: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """The codes of three tensors as numbers of `dtype`, in one launch."""
    tensors = [dense(x) for x in tensors]
    out = [torch.empty_like(x, dtype=dtype) for x in tensors]
    q, k, _ = tensors  # v has as many as k
    counts = [x.numel() // _CODES for x in (q, k)]
    if max(counts):
        args = [x.data_ptr() for some in (tensors, scale_invs, out) for x in some] + counts
        blocks, index = -(-max(counts) // _THREADS), tensors[0].device.index
        launch.launch(_kernel(dtype), (blocks, 3), (_THREADS,), args, device=index)
    return out


@on_cuda
def attention_fp8_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_scale_inv: torch.Tensor,
    k_scale_inv: torch.Tensor,
    v_scale_inv: torch.Tensor,
    out: torch.Tensor,
    m: torch.Tensor,
    inv: torch.Tensor,
    *given: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> (dq, dk, dv), of grad's dtype."""
    outputs(grad, q, k, v, q_scale_inv, k_scale_inv, v_scale_inv, out, m, inv, *given)
    q, k, v = _dequantized([q, k, v], [q_scale_inv, k_scale_inv, v_scale_inv], grad.dtype)
    return attention_backward(grad, q, k, v, out, m, inv, *Options.of_fp8(*given))
