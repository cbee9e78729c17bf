"""Benchmarks of GEMMs, with times that are made up: problems, operands, speeds and tables, computed here again."""

import functools
import json
import math
import re
import statistics
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from shared.asked import is_what_was_recorded
from shared.dry_bench import MS_PER_NOTE, DryBench, Round, is_table

from optimized.bench.kernels import gemm, gemm_blocks, gemm_epilogue
from optimized.ops.gemms.gemm_tile import FP8_TILES, TILES, select_tile

Row = dict[str, Any]
# Of a GPT layer of hidden 4096 with 8192 tokens: M, N, K.
SHAPES = {
    "qkv.fprop": (8192, 12288, 4096), "qkv.dgrad": (8192, 4096, 12288), "qkv.wgrad": (12288, 4096, 8192),
    "proj.fprop": (8192, 4096, 4096), "proj.dgrad": (8192, 4096, 4096), "proj.wgrad": (4096, 4096, 8192),
    "fc1.fprop": (8192, 16384, 4096), "fc1.dgrad": (8192, 4096, 16384), "fc1.wgrad": (16384, 4096, 8192),
    "fc2.fprop": (8192, 4096, 16384), "fc2.dgrad": (8192, 16384, 4096), "fc2.wgrad": (4096, 16384, 8192),
}  # fmt: skip
BLOCKS = ("qkv.fprop", "fc1.wgrad")  # which are measured in sustained blocks, too
SECONDS = 0.02  # of a block


class Tiles:
    """Notes the problems for which a benchmark asks which tile they get."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def __call__(self, *problem: Any) -> Any:
        self.asked.append(problem[:5])
        return select_tile(*problem)


def run(module: Any, **options: Any) -> tuple[Row, DryBench]:
    """A payload that a file can hold; its kernels are all that were launched."""
    told: list[float] = []
    with DryBench() as bench:
        payload = module.run(told.append, **options)
    assert {one.kernel.kernel for one in bench.gpu.launches} <= payload["provenance"]["kernels"].keys()
    assert payload["provenance"]["kernels"].keys() == set(module.KERNELS)
    assert json.loads(json.dumps(payload)) == payload
    is_what_was_recorded(module.NAME, payload)
    count = len(payload["rows"])
    assert told == [(i + 1) / count for i in range(count)]
    assert payload["what"].endswith(("same run", "bf16 output"))
    return payload, bench


def is_spread(found: dict[str, float], samples: list[float], *more: str) -> None:
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    wanted = {"median": statistics.median(samples), "p10": tenths[0], "p90": tenths[8]}
    assert {key: found[key] for key in wanted} == pytest.approx(wanted)
    assert set(found) == {*wanted, *more}
    assert not more or found["low"] <= found["median"] <= found["high"]


def ratios(timed: dict[str, list[float]], ours: str, theirs: str) -> list[float]:
    return [b / a for a, b in zip(timed[ours], timed[theirs], strict=True)]


def by_halves(samples: dict[str, list[float]]) -> list[float]:
    """Each sample is that of the variant which is the fastest in the other half of the rounds."""
    count = len(next(iter(samples.values())))
    found = []
    for i in range(count):
        others = {name: [values[j] for j in range(count) if j % 2 != i % 2] for name, values in samples.items()}
        best = min(others, key=lambda name: statistics.median(others[name]))
        found.append(samples[best][i])
    return found


def formats(name: str) -> tuple[str, str]:
    return ("e4m3" if name.endswith("fprop") else "e5m2"), "e4m3"


def promotion(kind: str) -> str:
    return f"PROMOTION={'Added' if kind == 'split' else 'OneChain'} "


def calls_are(kind: str, name: str, noted: dict[str, list[str]]) -> None:
    """Ours and theirs get the same operands, in the layouts and formats of a training step."""
    m, n, k = SHAPES[name]
    (ours,), (theirs,) = noted["ours"], noted["theirs"]
    if kind == "bf16":
        turned, columns = name.endswith("wgrad"), not name.endswith("fprop")
        a = rf"bf16\[{m}, {k}\]" + (rf"\(1,{m}\)" if turned else "") + "&"
        b = rf"bf16\[{k}, {n}\]" + ("" if columns else rf"\(1,{k}\)") + "&"
        assert re.match(rf"mm\({a}.*, {b}.* -> bf16\[{m}, {n}\]", theirs), theirs
        macros = rf"OUT=BF16 .*TRANSPOSE_A={int(turned)} TRANSPOSE_B={int(columns)} "
        assert re.match(rf"gemm\.gemm \[ACCUMULATE=0 .*{macros}", ours), ours
        return
    a, b = formats(name)
    fast = ", True" * (kind == "fast")
    operands = rf"{a}\[{m}, {k}\]&(\d+), {b}\[{k}, {n}\]\(1,{k}\)&(\d+), fp32\[1\]&(\d+), fp32\[1\]&\3"
    match = re.match(rf"_scaled_mm\({operands}, None, None, bf16{fast}\) -> bf16\[{m}, {n}\]", theirs)
    assert match, theirs
    macros = rf"A_FORMAT={a.upper()} .*B_FORMAT={b.upper()} .*OUT=BF16 .*{promotion(kind)}"
    assert re.match(rf"gemm_fp8\.gemm_fp8 \[ACCUMULATE=0 .*{macros}.*map &{match[1]} .*map &{match[2]} ", ours), ours


@functools.cache
def of_gemm() -> tuple[Row, list[Round]]:
    with mock.patch.object(gemm, "select_tile", Tiles()) as tiles:
        payload, bench = run(gemm, blocks=False)
    assert tiles.asked == [
        (m, n, 2 * k if kind == "bf16" else k, kind == "split", 132)
        for kind in ("fast", "split", "bf16")
        for m, n, k in SHAPES.values()
    ]
    return payload, bench.rounds


@functools.cache
def of_blocks() -> Row:
    shapes = {name: SHAPES[name] for name in BLOCKS}
    with mock.patch.object(gemm, "SECONDS", SECONDS), mock.patch.object(gemm, "shapes", return_value=shapes):
        return run(gemm)[0]


def gemms() -> Iterator[tuple[str, str, Row, Round]]:
    payload, rounds = of_gemm()
    problems = [(kind, name) for kind in ("fast", "split", "bf16") for name in SHAPES]
    for (kind, name), row, timed in zip(problems, payload["rows"], rounds, strict=True):
        yield kind, name, row, timed


def test_gemms_of_a_layer() -> None:
    assert of_gemm()[0]["repeats"] == 60
    assert 0.05 < of_gemm()[0]["sustained_block_seconds"] < 1
    assert not any("sustained" in key for row in of_gemm()[0]["rows"] for key in row)
    for kind, name, row, timed in gemms():
        m, n, k = SHAPES[name]
        assert (row["kind"], row["name"], row["m"], row["n"], row["k"]) == (kind, name, m, n, k)
        assert row["differing_words"] == 1  # so `DryGpu` says
        assert (timed.repeats, timed.flush, timed.ahead) == (60, False, False)
        assert timed.warmup >= 3
        calls_are(kind, name, timed.noted)
        offered = {side: values for side, values in timed.samples.items() if side.startswith("algorithm")}
        assert list(timed.samples) == ["ours", "theirs", *(["algorithm 0", "algorithm 1"] if kind != "bf16" else [])]
        times = {side: timed.samples[side] for side in ("ours", "theirs")}
        if offered:
            times["best"] = by_halves(offered)
            medians = {side: statistics.median(values) for side, values in offered.items()}
            assert row["best"] == f"{min(medians, key=medians.__getitem__)} of 2"
        assert set(row["ms"]) == set(row["tflops"]) == set(times)
        for side, values in times.items():
            is_spread(row["ms"][side], values, "low", "high")
            assert row["tflops"][side] == pytest.approx(2 * m * n * k / (row["ms"][side]["median"] * 1e9))
            if side != "ours":
                is_spread(row[f"speed_over_{side}"], ratios(times, "ours", side), "low", "high")
        assert ("speed_over_best" in row) == bool(offered)
        tiles, size = (TILES, 2) if kind == "bf16" else (FP8_TILES, 1)
        assert row["tile"] == str(select_tile(m, n, size * k, kind == "split", 132, tiles))


def test_sustained_blocks_are_of_many_calls_and_one_variant() -> None:
    """A call notes a line, and a line takes `MS_PER_NOTE`; five calls come before the clock is read."""
    payload = of_blocks()
    assert payload["sustained_block_seconds"] == SECONDS
    assert [row["name"] for row in payload["rows"]] == [*BLOCKS] * 3
    for row in payload["rows"]:
        assert set(row["sustained_ms"]) == set(row["ms"])
        for side, ms in row["sustained_ms"].items():
            count = max(10, int(SECONDS * 1000 / row["ms"][side]["median"]))
            assert ms == pytest.approx(MS_PER_NOTE * (count + 0.5) / count)
            if side != "ours":
                found = row[f"sustained_speed_over_{side}"]
                assert found == pytest.approx(ms / row["sustained_ms"]["ours"])
    (table,) = gemm.tables(payload)
    for kind, words in (("fast", "FP8, fast accumulation"), ("split", "FP8, split accumulation"), ("bf16", "bf16")):
        sustained = mean([row["sustained_speed_over_theirs"] for row in payload["rows"] if row["kind"] == kind])
        assert f"{words}: {percent(sustained)}" in table.note


def test_a_sustained_block_takes_the_seconds_that_it_should() -> None:
    calls: list[int] = []
    with DryBench():
        gemm.sustained({"one": lambda: calls.append(1)}, {"one": gemm.SECONDS * 1000 / 19.99})
    assert len(calls) == 3 * (5 + 19)


def test_the_fastest_is_chosen_by_the_other_half_of_the_rounds() -> None:
    """In the odd rounds b is the slower one, and in the even ones, by their median, a."""
    assert gemm.fastest({"a": [9, 1, 1, 1], "b": [4, 4, 4, 4]}) == [9, 4, 1, 4]
    assert gemm.fastest({"a": [2, 5, 2, 5], "b": [3, 3, 3, 3]}) == [3, 5, 3, 5]


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def mean(values: list[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def test_tables_of_gemms() -> None:
    payload, _ = of_gemm()
    by_kind: dict[str, list[Row]] = {}
    for kind, _, row, _ in gemms():
        by_kind.setdefault(kind, []).append(row)
    speeds = {
        (kind, side): [row[f"speed_over_{side}"]["median"] for row in rows]
        for kind, rows in by_kind.items()
        for side in ("theirs", "best")
        if kind != "bf16" or side == "theirs"
    }
    for side in ("theirs", "best"):
        wanted = {kind: pytest.approx(mean(found)) for (kind, one), found in speeds.items() if one == side}
        assert payload[f"geometric_mean_speed_over_{side}"] == wanted
    rows = []
    for i, (name, (m, n, k)) in enumerate(SHAPES.items()):
        cells = [f"{name} {m}×{n}×{k}"]
        for kind, of_kind in by_kind.items():
            cells.append(f"{of_kind[i]['tflops']['ours']:.0f}")
            cells += [percent(found[i]) for (one, _), found in speeds.items() if one == kind]
        rows.append(tuple(cells))
    last = ["geometric mean"]
    for kind in by_kind:
        last += ["", *(percent(mean(found)) for (one, _), found in speeds.items() if one == kind)]
    columns = [
        "GEMM M×N×K", "FP8, fast accumulation, TFLOP/s", "of cuBLASLt", "of its best",
        "FP8, split accumulation, TFLOP/s", "of cuBLASLt", "of its best", "bf16, TFLOP/s", "of cuBLASLt",
    ]  # fmt: skip
    (table,) = gemm.tables(payload)
    is_table(table, tuple(columns), [*rows, tuple(last)])
    assert "fastest of the eight" in table.how
    assert "sustained" not in table.note
    tflops = mean([row["tflops"]["ours"] for row in by_kind["fast"]])
    theirs, best = (mean(speeds["fast", side]) for side in ("theirs", "best"))
    assert gemm.summary(payload)[1::2] == (f"{tflops:.0f} TFLOP/s", f"{theirs:.2f}×; {best:.2f}×")


def test_a_table_of_gemms_with_a_part_of_what_is_measured() -> None:
    """As older results have it."""
    payload = json.loads(json.dumps(of_gemm()[0]))
    del payload["geometric_mean_speed_over_best"]
    for row in payload["rows"]:
        row.pop("speed_over_best", None)
    payload["rows"] = [row for row in payload["rows"] if row["kind"] != "split" or row["name"] == "fc1.dgrad"]
    (table,) = gemm.tables(payload)
    assert "eight" not in table.how
    assert len(table.columns) == 7
    lacking = {row[0].split()[0]: row[3:5] == ("–", "–") for row in table.rows[:-1]}
    assert lacking == {name: name != "fc1.dgrad" for name in SHAPES}


# Of each case: name, epilogue, and what the fused op and the separate ops launch.
ACTIVATED = [
    ("fc1.fprop", kind, ["EPILOGUE=BiasActivation "], ["gemm_fp8.", "activation_cast_transpose."])
    for kind in ("gelu", "geglu", "relu", "silu", "swiglu")
]
ADDED = [
    (name, f"bias + dropout {p} + residual", ["EPILOGUE=BiasDropoutAdd ", *advance],
     ["gemm_fp8.", "dropout.bias_dropout_add ", *advance])
    for name, p, advance in (("proj.fprop", 0.0, []), ("proj.fprop", 0.1, ["dropout.advance "]),
                             ("fc2.fprop", 0.1, ["dropout.advance "]))
]  # fmt: skip
ACCUMULATED = [
    ("fc1.wgrad", "added to float32", ["gemm_fp8.gemm_fp8 [ACCUMULATE=1 "], ["gemm_fp8.", "add(", "copy_(fp32"]),
    ("fc1.wgrad", "added to bfloat16", ["gemm_fp8.gemm_fp8 [ACCUMULATE=1 "], ["_to_copy(", "gemm_fp8.", "add(",
                                                                            "copy_(bf16"]),
]  # fmt: skip


def test_gemms_with_epilogues() -> None:
    with mock.patch.object(gemm_epilogue, "select_tile", Tiles()) as tiles:
        payload, bench = run(gemm_epilogue)
    assert payload["repeats"] == 20
    assert tiles.asked == [(*SHAPES[name], False, 132) for name, *_ in (*ACTIVATED, *ADDED)]
    wanted, cells = [*ACTIVATED, *ADDED, *ACCUMULATED], []
    for (name, epilogue, fused, apart), row, timed in zip(wanted, payload["rows"], bench.rounds, strict=True):
        m, n, k = SHAPES[name]
        assert [row[key] for key in ("name", "epilogue", "m", "n", "k")] == [name, epilogue, m, n, k]
        assert (timed.repeats, timed.flush, timed.ahead) == (20, False, False)
        assert timed.warmup >= 3
        assert list(timed.samples) == list(row["ms"]) == ["fused", "apart", "plain", "cublaslt"]
        kind = "split" if name.endswith("wgrad") else "fast"
        calls_are(kind, name, {"ours": timed.noted["plain"], "theirs": timed.noted["cublaslt"]})
        for side, begins in (("fused", fused), ("apart", apart)):
            assert len(timed.noted[side]) == len(begins)
            assert all(begin in line for begin, line in zip(begins, timed.noted[side], strict=True)), timed.noted[side]
        a, b = formats(name)
        for side, i in (("fused", 0), ("apart", int(apart[0] == "_to_copy("))):  # the GEMMs' operands
            line, plain = timed.noted[side][i], timed.noted["plain"][0]
            assert f"A_FORMAT={a.upper()} " in line
            assert f"B_FORMAT={b.upper()} " in line
            assert promotion(kind) in line or line.startswith("gemm_fp8_fused.")
            assert re.findall(r"map &\d+", line)[:2] == re.findall(r"map &\d+", plain)[:2]
            tile = r" (?:BLOCK_N|CLUSTER|STAGES|WARPGROUPS)=\d+"
            assert re.findall(tile, line) == re.findall(tile, plain), "the tile that the GEMM alone gets"
        for side, values in timed.samples.items():
            is_spread(row["ms"][side], values)
        speeds = []
        for side in ("plain", "cublaslt", "apart"):
            is_spread(row[f"speed_over_{side}"], found := ratios(timed.samples, "fused", side))
            speeds.append(percent(statistics.median(found)))
        cells.append((f"{name} {m}×{n}×{k}, {epilogue}", f"{row['ms']['fused']['median']:.3f}", *speeds))
    (table,) = gemm_epilogue.tables(payload)
    columns = ("of our GEMM alone", "of cuBLASLt's GEMM alone", "of separate ops")
    is_table(table, ("FP8 GEMM M×N×K, epilogue", "ms", *columns), cells)


def test_gemms_with_scales_of_blocks() -> None:
    payload, bench = run(gemm_blocks)
    assert payload["repeats"] == 40
    cells: list[tuple[str, ...]] = []
    speeds: dict[str, list[list[float]]] = {"square": [], "rows": []}
    for (name, (m, n, k)), row, timed in zip(SHAPES.items(), payload["rows"], bench.rounds, strict=True):
        assert [row[key] for key in ("name", "m", "n", "k")] == [name, m, n, k]
        assert (timed.repeats, timed.flush, timed.ahead) == (40, False, False)
        assert timed.warmup >= 3
        assert list(timed.samples) == list(row["ms"]) == ["ours", "theirs", "one_scale"]
        ours, theirs, one = (timed.noted[side] for side in timed.samples)
        square = int(not name.endswith("wgrad"))
        blocks = "bf16.*" if square else ".*"
        assert re.match(rf"gemm_fp8_blocks\.gemm_fp8_blocks \[.*OUT=BF16 .*SQUARE_A=0 SQUARE_B={square} ", ours[0])
        assert re.match(rf"gemm_fp8\.gemm_fp8 \[.*{promotion('split')}", one[0])
        operands = rf"e4m3\[{m}, {k}\]&(\d+), e4m3\[{k}, {n}\]\(1,{k}\)&(\d+), fp32\[{m}, {k // 128}\]"
        match = re.match(rf"_scaled_mm\({operands}.*{blocks} -> bf16\[{m}, {n}\]", theirs[0])
        assert match, theirs
        for line in (ours[0], one[0]):  # the same operands
            assert re.findall(r"map &(\d+)", line)[:2] == [match[1], match[2]]
        for side, values in timed.samples.items():
            is_spread(row["ms"][side], values, "low", "high")
            assert row["tflops"][side] == pytest.approx(2e-9 * m * n * k / statistics.median(values))
        found = {side: ratios(timed.samples, "ours", side) for side in ("theirs", "one_scale")}
        for side, values in found.items():
            is_spread(row[f"speed_over_{side}"], values, "low", "high")
        medians = [statistics.median(values) for values in found.values()]
        speeds["square" if square else "rows"].append(medians)
        label = f"{name} {m}×{n}×{k}"
        cells.append((label, f"{row['tflops']['ours']:.0f}", *map(percent, medians), str(row["differing_words"])))
    for kind, label in (("square", "row by square"), ("rows", "row by row")):
        means = [statistics.geometric_mean(side) for side in zip(*speeds[kind], strict=True)]
        cells.append((f"{label}: geometric mean", "", *map(percent, means), ""))
    columns = ("of cuBLASLt", "of ours with one scale", "words that differ from cuBLASLt's")
    is_table(gemm_blocks.tables(payload)[0], ("GEMM M×N×K", "TFLOP/s", *columns), cells)
