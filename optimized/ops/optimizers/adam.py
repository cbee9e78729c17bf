"""`twin::adam` on the GPU: kernels/optimizers/adam.cu, one launch for all tensors. Semantics:
`reference.ops.optimizers.adam`."""

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts.amax import WIDE, pointer
from reference.ops.library import on_cuda
from reference.ops.optimizers.adam import outputs

# Tensors of one launch: their addresses are in the kernel's argument (56 bytes for each, of 32764). A longer list takes
# more launches.
CAPACITIES = (32, 512)
_THREADS = 256
_ELEMENTS_PER_BLOCK = _THREADS * 8
_TENSOR = np.dtype(
    [
        *((name, "u8") for name in ("grad", "param", "exp_avg", "exp_avg_sq", "rounded")),
        *(("count", "i8"), ("first_block", "i4"), ("aligned", "i4")),
    ]
)
# By the gradient's dtype, whether the parameter is an fp32 master of it, and the capacity. fp32 has no masters.
_kernels = {
    (wide, master, capacity): launch.function(
        "adam", "adam", {"WIDE": WIDE[wide], "MASTER": int(master), "CAPACITY": capacity}
    )
    for wide, master, capacity in itertools.product(WIDE, (False, True), CAPACITIES)
    if not (wide == torch.float32 and master)
}
CONFIGURATIONS = [one.configuration for one in _kernels.values()]


@on_cuda
def adam(
    grads: list[torch.Tensor],
    params: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    rounded: list[torch.Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    correction1: float,
    correction2: float,
    decoupled: bool,
) -> None:
    """Change `params`, `exp_avgs`, `exp_avg_sqs` and `rounded` in place."""
    outputs(grads, params, exp_avgs, exp_avg_sqs, rounded)
    b1, b2, one = np.float32(beta1), np.float32(beta2), np.float32(1)
    scalars = [
        *(np.float32(lr), b1, one - b1, b2, one - b2, np.float32(eps), np.float32(weight_decay)),
        *(np.float32(correction1), np.float32(correction2), np.int32(decoupled)),
    ]
    copies: Sequence[torch.Tensor | None] = rounded or [None] * len(grads)
    filled = [one for one in zip(grads, params, exp_avgs, exp_avg_sqs, copies, strict=True) if one[0].numel()]
    for start in range(0, len(filled), CAPACITIES[-1]):
        part = filled[start : start + CAPACITIES[-1]]
        capacity = next(c for c in CAPACITIES if len(part) <= c)
        rows, blocks = [], 0
        for grad, param, first, second, copy in part:
            count = grad.numel()
            at = (grad.data_ptr(), param.data_ptr(), first.data_ptr(), second.data_ptr())
            last = pointer(copy)
            rows.append((*at, last, count, blocks, (at[0] | at[1] | at[2] | at[3] | last) % 16 == 0))
            blocks += -(-count // _ELEMENTS_PER_BLOCK)
        table = np.zeros(capacity, _TENSOR)
        table[: len(part)] = rows
        wide = grads[0].dtype
        kernel = _kernels[wide, params[0].dtype != wide, capacity]
        args = [launch.by_value(table), np.int32(len(part)), *scalars]
        launch.launch(kernel, (blocks,), (_THREADS,), args, device=grads[0].device.index)
