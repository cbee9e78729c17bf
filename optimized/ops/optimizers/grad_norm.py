"""`twin::grad_norm` on the GPU: kernels/optimizers/grad_norm.cu, a launch a dtype. Semantics:
`reference.ops.optimizers.grad_norm`."""

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts.amax import WIDE
from optimized.ops.multi_tensor import THREADS, Tensor, entries, kernels, tables
from reference.ops.library import on_cuda
from reference.ops.optimizers.grad_norm import CHUNK, LANES, outputs

CAPACITIES = (64, 512)
_ROW = entries(("x",), ("first_sum",))
_MACROS = {dtype: {"WIDE": wide} for dtype, wide in WIDE.items()}
_squares = kernels("grad_norm", "grad_squares", _MACROS, CAPACITIES)
_max = kernels("grad_norm", "grad_max", _MACROS, CAPACITIES)
_total = launch.function("grad_norm", "grad_norm_total", {"WIDE": 0, "CAPACITY": CAPACITIES[0]})
CONFIGURATIONS = [one.configuration for one in _squares.values()]


@on_cuda
def grad_norm(grads: list[torch.Tensor], kind: str) -> torch.Tensor:
    """The norm of all numbers of `grads`, fp32 `[]`."""
    norm = outputs(grads, kind)
    device, chunks = norm.device.index, 0
    found: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        if grad.numel():
            found.setdefault(grad.dtype, []).append(((grad.data_ptr(),), grad.numel(), (chunks,)))
            chunks += -(-grad.numel() // CHUNK)
    if kind == "l2" and chunks:
        target = torch.empty(chunks, dtype=torch.float64, device=norm.device)
    else:
        target = norm.zero_()
    for dtype, rows in found.items():
        for capacity, blocks, args in tables(_ROW, rows, CAPACITIES, CHUNK):
            kernel = (_squares if kind == "l2" else _max)[dtype, capacity]
            launch.launch(kernel, (blocks,), (THREADS,), [*args, target.data_ptr()], device=device)
    if target is not norm:
        args = [target.data_ptr(), np.int64(chunks), norm.data_ptr()]
        launch.launch(_total, (1,), (LANES,), args, device=device)
    return norm
