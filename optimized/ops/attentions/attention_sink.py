"""`twin::attention_sink_backward` on the GPU: kernels/attentions/attention_sink.cu. Semantics:
`reference.ops.attentions.attention_sink`."""

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.attentions import attention, attention_backward
from reference.ops.attentions.attention_options import Options
from reference.ops.attentions.attention_packed import by_heads
from reference.ops.attentions.attention_sink import LANES, outputs
from reference.ops.library import on_cuda

_kernel = launch.function("attention_sink", "attention_sink", {})
CONFIGURATIONS = [_kernel.configuration]


@on_cuda
def attention_sink_backward(
    grad: torch.Tensor,
    out: torch.Tensor,
    m: torch.Tensor,
    inv: torch.Tensor,
    sinks: torch.Tensor,
    q_lengths: torch.Tensor | None = None,
    q_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """-> dsinks fp32 `[h]`; arguments as in `reference.ops.attentions.attention_sink`."""
    dsinks = outputs(grad, out, m, inv, sinks, q_lengths, q_starts)
    b, h, sq = m.shape
    if not grad.numel() or not sq:
        return dsinks.zero_()
    grad, out = attention.loadable(by_heads(grad)), attention.loadable(by_heads(out))
    attention.check_grid("twin::attention_sink_backward", grad, b)
    every = Options(1.0, "none", -1, -1)
    if q_starts is not None:  # of keys nothing is read
        every = every._replace(q_lengths=q_lengths, q_starts=q_starts, longest_q=sq)
        every = every._replace(kv_lengths=q_lengths, kv_starts=q_starts, longest_kv=sq)
    dots = attention_backward.row_statistics((grad, out, out, out, out), m, inv, every)[2]
    args = [x.data_ptr() for x in (m, inv, dots, sinks, dsinks)]
    sizes = [np.int32(n) for n in (b, h, sq, dots.shape[1])]
    launch.launch(_kernel, (h,), (LANES,), [*args, *sizes], device=grad.device.index)
    return dsinks
