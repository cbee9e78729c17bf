"""`twin::attention_fp8` on the GPU: kernels/attentions/attention_fp8.cu. Semantics:
`reference.ops.attentions.attention_fp8`."""

import functools
import itertools
from typing import Any

import numpy as np
import torch

from optimized.cuda import launch
from optimized.cuda.tensor_map import TensorMap, encode
from optimized.ops.attentions.attention import (
    CAPACITIES,
    EITHER,
    ENTRIES,
    FORMATS,
    L2,
    SLACK,
    Entries,
    arguments,
    capacity,
    check_grid,
    clear_gaps,
    is_loadable,
    tensor_map,
)
from optimized.ops.random.dropout import advance
from reference.ops.attentions.attention import BLOCK, LOWEST
from reference.ops.attentions.attention_fp8 import by_columns, of_call, outputs
from reference.ops.attentions.attention_options import Options
from reference.ops.attentions.attention_packed import batch_of, by_heads, sizes
from reference.ops.casts.cast import ROOM
from reference.ops.casts.cast_transpose import ceil16
from reference.ops.library import on_cuda
from reference.ops.random.dropout import threshold

# struct KeyMaps of kernels/attentions/attention_fp8.cu.
KEY_MAPS = np.dtype([("from", "u8", (4, 16))])
QUERIES = 192  # of a tile: 64 for each consumer warpgroup
_THREADS = 512
_VALUE_THREADS, _VALUE_ROWS = 256, 128  # of a block of attention_fp8_values.cu


@functools.cache
def _kernels(dtype: torch.dtype, d: int, dropout: bool, entries: Entries) -> tuple[launch.Kernel, launch.Kernel]:
    """The kernel for heads of a capacity, with results of `dtype`, and the one that resets its ticket."""
    chunks, columns = -(-d // 128), min(d, 128)
    stages = 4 if chunks == 1 else 2
    macros: dict[str, int | str] = {
        "FORMAT": FORMATS[dtype],
        "DROPOUT": int(dropout),
        "D_CHUNKS": chunks,
        "D_STEPS": d // 32,
        "N_OUT": columns,
        "STAGES": stages,
        "Q_STAGES": 2,
        **entries.macros,
    }
    rows = 2 * chunks * QUERIES + stages * (chunks * BLOCK + columns + 8)  # of 128 bytes, in shared memory
    kernel = launch.function("attention_fp8", "attention_fp8", macros, rows * 128 + SLACK)
    return kernel, launch.function("attention_fp8", "attention_fp8_ticket", macros)


_PLACED = Entries(False, placed=1)
CONFIGURATIONS = [
    _kernels(dtype, d, dropout, entries)[0].configuration
    for entries, either in ((ENTRIES[0], EITHER), (_PLACED, (True,)), *((entries, EITHER) for entries in ENTRIES[1:]))
    for dtype, d, dropout in itertools.product(FORMATS, CAPACITIES, either)
]
_values = launch.function("attention_fp8_values", "attention_fp8_values")
CONFIGURATIONS.append(_values.configuration)


def loadable(x: torch.Tensor, rows: int = 1) -> torch.Tensor:
    """Codes `[b, h, s, columns]` that the copy engine can read, `rows` of them at a time: x, or a copy of x.

    A copy has room for a multiple of 16 columns, and a multiple of `rows` rows, the last of which mean nothing.
    """
    return x if is_loadable(x) and x.shape[2] % rows == 0 else _copied(x, rows)


def _copied(x: torch.Tensor, rows: int = 1) -> torch.Tensor:
    """The copy of `loadable`."""
    s, columns = x.shape[2:]
    copy = torch.empty((*x.shape[:2], -(-s // rows) * rows, ceil16(columns)), dtype=x.dtype, device=x.device)
    copy[:, :, :s, :columns].copy_(x)
    return copy[..., :columns]


def key_map(k: torch.Tensor) -> TensorMap:
    """The tensor map of k's `loadable(k, 4)` codes `[b, hkv, skv, d]`: rows 4 n + 2 h + e are at (e + 2 h, n).

    Two boxes, of h = 0 and of h = 1, have a block's keys in the order of kernels/attentions/attention_fp8_softmax.cuh.
    """
    b, h, s, d = k.shape
    row, head, batch = (k.stride(n) if k.shape[n] > 1 else 16 for n in (2, 1, 0))  # of one element it means nothing
    shape, steps = (d, 4, s // 4, h, b), (row, 4 * row, head, batch)
    return encode(k.data_ptr(), k.dtype, shape, steps, (128, 2, BLOCK // 4, 1, 1), 128, 256)


def _row(k: torch.Tensor) -> int:
    """Bytes from a row of packed keys' codes to the next one; where there is one alone, its stride means nothing."""
    return k.stride(2) if k.shape[2] > 1 else k.shape[3]


def with_room(k: torch.Tensor) -> torch.Tensor:
    """Codes of packed keys `[1, hkv, t, d]` after whose last row there is memory for `ROOM` more; k, or a copy of k."""
    _, heads, tokens, d = k.shape
    end = k.storage_offset() + (tokens - 1 + ROOM) * _row(k) + (heads - 1) * k.stride(1) + d
    if is_loadable(k) and end <= k.untyped_storage().nbytes():
        return k
    copy = torch.empty((tokens + ROOM, heads, d), dtype=k.dtype, device=k.device)[:tokens]
    return by_heads(copy.copy_(k[0].transpose(0, 1)))


def key_maps(k: torch.Tensor) -> launch.ByValue:
    """The tensor maps of packed keys' codes `[1, hkv, t, d]`, k `with_room`: as `key_map`, from rows 0 to 3 on."""
    _, h, t, d = k.shape
    row, head, found = _row(k), k.stride(1) if h > 1 else 16, []
    for first in range(4):
        left = max(t - first, 1)  # no sequence begins at a row that there is not
        shape, steps = (d, 4, -(-left // 4), h, 1), (row, 4 * row, head, 16)
        start = k.data_ptr() + (first * row if first < t else 0)
        found.append((start, encode(start, k.dtype, shape, steps, (128, 2, BLOCK // 4, 1, 1), 128, 256)))
    words = np.zeros(KEY_MAPS.itemsize + 64, np.uint8)
    words = words[-words.ctypes.data % 64 :][: KEY_MAPS.itemsize]
    words[:] = np.concatenate([one.words for _, one in found])
    return launch.by_value(words, [(128 * n, start) for n, (start, _) in enumerate(found)])


def moved_values(v_t: torch.Tensor, options: Options) -> torch.Tensor:
    """Values `[1, hkv, d, t]` of packed sequences as attention_fp8_values.cu moves them, `[1, hkv, d, width]`.

    Sequence n begins at column `BLOCK * (starts[n] // BLOCK + n)`; what its last block of keys lacks is zeros.
    """
    _, heads, d, tokens = v_t.shape
    end = v_t.storage_offset() + (heads - 1) * v_t.stride(1) + (d - 1) * v_t.stride(2) + ceil16(tokens)
    if not is_loadable(v_t) or end > v_t.untyped_storage().nbytes():  # it is read 16 bytes at a time
        v_t = _copied(v_t)
    batch, _, longest = batch_of(options)
    width, rows = (-(-tokens // BLOCK) + batch - 1) * BLOCK, heads * d
    found = torch.empty((1, heads, d, width), dtype=v_t.dtype, device=v_t.device)
    assert options.kv_lengths is not None
    assert options.kv_starts is not None
    args: list[Any] = [v_t.data_ptr(), np.int64(v_t.stride(1)), np.int64(v_t.stride(2)), options.kv_lengths.data_ptr()]
    args += [options.kv_starts.data_ptr(), np.int32(tokens), np.int32(d), np.int32(rows)]
    args += [found.data_ptr(), np.int32(width)]
    grid = (-(-longest // BLOCK), -(-rows // _VALUE_ROWS), batch)
    launch.launch(_values, grid, (_VALUE_THREADS,), args, device=v_t.device.index)
    return found


@on_cuda
def attention_fp8(
    q: torch.Tensor,
    k: torch.Tensor,
    v_t: torch.Tensor,
    q_scale_inv: torch.Tensor,
    k_scale_inv: torch.Tensor,
    v_scale_inv: torch.Tensor,
    *given: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """softmax(q kᵀ · scale) v -> (out like q, m fp32 `[b, h, sq]`, inv fp32 `[b, h, sq]`)."""
    result, m, inv = outputs(q, k, v_t, q_scale_inv, k_scale_inv, v_scale_inv, *given)
    options, dtype = of_call(given)
    q, k, v_t, out = by_heads(q), by_heads(k), by_columns(v_t), by_heads(result)
    (b, h, _, sq, skv), d = sizes(q, k, options), q.shape[3]
    check_grid("twin::attention_fp8", q, b)
    if out.numel() and k.numel() and sq and skv:
        q_codes = loadable(q)  # copies must live until the launch
        k_codes, v_codes = (
            (with_room(k), moved_values(v_t, options)) if options.packed else (loadable(k, 4), loadable(v_t))
        )
        a = arguments(q, k, out, options)
        a["together"] = max(1, L2 // (2 * skv * capacity(d))) * a["group"]  # heads whose keys and values fit
        kernel, reset = _kernels(dtype, capacity(d), threshold(options.dropout) > 0, Entries.of(options))
        of_keys = key_maps(k_codes) if options.packed else key_map(k_codes).argument
        of_values = tensor_map(v_codes, min(capacity(d), 128)).argument
        maps = (tensor_map(q_codes, QUERIES).argument, of_keys, of_values)
        tiles, index = -(-sq // QUERIES) * b * h * -(-d // 128), q.device.index
        blocks = min(tiles, launch.processors(index))
        ticket = torch.empty(1, dtype=torch.int32, device=q.device) if tiles > blocks else None
        if ticket is not None:
            launch.launch(reset, (1,), (1,), [ticket.data_ptr()], device=index)
        args = [*maps, *(x.data_ptr() for x in (q_scale_inv, k_scale_inv, v_scale_inv))]
        args += [launch.by_value(a), 0 if ticket is None else ticket.data_ptr()]
        args += [out.data_ptr(), m.data_ptr(), inv.data_ptr()]
        early = ticket is not None
        launch.launch(kernel, (blocks,), (_THREADS,), args, kernel.max_dynamic_smem, device=index, early=early)
        if options.packed:
            clear_gaps(q, k, options, (out,), False)
    elif out.numel() or m.numel():
        out.zero_(), m.fill_(float(LOWEST)), inv.zero_()
    if threshold(options.dropout):
        assert options.rng_state is not None
        advance(options.rng_state)
    return result, m, inv
