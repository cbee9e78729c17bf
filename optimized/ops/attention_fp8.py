"""`twin::attention_fp8` on the GPU: kernels/attention_fp8.cu. Semantics: `reference.ops.attention_fp8`."""

import functools
import itertools

import torch

from optimized import launch
from optimized.ops.attention import (
    CAPACITIES,
    EITHER,
    FORMATS,
    L2,
    SLACK,
    arguments,
    capacity,
    check_grid,
)
from optimized.ops.dropout import advance
from optimized.tensor_map import TensorMap, encode
from reference.ops.attention import BLOCK, LOWEST
from reference.ops.attention_fp8 import Options, outputs
from reference.ops.cast_transpose import ceil16
from reference.ops.dropout import threshold
from reference.ops.library import on_cuda

QUERIES = 192  # of a tile: 64 for each consumer warpgroup
_THREADS = 512


@functools.cache
def _kernels(dtype: torch.dtype, d: int, dropout: bool) -> tuple[launch.Kernel, launch.Kernel]:
    """The kernel for heads of a capacity, with results of `dtype`, and the one that resets its ticket."""
    chunks, columns = -(-d // 128), min(d, 128)
    stages = 4 if chunks == 1 else 2
    sizes: dict[str, int | str] = {
        "D_CHUNKS": chunks,
        "D_STEPS": d // 32,
        "N_OUT": columns,
        "STAGES": stages,
        "Q_STAGES": 2,
    }
    macros: dict[str, int | str] = {"FORMAT": FORMATS[dtype], "DROPOUT": int(dropout), **sizes}
    rows = 2 * chunks * QUERIES + stages * (chunks * BLOCK + columns)  # of 128 bytes, in shared memory
    kernel = launch.function("attention_fp8", "attention_fp8", macros, rows * 128 + SLACK)
    return kernel, launch.function("attention_fp8", "attention_fp8_ticket", macros)


CONFIGURATIONS = [_kernels(*case)[0].configuration for case in itertools.product(FORMATS, CAPACITIES, EITHER)]


def is_loadable(x: torch.Tensor) -> bool:
    """Whether the copy engine can read codes `[b, h, rows, columns]`: rows do not repeat and are 16-byte aligned."""
    steps = [stride for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1]
    return x.data_ptr() % 16 == 0 and all(step > 0 and step % 16 == 0 for step in steps)


def loadable(x: torch.Tensor) -> torch.Tensor:
    """Codes that the copy engine can read: x, or a copy with rows of a multiple of 16 bytes."""
    if is_loadable(x):
        return x
    room = torch.empty((*x.shape[:3], ceil16(x.shape[3])), dtype=x.dtype, device=x.device)
    return room[..., : x.shape[3]].copy_(x)


def tensor_map(x: torch.Tensor, rows: int) -> TensorMap:
    """The tensor map of `loadable` codes `[b, h, rows, columns]`; a box has `rows` rows and 128 columns of one head."""
    b, h, s, columns = x.shape
    # The stride of a dimension of one element means nothing, and torch may report any number.
    steps = (step if size > 1 else 16 for size, step in ((s, x.stride(2)), (h, x.stride(1)), (b, x.stride(0))))
    return encode(x.data_ptr(), x.dtype, (columns, s, h, b, 1), (*steps, 16), (128, rows, 1, 1, 1), 128, 256)


@on_cuda
def attention_fp8(
    q: torch.Tensor,
    k: torch.Tensor,
    v_t: torch.Tensor,
    q_scale_inv: torch.Tensor,
    k_scale_inv: torch.Tensor,
    v_scale_inv: torch.Tensor,
    *options: *Options,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """softmax(q kᵀ · scale) v -> (out like q, m fp32 `[b, h, sq]`, inv fp32 `[b, h, sq]`)."""
    out, m, inv = outputs(q, k, v_t, q_scale_inv, k_scale_inv, v_scale_inv, *options)
    *_, dropout, rng_state, dtype = options
    check_grid("twin::attention_fp8", q)
    b, h, sq, d = q.shape
    if out.numel() and k.numel():
        inputs = [loadable(x) for x in (q, k, v_t)]  # copies must live until the launch
        a = arguments(q, k, out, *options[:7])
        a["together"] = max(1, L2 // (2 * k.shape[2] * capacity(d))) * a["group"]  # heads whose keys and values fit
        kernel, reset = _kernels(dtype, capacity(d), threshold(dropout) > 0)
        rows = (QUERIES, BLOCK, min(capacity(d), 128))
        maps = [tensor_map(x, count).argument for x, count in zip(inputs, rows, strict=True)]
        tiles, index = -(-sq // QUERIES) * b * h * -(-d // 128), q.device.index
        blocks = min(tiles, launch.processors(index))
        ticket = torch.empty(1, dtype=torch.int32, device=q.device) if tiles > blocks else None
        if ticket is not None:
            launch.launch(reset, (1,), (1,), [ticket.data_ptr()], device=index)
        args = [*maps, *(x.data_ptr() for x in (q_scale_inv, k_scale_inv, v_scale_inv)), launch.by_value(a)]
        args += [0 if ticket is None else ticket.data_ptr(), out.data_ptr(), m.data_ptr(), inv.data_ptr()]
        early = ticket is not None
        launch.launch(kernel, (blocks,), (_THREADS,), args, kernel.max_dynamic_smem, device=index, early=early)
    elif out.numel():
        out.zero_(), m.fill_(float(LOWEST)), inv.zero_()
    if threshold(dropout):
        assert rng_state is not None
        advance(rng_state)
    return out, m, inv
