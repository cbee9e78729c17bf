"""Cast + transpose and its relatives against the device copy of the same run (docs/results/cast_transpose.json).

All are bound by memory, so the figure is bandwidth: the bytes that must move (each input read once, each output
written once) over the time. It stands beside two copies: `Tensor.copy_` of 512 MiB, the ceiling, and a copy that
moves as many bytes as the op, which pays for starting and ending a kernel as the op does. A sample is eight calls
between one pair of events, walking over inputs that together exceed L2 (the smallest shape excepted), replayed from a
CUDA graph, so that what is timed is the GPU and not the host's queueing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

import optimized.ops  # noqa: F401  (registers the ops)
from optimized import measure
from reference.ops.cast_transpose import cast_outputs

NAME = "cast_transpose"
KERNELS = ("cast", "cast_transpose", "multi_cast_transpose", "dbias", "amax", "scale_update")
SHAPES = ((8192, 4096), (8192, 12288), (8192, 16384), (4096, 4096), (16384, 4096), (2048, 1024))
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

_CALLS = 8
_FOOTPRINT = 256 << 20  # bytes of distinct inputs: several times L2
_COPY_BYTES = 1 << 29

twin = torch.ops.twin


def bytes_moved(op: str, rows: int, cols: int, size: int) -> int:
    """The fewest bytes an op moves: its inputs once and its outputs once."""
    written = {"cast": 1, "cast_transpose": 2, "cast_transpose_dbias": 2, "dbias": 0, "amax": 0}
    return rows * cols * (size + written[op])


def variants(inputs: Sequence[torch.Tensor]) -> dict[str, Callable[[], object]]:
    """One call per op, each walking over `inputs`."""
    scale = torch.full((3,), 2.0, device=inputs[0].device)
    history = torch.zeros(16, 3, device=inputs[0].device)
    q = torch.float8_e4m3fn

    def walk(op: Callable[[torch.Tensor], object]) -> Callable[[], None]:
        def calls() -> None:
            for i in range(_CALLS):
                op(inputs[i % len(inputs)])

        return calls

    return {
        "cast": walk(lambda x: twin.cast(x, scale, history, 0, q)),
        "cast_transpose": walk(lambda x: twin.cast_transpose(x, scale, history, 0, q)),
        "cast_transpose_dbias": walk(lambda x: twin.cast_transpose_dbias(x, scale, history, 0, q)),
        "dbias": walk(twin.dbias),
        "amax": walk(lambda x: twin.amax(x, history, 0)),
    }


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """Replay of a CUDA graph of one `call`."""
    return measure.graph(lambda _: call(), 1)


def scale_update_ms(modules: int = 100, repeats: int = 50) -> dict[str, float]:
    """One bulk update of `modules` modules of three columns and 1024 entries, every column rolled."""
    scales = [torch.ones(3, device="cuda") for _ in range(modules)]
    # Longer than there are calls of non-zero rows, so that the staging row never runs dry.
    histories = [torch.rand(1024, 3, device="cuda") + 1 for _ in range(modules)]
    staging = torch.ones(modules, 1, 3, device="cuda")

    def update() -> None:
        twin.scale_update(scales, histories, 448.0, 0, "max")

    def refill() -> None:
        for history, row in zip(histories, staging, strict=True):
            history[:1].copy_(row)

    replay, refill_graph = captured(update), captured(refill)
    samples = measure.interleave({"scale_update": replay}, repeats=repeats, flush=refill_graph)
    return measure.summary(samples["scale_update"])


def weights(hidden: int, dtype: torch.dtype, repeats: int = 20) -> dict[str, Any]:
    """The four weights of a transformer layer, cast one by one and in one launch."""
    shapes = ((3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden))
    size = sum(rows * cols for rows, cols in shapes)
    layers = max(2, min(_CALLS, -(-_FOOTPRINT // (size * dtype.itemsize))))
    xs = [[torch.randn(shape, device="cuda").to(dtype) for shape in shapes] for _ in range(layers)]
    out = [
        list(map(list, zip(*(cast_outputs(x, x.shape[1], torch.float8_e4m3fn) for x in layer), strict=True)))
        for layer in xs
    ]
    scale, history = torch.ones(4, device="cuda"), torch.zeros(16, 4, device="cuda")
    source = torch.empty(_COPY_BYTES // 2, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)

    def apart() -> None:
        for i in range(_CALLS):
            for column, x in enumerate(xs[i % layers]):
                twin.cast_transpose(x, scale, history, column, torch.float8_e4m3fn)

    def together() -> None:
        for i in range(_CALLS):
            args = ([scale] * 4, [history] * 4, [0, 1, 2, 3])
            twin.multi_cast_transpose(xs[i % layers], *args, *out[i % layers])

    calls: dict[str, Callable[[], object]] = {"cast_transpose": captured(apart), "multi": captured(together)}
    calls["copy"] = lambda: target.copy_(source)
    samples = measure.interleave(calls, repeats=repeats, warmup=2, flush=measure.Flush())
    ceiling = 2 * _COPY_BYTES / measure.summary(samples["copy"])["median"]
    found: dict[str, Any] = {"hidden": hidden, "dtype": str(dtype).removeprefix("torch.")}
    for name in ("cast_transpose", "multi"):
        ms = {key: value / _CALLS for key, value in measure.summary(samples[name]).items()}
        found[name] = {"ms": ms, "of_copy": size * (dtype.itemsize + 2) / ms["median"] / ceiling}
    return found


def run(progress: Callable[[float], None] | None = None, repeats: int = 20) -> dict[str, Any]:
    """Measure; `progress` is told the fraction done."""
    flush = measure.Flush()
    source = torch.empty(_COPY_BYTES // 2, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    rows: list[dict[str, Any]] = []
    cases = [(name, shape) for name in DTYPES for shape in SHAPES]
    with torch.no_grad():
        for done, (name, (tokens, cols)) in enumerate(cases):
            dtype = DTYPES[name]
            size = dtype.itemsize
            count = max(1, min(_CALLS, -(-_FOOTPRINT // (tokens * cols * size))))
            inputs = [torch.randn(tokens, cols, device="cuda").to(dtype) for _ in range(count)]
            calls = {op: captured(call) for op, call in variants(inputs).items()}
            sizes = {op: bytes_moved(op, tokens, cols, size) for op in calls}
            copies = {f"copy {moved}": measure.copy_of(moved, _CALLS) for moved in set(sizes.values())}
            calls |= {**copies, "large copy": lambda: target.copy_(source)}
            samples = measure.interleave(calls, repeats=repeats, warmup=2, flush=flush)
            times = {op: measure.summary(values) for op, values in samples.items()}
            ceiling = 2 * _COPY_BYTES / times["large copy"]["median"]
            for op, moved in sizes.items():
                ms = {key: value / _CALLS for key, value in times[op].items()}
                rate = moved / ms["median"]
                rows.append(
                    {
                        "op": op,
                        "dtype": name,
                        "rows": tokens,
                        "cols": cols,
                        "ms": ms,
                        "terabytes_per_second": rate / 1e9,
                        "copy_terabytes_per_second": ceiling / 1e9,
                        "of_copy": rate / ceiling,
                        "of_copy_of_as_many_bytes": times[f"copy {moved}"]["median"] / times[op]["median"],
                    }
                )
            if progress is not None:
                progress((done + 1) / len(cases))
    with torch.no_grad():
        layers = [weights(hidden, dtype) for hidden in (4096, 1024) for dtype in DTYPES.values()]
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
