"""The price list of exp, rsqrt and the activations: error, instructions, time. Needs a Hopper GPU.

    python -m optimized.bench.elementary [--record]

With --record it first records the special function unit's tables (reference/tables/) and the digests of all
2^32 fp32 words (tests/golden/elementary_h200.npz). It then compares `reference` with Hopper word for word,
measures every candidate, and writes docs/results/elementary.json. docs/elementary.md tells what came of it.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track

from optimized import compiler, launch, measure
from optimized.bench import elementary_digest as digest
from optimized.bench import elementary_error as error
from optimized.ops import gemm_fp8, gemm_operands
from optimized.ops.gemm_tile import Tile
from reference import elementary, files

ROOT = Path(__file__).parents[2]
DIGESTS = ROOT / "tests" / "golden" / "elementary_h200.npz"
ROWS, COLUMNS = 8192, 16384
FC1 = (8192, 16384, 4096)  # tokens, ffn, hidden
TILE = Tile(2, 256, 4)
IN_STREAM = tuple(name for names in error.CANDIDATES.values() for name in names)
IN_GEMM = (
    "identity", "gelu", "gelu_tanh", "gelu_grid15", "gelu_f32", "gelu_lean", "gelu_poly", "gelu_ieee",
    "dgelu", "dgelu_grid15", "dgelu_f32", "dgelu_lean", "dgelu_poly", "dgelu_ieee", "silu", "silu_f32",
)  # fmt: skip
AT_ONCE = ("identity", "gelu", "gelu_poly")  # also without deferring (some others spill)

CROWDED = ("identity", "gelu", "gelu_poly")  # also behind 8 and 16 k-blocks instead of 32


def gemm_defines(function: str, deferred: int = 1, plain: int = 0) -> dict[str, int | str]:
    """The macros of kernels/elementary_gemm.cu for one function."""
    dtype = torch.float8_e4m3fn
    base = gemm_fp8.defines(dtype, dtype, torch.bfloat16, "fast", TILE, FC1[1])
    del base["NARROW"]
    return {**base, "FUNCTION": function, "DEFERRED": deferred, "PLAIN": plain}


def configurations() -> list[tuple[str, dict[str, int | str]]]:
    """Every (kernel file, macros) this script launches."""
    found: list[tuple[str, dict[str, int | str]]] = []
    functions = ("identity", "ex2_approx", "reciprocal_1_2", "exp2_grid", *IN_STREAM)
    for function in functions:
        found += [("elementary_bench", {"FUNCTION": function, **extra}) for extra in ({}, {"OUT_FP8": 1})]
    found += [("elementary_gemm", gemm_defines("identity", deferred, 1)) for deferred in (0, 1)]
    found += [("elementary_gemm", gemm_defines(function)) for function in IN_GEMM]
    found += [("elementary_gemm", gemm_defines(function, deferred=0)) for function in AT_ONCE]
    found += [("elementary_gemm", {**gemm_defines(f), "SPREAD": spread}) for f in CROWDED for spread in (8, 16)]
    return found


# What CI compiles of these; `configurations` is everything.
CONFIGURATIONS = [
    *(("elementary_bench", {"FUNCTION": function, "OUT_FP8": 1}) for function in ("exp", "gelu", "dgelu_f32")),
    *(("elementary_gemm", gemm_defines(function)) for function in ("gelu", "dgelu_f32")),
]


def _build(configuration: tuple[str, dict[str, int | str]]) -> list[str]:
    return list(compiler.build(*configuration).complaints)


def build_all() -> None:
    """Compile everything, several at a time, and refuse a kernel of which ptxas complains."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(12, os.cpu_count() or 1), mp_context=context) as pool:
        for configuration, complaints in zip(configurations(), pool.map(_build, configurations()), strict=True):
            if complaints:
                raise RuntimeError(f"{configuration}: ptxas says {complaints}.")


def grid_facts() -> tuple[np.ndarray, dict[str, int]]:
    """`ex2.approx` on every multiple of 2^-15 in [-127, 129): is one period on either side of 0 enough?

    Returns:
        uint32 `[65536]`, the words of the period on [0, 1) and of twice the one on [-1, 0); the counts.
    """
    j = torch.arange(-32768, 32768, dtype=torch.int32, device="cuda")
    below, above = digest.apply("ex2_approx", j.float() / 32768).view(torch.int32).chunk(2)
    periods = torch.cat([above, below + (1 << 23)])
    steps = torch.arange(-127 * 32768, 129 * 32768, dtype=torch.int32, device="cuda")
    words = digest.apply("ex2_approx", steps.float() / 32768).view(torch.int32)
    expected = periods[(steps & 32767).long() + 32768 * (steps < 0)] + ((steps >> 15) << 23)
    expected = torch.where(steps < -126 * 32768, 0, torch.where(steps >= 128 * 32768, 0x7F800000, expected))
    wrong = steps[words != expected]
    if wrong.numel():
        print(f"ex2.approx is not periodic, first at {wrong[:4] / 32768}, last at {wrong[-4:] / 32768}")
        print({int(n): int(c) for n, c in zip(*torch.unique(wrong >> 15, return_counts=True), strict=True)})
    exact = torch.exp2(torch.arange(32768, dtype=torch.float64, device="cuda") / 32768).repeat(2)
    return periods.cpu().numpy().view(np.uint32), {
        "ex2_grid_words": steps.numel(),
        "ex2_grid_words_that_differ": wrong.numel(),
        "ex2_words_not_nearest_above_0": int((above != exact[:32768].float().view(torch.int32)).sum()),
        "ex2_words_not_nearest_below_0": int((periods != exact.float().view(torch.int32))[32768:].sum()),
        "ex2_largest_error_in_words": int((periods - exact.float().view(torch.int32)).abs().max()),
    }


def reciprocal_facts() -> dict[str, int]:
    """rcp.approx with one Newton step against the CPU's 1/d, over every fp32 d in [1, 2]."""
    words = np.arange(0x3F800000, 0x40000001, dtype=np.uint32)
    ours = (np.float32(1) / words.view(np.float32)).view(np.uint32)
    x = torch.from_numpy(words.view(np.float32)).cuda()
    theirs = digest.apply("reciprocal_1_2", x).cpu().numpy().view(np.uint32)
    return {"reciprocal_words": words.size, "reciprocal_words_that_differ": int((ours != theirs).sum())}


def rsqrt_facts() -> dict[str, int]:
    """The branch-free rsqrt forms against two IEEE roundings, and against one, over all positive normal words."""
    facts = {"rsqrt_normal_words": 0, "rsqrt_normal_words_that_differ": 0, "rsqrt_refined_words_not_nearest": 0}
    for start in range(0x00800000, 0x7F800000, 1 << 26):
        stop = min(start + (1 << 26), 0x7F800000)
        x = torch.arange(start, stop, dtype=torch.int32, device="cuda").view(torch.float32)
        nearest = (1 / torch.sqrt(x.double())).float()
        facts["rsqrt_normal_words"] += x.numel()
        facts["rsqrt_normal_words_that_differ"] += int(
            (digest.apply("rsqrt_normal", x) != digest.apply("rsqrt", x)).sum()
        )
        facts["rsqrt_refined_words_not_nearest"] += int((digest.apply("rsqrt_refined", x) != nearest).sum())
    return facts


def record(period: np.ndarray, provenance: dict[str, Any]) -> None:
    """Write the special function unit's tables: all results of ex2.approx's period and of the activations."""
    tables: dict[str, Any] = {"exp2": period}
    words = torch.arange(65536, dtype=torch.int32, device="cuda").to(torch.int16)
    for name in elementary.ACTIVATIONS:
        for kind, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            y = digest.apply(name, words.view(dtype).float())
            bits = torch.where(y.isnan(), 0x7FC00000, y.view(torch.int32))
            tables[f"{name}_{kind}"] = bits.cpu().numpy().view(np.uint32)
    tables["provenance"] = np.array(json.dumps(provenance))
    with files.replacing(elementary.TABLES) as file:
        np.savez_compressed(file, **tables)


def compare(write: bool, provenance: dict[str, Any]) -> dict[str, int]:
    """All 2^32 words through the seven fp32 functions, here and in `reference`: blocks that differ, by name."""
    differ: dict[str, int] = {}
    sums: dict[str, Any] = {}
    for name in track(digest.KERNEL_NAMES, "reference against Hopper, 2^32 words each"):
        sums[name] = digest.kernel_digest(name)
        wrong = np.flatnonzero(sums[name] != digest.reference_digest(name, os.cpu_count() or 1))
        differ[name] = len(wrong)
        for index in wrong[:3]:
            print(*digest.first_differences(name, int(index)), sep="\n", flush=True)
    if write:
        with files.replacing(DIGESTS) as file:
            np.savez_compressed(file, **sums, provenance=np.array(json.dumps(provenance)))
    return differ


def stream_variants() -> dict[str, Callable[[], object]]:
    """bf16 in, bf16 or E4M3 out, and two copies (ours and torch's) of the same bytes."""
    x = torch.randn(ROWS, COLUMNS, device="cuda").mul_(2).to(torch.bfloat16)
    out, amax = torch.empty_like(x), torch.zeros(1, device="cuda")
    blocks = x.numel() // 2048

    def variant(function: str, fp8: int) -> Callable[[], object]:
        kernel = launch.function(
            "elementary_bench", "stream", {"FUNCTION": function, **({"OUT_FP8": 1} if fp8 else {})}
        )
        args = [x.data_ptr(), out.data_ptr(), np.float32(16), amax.data_ptr()]
        return lambda: launch.launch(kernel, (blocks,), (256,), args, device=x.device.index)

    variants: dict[str, Callable[[], object]] = {"torch copy": lambda: out.copy_(x)}
    for name in ("identity", *IN_STREAM):
        variants[f"{name} bf16"], variants[f"{name} e4m3"] = variant(name, 0), variant(name, 1)
    return variants


def gemm_variants() -> dict[str, Callable[[], object]]:
    """fc1's GEMM: plain (ours, and cuBLASLt's through torch) and with each function in its epilogue."""
    m, n, k = FC1
    a = torch.randn(m, k, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.full((2,), 1 / 32, device="cuda")  # h has a standard deviation of 2
    bias = torch.randn(n, device="cuda").to(torch.bfloat16)
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    q, amax = torch.empty(m, n, dtype=torch.uint8, device="cuda"), torch.zeros(1, device="cuda")
    a_scale, b_scale = scales[:1], scales[1:].clone()
    sizes = tuple(map(np.int32, FC1))
    args: list[Any] = [
        gemm_operands.operands(a, b, TILE, gemm_operands.run(n, torch.bfloat16)),
        out.data_ptr(),
        bias.data_ptr(),
        np.int32(1),
        a_scale.data_ptr(),
        b_scale.data_ptr(),
        *sizes,
    ]
    args += [q.data_ptr(), np.float32(16), amax.data_ptr()]
    blocks = TILE.blocks(TILE.count(*FC1[:2]), launch.processors(a.device.index))

    def variant(defines: dict[str, int | str]) -> Callable[[], object]:
        kernel = launch.function("elementary_gemm", "gemm_activation", defines, TILE.shared_bytes)
        return lambda: launch.launch(kernel, (blocks,), (384,), args, TILE.shared_bytes, device=a.device.index)

    def ours() -> object:
        return gemm_fp8.gemm_fp8_tiled(a, b, a_scale, b_scale, bias, torch.bfloat16, "fast", TILE, out)

    def theirs() -> object:
        return torch._scaled_mm(a, b.t(), a_scale, b_scale, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True)

    variants: dict[str, Callable[[], object]] = {"gemm_fp8": ours, "torch._scaled_mm": theirs}
    variants["plain"] = variant(gemm_defines("identity", 1, 1))
    variants["plain, at once"] = variant(gemm_defines("identity", 0, 1))
    variants |= {name: variant(gemm_defines(name)) for name in IN_GEMM}
    for spread in (8, 16):
        variants |= {f"{f}, spread {spread}": variant({**gemm_defines(f), "SPREAD": spread}) for f in CROWDED}
    variants |= {f"{name}, at once": variant(gemm_defines(name, deferred=0)) for name in AT_ONCE}
    _check_gemm(variants, theirs, out, q)
    return variants


def _check_gemm(
    variants: dict[str, Callable[[], object]], theirs: Callable[[], Any], out: torch.Tensor, q: torch.Tensor
) -> None:
    """Before any time: h equals cuBLASLt's in every word, and the codes are those of the function of h."""
    expected = theirs()
    for name, call in variants.items():
        if name == "torch._scaled_mm":
            continue
        out.fill_(float("nan"))
        q.fill_(0xEE)
        call()
        if not torch.equal(out.view(torch.int16), expected.view(torch.int16)):
            raise RuntimeError(f"{name}: the GEMM's bf16 words are not cuBLASLt's.")
        function = name.split(",")[0]
        if function not in IN_GEMM:
            continue
        for rows in (slice(0, 256), slice(-256, None)):
            y = out[rows].float().flatten()
            y = y if function == "identity" else digest.apply(function, y)
            codes = (y * 16).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
            if not torch.equal(codes, q[rows].flatten()):
                raise RuntimeError(f"{name}: the epilogue's FP8 codes are not the function's.")


def cycles(function: str) -> float:
    """Clock cycles a scheduler spends on one evaluation of a warp, data in registers, beside two additions."""
    blocks, threads, loops = launch.processors(0), 1024, 512
    out = torch.empty(blocks * threads, device="cuda")
    taken = torch.zeros(blocks, dtype=torch.int64, device="cuda")
    kernel = launch.function("elementary_bench", "cycles", {"FUNCTION": function})
    first, step = (-8.0, 2.0**-10) if "rsqrt" not in function else (1.0, 2.0**-10)
    args = [np.float32(first), np.float32(step), out.data_ptr(), taken.data_ptr()]
    for _ in range(3):
        launch.launch(kernel, (blocks,), (threads,), args, device=out.device.index)
    warps = threads // 32 // 4  # of one of the four schedulers
    return statistics.median(taken.tolist()) / (loops * 4 * warps)


def summary(times: dict[str, list[float]], base: str) -> dict[str, dict[str, float]]:
    """Median and spread in ms, and the median over that of `base`."""
    reference = statistics.median(times[base])
    return {
        name: {**measure.summary(t), "over_base": round(statistics.median(t) / reference, 4)}
        for name, t in times.items()
    }


def errors() -> dict[str, Any]:
    """Every candidate's errors, from Hopper's own results."""
    found: dict[str, Any] = {}
    for name, candidates in track(error.CANDIDATES.items(), "errors against float64"):
        measure_error = error.fp32_errors if name in ("exp", "rsqrt") else error.activation_errors
        for candidate in candidates:
            found[candidate] = measure_error(name, partial(digest.apply, candidate), "cuda")
    return found


def main() -> None:
    """Record if asked, compare, measure, write docs/results/elementary.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="write the tables and digests anew")
    arguments = parser.parse_args()
    started = time.perf_counter()

    def note(what: str) -> None:
        print(f"{time.perf_counter() - started:6.1f} s  {what}", flush=True)

    build_all()
    note("kernels built")
    provenance = measure.provenance(["elementary_bench", "elementary_gemm"])
    period, facts = grid_facts()
    facts |= reciprocal_facts() | rsqrt_facts()
    note(f"facts {facts}")
    if arguments.record:
        record(period, provenance)
        elementary._recorded.cache_clear()
    differ = compare(arguments.record, provenance)
    note(f"blocks of 2^24 words that differ: {differ}")
    found = errors()
    note("errors")
    stream = summary(measure.interleave(stream_variants(), repeats=30, warmup=3), "identity bf16")
    note("stream")
    gemm = summary(measure.interleave(gemm_variants(), repeats=30, warmup=3), "plain")
    note("gemm")
    scheduler = {name: round(cycles(name), 3) for name in ("identity", *IN_STREAM)}
    note("cycles")
    payload = {
        "provenance": measure.provenance(["elementary_bench", "elementary_gemm"]),
        "facts": facts,
        "blocks_of_2^24_words_that_differ": differ,
        "errors": found,
        "stream": {"shape": [ROWS, COLUMNS], "base": "identity bf16", "times": stream},
        "gemm": {"shape": FC1, "base": "plain", "times": gemm},
        "scheduler_cycles_per_warp": scheduler,
    }
    measure.write_result("elementary", payload)
    for name in IN_STREAM:
        print(f"{name:14} cycles {scheduler[name]:6.2f}  stream bf16 {stream[name + ' bf16']['over_base']:.3f}"
              f"  e4m3 {stream[name + ' e4m3']['median'] / stream['identity e4m3']['median']:.3f}"
              f"  gemm {gemm.get(name, {}).get('over_base', '')}")  # fmt: skip
    print({name: round(t["median"], 4) for name, t in gemm.items()})


if __name__ == "__main__":
    main()
