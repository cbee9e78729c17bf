"""Every benchmark on a GPU that only takes notes: its numbers, computed here again from times that are made up.

tests/bench/test_bandwidth_benches.py and tests/bench/test_gemm_benches.py have those of ops bound by memory and of
GEMMs.
"""

import ast
import contextlib
import importlib.machinery
import itertools
import math
import re
import statistics
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from shared.dry_bench import is_summary, is_table
from shared.dry_runs import is_drawn, launches, layers, percents, run

from optimized import measure
from optimized.bench.kernels import attention, attention_plot, gemm_equality, gemm_shapes
from optimized.bench.layers import ladder, layer, layer_recipes, layer_sweep, rowwise_torchao, stats, timeline
from optimized.commands import tables


def test_gemms_of_random_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = gemm_shapes.problems()
    assert problems == gemm_shapes.problems()
    assert len(set(problems)) == len(problems) >= 300
    assert all(1 <= m <= 32768 and min(n, k) >= 16 and max(n, k) <= 32768 for m, n, k in problems)
    assert all(n % 16 == k % 16 == 0 for _, n, k in problems)
    monkeypatch.setattr(gemm_shapes, "problems", lambda: problems[:40])
    ran = run(gemm_shapes)
    full = {(m, n, k): -(-m // 128) * -(-n // 128) >= 132 for m, n, k in problems[:40]}
    cases = [(kind, *one) for one in problems[:40] for kind in (("fast", "split") if full[one] else ("split",))]
    assert {kind for kind, *_ in cases} == {"fast", "split"}
    rows = ran.payload["rows"]
    for row, case, timed in zip(rows, cases, ran.rounds, strict=True):
        assert (row["kind"], row["m"], row["n"], row["k"]) == case
        assert (timed.repeats, timed.warmup, timed.flush, timed.ahead) == (9, 2, True, True)
        assert row["ms"] == {side: pytest.approx(statistics.median(timed.samples[side])) for side in ("ours", "theirs")}
        assert row["speed_over_theirs"] == pytest.approx(row["ms"]["theirs"] / row["ms"]["ours"])
        ours = launches(timed.noted["ours"])[0]
        assert launches(timed.noted["theirs"]) == []
        assert (row["tile"] == gemm_shapes.SPLIT_K) == ours.startswith("gemm_fp8_split_k."), (row, ours)
        macros = re.search(r"BLOCK_M=(\d+) BLOCK_N=(\d+)", timed.noted["ours"][0])
        assert macros is None or row["tile"].startswith(f"{macros[1]}x{macros[2]},")
    cells = []
    for kind in ("fast", "split"):
        mine = [row for row in rows if row["kind"] == kind]
        ratios = [row["speed_over_theirs"] for row in mine]
        worst = mine[ratios.index(min(ratios))]
        shape, below = [worst["m"], worst["n"], worst["k"]], sum(one < 0.75 for one in ratios)
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        assert ran.payload["summary"][kind] == {
            **{"problems": len(mine), "geometric_mean": pytest.approx(mean), "worst": min(ratios)},
            **{"worst_shape": shape, "below_0.75": below},
        }
        of, least = percents([mean, min(ratios)])
        least += f" ({'×'.join(map(str, shape))})"
        cells.append((f"FP8, {kind} accumulation", of, least, f"{below} of {len(mine)}"))
    is_table(ran.tables[0], ran.tables[0].columns, cells)
    assert {row["speed_over_theirs"] for row in rows} <= is_drawn(
        partial(gemm_shapes.plot, ran.payload), "gemm_shapes", 2
    )


def test_equality_with_cublaslt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers are made up too: every third problem differs, and every second of those is found to be split."""
    counts, cpu, twin = {"compared": 0}, list[Any](), torch.ops.twin

    def differing(a: torch.Tensor, b: torch.Tensor) -> int:
        assert a.shape == b.shape
        if a.device.type == "cpu":
            return 5
        counts["compared"] += 1
        return int(counts["compared"] % 3 == 0) * (1 + counts["compared"])

    def gemm_fp8(*args: Any) -> torch.Tensor:
        if args[0].device.type == "cuda":
            return twin.gemm_fp8(*args)  # type: ignore[no-any-return]
        cpu.append(args)
        return torch.zeros(args[0].shape[0], args[1].shape[0])

    monkeypatch.setattr(gemm_equality, "differing", differing)
    monkeypatch.setattr(gemm_equality, "twin", types.SimpleNamespace(gemm_fp8=gemm_fp8))
    ran = run(gemm_equality)
    rows, payload = ran.payload["rows"], ran.payload
    wanted = [(name, *shape, how) for name, shape in gemm_equality.problems().items() for how in ("fast", "split")]
    assert [(row["name"], row["m"], row["n"], row["k"], row["accumulate"]) for row in rows] == wanted
    unequal = [row for row in rows if row["differing_words"]]
    assert 5 < len(unequal) < len(rows) - 5
    for row in rows:
        assert row["words"] == row["m"] * row["n"]
        assert re.fullmatch("e[45]m[32].e4m3", row["formats"])
        assert ("why" in row) == bool(row["differing_words"])
        sampled = row["m"] * row["n"] <= 1 << 20 or row["differing_words"]
        least = min(row["m"], gemm_equality.SAMPLED_ROWS) * min(row["n"], gemm_equality.SAMPLED_COLUMNS)
        assert row.get("sampled_against_the_cpu") == ({"words": least, "differing_words": 5} if sampled else None)
    for row in unequal:
        pieces, step = map(int, re.findall(r"into (\d+) pieces of (\d+) and", row["why"])[0])
        assert step % 128 == 0
        assert step * pieces >= row["k"]
    assert {tuple(args[0].shape[1:]) for args in cpu} <= {(row["k"],) for row in rows}  # at full K
    assert all((args[4], args[5:]) == (None, (torch.float32, args[-1])) for args in cpu)
    assert payload["problems"] == len(rows)
    assert payload["problems_with_every_word_equal"] == len(rows) - len(unequal)
    assert payload["words"] == sum(row["words"] for row in rows)
    assert payload["differing_words"] == sum(row["differing_words"] for row in unequal)
    equal = sum(row["words"] for row in rows if row not in unequal)
    cells = [(f"{len(rows) - len(unequal)} of {len(rows)} GEMMs", f"{equal:,}", "0", "")]
    for row in unequal:
        name = f"{row['m']}×{row['n']}×{row['k']}, {row['accumulate']} accumulation"
        cells.append((name, f"{row['words']:,}", f"{row['differing_words']:,}", row["why"]))
    is_table(ran.tables[0], ran.tables[0].columns, cells)


def test_the_ladder() -> None:
    ran = run(ladder)
    rows = iter(ran.payload["rows"])
    assert ran.payload["rungs"].keys() == {rung.name for rung in ladder.RUNGS}
    variants = [*ran.payload["rungs"], "twin::gemm_fp8", "cuBLASLt, first", "cuBLASLt, best"]
    cells: dict[str, list[str]] = {}
    timed = [one for one in ran.rounds if set(one.samples) == set(variants)]
    for (name, (m, n, k)), one in zip(ladder.SHAPES.items(), timed, strict=True):
        assert (one.repeats, one.warmup, list(one.samples)) == (21, 2, variants)
        theirs = statistics.median(one.samples["cuBLASLt, first"])
        for variant in variants:
            row, ms = next(rows), statistics.median(one.samples[variant])
            assert (row["shape"], row["m"], row["n"], row["k"], row["kernel"]) == (name, m, n, k, variant)
            is_summary(row["ms"], one.samples[variant])
            assert row["tflops"] == pytest.approx(2 * m * n * k / ms * 1e-9)
            assert row["of_cublaslt"] == pytest.approx(theirs / ms)
            cells.setdefault(variant, []).extend((f"{row['tflops']:.0f}", *percents([theirs / ms])))
            kernels = launches(one.noted[variant])
            rung = variant in ran.payload["rungs"]
            assert kernels == [f"ladder/{variant}.rung"] * rung or variant == "twin::gemm_fp8", kernels
    assert next(rows, None) is None
    assert [(row[0], *row[3:]) for row in ran.tables[0].rows] == [(name, *cells[name]) for name in variants]
    speeds = {row["tflops"] for row in ran.payload["rows"] if row["kernel"] != "cuBLASLt, best"}
    assert speeds <= is_drawn(partial(ladder.plot, ran.payload), "ladder", 1)


def test_attention() -> None:
    ran = run(attention)
    of_pairs, of_fp8 = ran.rounds[: len(attention.CASES)], ran.rounds[len(attention.CASES) :]
    found, cells = ran.payload["ms"]["attention"], []
    for timed, case in zip(of_pairs, attention.CASES, strict=True):
        b, h, hkv, s, d, mask, dropout = case
        name = f"b={b} h={h} hkv={hkv} s={s} d={d} {mask} dropout={dropout}"
        assert (timed.repeats, timed.flush, timed.ahead) == (max(5, 20 * 2048 // max(2048, s)), False, True)
        assert set(found[name]) == {"forward", "cuDNN forward", "backward", "cuDNN backward"}
        row = [name.replace(" none", "").replace(" dropout=0.0", "")]
        for way, products in (("forward", 2), ("backward", 5)):
            is_summary(found[name][way], timed.samples[way])
            is_summary(found[name][f"cuDNN {way}"], timed.samples[f"cuDNN {way}"])
            ours, theirs = (statistics.median(timed.samples[one]) for one in (way, f"cuDNN {way}"))
            work = 2 * products * b * h * s * s * d / (2 if mask == "causal" else 1)
            row += [f"{ours:.3g}", f"{work / ours * 1e-9:.0f}", *percents([theirs / ours])]
            kernels = launches(timed.noted[way])
            assert kernels[0].startswith("attention" + ("_backward" if way == "backward" else "")), kernels
            assert launches(timed.noted[f"cuDNN {way}"]) == []
        cells.append(tuple(row))
    assert len(found) == len(attention.CASES)
    is_table(ran.tables[0], ran.tables[0].columns, cells)
    cells = []
    for timed, (b, h, s, d, mask), name in zip(of_fp8, attention.FP8_CASES, ran.payload["ms"]["FP8"], strict=False):
        assert name == f"b={b} h={h} hkv={h} s={s} d={d} {mask} dropout=0.0"
        assert (timed.repeats, timed.ahead) == (max(5, 20 * 2048 // s), True)
        for way in ("FP8", "bf16"):
            is_summary(ran.payload["ms"]["FP8"][name][way], timed.samples[way])
            assert launches(timed.noted[way])[0].startswith(
                ("attention_fp8.",) if way == "FP8" else ("attention.", "attention_wide.")
            )
        fp8, bf16 = (statistics.median(timed.samples[way]) for way in ("FP8", "bf16"))
        speed = 4 * b * h * s * s * d / (2 if mask == "causal" else 1) / fp8 * 1e-9
        short = name.replace(" none", "").replace(" dropout=0.0", "")
        cells.append((short, f"{fp8:.3g}", f"{speed:.0f}", f"{bf16 / fp8:.2f}"))
    is_table(ran.tables[1], ran.tables[1].columns, cells)
    around = ran.payload["ms"]["elementwise"]
    copy = around["copy"]["TB/s"]
    for one in around.keys() - {"copy"}:
        assert around[one]["p10"] <= around[one]["median"] <= around[one]["p90"]
    shown = [(one.replace("_", " "), f"{x['TB/s']:.2f}", *percents([x["TB/s"] / copy])) for one, x in around.items()]
    is_table(ran.tables[2], ("kernel", "TB/s", "of a copy"), shown)
    # Bytes of 8192 x 4096 bf16 numbers, and of 16 x 2048 x 2048 scores: what each must move at least.
    moved = {"bias_dropout_add": 3, "dropout_backward": 2, "rotary": 2, "rotary interleaved": 2}
    moved |= {"softmax": 4, "softmax causal": 3, "softmax_backward": 6}
    (last,) = of_fp8[len(attention.FP8_CASES) :]
    for name, times in moved.items():
        ms = statistics.median(last.samples[name]) / 4
        assert around[name]["median"] == pytest.approx(ms)
        assert around[name]["TB/s"] == pytest.approx(times * 2 * 8192 * 4096 / ms * 1e-9)
    heights = {round(one) for one in is_drawn(partial(attention_plot.plot, ran.payload), "attention", 4)}
    assert sum(int(row[2]) in heights for row in ran.tables[0].rows) >= 8


def test_statistics() -> None:
    ran = run(stats)
    ways = ("off", "between", "measured", "beside")
    cells = []
    for row, timed, case in zip(ran.payload["rows"], ran.rounds, stats.CASES, strict=True):
        assert (timed.repeats, tuple(timed.samples)) == (15, ways)
        assert (row["layer"], row["tokens"]) == (case.name, case.sequence * case.batch)
        for way in ways:
            is_summary(row["ms"][way], timed.samples[way])
        off, between, measured, _ = (row["ms"][way]["median"] for way in ways)
        assert row["cost"] == pytest.approx((99 * between + measured) / 100 / off - 1)
        shown = [f"{row['ms'][way]['median']:.3f}" for way in ways]
        cells.append((f"{case.name}, {row['tokens']} tokens", *shown, f"{100 * row['cost']:.1f} %"))
        counted = {way: sum(one.startswith("cast_stats") for one in launches(timed.noted[way])) for way in ways}
        assert counted["off"] == counted["between"] == 0 < counted["measured"] < counted["beside"], counted
    is_table(ran.tables[0], ran.tables[0].columns, cells)


def test_layers_by_width_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = layer_sweep.SIZES
    for hidden, tokens in sizes:
        case = layer_sweep.case(hidden, tokens)
        assert (case.ffn, case.heads, case.tokens, case.sequence) == (
            4 * hidden,
            hidden // 128,
            tokens,
            min(tokens, 2048),
        )
    monkeypatch.setattr(layer_sweep, "SIZES", [sizes[1], sizes[7]])
    with layers():
        ran = run(layer_sweep)
    table, cells = ran.tables[0], []
    for point, timed, size in zip(ran.payload["points"], ran.rounds, layer_sweep.SIZES, strict=True):
        assert (point["hidden"], point["tokens"], timed.repeats) == (*size, 5)
        titles = [f"{row['step']}, {row['attention']} attention" for row in point["rows"]]
        assert len(timed.samples) == len(titles) + 1
        for row, times, title in zip(point["rows"], timed.samples.values(), titles, strict=False):
            is_summary(row["ms"], times)
            assert title in table.columns
        is_summary(point["parts"], timed.samples["parts"])
        shown = {title: f"{row['ms']['median']:.2f}" for title, row in zip(titles, point["rows"], strict=True)}
        cells.append((*map(str, size), *(shown.get(one, "–") for one in table.columns[2:-1]),
                      f"{point['parts']['median']:.2f}"))  # fmt: skip
        assert launches(timed.noted["parts"]) == []
        assert sum(bool(launches(noted)) for noted in timed.noted.values()) >= 3  # ours
    is_table(table, table.columns, cells)
    is_drawn(partial(layer_sweep.plot, ran.payload), "layer_sweep", 2)


def test_a_layer_under_each_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_recipes, "SIZES", [layer_recipes.SIZES[-1]])
    with layers():
        ran = run(layer_recipes, lambda told: layer_recipes.run(told, repeats=2, inner=1))
    (row,), (timed,) = ran.payload["rows"], ran.rounds
    ours = [f"ours, {name}" for name in ("bf16", *layer_recipes.RECIPES)]
    assert set(ours) <= set(row["ms"]) == set(timed.samples)
    for name, times in timed.samples.items():
        is_summary(row["ms"][name], times)
    for name, kernel in zip(ours, ("gemm.", "gemm_fp8.", "gemm_fp8.", "gemm_fp8_blocks."), strict=True):
        found = launches(timed.noted[name])
        assert any(one.startswith(kernel) for one in found), (name, found)
        assert any(one.startswith("cast_blocks.") for one in found) == name.endswith("block")
    shares = row.get("of_theirs", {})
    for name, share in shares.items():
        pairs = zip(timed.samples[f"ours, {name}"], timed.samples[f"theirs, {name}"], strict=True)
        assert share == pytest.approx(statistics.median(a / b for a, b in pairs))
    cells, graphs = ran.tables[0].rows
    graphed = [f"{row['ms'][f'ours, {name}, CUDA graph']['median']:.2f}" for name in layer_recipes.RECIPES]
    assert graphs == (f"{row['case']}, CUDA graph", "–", *graphed)
    for name, cell in zip(("bf16", *layer_recipes.RECIPES), cells[1:], strict=True):
        brackets = f" ({percents([shares[name]])[0]})" if name in shares else ""
        assert cell == f"{row['ms'][f'ours, {name}']['median']:.2f}{brackets}"


@pytest.mark.parametrize("installed", [True, False])
def test_row_wise_scaling_beside_torchao(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    """torchao's place has a library that leaves a model as it is; every second comparison finds three words."""
    converted, compared = list[str](), list[int]()

    def differing(a: torch.Tensor, b: torch.Tensor) -> int:
        assert (a.shape, a.dtype) == (b.shape, torch.bfloat16)
        compared.append(a.numel())
        return 3 * (len(compared) % 2)

    def convert(model: Any, config: str) -> Any:
        converted.append(config)
        return model

    library: Any = types.ModuleType("torchao.float8")
    library.Float8LinearConfig = types.SimpleNamespace(from_recipe_name=lambda name: name)
    library.convert_to_float8_training = convert
    package = types.ModuleType("torchao")
    package.__spec__ = importlib.machinery.ModuleSpec("torchao", None) if installed else None
    for name, module in (("torchao", package if installed else None), ("torchao.float8", library)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(rowwise_torchao, "differing", differing)
    for name, size in {"TOKENS": 256, "HIDDEN": 128, "FFN": 512}.items():
        monkeypatch.setattr(rowwise_torchao, name, size)
    ran = run(rowwise_torchao)
    payload, (timed,), names = ran.payload, ran.rounds, list(rowwise_torchao.RECIPES)
    assert names == ["rowwise", "rowwise_with_gw_hp"]
    assert converted == 2 * names * installed
    theirs = [f"theirs, {name}" for name in names * installed]
    assert set(timed.samples) == set(payload["ms"]) == {"bf16, compiled", *(f"ours, {one}" for one in names), *theirs}
    first = next(i for i, line in enumerate(ran.lines) if line.startswith("timed in turn"))
    cells, warm = [], set(launches(ran.lines[:first]))
    for name, times in timed.samples.items():
        is_summary(payload["ms"][name], times)
        assert launches(timed.noted[name]) == [] or name.startswith("ours")
    for name in names:
        found = launches(timed.noted[f"ours, {name}"])
        assert set(found) <= warm, "a kernel that is loaded while its time is taken"
        assert any(one.startswith("gemm_fp8_rowwise.") for one in found), found
        assert any(one.startswith("gemm.") for one in found) == (name != "rowwise"), "the weight's gradient"
        ours, bf16 = (f"{payload['ms'][one]['median']:.2f}" for one in (f"ours, {name}", "bf16, compiled"))
        beside = ["–"] * 4
        if installed:
            pairs = zip(timed.samples[f"ours, {name}"], timed.samples[f"theirs, {name}"], strict=True)
            share = statistics.median(a / b for a, b in pairs)
            assert payload["of_theirs"][name] == pytest.approx(share)
            words = payload["words"][name]
            assert list(words) == ["y", "dx", "dw"]
            total = [sum(one[key] for one in words.values()) for key in ("compared", "different")]
            theirs_ms = f"{payload['ms'][f'theirs, {name}']['median']:.2f}"
            beside = [theirs_ms, *percents([share]), *(f"{one:,}" for one in total)]
        cells.append((f"`{name}`", ours, *beside, bf16))
    is_table(ran.tables[0], ran.tables[0].columns, cells)
    assert compared == 2 * [256 * 128, 256 * 128, 128 * 128] * installed
    total = (f"{sum(compared):,}", f"{9 * installed}", "y, dx and dw, two recipes")
    assert [row[1:] for row in rowwise_torchao.equality(payload)] == [total] * installed


def test_a_step_kernel_by_kernel() -> None:
    with layers():
        ran = run(timeline)
    counts = []
    for variant, row in zip(ran.payload["variants"], ran.tables[0].rows, strict=True):
        spans, kernels = variant["ms"], variant["kernels"]
        # Each kernel of step i takes 10 + i us, and the next one begins 2 us later.
        assert spans == [pytest.approx((12 + i) * len(kernels) / 1e3 - 0.002, abs=1e-3) for i in range(5)]
        assert [one[1] for one in kernels] == [pytest.approx(14 * i) for i in range(len(kernels))]
        assert {one[2] for one in kernels} == {12.0}
        assert {one[3] for one in kernels} <= set(timeline.CATEGORIES)
        by_category = [0.012 * sum(one[3] == what for one in kernels) for what in timeline.CATEGORIES]
        idle = 0.002 * (len(kernels) - 1)
        assert row[1:] == (str(len(kernels)), *(f"{ms:.2f}" for ms in (*by_category, idle, spans[2])))
        assert row[0] == f"{variant['step']}; attention: {variant['attention']}"
        counts.append(len(kernels))
    steps = [variant["step"] for variant in ran.payload["variants"]]
    assert len(set(steps)) >= 4
    assert [step for step in steps if step.startswith("TransformerLayer")] == ["TransformerLayer, FP8"]
    assert counts[0] > counts[-1], "the fused layer has the fewest kernels"


@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_one_layer(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones: a GPT layer or a Llama-like one."""
    monkeypatch.setattr(layer, "CASES", [[one for one in layer.CASES if one.tokens <= 1024][which]])
    monkeypatch.setattr(layer, "on_one_core", contextlib.nullcontext)
    with layers():
        ran = run(layer)
    rounds, recorded = iter(ran.rounds), {one["case"]["name"]: one for one in measure.read_result("layer")["cases"]}
    for found, case in zip(ran.payload["cases"], layer.CASES, strict=True):
        timed, ceilings, one_core = next(rounds), next(rounds), next(rounds)
        assert (timed.repeats, timed.warmup, one_core.warmup) == (6, layer.UNCOUNTED, layer.UNCOUNTED)
        assert (ceilings.flush, ceilings.ahead) == (True, False)
        assert found["case"] == recorded[case.name]["case"]
        contestants = [(row["step"], row["attention"]) for row in found["rows"]]
        assert contestants == [(row["step"], row["attention"]) for row in recorded[case.name]["rows"]]
        parts = [statistics.median(timed.samples[name]) for name in found["parts"]]
        assert found["parts_ms"] == pytest.approx(sum(parts))
        products = case.products()
        flop = sum(2 * m * n * k for m, n, k, _ in products.values())
        times = {"×".join(map(str, products[name][:3])): ceilings.samples[name] for name in products}
        copied = 2 * layer.COPY_BYTES / statistics.median(ceilings.samples["copy"])
        for row in found["rows"]:
            title = f"{row['step']} / {row['attention']}"
            is_summary(row["ms"], timed.samples[title])
            is_summary(row["ms_on_one_core"], one_core.samples[title])
            assert bool(launches(timed.noted[title])) == (row["step"].startswith(("Transformer", "te.", "LayerNorm")))
            assert (row["peak_bytes"] is None) == ("graph" in row["step"])
            assert ("ops" in row, "memory" in row) == (row["step"] in layer.BROKEN_DOWN, row["step"] in layer.HELD)
            ops = row.get("ops", ())
            assert [op["ms"] for op in ops] == sorted((op["ms"] for op in ops), reverse=True)
            for op in ops:
                share = op["bytes"] / copied if op["bound"] == "memory" else None
                if op["bound"] == "product" and op["sizes"] in times:
                    share = op["count"] * statistics.median(times[op["sizes"]])
                assert share is None or op["of_ceiling"] == pytest.approx(share / op["ms"]), op
            gemms = [op for op in ops if op["bound"] == "product"]
            assert not ops or sum(op["flop"] for op in gemms) == flop, title
            assert not ops or sum(op["count"] for op in gemms) == len(products) == 12
            held = row.get("memory", ())
            assert [one["bytes"] for one in held] == sorted((one["bytes"] for one in held), reverse=True)
    linears = next(rounds)
    for row, times_of_one in zip(ran.payload["linear"]["rows"], linears.samples.values(), strict=True):
        is_summary(row["ms"], times_of_one)
    assert ran.payload["cupy_pool_bytes"] == 5


# They compare what was recorded, and run no benchmark.
OF_RESULTS = {"test_drawn_results.py", "test_recorded_settings.py"}


def test_every_benchmark_has_a_test() -> None:
    """Some file here imports it."""
    paths = [path for path in Path(__file__).parent.glob("test_*.py") if path.name not in OF_RESULTS]
    nodes = itertools.chain.from_iterable(ast.parse(path.read_text("utf-8")).body for path in paths)
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    imported = {f"{node.module}.{one.name}" for node in froms for one in node.names}
    assert {module.__name__ for module in tables.BENCHMARKS} <= imported
