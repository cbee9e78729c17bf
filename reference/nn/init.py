"""Parameter initialisation: Transformer Engine's defaults as distributions, the same bits everywhere.

`torch.nn.init` draws different numbers on a CPU and on a GPU, and on CPUs with other instruction sets. These
draw with `twin::normal` in fp32 and round once to the parameter's dtype. A parameter on a GPU is drawn there, if
`optimized` is imported, and on the CPU otherwise. The seed comes from torch's default CPU generator: after the same
`torch.manual_seed`, the same sequence of calls gives the same parameters on every machine and device.

Of a DTensor (`fully_shard`, `distribute_tensor`) every rank draws the whole tensor and keeps its shard: after the same
seed on all ranks a sharded model has the numbers of one that is not.

Transformer Engine's defaults: weights of `Linear` and its relatives normal(0, 0.023), biases 0, LayerNorm
weights 1 (0 with zero_centered_gamma).
"""

import torch

from reference import philox
from reference.dtensor import distributed
from reference.ops import library

# The standard deviation of Transformer Engine's default weight initialisation.
WEIGHT_STD = 0.023


def normal_(tensor: torch.Tensor, mean: float = 0.0, std: float = WEIGHT_STD) -> torch.Tensor:
    """Fill `tensor` in place with normal numbers of that mean and standard deviation, and return it."""
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise ValueError(
            f"tensor must be torch.float32, torch.bfloat16, torch.float16 or torch.float64; got {tensor.dtype}."
        )
    there = tensor.device if tensor.is_cuda and library.runs_on_cuda("normal") else "cpu"
    with torch.no_grad():
        values = torch.empty(tensor.shape, dtype=torch.float32, device=there)
        library.twin.normal(values, mean, std, philox.draw_seed())
        return tensor.copy_(distributed(values.to(tensor.dtype), tensor))
