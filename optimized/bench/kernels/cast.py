"""Casts and reductions, compared with a device copy as `copies` explains (docs/results/cast_transpose.json)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

import optimized.ops  # noqa: F401  (registers the ops)
from optimized.bench import Payload, Progress, each, silent
from optimized.bench.memory_bound import DTYPES, Copies, in_turn, of_copy
from optimized.bench.table import Table, percent, table
from reference.ops.casts.cast_transpose import cast_outputs

NAME = "cast_transpose"
WHAT = "casts and reductions, against a device copy"
KERNELS = ("cast", "cast_transpose", "multi_cast_transpose", "cast_blocks", "dbias", "amax")
SHAPES = ((8192, 4096), (8192, 12288), (8192, 16384), (4096, 4096), (16384, 4096), (2048, 1024))

twin = torch.ops.twin


def bytes_moved(op: str, rows: int, cols: int, size: int) -> int:
    """The fewest bytes that an op must move: its inputs once and its outputs once; not a scale for 16,384 codes."""
    if op.startswith("cast_blocks"):
        copies = 1 if op == "cast_blocks" else 2
        scales = 0 if op.endswith("square") else copies * 4 * rows * cols // 128
        return rows * cols * (size + copies) + scales
    written = {"cast": 1, "cast_transpose": 2, "cast_transpose_dbias": 2, "dbias": 0, "amax": 0}
    return rows * cols * (size + written[op])


def variants(inputs: Sequence[torch.Tensor]) -> dict[str, Callable[[int], object]]:
    """One call per op; call i takes its input from `inputs`, in turn."""
    scale = torch.full((3,), 2.0, device=inputs[0].device)
    history = torch.zeros(16, 3, device=inputs[0].device)
    x, scaling = in_turn(inputs), (scale, history, 0, torch.float8_e4m3fn)
    blocks = (torch.float8_e4m3fn, False, "power_of_two", 0.0)
    square = (torch.float8_e4m3fn, True, "power_of_two", 0.0)
    return {
        "cast": lambda i: twin.cast(x(i), *scaling),
        "cast_transpose": lambda i: twin.cast_transpose(x(i), *scaling),
        "cast_transpose_dbias": lambda i: twin.cast_transpose_dbias(x(i), *scaling),
        "dbias": lambda i: twin.dbias(x(i)),
        "amax": lambda i: twin.amax(x(i), history, 0),
        "cast_blocks": lambda i: twin.cast_blocks(x(i), *blocks),
        "cast_blocks_transpose": lambda i: twin.cast_blocks_transpose(x(i), *blocks),
        "cast_blocks_transpose_square": lambda i: twin.cast_blocks_transpose(x(i), *square),
    }


def weights(hidden: int, dtype: torch.dtype, copies: Copies) -> dict[str, Any]:
    """The four weights of a transformer layer, cast one by one and in one launch."""
    shapes = ((3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden))
    size = sum(rows * cols for rows, cols in shapes)
    layers, fp8 = copies.inputs(size * dtype.itemsize, least=2), torch.float8_e4m3fn
    xs = [[torch.randn(shape, device="cuda").to(dtype) for shape in shapes] for _ in range(layers)]
    out = [list(map(list, zip(*(cast_outputs(x, x.shape[1], fp8) for x in layer), strict=True))) for layer in xs]
    scale, history = torch.ones(4, device="cuda"), torch.zeros(16, 4, device="cuda")

    def apart(i: int) -> None:
        for column, x in enumerate(xs[i % layers]):
            twin.cast_transpose(x, scale, history, column, fp8)

    def together(i: int) -> None:
        twin.multi_cast_transpose(xs[i % layers], [scale] * 4, [history] * 4, [0, 1, 2, 3], *out[i % layers])

    ops = {"cast_transpose": apart, "multi": together}
    found = copies.beside(ops, dict.fromkeys(ops, size * (dtype.itemsize + 2)))
    return {"hidden": hidden, "dtype": str(dtype).removeprefix("torch."), **found}


@torch.no_grad()
def run(progress: Progress = silent, repeats: int = 20) -> Payload:
    copies = Copies(8, repeats)
    rows: list[dict[str, Any]] = []
    for name, (tokens, cols) in each([(name, shape) for name in DTYPES for shape in SHAPES], progress):
        dtype, size = DTYPES[name], DTYPES[name].itemsize
        count = copies.inputs(tokens * cols * size)
        ops = variants([torch.randn(tokens, cols, device="cuda").to(dtype) for _ in range(count)])
        moved = {op: bytes_moved(op, tokens, cols, size) for op in ops}
        rows += copies.rows({"dtype": name, "rows": tokens, "cols": cols}, ops, moved)
    layers = [weights(hidden, dtype, copies) for hidden in (4096, 1024) for dtype in DTYPES.values()]
    return copies.result(rows, KERNELS, weights_of_a_layer=layers)


def tables(payload: Payload) -> list[Table]:
    """Casts and reductions against the device copy, every input type in its column."""
    found = [of_copy(payload, "Casts, transposes and reductions", "dtype", lambda dtype: f"{dtype} input")]
    layers = []
    for one in payload.get("weights_of_a_layer", ()):
        ways = (one["cast_transpose"], one["multi"])
        speeds = (f"{1e3 * way['ms']['median']:.1f} ({percent(way['of_copy'])})" for way in ways)
        layers.append((str(one["hidden"]), one["dtype"], *speeds))
    if layers:
        columns = ("hidden", "dtype", "one by one, µs", "in one launch (`multi_cast_transpose`), µs")
        how = "In brackets the bandwidth as a share of what `Tensor.copy_` reaches in the same run."
        title = "The four weights of a layer, cast to FP8 and transposed"
        found.append(table(payload, title, columns, layers, how))
    return found
