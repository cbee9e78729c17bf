"""`twin::normal`: normal numbers from a seed, the same bits on every machine and device.

Element i of `values`, in row-major order, fp32:

    z_i = quantile(u_i)      u_i: 52 bits of philox4x32(i, seed), in the middle of their interval; float64
    values_i = fp32(fp64(mean) + fp64(std) · z_i)

`reference.numbers.philox` defines the words and the quantile (AS241) by additions, multiplications, divisions and
square roots in float64, each rounded by itself.
"""

import torch

from reference.numbers import philox
from reference.ops.library import define


def outputs(values: torch.Tensor, mean: float, std: float, seed: int) -> None:
    """Refuse what `twin::normal` does not accept."""
    if values.dtype != torch.float32 or not values.is_contiguous():
        layout = "contiguous" if values.is_contiguous() else "strided"
        raise ValueError(f"twin::normal: values is {values.dtype} and {layout}; contiguous torch.float32 is accepted.")
    if not std >= 0:
        raise ValueError(f"std must not be negative; got {std}.")
    if seed < 0:
        raise ValueError(f"seed must be from 0 to 2^63 - 1; got {seed}.")


@define(outputs, mutates=("values",))
def normal(values: torch.Tensor, mean: float, std: float, seed: int) -> None:
    """Fill `values`, fp32 and contiguous, of any shape."""
    outputs(values, mean, std, seed)
    values.copy_(philox.normal(values.shape, mean, std, seed=seed))
