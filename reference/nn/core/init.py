"""Parameter initialisation: Transformer Engine's distributions, the same bits everywhere.

`torch.nn.init` draws different numbers on a CPU, on a GPU, and on CPUs with other instruction sets. `normal_` draws
with `twin::normal` in fp32 and rounds once to the parameter's dtype, on the parameter's GPU if `optimized` is imported,
otherwise on the CPU. The seed comes from torch's default CPU generator: after the same `torch.manual_seed`, the same
sequence of calls gives the same parameters on every machine and device.

For a DTensor (`fully_shard`, `distribute_tensor`) every rank draws the whole tensor and keeps its shard: with the same
seed on all ranks a sharded model has the numbers of an unsharded one.

Transformer Engine's defaults: weights of `Linear` and its relatives normal(0, 0.023), biases 0, LayerNorm weights 1 (0
with zero_centered_gamma).
"""

import torch

from reference.numbers import philox
from reference.ops import library
from reference.support.dtensor import distributed

WEIGHT_STD = 0.023  # Transformer Engine's default


def normal_(tensor: torch.Tensor, mean: float = 0.0, std: float = WEIGHT_STD) -> torch.Tensor:
    """Fill `tensor` in place with normal numbers and return it."""
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise ValueError(f"tensor is {tensor.dtype}; float32, bfloat16, float16 and float64 are accepted.")
    there = tensor.device if tensor.is_cuda and library.runs_on_cuda("normal") else "cpu"
    with torch.no_grad():
        values = torch.empty(tensor.shape, dtype=torch.float32, device=there)
        library.twin.normal(values, mean, std, philox.draw_seed())
        return tensor.copy_(distributed(values.to(tensor.dtype), tensor))
