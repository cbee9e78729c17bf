"""Few queries of many keys on the GPU: kernels/attentions/attention_decode.cu, in place of attention.cu.

The words are those of `reference.ops.attentions.attention`: what the kernels share among blocks of threads, the written
order leaves free. `attend` of `optimized.ops.attentions.attention` takes it where `takes` says so.

Scores, and the largest of each row, are in memory between the two kernels: b · hkv · ceil(keys / 128) · rows · 516
bytes, rows being the queries of a group's heads. Keys of 16 bits take it up to `MOST_BYTES` of them; attention.cu has
the same words and no scores in memory. Codes have no such limit: otherwise they are dequantized, which takes 4 bytes
for each channel of a key and its value where scores take 4 for each row, of which there are `ROWS[-1]` at most.
"""

import functools
import itertools

import numpy as np
import torch

from optimized.cuda import launch
from optimized.cuda.tensor_map import TensorMap, encode
from reference.ops.attentions.attention import BLOCK, factor, limits
from reference.ops.attentions.attention_options import KEY_SEGMENTS, Options
from reference.ops.attentions.attention_packed import sizes
from reference.ops.random.dropout import threshold

FORMATS = {torch.bfloat16: "BF16", torch.float16: "FP16"}
ROWS = (8, 16, 32)  # of a key head that kernels are compiled for: the queries of a group's heads
LEAST_KEYS = 1024  # fewer keys take one launch of attention.cu
MOST_BYTES = 256 << 20  # of scores
WAVES = 1  # key heads of all sequences a multiprocessor, above which attention.cu is busy everywhere
SCORE_STAGES, CHAIN_STAGES, GROUPS = 3, 6, 4  # kScoreStages, kChainStages, kGroups of the kernel file
SCORE_THREADS, CHAIN_THREADS = 160, 128 + 4 * 64 + 32
SLACK = 1024  # what the alignment of shared memory adds
_SCORE_BLOCKS = 2  # of threads, a multiprocessor, that score: as many as fit with heads of 128 channels

# struct Arguments of the kernel file.
_WRITTEN = ("q", "out", "m", "inv", "scores", "tops")
_OPTIONAL = ("sinks", "q_lengths", "kv_lengths", "q_starts", "kv_starts", "page_table", "k_scales", "v_scales", "mask")
_SIZES = ("heads", "group", "sq", "skv", "d", "e")
_INTS = (*_SIZES, "lower", "upper", "ends_align", "q_rows", "kv_rows", "pages", "page_size", "blocks")
ARGUMENTS = np.dtype(
    [(name, "u8") for name in _WRITTEN + _OPTIONAL]
    + [("mask_strides", "i8", 4), ("q_strides", "i8", 3), ("out_strides", "i8", 3)]
    + [(name, "i4") for name in _INTS]
    + [("c", "f4")],
    align=True,
)
_OF_SEGMENTS = [("found", "u8"), ("arrived", "u8"), ("chunks", "i4")]


@functools.cache
def argument_type(segment: int) -> np.dtype:
    """The type of struct Arguments with this macro."""
    fields = [(name, ARGUMENTS[name]) for name in ARGUMENTS.names or ()]
    return np.dtype(fields + _OF_SEGMENTS, align=True) if segment else ARGUMENTS


def _score_bytes(rows: int, chunks: int, codes: bool) -> int:
    """Of shared memory: queries and barriers, the ring of keys, and of codes a tile of numbers."""
    keys = chunks * BLOCK * 128
    return 4 * rows * 128 + 2048 + (SCORE_STAGES * keys // 2 + keys if codes else SCORE_STAGES * keys) + SLACK


def _chain_bytes(rows: int, codes: bool) -> int:
    """Of shared memory: values, weights, barriers and sums."""
    values = BLOCK * 128
    tiles = CHAIN_STAGES * values // 2 + 2 * values if codes else CHAIN_STAGES * values
    return tiles + GROUPS * rows * 256 + 2048 + 128 * rows + SLACK


@functools.cache
def kernels(dtype: torch.dtype, rows: int, codes: bool, segment: int = 0) -> tuple[launch.Kernel, launch.Kernel]:
    """The kernel that scores, and the one that goes along the chain."""
    macros: dict[str, int | str] = {"FORMAT": FORMATS[dtype], "ROWS": rows, "CODES": int(codes)}
    if segment:
        macros["SEGMENT"] = segment
    scores = launch.function("attention_decode", "attention_scores", macros, _score_bytes(rows, 4, codes))
    return scores, launch.function("attention_decode", "attention_chain", macros, _chain_bytes(rows, codes))


CONFIGURATIONS = [
    kernels(dtype, rows, False, segment)[0].configuration
    for segment, dtype, rows in itertools.product((0, *KEY_SEGMENTS), FORMATS, ROWS)
]


def segment_of(options: Options, keys: int) -> int:
    """Keys of a segment; 0 where there is one at most, which one chain has in the same words."""
    segment = options.key_segment or 0
    return segment if keys > segment else 0


def rows_of(q: torch.Tensor, k: torch.Tensor, options: Options) -> int:
    """Rows of a key head: q and k by heads, `[b, h, s, d]`."""
    _, h, heads, sq, _ = sizes(q, k, options)
    return h // heads * sq


def can(q: torch.Tensor, k: torch.Tensor, options: Options) -> bool:
    """Whether these kernels could attend: few queries, and no bias or dropout."""
    return 0 < rows_of(q, k, options) <= ROWS[-1] and not options.biased and not threshold(options.dropout)


def bytes_of_scores(q: torch.Tensor, k: torch.Tensor, options: Options) -> int:
    """Memory between the two kernels."""
    b, _, heads, _, skv = sizes(q, k, options)
    return b * heads * -(-skv // BLOCK) * rows_of(q, k, options) * (BLOCK + 1) * 4


def takes(q: torch.Tensor, k: torch.Tensor, options: Options, processors: int) -> bool:
    """Whether they do: many keys, fewer heads than keep the GPU busy, and scores that take little memory."""
    b, _, heads, _, skv = sizes(q, k, options)
    many = skv >= LEAST_KEYS and b * heads <= WAVES * processors
    return many and can(q, k, options) and bytes_of_scores(q, k, options) <= MOST_BYTES


def tensor_map(x: torch.Tensor) -> TensorMap:
    """The tensor map of keys or values `[b, h, s, d]`, or of their codes: boxes of 64 channels and a block's keys."""
    b, h, s, d = x.shape
    size = x.element_size()
    steps = (x.stride(n) * size if x.shape[n] > 1 else 16 for n in (2, 1, 0))  # of one element it means nothing
    return encode(
        x.data_ptr(), x.dtype, (d, s, h, b, 1), (*steps, 16), (64, BLOCK, 1, 1, 1), 128 if size == 2 else 0, 256
    )


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    options: Options,
    pages: tuple[torch.Tensor, int] | None = None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Launch the kernels that fill `results`; all are by heads, `[b, h, s, d]`, and can be read by the copy engine.

    Args:
        pages: the page table and keys of a page, where k and v are all rows of a cache, `[1, hkv, rows, d]`.
        scales: of k and v, fp32 `[rows, hkv]`, where these are codes of E4M3.
    """
    out, m, inv = results
    b, h, heads, sq, skv = sizes(q, k, options)
    index, o, blocks, rows = q.device.index, options, -(-skv // BLOCK), h // heads * sq
    scores = torch.empty((b * heads, blocks, rows, BLOCK), dtype=torch.float32, device=q.device)
    tops = torch.empty((b * heads, blocks, rows), dtype=torch.float32, device=q.device)
    segment, chunks_out = segment_of(o, skv), -(-v.shape[3] // 64)
    segments = -(-skv // segment) if segment else 1
    a = np.zeros((), argument_type(segment))
    for name, x in zip(_WRITTEN, (q, out, m, inv, scores, tops), strict=True):
        a[name] = x.data_ptr()
    k_scales, v_scales = (None, None) if scales is None else scales
    kv_starts, table = (o.kv_starts, None) if pages is None else (None, pages[0])
    given = (o.sinks, o.q_lengths, o.kv_lengths, o.q_starts, kv_starts, table, k_scales, v_scales, o.mask)
    for name, one in zip(_OPTIONAL, given, strict=True):
        a[name] = 0 if one is None else one.data_ptr()
    if o.mask is not None:
        a["mask_strides"] = o.mask.expand(b, h, sq, skv).stride()
    a["q_strides"], a["out_strides"] = q.stride()[:3], out.stride()[:3]
    for name, size in zip(_SIZES, (h, h // heads, sq, skv, k.shape[3], v.shape[3]), strict=True):
        a[name] = size
    if o.has_lengths:
        a["ends_align"] = o.mask_type != "causal"
    of_lengths = (0, 0) if o.has_lengths else (sq, skv)  # the kernel adds the difference
    a["lower"], a["upper"] = limits(o.mask_type, o.left, o.right, *of_lengths)
    a["q_rows"], a["kv_rows"], a["blocks"], a["c"] = q.shape[2], k.shape[2], blocks, factor(o.scale)
    if pages is not None:
        a["pages"], a["page_size"] = pages[0].shape[1], pages[1]
    most = next(one for one in ROWS if rows <= one)
    score, chain = kernels(q.dtype, most, scales is not None, segment)
    if segment:  # of each thread of a chain O, m and l; and how many chains have ended
        floats = b * heads * segments * chunks_out * 128 * (most // 2 + 2)
        found = torch.empty(floats, dtype=torch.float32, device=q.device)
        arrived = torch.empty(b * heads * chunks_out, dtype=torch.int32, device=q.device)
        a["found"], a["arrived"], a["chunks"] = found.data_ptr(), arrived.data_ptr(), chunks_out
    chunks, codes = -(-k.shape[3] // 64), scales is not None
    arguments = launch.by_value(a)
    splits = min(blocks, -(-_SCORE_BLOCKS * launch.processors(index) // (b * heads)))
    args, smem = [tensor_map(k).argument, arguments], _score_bytes(most, chunks, codes)
    launch.launch(score, (splits, b * heads), (SCORE_THREADS,), args, smem, device=index)
    args, smem = [tensor_map(v).argument, arguments], _chain_bytes(most, codes)
    grid = (chunks_out, b * heads, segments) if segment else (chunks_out, b * heads)
    threads = CHAIN_THREADS + 128 * codes
    launch.launch(chain, grid, (threads,), args, smem, device=index, early=True)
