"""Parameter initialisation: Transformer Engine's defaults as distributions, the same bits everywhere.

`torch.nn.init` draws different numbers on a CPU and on a GPU, and on CPUs with other instruction sets. These
draw on the CPU with `reference.philox` for a parameter on any device, in fp32, round once to the parameter's
dtype and copy the result there. The seed comes from torch's default CPU generator: after the same
`torch.manual_seed`, the same sequence of calls gives the same parameters on every machine and device.

Of a DTensor (`fully_shard`, `distribute_tensor`) every rank draws the whole tensor and keeps its shard: after the same
seed on all ranks a sharded model has the numbers of one that is not.

Transformer Engine's defaults: weights of `Linear` and its relatives normal(0, 0.023), biases 0, LayerNorm
weights 1 (0 with zero_centered_gamma).
"""

import torch

from reference import philox
from reference.dtensor import distributed

# The standard deviation of Transformer Engine's default weight initialisation.
WEIGHT_STD = 0.023


def normal_(tensor: torch.Tensor, mean: float = 0.0, std: float = WEIGHT_STD) -> torch.Tensor:
    """Fill `tensor` in place with normal numbers of that mean and standard deviation, and return it."""
    _check(tensor)
    return _place(tensor, philox.normal(tensor.shape, mean, std))


def uniform_(tensor: torch.Tensor, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    """Fill `tensor` in place with numbers uniform in [low, high), and return it."""
    _check(tensor)
    return _place(tensor, philox.uniform(tensor.shape, low, high))


def constant_(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """Fill `tensor` in place with `value` and return it; draws no seed."""
    _check(tensor)
    with torch.no_grad():
        return tensor.fill_(value)


def _check(tensor: torch.Tensor) -> None:
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise ValueError(
            f"tensor must be torch.float32, torch.bfloat16, torch.float16 or torch.float64; got {tensor.dtype}."
        )


def _place(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Round fp32 `values` to tensor's dtype on the CPU, where the rounding is known, and copy them over."""
    with torch.no_grad():
        return tensor.copy_(distributed(values.to(tensor.dtype), tensor))
