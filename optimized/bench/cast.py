"""Cast + transpose and its relatives against the device copy (docs/results/cast_transpose.json); how: `copies`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

import optimized.ops  # noqa: F401  (registers the ops)
from optimized import measure
from optimized.bench.copies import Copies, of_copy
from optimized.bench.table import Table, origin, percent
from reference.ops.cast_transpose import cast_outputs

NAME = "cast_transpose"
WHAT = "casts, transposes and reductions against a copy"
KERNELS = ("cast", "cast_transpose", "multi_cast_transpose", "dbias", "amax", "scale_update")
SHAPES = ((8192, 4096), (8192, 12288), (8192, 16384), (4096, 4096), (16384, 4096), (2048, 1024))
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

_CALLS = 8

twin = torch.ops.twin


def bytes_moved(op: str, rows: int, cols: int, size: int) -> int:
    """The fewest bytes an op moves: its inputs once and its outputs once."""
    written = {"cast": 1, "cast_transpose": 2, "cast_transpose_dbias": 2, "dbias": 0, "amax": 0}
    return rows * cols * (size + written[op])


def variants(inputs: Sequence[torch.Tensor]) -> dict[str, Callable[[int], object]]:
    """One call per op; call i takes its input from `inputs`, in turn."""
    scale = torch.full((3,), 2.0, device=inputs[0].device)
    history = torch.zeros(16, 3, device=inputs[0].device)
    q = torch.float8_e4m3fn

    def in_turn(op: Callable[[torch.Tensor], object]) -> Callable[[int], object]:
        return lambda i: op(inputs[i % len(inputs)])

    return {
        "cast": in_turn(lambda x: twin.cast(x, scale, history, 0, q)),
        "cast_transpose": in_turn(lambda x: twin.cast_transpose(x, scale, history, 0, q)),
        "cast_transpose_dbias": in_turn(lambda x: twin.cast_transpose_dbias(x, scale, history, 0, q)),
        "dbias": in_turn(twin.dbias),
        "amax": in_turn(lambda x: twin.amax(x, history, 0)),
    }


def scale_update_ms(modules: int = 100, repeats: int = 50) -> dict[str, float]:
    """One bulk update of `modules` modules of three columns and 1024 entries, every column rolled."""
    scales = [torch.ones(3, device="cuda") for _ in range(modules)]
    # Longer than there are calls of non-zero rows, so that the staging row never runs dry.
    histories = [torch.rand(1024, 3, device="cuda") + 1 for _ in range(modules)]
    staging = torch.ones(modules, 1, 3, device="cuda")

    def update(_: int) -> None:
        twin.scale_update(scales, histories, 448.0, 0, "max")

    def refill(_: int) -> None:
        for history, row in zip(histories, staging, strict=True):
            history[:1].copy_(row)

    replay, refill_graph = measure.graph(update, 1), measure.graph(refill, 1)
    samples = measure.interleave({"scale_update": replay}, repeats=repeats, flush=refill_graph)
    return measure.summary(samples["scale_update"])


def weights(hidden: int, dtype: torch.dtype, copies: Copies) -> dict[str, Any]:
    """The four weights of a transformer layer, cast one by one and in one launch."""
    shapes = ((3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden))
    size = sum(rows * cols for rows, cols in shapes)
    layers = copies.inputs(size * dtype.itemsize, least=2)
    xs = [[torch.randn(shape, device="cuda").to(dtype) for shape in shapes] for _ in range(layers)]
    out = [
        list(map(list, zip(*(cast_outputs(x, x.shape[1], torch.float8_e4m3fn) for x in layer), strict=True)))
        for layer in xs
    ]
    scale, history = torch.ones(4, device="cuda"), torch.zeros(16, 4, device="cuda")

    def apart(i: int) -> None:
        for column, x in enumerate(xs[i % layers]):
            twin.cast_transpose(x, scale, history, column, torch.float8_e4m3fn)

    def together(i: int) -> None:
        twin.multi_cast_transpose(xs[i % layers], [scale] * 4, [history] * 4, [0, 1, 2, 3], *out[i % layers])

    moved = size * (dtype.itemsize + 2)
    found = copies.beside({"cast_transpose": apart, "multi": together}, {"cast_transpose": moved, "multi": moved})
    return {"hidden": hidden, "dtype": str(dtype).removeprefix("torch."), **found}


def run(progress: Callable[[float], None] | None = None, repeats: int = 20) -> dict[str, Any]:
    """Measure; `progress` is told the fraction done."""
    copies = Copies(_CALLS, repeats)
    rows: list[dict[str, Any]] = []
    cases = [(name, shape) for name in DTYPES for shape in SHAPES]
    with torch.no_grad():
        for done, (name, (tokens, cols)) in enumerate(cases):
            dtype = DTYPES[name]
            size = dtype.itemsize
            inputs = [
                torch.randn(tokens, cols, device="cuda").to(dtype) for _ in range(copies.inputs(tokens * cols * size))
            ]
            ops = variants(inputs)
            found = copies.beside(ops, {op: bytes_moved(op, tokens, cols, size) for op in ops})
            case = {"dtype": name, "rows": tokens, "cols": cols}
            rows += [{"op": op, **case, **result} for op, result in found.items()]
            if progress is not None:
                progress((done + 1) / len(cases))
        layers = [weights(hidden, dtype, copies) for hidden in (4096, 1024) for dtype in DTYPES.values()]
    update = scale_update_ms()
    return {
        "what": "bytes that must move over time (graph replays), against Tensor.copy_ of 512 MiB and of as many bytes",
        "calls_per_sample": _CALLS,
        "repeats": repeats,
        "rows": rows,
        "weights_of_a_layer": layers,
        "scale_update_100_modules_ms": update,
        "provenance": measure.provenance(KERNELS),
    }


def tables(payload: dict[str, Any]) -> list[Table]:
    """Casts and reductions against the device copy, every input type in its column."""
    found = [of_copy(payload, "Casts and reductions", "dtype", lambda dtype: f"{dtype} input, of copy")]
    layers = []
    for one in payload.get("weights_of_a_layer", ()):
        ways = (one["cast_transpose"], one["multi"])
        speeds = (f"{1e3 * way['ms']['median']:.1f} ({percent(way['of_copy'])})" for way in ways)
        layers.append((str(one["hidden"]), one["dtype"], *speeds))
    if layers:
        heads = ("hidden", "weights", "one by one, µs (of copy)", "`multi_cast_transpose`, µs (of copy)")
        moved = "In brackets the bytes that must move over the time, as a share of `Tensor.copy_` in the same run. "
        title = "The four weights of a layer, to FP8 with their transposes"
        found.append(Table(title, heads, tuple(layers), moved + origin(payload)))
    return found
