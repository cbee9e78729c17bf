"""`twin::attention` on the GPU: kernels/attentions/attention.cu, for wide heads attention_wide.cu.

Semantics: `reference.ops.attentions.attention`.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from optimized.cuda import launch
from optimized.cuda.tensor_map import TensorMap, encode
from optimized.ops.attentions import attention_decode
from optimized.ops.random.dropout import advance
from reference.ops.attentions.attention import BLOCK, LOWEST, NO_LIMIT, factor, limits, outputs
from reference.ops.attentions.attention_bias import diagonal
from reference.ops.attentions.attention_options import KEY_SEGMENTS, Options
from reference.ops.attentions.attention_packed import batch_of, by_heads, sizes
from reference.ops.library import on_cuda
from reference.ops.random.dropout import keep_scale, threshold

FORMATS = {torch.bfloat16: "BF16", torch.float16: "FP16"}
WIDE = 256  # the head dimension that takes attention_wide.cu
SLACK = 1024  # bytes of shared memory after the tiles: barriers, and what the alignment of the structure adds
L2 = 32 << 20  # bytes of tensors that stay in the H100's 50 MiB of L2
MAX_GRID_Y = 65535

# struct Arguments of kernels/attentions/attention_tile.cuh.
_INTS = ("batches", "heads", "group", "sq", "skv", "d", "together", "lower", "upper", "threshold")
ARGUMENTS = np.dtype(
    [("rng_state", "u8"), ("mask", "u8"), ("mask_strides", "i8", 4), ("out_strides", "i8", 3)]
    + [(name, "i4") for name in _INTS]
    + [(name, "f4") for name in ("c", "kept", "scale")],
    align=True,
)
# What follows where BIAS, SINK, LENGTHS, PACKED or PAGED is 1.
_BIAS = [("bias", "u8"), ("slopes", "u8"), ("bias_strides", "i8", 3), ("slope_b", "i8")]
_BIAS += [("bias_is_fp32", "i4"), ("diagonal", "i4")]
_SINK = [("sinks", "u8")]
_LENGTHS = [("q_lengths", "u8"), ("kv_lengths", "u8"), ("ends_align", "i4")]
_PACKED = [("q_rows", "i4"), ("kv_rows", "i4"), ("q_starts", "u8"), ("kv_starts", "u8")]
_PAGED = [("page_table", "u8"), ("pages", "i4"), ("page_size", "i4")]


CAPACITIES = (64, 128, 256)  # head dimensions that kernels are compiled for


def capacity(d: int) -> int:
    """The least of `CAPACITIES` that holds heads of `d` channels."""
    return 64 if d <= 64 else 128 if d <= 128 else 256


def defines(dtype: torch.dtype, d: int, dropout: bool, **more: int) -> dict[str, Any]:
    """The macros of both kernels for a head dimension of `CAPACITIES`; `more` are those of one kernel alone."""
    sizes = {"D_CHUNKS": d // 64, "N_OUT": min(d, 128), "STAGES": 1 if d == 256 else 2}
    return {"FORMAT": FORMATS[dtype], "DROPOUT": int(dropout), **more, **sizes}


@functools.cache
def argument_type(biased: bool, sunk: bool, lengths: bool, packed: bool = False, paged: bool = False) -> np.dtype:
    """The type of struct Arguments with these macros."""
    more = _BIAS * biased + _SINK * sunk + _LENGTHS * lengths + _PACKED * packed + _PAGED * paged
    return np.dtype([(name, ARGUMENTS[name]) for name in ARGUMENTS.names or ()] + more, align=True)


class Entries(NamedTuple):
    """Whether entries of a batch have lengths, lie one after the other, and have keys in pages.

    `placed`: whether they are a part of a larger tensor, in which dropout draws: 1 of its heads, 2 also of its tokens.
    """

    lengths: bool
    packed: bool = False
    paged: bool = False
    placed: int = 0

    @staticmethod
    def of(options: Options) -> "Entries":
        """Those of a call."""
        return Entries(options.has_lengths, options.packed, placed=placed(options))

    @property
    def macros(self) -> dict[str, int]:
        """The kernels' macros that say it."""
        more = {"PLACED": self.placed} if self.placed else {}
        return {"LENGTHS": int(self.lengths), "PACKED": int(self.packed), **more}


def placed(options: Options) -> int:
    """`Entries.placed`: what a random state's numbers after seed and offset say; 0 where nothing is dropped."""
    if options.rng_state is None or not threshold(options.dropout):
        return 0
    return {2: 0, 5: 1, 9: 2}[len(options.rng_state)]


PLACES = (1, 2)
ENTRIES = (Entries(False), Entries(True), Entries(True, True))


SEGMENTS = (0, *KEY_SEGMENTS)  # the kernels' macro SEGMENT; 0: one chain along all keys


def queries_of(d: int) -> int:
    """Queries of a tile, 64 for each consumer warpgroup, for one of `CAPACITIES`."""
    return 128 if d == WIDE else 192


@functools.cache
def kernels(
    dtype: torch.dtype,
    d: int,
    dropout: bool,
    biased: bool,
    sunk: bool,
    entries: Entries,
    cluster: int = 1,
    segment: int = 0,
    amax: bool = False,
) -> tuple[launch.Kernel, launch.Kernel]:
    more = {"BIAS": int(biased), "SINK": int(sunk), **entries.macros, "PAGED": int(entries.paged)}
    if segment:
        more["SEGMENT"] = segment
    if amax:
        more["AMAX"] = 1
    if d == WIDE:
        file, rows = "attention_wide", 4 * BLOCK + 5 * 4 * 64  # of 64 channels: queries, the ring's five parts
        macros: dict[str, Any] = {"FORMAT": FORMATS[dtype], "CLUSTER": cluster, "DROPOUT": int(dropout), **more}
    else:
        file, macros = "attention", defines(dtype, d, dropout, Q_STAGES=2, **more)
        rows = macros["D_CHUNKS"] * (2 * queries_of(d) + 4 * BLOCK)
    kernel = launch.function(file, "attention", macros, rows * 128 + SLACK)
    return kernel, launch.function(file, "attention_ticket", macros)


EITHER = (False, True)


def _configurations(segment: int) -> Iterator[tuple[str, dict[str, Any]]]:
    for entries, more in itertools.product(ENTRIES, ((False, False), (True, False), (False, True))):
        for case in itertools.product(FORMATS, CAPACITIES, EITHER):
            for cluster in (1, 2) if case[1] == WIDE and not entries.lengths else (1,):
                yield kernels(*case, *more, entries, cluster, segment)[0].configuration
    for biased, place, dtype, d in itertools.product(EITHER, PLACES, FORMATS, CAPACITIES):
        for cluster in (1, 2) if d == WIDE else (1,):
            drawn = (True, biased, False, Entries(False, placed=place))
            yield kernels(dtype, d, *drawn, cluster, segment)[0].configuration


CONFIGURATIONS = list(_configurations(0))

_gaps = launch.function("attention_gaps", "attention_gaps")
CONFIGURATIONS.append(_gaps.configuration)
CONFIGURATIONS += [one for segment in KEY_SEGMENTS for one in _configurations(segment)]
_GAP_BLOCKS = 32  # that share a gap's rows


def is_loadable(x: torch.Tensor) -> bool:
    """Whether the copy engine can read `x` `[b, h, s, d]`: its rows do not repeat and are 16-byte aligned."""
    steps = [stride * x.element_size() for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1]
    return x.data_ptr() % 16 == 0 and all(step > 0 and step % 16 == 0 for step in steps)


def loadable(x: torch.Tensor) -> torch.Tensor:
    """`x` `[b, h, s, d]`, or a copy where the copy engine cannot read it."""
    return x if is_loadable(x) else x.clone(memory_format=torch.contiguous_format)


def tensor_map(x: torch.Tensor, rows: int) -> TensorMap:
    """The tensor map of a `loadable` `x` `[b, h, s, d]`; a box has `rows` rows and 128 bytes of columns of one head."""
    b, h, s, d = x.shape
    size = x.element_size()
    # The stride of a dimension of one element means nothing, and torch may report any number.
    steps = (x.stride(n) * size if x.shape[n] > 1 else 16 for n in (2, 1, 0))
    return encode(x.data_ptr(), x.dtype, (d, s, h, b, 1), (*steps, 16), (128 // size, rows, 1, 1, 1), 128, 256)


class Pages(NamedTuple):
    """Where keys and values lie: `page_table` of `twin::attention_paged`, and the keys of a page."""

    table: torch.Tensor
    size: int


def arguments(
    q: torch.Tensor, k: torch.Tensor, out: torch.Tensor, options: Options, pages: Pages | None = None
) -> np.ndarray:
    """The kernels' struct Arguments; `out` is the tensor that they write, or one with its strides and channels.

    All three are `[b, h, s, d]`; of packed sequences they have b = 1 and all tokens, or all rows of all pages.
    """
    (b, h, heads, sq, skv), d = sizes(q, k, options), out.shape[3]
    o, lengths, packed = options, options.has_lengths, options.packed
    a = np.zeros((), argument_type(o.biased, o.sinks is not None, lengths, packed, pages is not None))
    if pages is not None:
        a["page_table"], a["pages"], a["page_size"] = pages.table.data_ptr(), pages.table.shape[1], pages.size
    if packed:
        a["q_rows"], a["kv_rows"] = q.shape[2], k.shape[2]
        a["q_starts"], a["kv_starts"] = (0 if x is None else x.data_ptr() for x in (o.q_starts, o.kv_starts))
    if o.sinks is not None:
        a["sinks"] = o.sinks.data_ptr()
    if o.bias is not None:
        a["bias"], a["bias_is_fp32"] = o.bias.data_ptr(), o.bias.dtype == torch.float32
        a["bias_strides"] = o.bias.expand(b, h, sq, skv).stride()[:3]
    if o.slopes is not None:
        a["slopes"], a["slope_b"] = o.slopes.data_ptr(), o.slopes.shape[-1] if o.slopes.dim() == 2 else 0
        a["diagonal"] = diagonal(o.mask_type, sq, skv)
    if threshold(o.dropout):
        assert o.rng_state is not None
        a["rng_state"] = o.rng_state.data_ptr()
    if o.mask is not None:
        a["mask"] = o.mask.data_ptr()
        a["mask_strides"] = o.mask.expand(b, h, sq, skv).stride()
    a["out_strides"] = strides_of(out, packed)
    a["batches"], a["heads"], a["group"], a["sq"], a["skv"], a["d"] = b, h, h // heads, sq, skv, d
    channels = capacity(max(d, k.shape[3]))
    a["together"] = max(1, L2 // (4 * skv * channels)) * a["group"]  # heads whose keys and values fit
    if lengths:
        a["q_lengths"], a["kv_lengths"] = (0 if x is None else x.data_ptr() for x in (o.q_lengths, o.kv_lengths))
        a["ends_align"], sq, skv = o.mask_type != "causal", 0, 0  # kernels add the difference
    a["lower"], a["upper"] = limits(o.mask_type, o.left, o.right, sq, skv)
    a["threshold"] = threshold(o.dropout)
    a["c"], a["kept"], a["scale"] = factor(o.scale), keep_scale(o.dropout), o.scale
    return a


def widest(q: torch.Tensor, v: torch.Tensor) -> int:
    """The `capacity` for heads of q and k, and of v. The copy engine fills what a head lacks with zeros.

    A step of the tensor core over zeros changes no bit, and what they multiply is not stored.
    """
    return capacity(max(q.shape[3], v.shape[3]))


def strides_of(x: torch.Tensor, packed: bool) -> tuple[int, ...]:
    """The strides of x `[b, h, s, d]`, but d's; packed sequences `[1, h, t, d]` lie in one."""
    return (0, *x.stride()[1:3]) if packed else x.stride()[:3]


def check_grid(op: str, q: torch.Tensor, batch: int | None = None) -> None:
    """Refuse more heads than a grid has rows; `batch` is q's `[b, h, s, d]` if it is not given."""
    count = (q.shape[0] if batch is None else batch) * q.shape[1]
    if count > MAX_GRID_Y:
        raise ValueError(f"{op}: batch times heads must be at most {MAX_GRID_Y}; got {count}.")


def clear_gaps(
    q: torch.Tensor, k: torch.Tensor, options: Options, written: tuple[torch.Tensor, ...], of_keys: bool
) -> None:
    """Zeros in the rows of one or two results, of equal strides and `[1, h, t, d]`, that no packed sequence has."""
    first, *others = written
    a = launch.by_value(arguments(q, k, first, options.unbiased()))
    args = [a, first.data_ptr(), others[0].data_ptr() if others else 0, np.int32(of_keys)]
    launch.launch(_gaps, (batch_of(options)[0] + 1, _GAP_BLOCKS), (256,), args, device=q.device.index)


def readable(options: Options) -> Options:
    """The options with a bias and slopes that the kernels can read: rows of neighbours, or copies."""
    bias, slopes = options.bias, options.slopes
    if bias is not None and bias.stride(3) != 1 and bias.numel():
        options = options._replace(bias=bias.contiguous())
    if slopes is not None:
        options = options._replace(slopes=slopes.contiguous())
    return options


@on_cuda
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """softmax(q kᵀ · scale) v -> (out `[b, h, sq, e]`, m fp32 `[b, h, sq]`, inv fp32 `[b, h, sq]`)."""
    results = outputs(q, k, v, *given)
    attend("twin::attention", q, k, v, results, Options(*given))
    return results


def attend(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    options: Options,
    pages: Pages | None = None,
    amax: torch.Tensor | None = None,
) -> None:
    """Launch the kernel that fills `results`; with `pages` k and v are all rows of a cache `[rows, hkv, d]`.

    It writes the amax of out to `amax`, fp32 of one element, where `attention_amax.in_passing` says that it can.
    """
    result, m, inv = results
    q, k, v, out = by_heads(q), by_heads(k), by_heads(v), by_heads(result)
    options = readable(options)
    dropout, rng_state = options.dropout, options.rng_state
    b, h, _, sq, skv = sizes(q, k, options)
    check_grid(op, q, b)
    if out.numel() and k.numel() and sq and skv:
        inputs = [loadable(x) for x in (q, k, v)]  # copies must live until the launch
        if attention_decode.takes(q, k, options, launch.processors(q.device.index)):
            attention_decode.decode(inputs[0], inputs[1], inputs[2], (out, m, inv), options, pages)
            return
        a = arguments(q, k, out, options, pages)
        size, index = widest(q, v), q.device.index
        wide, queries = size == WIDE, queries_of(size)
        boxes = (64, BLOCK, 64) if wide else (queries, BLOCK, BLOCK)
        maps = [tensor_map(x, rows).argument for x, rows in zip(inputs, boxes, strict=True)]
        # Two tiles that visit the same keys share them.
        alike = (a["lower"], a["upper"]) == (-NO_LIMIT, NO_LIMIT) and not options.has_lengths
        cluster = 2 if wide and sq > queries and alike else 1
        entries = Entries.of(options)._replace(paged=pages is not None)
        segment = attention_decode.segment_of(options, skv)
        more = (options.biased, options.sinks is not None, entries, cluster, segment, amax is not None)
        kernel, reset = kernels(q.dtype, size, threshold(dropout) > 0, *more)
        threads, smem = 2 * queries + 128, kernel.max_dynamic_smem
        if cluster > 1:
            at_a_time = launch.clusters_at_once(kernel, cluster, threads, smem, index)
        else:
            at_a_time = launch.processors(index)
        works = -(-sq // (cluster * queries)) * b * h
        cleared = works > at_a_time or amax is not None
        ticket = torch.empty(1, dtype=torch.int32, device=q.device) if cleared else None
        found = [] if amax is None else [amax.data_ptr()]
        if ticket is not None:
            launch.launch(reset, (1,), (1,), [ticket.data_ptr(), *found], device=index)
        args = [*maps, launch.by_value(a), 0 if ticket is None else ticket.data_ptr()]
        args += [out.data_ptr(), m.data_ptr(), inv.data_ptr()]
        grid, early = (cluster * min(works, at_a_time),), ticket is not None and cluster == 1
        if segment:  # of each consumer's thread O of the segments so far, two m and two sums
            floats = grid[0] * (threads - 128) * (size // 2 + 4)
            totals = torch.empty(floats, dtype=torch.float32, device=q.device)
            args.append(totals.data_ptr())
        launch.launch(kernel, grid, (threads,), [*args, *found], smem, device=index, early=early)
        if options.packed:
            clear_gaps(q, k, options, (out,), False)
    elif m.numel():
        out.zero_(), m.fill_(float(LOWEST)), inv.zero_()
    if threshold(dropout):
        assert rng_state is not None
        advance(rng_state)
