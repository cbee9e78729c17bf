"""`twin::attention_backward` on the GPU.

Kernels: attention_backward.cu, for wide heads attention_backward_wide.cu; before and after, attention_backward_ends.cu.

Semantics: `reference.ops.attentions.attention_backward`.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.attentions import attention
from optimized.ops.attentions.attention import ENTRIES, PLACES, Entries, strides_of
from reference.ops.attentions.attention import BLOCK, NO_LIMIT, limits
from reference.ops.attentions.attention_backward import outputs
from reference.ops.attentions.attention_options import Options
from reference.ops.attentions.attention_packed import by_heads, sizes
from reference.ops.library import on_cuda
from reference.ops.random.dropout import threshold

_THREADS = 384
WIDE = attention.WIDE  # the head dimension that takes attention_backward_wide.cu
_HALVES = 2  # of its dq's channels, each of which has its turns
_WIDE_KEYS = 64  # of one of a cluster's two blocks
_WIDE_SHARED = 218 << 10  # bytes of shared memory: keys 80 KB, queries 96, P and dS 24, dq 16, and what is small
_DOT_CHANNELS = 8192  # channels of all queries of a block of `dots`

KEEP = 256 << 20  # bytes that dropout's bits may take: as many heads as have theirs there run in one launch

# struct Scratch of kernels/attentions/attention_backward_workspace.cuh.
POINTERS = ("base", "inv", "dots", "dq", "turns", "ticket", "keep")
SCRATCH = np.dtype([(name, "u8") for name in POINTERS] + [("first_head", "i4"), ("works", "i4")])
# What follows where HEADS_APART is 1.
_APART = [("handed", "u8"), ("summed", "u8"), ("apart_from", "i4"), ("apart", "i4"), ("each", "i4")]
SCRATCH_APART = np.dtype([*SCRATCH.descr, *_APART], align=True)

PARTS = 8  # at most, of the works of a head of keys; each costs its sums once out and once in
AT_LEAST = 1.5  # works of a part for each multiprocessor, so that few of them wait for the part before
_WARPS = 8  # that hand sums over


def queries_of(d: int) -> int:
    """Queries of a tile, for one of `attention.CAPACITIES`."""
    return max(64, 8192 // d)


@functools.cache
def main_kernel(
    dtype: torch.dtype, d: int, dropout: bool, biased: bool, entries: Entries, apart: bool = False, amax: bool = False
) -> launch.Kernel:
    more = {"BIAS": int(biased), **entries.macros, **({"AMAX": 1} if amax else {})}
    queries = queries_of(d)
    if d == WIDE:
        macros: dict[str, Any] = {"FORMAT": attention.FORMATS[dtype], "N_OUT": d, "QUERIES": queries}
        macros |= {"DROPOUT": int(dropout), **more}
        return launch.function("attention_backward_wide", "attention_backward", macros, _WIDE_SHARED)
    macros = attention.defines(dtype, d, dropout, QUERIES=queries, HEADS_APART=int(apart), **more)
    chunks, stages = macros["D_CHUNKS"], macros["STAGES"]
    keys, streamed = 2 * chunks * BLOCK * 128, stages * 2 * (chunks * queries * 128 + 6 * queries)
    ds, dq = 2 * queries * BLOCK * 2, (2 if d == 128 else 1) * queries * d * 4
    shared = keys + streamed + ds + dq + attention.SLACK
    return launch.function("attention_backward", "attention_backward", macros, shared)


@functools.cache
def end_kernel(
    dtype: torch.dtype, d: int, entries: Entries, name: str, apart: bool = False, amax: bool = False
) -> launch.Kernel:
    sizes: dict[str, int | str] = {"FORMAT": attention.FORMATS[dtype], "N_OUT": d, "QUERIES": queries_of(d)}
    macros = sizes | entries.macros | {"HEADS_APART": int(apart)} | ({"AMAX": 1} if amax else {})
    return launch.function("attention_backward_ends", name, macros)


_EITHER = attention.EITHER


def _configurations(several: tuple[Entries, ...]) -> Iterator[Any]:
    """All that are launched for such batches."""
    cases: Any = itertools.product(attention.FORMATS, attention.CAPACITIES, *[_EITHER] * 2, several)
    for case in cases:
        yield main_kernel(*case).configuration
    for dtype, d, entries in itertools.product(attention.FORMATS, attention.CAPACITIES, several):
        yield end_kernel(dtype, d, entries, "dots").configuration
    narrow = [d for d in attention.CAPACITIES if d != WIDE]
    for dtype, d, entries in itertools.product(attention.FORMATS, narrow, several):
        for dropout in _EITHER:
            yield main_kernel(dtype, d, dropout, False, entries, True).configuration
        yield end_kernel(dtype, d, entries, "dots", True).configuration


CONFIGURATIONS = [*_configurations(ENTRIES[:2]), *_configurations(ENTRIES[2:])]
CONFIGURATIONS += [
    end_kernel(dtype, d, Entries(False, placed=place), "attention_keep", apart).configuration
    for place in PLACES
    for dtype, d, apart in itertools.product(attention.FORMATS, attention.CAPACITIES, _EITHER)
    if not (apart and d == WIDE)
]

Tensors = tuple[torch.Tensor, ...]


@on_cuda
def attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    m: torch.Tensor,
    inv: torch.Tensor,
    *given: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> (dq like q, dk like k, dv like v); arguments as in `reference.ops.attentions.attention_backward`."""
    results = outputs(grad, q, k, v, out, m, inv, *given)
    differentiate("twin::attention_backward", (grad, q, k, v, out), m, inv, results, Options(*given))
    return results


def differentiate(
    op: str,
    given: Tensors,
    m: torch.Tensor,
    inv: torch.Tensor,
    results: Tensors,
    options: Options,
    amax: torch.Tensor | None = None,
) -> None:
    """Fill `results`, dq, dk and dv; `given` are grad, q, k, v and out.

    The amax of all three goes to `amax`, fp32 of one element, where `attention_amax.in_passing` says that it can.
    """
    grad, q, k, v, out = map(by_heads, given)
    options = attention.readable(options)._replace(sinks=None)  # 1 / l has what sinks take
    b, _, _, sq, skv = sizes(q, k, options)
    attention.check_grid(op, q, b)
    if not q.numel() or not k.numel() or not sq or not skv:
        for one in results:
            one.zero_()
        return
    inputs = tuple(attention.loadable(x) for x in (grad, q, k, v, out))
    dq, dk, dv = map(by_heads, results)
    # One stride, and one number of channels, serve both dk and dv.
    dk_written = dk if dk.shape[3] >= dv.shape[3] else torch.empty_like(dv)
    alike = dv.shape == dk_written.shape and dv.stride() == dk_written.stride()
    dv_written = dv if alike else torch.empty_like(dk_written)
    _run(inputs, m, inv, (dq, dk_written, dv_written), options, amax)
    for found, written in ((dk, dk_written), (dv, dv_written)):
        if found is not written:
            found.copy_(written[..., : found.shape[3]])


def _scratch(inputs: Tensors, options: Options, sums: int, keep: int) -> tuple[np.ndarray, Tensors]:
    """Scratch for `sums` fp32 numbers of dq and `keep` bytes, and the tensors that it points to: statistics first."""
    _, q, k, v, _ = inputs
    b, h, _, sq, _ = sizes(q, k, options)
    capacity, padded = attention.widest(q, v), -(-sq // BLOCK) * BLOCK
    turns = b * h * (padded // queries_of(capacity)) * (_HALVES if capacity == WIDE else 1)
    stats = torch.empty((3, b * h, padded), dtype=torch.float32, device=q.device)
    dq = torch.empty(sums, dtype=torch.float32, device=q.device)
    words = torch.empty(turns + 1, dtype=torch.int32, device=q.device)
    bits = torch.empty(keep, dtype=torch.uint8, device=q.device)
    scratch = np.zeros((), SCRATCH)
    for name, tensor in zip(POINTERS, (*stats, dq, words, words[-1:], bits), strict=True):
        scratch[name] = tensor.data_ptr()
    return scratch, (stats, dq, words, bits)


def _make_statistics(
    inputs: Tensors,
    m: torch.Tensor,
    inv: torch.Tensor,
    options: Options,
    arguments: launch.ByValue,
    scratch: np.ndarray,
    found: list[int],
) -> None:
    """Launch `dots`, which also clears what blocks take turns by; `arguments` are of `options.of_rows()`.

    `found`: the address of an amax, which it clears, too, or nothing.
    """
    grad, q, k, v, out = inputs
    b, h, _, sq, _ = sizes(q, k, options)
    capacity, padded = attention.widest(q, v), -(-sq // BLOCK) * BLOCK
    strides = strides_of(grad, options.packed)
    args = [arguments, grad.data_ptr(), out.data_ptr(), *strides, m.data_ptr(), inv.data_ptr()]
    entries = Entries(options.packed, options.packed)
    kernel = end_kernel(q.dtype, capacity, entries, "dots", scratch.dtype == SCRATCH_APART, bool(found))
    grid = (b * h, -(-padded * capacity // _DOT_CHANNELS))
    launch.launch(kernel, grid, (256,), [*args, launch.by_value(scratch.copy()), *found], device=q.device.index)


def row_statistics(inputs: Tensors, m: torch.Tensor, inv: torch.Tensor, options: Options) -> torch.Tensor:
    """384 - m, 1 / l and D of each query, fp32 `[3, b h, sq up to a multiple of 128]`."""
    _, q, k, _, out = inputs
    scratch, (stats, *_held) = _scratch(inputs, options, 0, 0)
    arguments = launch.by_value(attention.arguments(q, k, out, options.of_rows()))
    _make_statistics(inputs, m, inv, options, arguments, scratch, [])
    return stats


def _set_apart(inputs: Tensors, options: Options, heads: int, scratch: np.ndarray) -> tuple[np.ndarray, Tensors]:
    """`scratch` with what parts of `heads` heads of keys hand over, and the tensors that it points to."""
    _, q, k, v, _ = inputs
    b, h, key_heads, _, skv = sizes(q, k, options)
    capacity, blocks = attention.widest(q, v), -(-skv // BLOCK)
    handed = torch.empty(heads * blocks * 2 * BLOCK * capacity, dtype=torch.float32, device=q.device)
    summed = torch.empty(b * key_heads * blocks * _WARPS, dtype=torch.int32, device=q.device)
    found = np.zeros((), SCRATCH_APART)
    for name in SCRATCH.names or ():
        found[name] = scratch[name]
    found["handed"], found["summed"] = handed.data_ptr(), summed.data_ptr()
    found["each"] = -(-(h // key_heads) // PARTS)
    return found, (handed, summed)


def _run(
    inputs: Tensors,
    m: torch.Tensor,
    inv: torch.Tensor,
    results: Tensors,
    options: Options,
    amax: torch.Tensor | None,
) -> None:
    found = [] if amax is None else [amax.data_ptr()]
    grad, q, k, v, out = inputs
    dq, dk, dv = results
    b, h, heads, sq, skv = sizes(q, k, options)
    index, capacity, drops = q.device.index, attention.widest(q, v), threshold(options.dropout) > 0
    group, queries, blocks, padded = h // heads, queries_of(capacity), -(-skv // BLOCK), -(-sq // BLOCK) * BLOCK
    tiles, wide = padded // queries, capacity == WIDE
    keys = _WIDE_KEYS if wide else BLOCK  # in a box
    # Heads of keys whose q, grad, dq, k and v fit into L2 side by side, and as many as a launch takes.
    together = max(1, attention.L2 // (12 * padded * capacity * group))
    at_once = b * heads
    keep_bytes = padded * blocks * (BLOCK // 8) * group  # of a head of keys
    if drops and at_once * keep_bytes > KEEP:
        at_once = max(1, KEEP // keep_bytes)
        together = min(together, at_once)
        at_once -= at_once % together
    scratch, _held = _scratch(inputs, options, b * h * padded * capacity, at_once * keep_bytes if drops else 0)

    drawn = Entries.of(options)  # of which only what draws needs to know a place
    entries, biased = drawn._replace(placed=0), options.biased
    # A group's works are long, and few are left at the end: the last ones are taken in parts.
    last_heads = math.ceil(AT_LEAST * launch.processors(index) / blocks)
    is_windowed = int(limits(options.mask_type, options.left, options.right, sq, skv)[0]) != -NO_LIMIT
    is_apart = group > 1 and last_heads <= at_once and not (wide or biased or is_windowed)
    if is_apart:
        scratch, _handed = _set_apart(inputs, options, last_heads, scratch)

    def of(written: torch.Tensor, options: Options) -> launch.ByValue:
        a = attention.arguments(q, k, written, options)
        a["together"] = together
        return launch.by_value(a)

    unbiased = options.unbiased()
    _make_statistics(inputs, m, inv, options, of(out, options.of_rows()), scratch, found)
    maps = [attention.tensor_map(x, rows) for x, rows in ((q, queries), (k, keys), (v, keys), (grad, queries))]
    kernel = main_kernel(q.dtype, capacity, drops, biased, entries, is_apart, bool(found))
    draw = end_kernel(q.dtype, capacity, drawn, "attention_keep", is_apart)
    for first in range(0, b * heads, at_once):
        count = min(at_once, b * heads - first)
        works = count * blocks
        if is_apart:
            apart = last_heads if last_heads <= count else 0
            scratch["apart_from"], scratch["apart"] = first + count - apart, apart
            works += apart * blocks * (-(-group // int(scratch["each"])) - 1)
        scratch["first_head"], scratch["works"] = first * group, first * blocks + works
        space = launch.by_value(scratch.copy())
        if drops:
            args = [of(out, unbiased), space, np.uint32(first * blocks)]
            launch.launch(draw, (blocks, padded // BLOCK, count * group), (256,), args, device=index)
        args = [*(one.argument for one in maps), of(dk, options), space, dk.data_ptr(), dv.data_ptr(), *found]
        smem, early = kernel.max_dynamic_smem, not (drops or wide)
        at_a_time = launch.clusters_at_once(kernel, 2, _THREADS, smem, index) if wide else launch.processors(index)
        grid = (min(works, at_a_time) * (2 if wide else 1),)
        launch.launch(kernel, grid, (_THREADS,), args, smem, device=index, early=early)

    args = [of(dq, unbiased), space, dq.data_ptr(), *found]
    kernel = end_kernel(q.dtype, capacity, entries, "attention_dq", is_apart, bool(found))
    all_tiles = (tiles, b * h, _HALVES) if wide else (tiles, b * h)
    launch.launch(kernel, all_tiles, (256,), args, device=index, early=True)
    if options.packed:
        attention.clear_gaps(q, k, options, (dq,), False)
        attention.clear_gaps(q, k, options, (dk, dv), True)
