"""`twin::activation` and its relatives on the GPU. kernels/activations/activation.cu computes activations and their
derivatives, kernels/activations/activation_cast_transpose.cu also casts them to FP8; the kernels `total` of
kernels/casts/dbias.cu and current_scale.cu finish dbias and scales. Semantics: `reference.ops.activations.activation`.
"""

import itertools
from functools import cache

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts import cast_transpose
from optimized.ops.casts.amax import WIDE, aligned, pointer
from optimized.ops.casts.cast import FP8, scaling_pointers
from optimized.ops.casts.cast_transpose import tile_grid
from optimized.ops.casts.current_scale import total
from optimized.ops.casts.dbias import add_blocks, new_partial
from reference.numbers.elementary import alpha_log2e
from reference.ops.activations.activation import (
    CLAMPED,
    GRADIENT_IS_ROUNDED,
    KINDS,
    RECORDED,
    activation_backward_outputs,
    activation_backward_scale_outputs,
    activation_outputs,
    activation_scale_cast_outputs,
    activation_scale_outputs,
    backward_cast_outputs,
    clamp_of,
    forward_cast_outputs,
    is_gated,
    width,
)
from reference.ops.casts.cast import Scaling
from reference.ops.casts.cast_transpose import Four, Three
from reference.ops.casts.current_scale import Scale
from reference.ops.library import on_cuda

# The macro of kernels/activations/activation.cuh.
KIND = {"gelu": 0, "geglu": 1, "relu": 2, "silu": 3, "swiglu": 4}
KIND |= {"reglu": 5, "srelu": 6, "sreglu": 7, "qgelu": 8, "qgeglu": 9, "glu": 10, CLAMPED: 11}
_THREADS = 128
_ROWS = 4  # that a block of kernels/activations/activation.cu computes
# A tile of kernels/activations/activation_cast_transpose.cu has 64 rows of 256 bytes, and 64 bytes of padding after
# each 16 rows.
_TILE_ROWS, _ROW_BYTES = 64, 256
_TILE_BYTES = _TILE_ROWS * _ROW_BYTES + 4 * 64
# Percent of a multiprocessor's 228 KB: 164 KB of shared memory. What is read passes through L1, and 60 KB would starve
# it.
_CARVEOUT = 70
# The kernels of kernels/activations/activation.cu that find an amax, and their macros: AMAX is 1 of fp32 numbers, 2 of
# rounded ones.
_AMAX: dict[str, tuple[str, dict[str, int]]] = {
    "y": ("forward_kernel", {"AMAX": 1}),
    "y alone": ("forward_kernel", {"AMAX": 1, "AMAX_ALONE": 1}),
    "dx": ("backward_kernel", {"BACKWARD": 1, "AMAX": 2 if GRADIENT_IS_ROUNDED else 1}),
}
_BLOCKS = {
    1: 6,
    2: 4,
    3: 3,
}  # that a multiprocessor should hold, by the matrices that are read (docs/log/activation.md)


def macros(kind: str) -> dict[str, int | str]:
    """The macros of kernels/activations/activation.cuh by which a kind is compiled, with its parameters if it has
    any."""
    clamp = clamp_of(kind)
    if clamp is None:
        return {"KIND": KIND[kind]}
    limit, alpha, offset = clamp
    words: dict[str, float | np.float32] = {
        "LIMIT": limit,
        "ALPHA": alpha,
        "ALPHA_LOG2E": alpha_log2e(alpha),
        "OFFSET": offset,
    }
    literals = {name: f"{float(np.float32(value)).hex()}f" for name, value in words.items()}
    return {"KIND": KIND[CLAMPED], **literals}


@cache
def _plain(name: str, kind: str, x: torch.dtype, vector: int) -> launch.Kernel:
    return launch.function("activation", name, {**macros(kind), "WIDE": WIDE[x], "VECTOR": vector})


@cache
def _with_amax(of: str, kind: str, x: torch.dtype, vector: int) -> launch.Kernel:
    name, more = _AMAX[of]
    return launch.function("activation", name, {**macros(kind), "WIDE": WIDE[x], "VECTOR": vector, **more})


@cache
def _casting(kind: str, x: torch.dtype, q: torch.dtype, backward: bool, rounds: bool = False) -> launch.Kernel:
    name, matrices = "activation_cast_transpose", (2 if is_gated(kind) else 1) + backward
    defines = {**macros(kind), "WIDE": WIDE[x], "FP8": FP8[q], "BACKWARD": int(backward), "BLOCKS": _BLOCKS[matrices]}
    more = {"ROUND": 1} if rounds and x != torch.float32 else {}
    return launch.function(name, name, {**defines, **more}, matrices * _TILE_BYTES, _CARVEOUT)


_MORE = KINDS[len(RECORDED) :]
# What the CPU suite compiles: of the kinds that differ from others in one function only, no fp32 and fp16 but of glu.
CHOICES = [*itertools.product(RECORDED, WIDE), *itertools.product(_MORE, [torch.bfloat16])]
CHOICES += [("glu", torch.float16), ("glu", torch.float32)]
CONFIGURATIONS = [
    *(_plain("forward_kernel", *choice, vector).configuration for choice in CHOICES for vector in (0, 1)),
    *(_with_amax(of, *x, vector).configuration for of in ("y", "dx") for x in CHOICES for vector in (0, 1)),
    *(_with_amax("y alone", *x, 1).configuration for x in CHOICES if not is_gated(x[0])),
    *(_casting(*x, *cast).configuration for x in CHOICES for cast in itertools.product(FP8, (False, True))),
    *(
        _casting(*x, q, False, True).configuration
        for x, q in itertools.product(CHOICES, FP8)
        if not is_gated(x[0]) and x[1] != torch.float32
    ),
]


def _shape(tensors: tuple[torch.Tensor, ...], rows: int, cols: int) -> tuple[int, int]:
    """Whether vectors of `tensors` lie at multiples of 16 bytes, and the blocks of a kernel of activation.cu."""
    size = tensors[-1].element_size()
    vector = int(cols * size % 16 == 0 and all(tensor.data_ptr() % 16 == 0 for tensor in tensors))
    tile_cols = _THREADS * (16 // size if vector else 1)
    return vector, -(-rows // _ROWS) * -(-cols // tile_cols)


def _run(name: str, kind: str, tensors: tuple[torch.Tensor, ...], rows: int, cols: int) -> None:
    """Launch a kernel of activation.cu; y has `rows` and `cols`, and the last tensor is the kernel's output."""
    if rows * cols == 0:
        return
    out = tensors[-1]
    vector, blocks = _shape(tensors, rows, cols)
    args = [*(tensor.data_ptr() for tensor in tensors), np.int32(rows), np.int32(cols)]
    launch.launch(_plain(name, kind, out.dtype, vector), (blocks,), (_THREADS,), args, device=out.device.index)


def _run_with_scale(
    of: str, kind: str, tensors: tuple[torch.Tensor, ...], shape: tuple[int, int], scale: torch.Tensor, *how: *Scale
) -> None:
    """The same with one of the kernels of `_AMAX`, and `scale` `[1]` of the amax; `shape` is y's."""
    rows, cols = shape
    vector, blocks = _shape(tensors, rows, cols)
    partial = scale.new_empty(blocks)
    if blocks:
        pointers = [tensor.data_ptr() for tensor in tensors] + [0] * (of == "y alone")
        args = (*pointers, np.int32(rows), np.int32(cols), partial.data_ptr())
        kernel = _with_amax(of, kind, tensors[0].dtype, vector)
        launch.launch(kernel, (blocks,), (_THREADS,), args, device=scale.device.index)
    total(partial, scale, *how)


@on_cuda
def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """`x` `[rows, n]` -> y `[rows, m]` of x's dtype: fp32, bf16 or fp16."""
    y = activation_outputs(x, kind)
    _run("forward_kernel", kind, (x, y), *y.shape)
    return y


@on_cuda
def activation_scale(x: torch.Tensor, kind: str, *how: *Scale) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` `[rows, n]` -> (y `[rows, m]` of x's dtype, the scale for a cast of it to `dtype`, fp32 `[1]`)."""
    y, scale = activation_scale_outputs(x, kind, *how)
    _run_with_scale("y", kind, (x, y), (y.shape[0], y.shape[1]), scale, *how)
    return y, scale


@on_cuda
def activation_scale_cast_transpose(x: torch.Tensor, kind: str, *how: *Scale) -> Three:
    """`x` `[rows, n]` -> (q `[rows, m]`, q_t `[m, ceil16(rows)]` of `dtype`, scale_inv fp32 `[1]`)."""
    out = activation_scale_cast_outputs(x, kind, *how)
    if is_gated(kind):  # reading both halves twice takes as long as writing y and reading it, and computes it twice
        y, scale = activation_scale(x, kind, *how)
        cast_transpose.run(out, y, None, scale, None, 0, how[0])
    else:
        x, scale = aligned(x), x.new_empty(1, dtype=torch.float32)
        _run_with_scale("y alone", kind, (x,), (x.shape[0], x.shape[1]), scale, *how)
        run_cast(out, kind, None, x, None, scale, None, 0, how[0], rounds=True)
    return out


@on_cuda
def activation_backward(grad: torch.Tensor, x: torch.Tensor, kind: str) -> torch.Tensor:
    """`grad` `[rows, m]`, `x` `[rows, n]` of one dtype -> dx `[rows, n]` of that dtype."""
    dx = activation_backward_outputs(grad, x, kind)
    _run("backward_kernel", kind, (grad, x, dx), *grad.shape)
    return dx


@on_cuda
def activation_backward_scale(
    grad: torch.Tensor, x: torch.Tensor, kind: str, *how: *Scale
) -> tuple[torch.Tensor, torch.Tensor]:
    """`grad` `[rows, m]`, `x` `[rows, n]` -> (dx `[rows, n]` of x's dtype, the scale for a cast of it, fp32 `[1]`)."""
    dx, scale = activation_backward_scale_outputs(grad, x, kind, *how)
    _run_with_scale("dx", kind, (grad, x, dx), (grad.shape[0], grad.shape[1]), scale, *how)
    return dx, scale


def run_cast(
    out: Three,
    kind: str,
    grad: torch.Tensor | None,
    x: torch.Tensor,
    partial: torch.Tensor | None,
    *scaling: *Scaling,
    rounds: bool = False,
) -> None:
    """Launch activation_cast_transpose.cu on checked arguments: forward, or backward where there is a `grad`.

    It writes q, q_t and scale_inv to `out`, and sums over rows to `partial`. `rounds`: y is rounded to x's dtype first.
    """
    x, grad = aligned(x), aligned(grad)
    rows, m = x.shape[0], width(kind, x.shape[1])
    scale, amax_history, column, dtype = scaling
    inputs = (pointer(grad), x.data_ptr(), *scaling_pointers(scale, amax_history, column))
    results = (out[0].data_ptr(), out[1].data_ptr(), out[2].data_ptr(), pointer(partial))
    args = (*inputs, *results, np.int32(rows), np.int32(m))
    kernel = _casting(kind, x.dtype, dtype, grad is not None, rounds)
    tile_cols = _ROW_BYTES // x.element_size()
    grid = tile_grid(-(-m // tile_cols), -(-rows // _TILE_ROWS))
    launch.launch(kernel, grid, (tile_cols,), args, kernel.max_dynamic_smem, device=x.device.index)


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
    q, q_t, scale_inv, dbias = out
    run_cast((q, q_t, scale_inv), kind, grad, x, partial, *scaling)
    add_blocks(partial, dbias)
