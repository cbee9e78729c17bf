"""`twin::adafactor` on the GPU: kernels/optimizers/adafactor.cu, several launches. Semantics:
`reference.ops.optimizers.adafactor`."""

import itertools

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts.amax import WIDE
from optimized.ops.multi_tensor import ELEMENTS_PER_BLOCK, THREADS, tables
from optimized.ops.optimizers.grad_norm import _ROW, CAPACITIES, _squares
from reference.ops.library import on_cuda
from reference.ops.optimizers.adafactor import BLOCK, extents, outputs
from reference.ops.optimizers.grad_norm import CHUNK, LANES

_STATE = np.dtype(
    [
        *((name, "u8") for name in ("grad", "row_var", "col_var", "factor")),
        *((name, "i8") for name in ("rows", "cols", "count")),
        *(("eps1_squared", "f4"), ("unused", "i4")),
    ]
)
# By the gradient's dtype, and whether the parameter is fp32 while the gradient is not.
_MACROS = {
    (wide, master): {"WIDE": WIDE[wide], "MASTER": int(master)}
    for wide, master in itertools.product(WIDE, (False, True))
    if not (wide == torch.float32 and master)
}
CONFIGURATIONS = [("adafactor", dict(macros)) for macros in _MACROS.values()]


@on_cuda
def adafactor(
    grad: torch.Tensor,
    param: torch.Tensor,
    row_var: torch.Tensor,
    col_var: torch.Tensor | None,
    rho: float,
    weight: float,
    decay: float,
    eps1: float,
    eps1_squared: float,
    eps2: float,
    d: float,
    maximize: bool,
) -> None:
    """Change `param`, `row_var` and `col_var` in place."""
    outputs(grad, param, row_var, col_var)
    count, device = grad.numel(), grad.device
    if not count:
        return
    macros = _MACROS[grad.dtype, param.dtype != grad.dtype]

    def run(name: str, grid: tuple[int, ...], *args: object, threads: int = THREADS) -> None:
        kernel = launch.function("adafactor", f"adafactor_{name}", macros)
        launch.launch(kernel, grid, (threads,), args, device=device.index)

    batch, rows, cols = extents(grad)
    chunks = -(-count // CHUNK)
    sums = torch.empty(2, chunks, dtype=torch.float64, device=device)
    of_param, of_update = sums.data_ptr(), sums.data_ptr() + 8 * chunks
    (capacity, blocks, args) = next(tables(_ROW, [((param.data_ptr(),), count, (0,))], CAPACITIES, CHUNK))
    launch.launch(_squares[param.dtype, capacity], (blocks,), (THREADS,), [*args, of_param], device=device.index)
    new = np.float32(weight)
    factor = None
    if col_var is None:
        run("variance", (-(-count // THREADS),), grad.data_ptr(), row_var.data_ptr(), np.int64(count), new)
    else:
        factor = torch.empty(batch, dtype=torch.float32, device=device)
        parts, wide = -(-rows // BLOCK), -(-cols // THREADS)
        columns = torch.empty(batch * parts, cols, dtype=torch.float64, device=device)
        sizes = (np.int64(rows), np.int64(cols), np.int64(parts))
        run("rows", (batch * rows,), grad.data_ptr(), row_var.data_ptr(), np.int64(cols), new)
        run("columns", (batch * parts, wide), grad.data_ptr(), columns.data_ptr(), *sizes)
        run("col_var", (batch, wide), columns.data_ptr(), col_var.data_ptr(), *sizes, new)
        run("factor", (batch,), row_var.data_ptr(), factor.data_ptr(), np.int64(rows), np.float32(eps1))
    pointers = [0 if x is None else x.data_ptr() for x in (grad, row_var, col_var, factor)]
    state = launch.by_value(np.array([(*pointers, rows, cols, count, np.float32(eps1_squared), 0)], _STATE))
    rate = torch.empty(1, dtype=torch.float32, device=device)
    run("squares", (chunks,), state, of_update)
    scalars = (np.float32(rho), np.float32(eps2), np.float32(d))
    of = (of_param, of_update, np.int64(chunks), np.int64(count))
    run("rate", (1,), *of, *scalars, rate.data_ptr(), threads=LANES)
    last = (np.float32(decay), np.int32(maximize))
    run("step", (-(-count // ELEMENTS_PER_BLOCK),), state, param.data_ptr(), rate.data_ptr(), *last)
