"""The activations on the GPU: kernels/activation.cu, and with the FP8 cast kernels/activation_cast_transpose.cu and the
kernel `total` of kernels/dbias.cu. Semantics: `reference.ops.activation`.
"""

import itertools
from functools import cache

import numpy as np
import torch

from optimized import launch
from optimized.ops.amax import WIDE, aligned, amax_pointer
from optimized.ops.cast import FP8, scale_pointer
from optimized.ops.cast_transpose import tile_grid
from optimized.ops.dbias import add_blocks, new_partial
from reference.ops.activation import (
    GATED,
    KINDS,
    activation_backward_outputs,
    activation_outputs,
    backward_cast_outputs,
    forward_cast_outputs,
    width,
)
from reference.ops.cast import Scaling
from reference.ops.cast_transpose import Four, Three
from reference.ops.library import on_cuda

# The macro KIND of kernels/activation.cuh.
KIND = {"gelu": 0, "geglu": 1, "relu": 2, "silu": 3, "swiglu": 4}
_THREADS = 128
_ROWS = 4  # of a block of kernels/activation.cu
# A tile of kernels/activation_cast_transpose.cu: 64 rows, 256 bytes of each and 64 more after 16 of them.
_TILE_ROWS, _ROW_BYTES = 64, 256
_TILE_BYTES = _TILE_ROWS * _ROW_BYTES + 4 * 64
_CARVEOUT = 70  # percent: 164 KB of shared memory. What is read passes through L1, and 60 KB would starve it

Defines = dict[str, int | str]


def _inputs(kind: str, backward: bool) -> int:
    """Matrices of y's shape that the kernel with the cast reads."""
    return (2 if kind in GATED else 1) + backward


def cast_defines(kind: str, x: torch.dtype, q: torch.dtype, backward: bool) -> Defines:
    """The macros of one configuration of kernels/activation_cast_transpose.cu.

    The blocks that must fit a multiprocessor are as many as its shared memory has room for, or enough
    (docs/log/activation.md).
    """
    return {
        "KIND": KIND[kind],
        "WIDE": WIDE[x],
        "FP8": FP8[q],
        "BACKWARD": int(backward),
        "BLOCKS": {1: 6, 2: 4, 3: 3}[_inputs(kind, backward)],
    }


def defines(kind: str, x: torch.dtype, vector: int) -> Defines:
    """The macros of one configuration of kernels/activation.cu."""
    return {"KIND": KIND[kind], "WIDE": WIDE[x], "VECTOR": vector}


CONFIGURATIONS: list[tuple[str, Defines]] = [
    *(("activation", defines(*choice)) for choice in itertools.product(KINDS, WIDE, (0, 1))),
    *(
        ("activation_cast_transpose", cast_defines(*choice))
        for choice in itertools.product(KINDS, WIDE, FP8, (False, True))
    ),
]


@cache
def _plain(name: str, kind: str, x: torch.dtype, vector: int) -> launch.Kernel:
    return launch.function("activation", name, defines(kind, x, vector))


@cache
def _casting(kind: str, x: torch.dtype, q: torch.dtype, backward: bool) -> tuple[launch.Kernel, int]:
    """The kernel, and the bytes of shared memory that a tile of all that it reads takes."""
    macros = cast_defines(kind, x, q, backward)
    shared = _inputs(kind, backward) * _TILE_BYTES
    name = "activation_cast_transpose"
    return launch.function(name, name, macros, shared, _CARVEOUT), shared


def _run(name: str, kind: str, tensors: tuple[torch.Tensor, ...], rows: int, cols: int) -> None:
    """Launch a kernel of activation.cu over `rows` and `cols`, those of y; the last tensor is its output."""
    if rows * cols == 0:
        return
    out = tensors[-1]
    size = out.element_size()
    vector = int(cols * size % 16 == 0 and all(tensor.data_ptr() % 16 == 0 for tensor in tensors))
    tile_cols = _THREADS * (16 // size if vector else 1)
    grid = (-(-rows // _ROWS) * -(-cols // tile_cols),)
    args = [*(tensor.data_ptr() for tensor in tensors), np.int32(rows), np.int32(cols)]
    launch.launch(_plain(name, kind, out.dtype, vector), grid, (_THREADS,), args, device=out.device.index)


@on_cuda
def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """`x` `[rows, n]` -> y `[rows, m]` of x's dtype (fp32, bf16 or fp16)."""
    y = activation_outputs(x, kind)
    _run("forward_kernel", kind, (x, y), *y.shape)
    return y


@on_cuda
def activation_backward(grad: torch.Tensor, x: torch.Tensor, kind: str) -> torch.Tensor:
    """`grad` `[rows, m]`, `x` `[rows, n]` of one dtype -> dx `[rows, n]` of that dtype."""
    dx = activation_backward_outputs(grad, x, kind)
    _run("backward_kernel", kind, (grad, x, dx), *grad.shape)
    return dx


def run_cast(
    out: Three, kind: str, grad: torch.Tensor | None, x: torch.Tensor, partial: torch.Tensor | None, *scaling: *Scaling
) -> None:
    """Launch activation_cast_transpose.cu on checked arguments, backward with a grad: q, q_t and scale_inv into `out`,
    sums over rows into `partial`.
    """
    x = aligned(x)
    grad = None if grad is None else aligned(grad)
    rows, m = x.shape[0], width(kind, x.shape[1])
    scale, amax_history, column, dtype = scaling
    args = [
        0 if grad is None else grad.data_ptr(),
        x.data_ptr(),
        scale_pointer(scale, column),
        amax_pointer(amax_history, column),
        out[0].data_ptr(),
        out[1].data_ptr(),
        out[2].data_ptr(),
        0 if partial is None else partial.data_ptr(),
        np.int32(rows),
        np.int32(m),
    ]
    kernel, shared = _casting(kind, x.dtype, dtype, grad is not None)
    tile_cols = _ROW_BYTES // x.element_size()
    grid = tile_grid(-(-m // tile_cols), -(-rows // _TILE_ROWS))
    launch.launch(kernel, grid, (tile_cols,), args, shared, device=x.device.index)


@on_cuda
def activation_cast_transpose(x: torch.Tensor, kind: str, *scaling: *Scaling) -> Three:
    """`x` `[rows, n]` -> (q `[rows, m]`, q_t `[m, ceil16(rows)]` of `dtype`, scale_inv fp32 `[1]`)."""
    out = forward_cast_outputs(x, kind, *scaling)
    run_cast(out, kind, None, x, None, *scaling)
    return out


@on_cuda
def activation_backward_cast_transpose_dbias(
    grad: torch.Tensor, x: torch.Tensor, kind: str, *scaling: *Scaling
) -> Four:
    """`grad` `[rows, m]`, `x` `[rows, n]` -> (q `[rows, n]`, q_t `[n, ceil16(rows)]`, scale_inv, dbias `[n]`).

    q and q_t are of `dtype`, scale_inv fp32 `[1]`, dbias of x's dtype.
    """
    out = backward_cast_outputs(grad, x, kind, *scaling)
    run_backward_cast(out, kind, grad, x, *scaling)
    return out


def run_backward_cast(out: Four, kind: str, grad: torch.Tensor, x: torch.Tensor, *scaling: *Scaling) -> None:
    """`activation_backward_cast_transpose_dbias` on checked arguments, into `out`."""
    partial = new_partial(x)
    run_cast(out[:3], kind, grad, x, partial, *scaling)
    add_blocks(partial, out[3])
