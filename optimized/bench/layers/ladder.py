"""The ladder (docs/results/ladder.json): from a naive wgmma kernel to the production design, one idea for each rung.

kernels/ladder/<n>_<idea>.cu are eight kernels of the same product, D[M, N] = bf16(A[M, K] · B[N, K]ᵀ) in E4M3 with fast
accumulation; each file can be read alone. `product` runs one; `run` times all of them, interleaved with the production
kernel and cuBLASLt. docs/ladder.md explains the steps; its table and docs/ladder.png are built from the result
(`python -m optimized.commands.tables`, `python -m optimized.bench.layers.ladder`).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import optimized.ops  # noqa: F401  (registers the ops)
from optimized import measure
from optimized.bench import Payload, Progress, each, plots, result, silent
from optimized.bench.kernels import cublaslt
from optimized.bench.kernels.gemm import fp8_calls
from optimized.bench.table import Table, percent, table
from optimized.cuda import launch
from optimized.cuda.tensor_map import TensorMap, encode
from optimized.ops.gemms.gemm_tile import multiprocessors

NAME = "ladder"
WHAT = "eight GEMM kernels, from naive to production"
# The forward products of fc1, which has a short K and many tiles, and of fc2, which has a long K.
SHAPES = {"fc1.fprop": (8192, 16384, 4096), "fc2.fprop": (8192, 4096, 16384)}
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Rung:
    """One kernel: its tile, the multiples that it takes, how it is launched, and what was expected of it.

    `expected` is a range of TFLOP/s on fc1.fprop, written down before the kernel was measured.
    """

    name: str
    idea: str
    expected: tuple[int, int]
    block_m: int = 128
    block_n: int = 256
    threads: int = 384
    stages: int = 4
    multiple_k: int = 128
    copy_engine: bool = True
    persistent: bool = True
    permuted: bool = False
    cluster: int = 1

    def __str__(self) -> str:
        return self.name

    @property
    def kernel(self) -> str:
        """The kernel file."""
        return f"ladder/{self.name}"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the stages of A and B, and two barriers a stage."""
        return self.stages * ((self.block_m + self.block_n) * 128 + 16)


RUNGS = (
    Rung("1_naive_wgmma", "ordinary loads, wgmma", (300, 600), 64, 128, 128, 1, copy_engine=False, persistent=False),
    Rung("2_tma", "copy engine and mbarrier", (700, 900), 64, 128, 128, 1, persistent=False),
    Rung("3_pipeline", "ring of 4 stages, producer warp", (750, 950), 64, 128, 160, persistent=False),
    Rung("4_large_tile", "128x256, two consumers, setmaxnreg", (1150, 1300), persistent=False),
    Rung("5_persistent", "persistent blocks, order of tiles for L2", (1250, 1350)),
    Rung("6_permuted", "permuted B, 16-byte stores", (1280, 1380), permuted=True),
    Rung("7_cluster", "clusters of 2 share B", (1280, 1400), permuted=True, cluster=2),
    Rung("8_deferred", "stores during the next tile", (1350, 1420), permuted=True, cluster=2, multiple_k=1024),
)
CONFIGURATIONS: list[tuple[str, dict[str, int | str]]] = [(rung.kernel, {}) for rung in RUNGS]


def check(rung: Rung, m: int, n: int, k: int) -> None:
    """Refuse a size that the rung does not take, with a sentence."""
    multiples = (rung.block_m * rung.cluster, rung.block_n, rung.multiple_k)
    for name, size, multiple in zip("MNK", (m, n, k), multiples, strict=True):
        if size < 1 or size % multiple:
            raise ValueError(f"{name} = {size}; ladder kernel {rung.name} takes positive multiples of {multiple}.")


def _map(x: torch.Tensor, rows: int, permuted: bool = False) -> TensorMap:
    """A row-major matrix in boxes of `rows` x 128.

    With `permuted` the rows come in the order 32 g + 8 q + 2 j + e, e fastest (kernels/ladder/6_permuted.cu).
    """
    n, k = x.shape
    if not permuted:
        return encode(x.data_ptr(), x.dtype, (k, n), (k,), (128, rows), 128, 256)
    shape, strides = (k, 2, 4, 4, n // 32), (k, 8 * k, 2 * k, 32 * k)
    return encode(x.data_ptr(), x.dtype, shape, strides, (128, 2, 4, 4, rows // 32), 128, 256)


def product(rung: Rung, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a `[M, K]` and b `[N, K]` E4M3, contiguous, on the GPU -> `[M, N]` bf16.

    Raises:
        ValueError: the rung does not take the sizes.
    """
    (m, k), n = a.shape, b.shape[0]
    check(rung, m, n, k)
    out = torch.empty((m, n), dtype=torch.bfloat16, device=a.device)
    kernel = launch.function(rung.kernel, "rung", {}, rung.shared_bytes)
    operands: list[Any] = [a.data_ptr(), b.data_ptr()]
    if rung.copy_engine:
        b_map = _map(b, rung.block_n // rung.cluster, rung.permuted)
        operands = [_map(a, rung.block_m).argument, b_map.argument]
    sizes = [np.int32(n), np.int32(k)]
    grid: tuple[int, ...] = (n // rung.block_n, m // rung.block_m)
    if rung.persistent:
        sizes.insert(0, np.int32(m))
        grid = (min(grid[0] * grid[1], multiprocessors(a.device.index) // rung.cluster * rung.cluster),)
    args = [*operands, out.data_ptr(), *sizes]
    launch.launch(kernel, grid, (rung.threads,), args, rung.shared_bytes, device=a.device.index)
    return out


def _measure(name: str, m: int, n: int, k: int, repeats: int) -> list[dict[str, Any]]:
    """The rows of one shape: every rung, the production kernel, and cuBLASLt's first and best algorithm."""
    a, b = (torch.randn(rows, k, device="cuda").to(E4M3) for rows in (m, n))
    one = torch.ones(1, device="cuda")
    calls: dict[str, Callable[[], torch.Tensor]] = {rung.name: functools.partial(product, rung, a, b) for rung in RUNGS}
    calls["twin::gemm_fp8"], calls["cuBLASLt, first"] = fp8_calls(a, b, one, "fast").values()
    calls["cuBLASLt, best"] = cublaslt.fastest(cublaslt.Product(a, b, one, one, torch.bfloat16, "fast"))
    words = calls["cuBLASLt, first"]().view(torch.int16)
    differing = {key: int((call().view(torch.int16) != words).sum()) for key, call in calls.items()}
    samples = measure.interleave(calls, repeats=repeats, warmup=2)
    ms = {key: measure.interval(times) for key, times in samples.items()}
    return [
        {
            **{"shape": name, "m": m, "n": n, "k": k, "kernel": key, "differing_words": differing[key], "ms": found},
            "tflops": 2e-9 * m * n * k / found["median"],
            "of_cublaslt": ms["cuBLASLt, first"]["median"] / found["median"],
        }
        for key, found in ms.items()
    ]


@torch.no_grad()
def run(progress: Progress = silent, repeats: int = 21) -> Payload:
    torch.manual_seed(0)
    rows = [row for name, shape in each([*SHAPES.items()], progress) for row in _measure(name, *shape, repeats)]
    what = "the ladder, the production kernel and cuBLASLt, interleaved, E4M3, fast accumulation, bf16 out"
    rungs = {rung.name: {"idea": rung.idea, "expected_tflops": list(rung.expected)} for rung in RUNGS}
    return result(what, [*(rung.kernel for rung in RUNGS), "gemm_fp8"], repeats=repeats, rungs=rungs, rows=rows)


def plot(payload: Payload) -> None:
    """Draw bars of TFLOP/s by rung and shape, cuBLASLt as lines, and what was expected on fc1.fprop as brackets."""
    names = [*payload["rungs"], "twin::gemm_fp8"]
    with plots.drawing(NAME, 1, 1, (9, 4.6)) as (_, axes):
        for side, (shape, color) in enumerate(zip(SHAPES, (plots.BLUE, plots.ORANGE), strict=True)):
            found = {row["kernel"]: row for row in payload["rows"] if row["shape"] == shape}
            size = "×".join(str(extent) for extent in SHAPES[shape])
            places = [i + 0.4 * (side - 0.5) for i in range(len(names))]
            axes.bar(places, [found[name]["tflops"] for name in names], 0.38, color=color, label=f"{shape}, {size}")
            for place, name in zip(places, names, strict=True):
                row = found[name]
                axes.text(place, row["tflops"] + 12, f"{100 * row['of_cublaslt']:.0f}%", ha="center", fontsize=7.5)
            axes.axhline(found["cuBLASLt, first"]["tflops"], color=color, lw=1, ls="--")
        spans = [rung["expected_tflops"] for rung in payload["rungs"].values()]
        middle, half = ([(high + sign * low) / 2 for low, high in spans] for sign in (1, -1))
        places = [i - 0.42 for i in range(len(spans))]
        axes.errorbar(places, middle, half, fmt="none", ecolor=plots.INK, capsize=3, lw=1, label="expected, fc1.fprop")
        axes.set_xticks(range(len(names)), [name.replace("_", "\n", 1).replace("_", " ") for name in names], fontsize=8)
        axes.set_ylabel("TFLOP/s, and % of cuBLASLt")
        axes.set_title("The ladder: E4M3, fast accumulation, bf16 out. Dashed: cuBLASLt as torch calls it")
        axes.set_ylim(0, 1.25 * max(row["tflops"] for row in payload["rows"]))
        axes.legend(loc="upper left", fontsize=8, ncols=3)


def tables(payload: Payload) -> list[Table]:
    """What was expected of each kernel of the ladder, and what was measured."""
    shapes = list(dict.fromkeys(row["shape"] for row in payload["rows"]))
    found = {(row["kernel"], row["shape"]): row for row in payload["rows"]}
    columns = ["kernel", "idea", f"expected, {shapes[0]}"]
    columns += [head for shape in shapes for head in (f"measured, {shape}", "of cuBLASLt")]
    rows = []
    for kernel in dict.fromkeys(row["kernel"] for row in payload["rows"]):
        rung = payload["rungs"].get(kernel)
        cells = [kernel, rung["idea"], "{} to {}".format(*rung["expected_tflops"])] if rung else [kernel, "", ""]
        for shape in shapes:
            cells += [f"{found[kernel, shape]['tflops']:.0f}", percent(found[kernel, shape]["of_cublaslt"])]
        rows.append(cells)
    how = (
        "TFLOP/s of eight kernels, each with one idea more than the one before; 100 % is the speed of "
        "`torch._scaled_mm`, interleaved in the same run."
    )
    note = "E4M3, fast accumulation, bf16 output. Every kernel gave cuBLASLt's words."
    return [table(payload, "The ladder: from a naive FP8 GEMM to the production kernel", columns, rows, how, note)]


if __name__ == "__main__":
    plot(measure.read_result(NAME))
