"""What the ops of `optimized.ops` are called with for the snapshots of their launches (tests/golden/launches).

A case is a call on a `DryGpu`. Its text is the call with its tensors, and below it, indented, what it launched. The
sizes are chosen so that every branch of the host code is taken and every number in it decides something.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from dry_gpu import PROCESSORS, DryGpu
from launch_cases_attention import attentions, attentions_fp8, rotaries, softmaxes
from launch_cases_losses import embeddings, losses
from launch_cases_optimizers import adafactors, adam_capturables, adam_states, clippings, sgds
from launch_cases_products import fp8_gemms, fused_gemms, gemms, split_k, tiles
from launch_notes import BF16, E4M3, E5M2, FP8, FP16, FP32, WIDE, Notes, empty, macros, state, twin

import optimized
import reference as te
from optimized import compiler, device, launch, tensor_map
from optimized.ops import (
    MODULES,
    gemm_operands,
    gemm_tile,
    norm,
    norm_backward,
    norm_cast_transpose,
)
from optimized.replay import calls, launches, memory, watch
from reference.ops.activation import CLAMPED, GATED, RECORDED
from reference.ops.cast_transpose import cast_outputs
from reference.ops.norm import KINDS as NORMS


def casts(note: Notes) -> None:
    for dtype in WIDE:
        for shape in ((1, 48), (33, 4096), (0, 48)):
            note(twin.amax, empty(*shape, dtype=dtype), state()[1], 2)
        for q in FP8:
            for shape in ((1, 80), (33, 4096)):
                note(twin.cast, empty(*shape, dtype=dtype), *state(), 1, q)
    note(twin.amax, empty(40000, 1024), state(step=2)[1], 1)
    note(twin.amax, empty(3, 48, start=1), state()[1], 0)
    note(twin.cast, empty(0, 16), *state(), 0, E4M3)
    note(twin.cast, empty(5, 16, start=3), state()[0], None, 2, E4M3)
    note(twin.cast, empty(5, 16, start=8), *state(step=3), 2, E5M2)


def cast_stats(note: Notes) -> None:
    one = empty(1, dtype=FP32)
    for dtype in WIDE:
        note(twin.cast_stats, empty(33, 4096, dtype=dtype), None, None)
        for q in FP8:
            note(twin.cast_stats, empty(33, 4096, dtype=dtype), empty(33, 4096, dtype=q), one)
    note(twin.cast_stats, empty(0, 48), None, None)
    note(twin.cast_stats, empty(3, 48, start=1), empty(3, 48, dtype=E4M3, start=3), one)


def cast_transposes(note: Notes) -> None:
    for dtype, q, op in itertools.product(WIDE, FP8, (twin.cast_transpose, twin.cast_transpose_dbias)):
        note(op, empty(130, 272, dtype=dtype), *state(), 1, q)
    for op in (twin.cast_transpose, twin.cast_transpose_dbias):
        for x in (empty(1, 16), empty(0, 16), empty(65, 16, start=4), empty(128 * 65535, 16), empty(128 * 65536, 16)):
            note(op, x, *state(step=2), 2, E4M3)
        note(op, empty(64, 128 * 300), state()[0], None, 0, E5M2)  # three times as many columns as processors


def multi_cast_transposes(note: Notes) -> None:
    def cast(xs: list[torch.Tensor], q: torch.dtype = E4M3, with_history: bool = True) -> None:
        scale, history = state(len(xs))
        outputs = [list(part) for part in zip(*(cast_outputs(x, x.shape[1], q) for x in xs), strict=True)]
        histories = [history] * len(xs) if with_history else []
        note(twin.multi_cast_transpose, xs, [scale] * len(xs), histories, list(range(len(xs))), *outputs)

    for dtype, q in itertools.product(WIDE, FP8):
        cast([empty(rows, 144, dtype=dtype) for rows in (1, 130, 400)], q)
    cast([empty(7, 16, start=1), empty(0, 16), empty(16, 16), empty(3, 32)], with_history=False)
    for count in (5, 256, 257):
        cast([empty(16, 32) for _ in range(count)])


def cat_cast_transposes(note: Notes) -> None:
    for dtype, q, groups in itertools.product(WIDE, FP8, (1, 3)):
        xs = [empty(130, groups * width, dtype=dtype) for width in (32, 16, 16)]
        note(twin.cat_cast_transpose_dbias, xs, groups, *state(), 1, q)
    note(twin.cat_cast_transpose_dbias, [empty(7, 16, start=1), empty(7, 16)], 1, *state(step=2), 2, E4M3)
    note(twin.cat_cast_transpose_dbias, [empty(7, 2400)], 1, state()[0], None, 0, E4M3)
    note(twin.cat_cast_transpose_dbias, [empty(0, 16), empty(0, 16)], 1, *state(), 0, E4M3)


def dbiases(note: Notes) -> None:
    for dtype, (rows, cols) in itertools.product(WIDE, ((1, 48), (65, 300), (64, 9))):
        note(twin.dbias, empty(rows, cols, dtype=dtype))
    for x in (empty(5, 0), empty(0, 16), empty(5, 48, start=1), empty(5, 48, start=8)):
        note(twin.dbias, x)
    # Blocks that share a multiprocessor: their sums need shared memory, the less the more of them there are.
    for cols in (32 * PROCESSORS, 32 * PROCESSORS + 16, 32 * PROCESSORS * 7, 32 * PROCESSORS * 14):
        note(twin.cast_transpose_dbias, empty(64, cols), *state(), 0, E4M3)


def normals(note: Notes) -> None:
    for count, mean, std, seed in (
        (1, 0.0, 1.0, 0),
        (2048, 0.5, 0.023, 7),
        (2049, -0.5, 0.0, 2**63 - 1),
        (0, 0.0, 1.0, 1),
    ):
        note(twin.normal, empty(count, dtype=FP32), mean, std, seed)


def dropouts(note: Notes) -> None:
    for dtype, p in itertools.product(WIDE, (0.0, 0.1)):
        x, bias, residual = empty(45, 100, dtype=dtype), empty(100, dtype=dtype), empty(45, 100, dtype=dtype)
        rng = empty(2, dtype=torch.int64) if p else None
        note(twin.bias_dropout_add, x, bias, residual, p, rng)
        note(twin.dropout_backward, x, p, rng)
    rng = empty(2, dtype=torch.int64)
    note(twin.bias_dropout_add, empty(41, 50), None, None, 0.5, rng)  # one element more than a block's
    note(twin.bias_dropout_add, empty(41, 50), None, empty(41, 50), 0.0, rng)
    note(twin.bias_dropout_add, empty(0, 50), empty(50), None, 0.5, rng)
    for starts in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        x, bias, residual = (empty(*s, start=n) for s, n in zip(((4, 64), (64,), (4, 64)), starts, strict=True))
        note(twin.bias_dropout_add, x, bias, residual, 0.25, rng)


def activations(note: Notes) -> None:
    def pair(kind: str, rows: int, cols: int, dtype: torch.dtype, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        x = empty(rows, cols * (2 if kind in GATED else 1), dtype=dtype, start=start)
        return empty(rows, cols, dtype=dtype), x

    more = (("gelu", FP16), ("swiglu", FP16), ("srelu", BF16), ("glu", BF16), (CLAMPED, BF16))
    for kind, dtype in (*itertools.product(RECORDED, (BF16, FP32)), *more):
        for cols in (48, 51):
            grad, x = pair(kind, 9, cols, dtype)
            note(twin.activation, x, kind)
            note(twin.activation_backward, grad, x, kind)
        for q in FP8:
            grad, x = pair(kind, 130, 272, dtype)
            note(twin.activation_cast_transpose, x, kind, *state(), 1, q)
            note(twin.activation_backward_cast_transpose_dbias, grad, x, kind, *state(), 1, q)
    for kind, rows, cols, start in (("gelu", 0, 16, 0), ("swiglu", 65536 * 64, 16, 0), ("swiglu", 3, 2064, 1)):
        grad, x = pair(kind, rows, cols, BF16, start)
        note(twin.activation, x, kind)
        note(twin.activation_backward, grad, x, kind)
        note(twin.activation_cast_transpose, x, kind, state()[0], None, 0, E4M3)
        note(twin.activation_backward_cast_transpose_dbias, grad, x, kind, *state(step=2), 2, E4M3)
    note(twin.activation_backward, empty(3, 16, start=1), empty(3, 16), "relu")
    note(twin.activation_backward_cast_transpose_dbias, empty(3, 16, start=1), empty(3, 16), "relu", *state(), 0, E5M2)


def adams(note: Notes) -> None:
    def step(
        shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, master: bool, decoupled: bool = True, start: int = -1
    ) -> None:
        """`start`: which of the five lists' last tensor begins off a multiple of 16 bytes."""
        kinds = (dtype, FP32 if master else dtype, FP32, FP32, *([dtype] if master else []))
        lists = [
            [empty(*shape, dtype=kind, start=int(i == start and shape is shapes[-1])) for shape in shapes]
            for i, kind in enumerate(kinds)
        ]
        rest = (1e-2, 0.9, 0.999, 1e-8, 0.1, 0.19, 0.002, decoupled)
        note(twin.adam, *lists, *([] if master else [[]]), *rest)

    for dtype, master, decoupled in itertools.product(WIDE, (False, True), (False, True)):
        if not (master and dtype == FP32):
            step([(3, 7), (41, 100)], dtype, master, decoupled)
    step([(3, 7), (0, 4), (16,)], BF16, False)
    for start in range(5):
        step([(8,), (8,)], BF16, True, start=start)
    for count in (32, 33, 512, 513):
        step([(5, 5)] * count, BF16, True)


def scale_updates(note: Notes) -> None:
    def update(widths: Sequence[int], algorithm: str, margin: int, times: int = 1) -> None:
        scales = [empty(n, dtype=FP32) for n in widths]
        histories = [empty(3 + n, n, dtype=FP32) for n in widths]
        for _ in range(times):
            note(twin.scale_update, scales, histories, 448.0, margin, algorithm)

    for algorithm, margin in itertools.product(("max", "most_recent"), (0, 2)):
        update((3, 2, 6), algorithm, margin, times=2)
    update((0,), "max", 0)
    for count in (64, 65, 1024, 1025):
        update([2] * count, "max", 0)


def norms(note: Notes) -> None:
    """Forward and backward; rows of every width at which another kernel begins."""

    def both(
        kind: str, rows: int, hidden: int, dtype: torch.dtype, zero_centered: bool = False, starts: int = 0
    ) -> None:
        """`starts`: bits, which of x, weight, bias, gradient and residual begin off a multiple of 16 bytes."""
        x, weight, bias, grad, residual = (
            empty(*shape, dtype=dtype, start=starts >> i & 1)
            for i, shape in enumerate([(rows, hidden), (hidden,), (hidden,), (rows, hidden), (rows, hidden)])
        )
        _, mean, rstd = note(
            twin.norm, x, weight, bias if kind == "layernorm" else None, 1e-5, zero_centered, kind, dtype
        )
        note(twin.norm_backward, grad, x, weight, mean, rstd, zero_centered, kind, residual if zero_centered else None)

    for kind, dtype in itertools.product(NORMS, WIDE):
        for hidden in (1024, 3080) if dtype == FP16 else (16, 201, 1024, 3080, 8192, 16384, 16392):
            both(kind, 7, hidden, dtype, zero_centered=hidden == 1024)
    for rows in (0, 1, 4, 264 * 4, 132 * 6 * 4, 132 * 6 * 4 + 1, 132 * 6 * 8 - 30, 132 * 6 * 8 - 900, 20000):
        both("layernorm", rows, 1024, BF16)
    for rows, hidden in ((0, 33), (700, 33), (3000, 5000), (3000, 6016)):
        both("rmsnorm", rows, hidden, BF16)
    for i in range(5):
        both("layernorm", 3, 64, BF16, zero_centered=True, starts=1 << i)
    x, weight = empty(5, 64), empty(64, dtype=FP32)
    for out in WIDE:
        _, mean, rstd = note(twin.norm, x, weight, None, 1e-6, False, "rmsnorm", out)
    note(twin.norm_backward, x, x, weight, mean, rstd, False, "rmsnorm", None)
    widths = sorted({w + e for w in (8, 16, *(1024 * n for n in norm.ROW_WARPS)) for e in (-4, 0, 8)})
    for name, rows in (
        ("norm: dtype, hidden, warps, macros", _norm_rows(widths)),
        ("norm_backward: dtype, kind, hidden, file, macros", _backward_rows()),
    ):
        note.table(name, rows)


def _norm_rows(widths: Sequence[int]) -> Iterable[Sequence[Any]]:
    for dtype, hidden in itertools.product((FP32, BF16), widths):
        warps = norm.row_warps(hidden)
        written = "" if warps is None else macros(norm.defines(dtype, "rmsnorm", warps, hidden))
        yield dtype, hidden, warps, written


def _backward_rows() -> Iterable[Sequence[Any]]:
    widths = sorted({256 * warps * vectors + e for warps, vectors in norm_backward.SHAPES for e in (0, 8)})
    for dtype, kind, hidden in itertools.product((FP32, BF16), NORMS, widths):
        shape = norm_backward.backward_shape(dtype, hidden)
        if shape is None:
            yield dtype, kind, hidden, shape
        else:
            yield dtype, kind, hidden, macros(norm_backward.defines(dtype, kind, shape, hidden))


def norm_casts(note: Notes) -> None:
    def cast(
        kind: str, rows: int, hidden: int, dtype: torch.dtype, q: torch.dtype = E4M3, start: int = 0, **kinds: Any
    ) -> None:
        weight, bias = (empty(hidden, dtype=kinds.get("weight", dtype), start=start) for _ in range(2))
        x = empty(rows, hidden, dtype=dtype, start=start)
        beta = bias if kind == "layernorm" else None
        note(twin.norm_cast_transpose, x, weight, beta, 1e-5, bool(rows % 2), kind, *state(), 1, q)

    for kind, dtype, q in itertools.product(NORMS, WIDE, FP8):
        cast(kind, 65, 80, dtype, q)
    for kind, dtype, hidden in itertools.product(NORMS, WIDE, (1024, 1040, 2560, 4096, 16384, 16400)):
        cast(kind, 9000, hidden, dtype)
    for rows in (0, 1, 64, 64 * PROCESSORS + 1):
        cast("layernorm", rows, 64, BF16)
    cast("layernorm", 4, 64, BF16, start=1)
    cast("rmsnorm", 4, 64, BF16, weight=FP32)
    rows = []
    for dtype, kind, hidden in itertools.product(
        WIDE[:2], NORMS, (512, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 8192, 12288, 16384)
    ):
        for short in (0, 16):
            shape = norm_cast_transpose.tile_shape(dtype, kind, hidden - short)
            if shape is not None:
                chosen = (*shape, shape.share, shape.ring(dtype, kind), shape.shared(dtype, kind))
                rows.append((dtype, kind, hidden - short, *chosen))
    note.table("tile_shape: dtype, kind, hidden: stripes, cluster, warps, rows, share, ring, bytes", rows)


def layers(note: Notes) -> None:
    """Two steps of a layer, FP8: casts of weights, scale updates. The others, one step."""

    def step(layer: torch.nn.Module, x: torch.Tensor, fp8: bool, **options: Any) -> None:
        with te.autocast(enabled=fp8):
            out = layer(x, **options)
        out.backward(torch.empty_like(out))

    layer = optimized.TransformerLayer(64, 128, 4, params_dtype=BF16, fuse_qkv_params=True)
    x = empty(40, 2, 64).requires_grad_()
    note.gpu.lines.clear()
    for fp8 in (False, True):
        for first in (True, False):
            step(layer, x, fp8, is_first_microbatch=first)
            lines = note.gpu.taken()
            title = f"TransformerLayer, {'FP8' if fp8 else 'bf16'}, {'first' if first else 'second'} microbatch"
            note.cases.append("\n  ".join([title, *lines]))
    with te.quantized_model_init(enabled=True):
        weights = optimized.LayerNormMLP(64, 128, params_dtype=BF16, normalization="RMSNorm", activation="swiglu")
    note.gpu.lines.clear()
    step(weights, x, True)
    note.cases.append("\n  ".join(["LayerNormMLP with FP8 weights, RMSNorm, swiglu", *note.gpu.taken()]))


def configurations(note: Notes) -> None:
    """What CI compiles of each module: how many, and a digest. And which functions keep how many results."""
    for module in MODULES:
        made = [f"{kernel} {macros(defines)}" for kernel, defines in module.CONFIGURATIONS]
        digest = hashlib.sha256("\n".join(made).encode()).hexdigest()[:16]
        note.cases.append(f"{module.__name__.rpartition('.')[2]}: {len(made)} configurations, {digest}")
    cached = []
    for module in (*MODULES, compiler, device, gemm_operands, gemm_tile, launch, launches, tensor_map):
        for name, value in sorted(vars(module).items()):
            if hasattr(value, "cache_parameters") and value.__module__ == module.__name__:
                cached.append((module.__name__, name, value.cache_parameters()["maxsize"]))
    note.table("cached functions: module, name, most results", cached)
    limits: list[tuple[Any, tuple[str, ...]]] = [
        (launches, ("_WORTH_A_GRAPH",)),
        (calls, ("LARGEST", "MOST_KINDS", "MOST_TAPES", "MOST_MISSES")),
        (memory, ("_ALIGNMENT",)),
        (watch, ("MOST_MOVED",)),
    ]
    rows = [(module.__name__, name, getattr(module, name)) for module, names in limits for name in names]
    note.table("limits", rows)


FILES: dict[str, Callable[[Notes], None]] = {
    "activation": activations,
    "adafactor": adafactors,
    "adam": adams,
    "adam_capturable": adam_capturables,
    "adam_states": adam_states,
    "attention": attentions,
    "attention_fp8": attentions_fp8,
    "cast": casts,
    "cast_stats": cast_stats,
    "cast_transpose": cast_transposes,
    "cat_cast_transpose": cat_cast_transposes,
    "clip_grads": clippings,
    "configurations": configurations,
    "cross_entropy": losses,
    "dbias": dbiases,
    "dropout": dropouts,
    "embedding": embeddings,
    "gemm": gemms,
    "gemm_fp8": fp8_gemms,
    "gemm_fp8_split_k": split_k,
    "gemm_fused": fused_gemms,
    "gemm_tile": tiles,
    "layers": layers,
    "multi_cast_transpose": multi_cast_transposes,
    "norm": norms,
    "normal": normals,
    "norm_cast_transpose": norm_casts,
    "rotary": rotaries,
    "scale_update": scale_updates,
    "sgd": sgds,
    "softmax": softmaxes,
}


def noted(name: str) -> tuple[str, DryGpu]:
    """The text of a file, and the GPU on which it was made."""
    with DryGpu() as gpu:
        note = Notes(gpu)
        FILES[name](note)
    return "\n".join(note.cases) + "\n", gpu
