"""`twin::sgd` on the GPU: kernels/optimizers/sgd.cu, one launch for all tensors. Semantics:
`reference.ops.optimizers.sgd`."""

import itertools

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts.amax import WIDE
from optimized.ops.multi_tensor import ELEMENTS_PER_BLOCK, THREADS, entries, kernels, tables
from reference.ops.library import on_cuda
from reference.ops.optimizers.sgd import outputs

CAPACITIES = (32, 512)
_ROW = entries(("grad", "param", "buffer"))
# By the gradient's dtype, and whether the parameter is fp32 while the gradient is not.
_MACROS = {
    (wide, master): {"WIDE": WIDE[wide], "MASTER": int(master)}
    for wide, master in itertools.product(WIDE, (False, True))
    if not (wide == torch.float32 and master)
}
_kernels = kernels("sgd", "sgd", _MACROS, CAPACITIES)
CONFIGURATIONS = [one.configuration for one in _kernels.values()]


@on_cuda
def sgd(
    grads: list[torch.Tensor],
    params: list[torch.Tensor],
    buffers: list[torch.Tensor],
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
) -> None:
    """Change `params` and `buffers` in place."""
    outputs(grads, params, buffers, lr, momentum)
    rest = np.float32(1) - np.float32(dampening)
    scalars = (np.float32(lr), np.float32(momentum), rest, np.float32(weight_decay))
    flags = (np.int32(nesterov), np.int32(first_run), np.int32(wd_after_momentum))
    found = [
        ((grad.data_ptr(), param.data_ptr(), buffers[i].data_ptr() if buffers else 0), grad.numel(), ())
        for i, (grad, param) in enumerate(zip(grads, params, strict=True))
        if grad.numel()
    ]
    for capacity, blocks, args in tables(_ROW, found, CAPACITIES, ELEMENTS_PER_BLOCK):
        kernel = _kernels[(grads[0].dtype, params[0].dtype != grads[0].dtype), capacity]
        launch.launch(kernel, (blocks,), (THREADS,), [*args, *scalars, *flags], device=grads[0].device.index)
