"""Benchmarks of what is bound by memory, with times that are made up: their cases, bytes, shares of a copy and tables.

Everything that a payload says is computed here again, from the times that `DryBench` gave and from what an op must read
and write; every op's launches are those of its kernel, on inputs that come in turn.
"""

import json
import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from shared.asked import is_what_was_recorded
from shared.dry_bench import DryBench, Round, is_table

from optimized.bench.kernels import activation, adam, cast, cross_entropy, embedding, norm

MIB = 1 << 20
SIZES = {"bf16": 2, "fp32": 4}
GATED = ("geglu", "qgeglu", "reglu", "sreglu", "swiglu")
Row = dict[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """What a benchmark must measure: `cases` in their order, bytes of an op in a case, its launches, its inputs."""

    module: Any
    calls: int
    repeats: int
    cases: list[Row]
    moved: Callable[[str, Row], int]
    launched: Mapping[str, tuple[str, ...]]  # by op: the beginnings of what each call notes; {…} is of the case
    column: str  # of the table
    columns: Mapping[str, str]
    input_bytes: Callable[[Row], int] | None = None  # of one input, where inputs come in turn
    least: int = 1
    hidden: Callable[[Row], Row] = field(default=lambda case: {})  # what a case is called by in `launched`


def of_casts() -> Benchmark:
    shapes = ((8192, 4096), (8192, 12288), (8192, 16384), (4096, 4096), (16384, 4096), (2048, 1024))
    # In bytes of 128 elements: codes, and 4 for each scale.
    written = {
        **{"cast": 128, "cast_transpose": 256, "cast_transpose_dbias": 256, "dbias": 0, "amax": 0},
        **{"cast_blocks": 132, "cast_blocks_transpose": 264, "cast_blocks_transpose_square": 256},
    }
    blocks = "cast_blocks.cast_blocks [FP8=0 SQUARE={} TRANSPOSE={} WIDE={{wide}}]"
    return Benchmark(
        cast, 8, 20,
        [{"dtype": dtype, "rows": rows, "cols": cols} for dtype in SIZES for rows, cols in shapes],
        lambda op, case: case["rows"] * case["cols"] * (128 * SIZES[case["dtype"]] + written[op]) // 128,
        {
            "cast": ("cast.cast [FP8=0 WIDE={wide}]",),
            "cast_transpose": ("cast_transpose.cast_transpose [DBIAS=0 FP8=0 WIDE={wide}]",),
            "cast_transpose_dbias": ("cast_transpose.cast_transpose [DBIAS=1 FP8=0 WIDE={wide}]", "dbias.total ["),
            "dbias": ("dbias.dbias [",),
            "amax": ("amax.amax [WIDE={wide}]",),
            "cast_blocks": (blocks.format(0, 0),),
            "cast_blocks_transpose": (blocks.format(0, 1),),
            "cast_blocks_transpose_square": (blocks.format(1, 1),),
        },
        "dtype", {"bf16": "bf16 input", "fp32": "fp32 input"},
        lambda case: case["rows"] * case["cols"] * SIZES[case["dtype"]],
        hidden=lambda case: {"wide": int(case["dtype"] == "bf16")},
    )  # fmt: skip


def of_norms() -> Benchmark:
    shapes = ((8192, 4096), (8192, 1024), (8192, 2048), (8192, 5120), (8192, 8192), (8192, 12288))
    moved = {"norm": 4, "norm_cast_transpose": 4, "norm_backward": 6, "norm_backward + residual": 8}
    kinds = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
    backward = (r"norm_backward.norm_backward [ KIND={kind} ", "norm_total.norm_total [")
    return Benchmark(
        norm, 8, 15,
        [{"kind": kind, "rows": rows, "hidden": hidden} for rows, hidden in shapes for kind in kinds],
        lambda op, case: moved[op] * case["rows"] * case["hidden"],
        {
            "norm": ("norm.norm_rows [ KIND={kind} ",),
            "norm_cast_transpose": (r"norm_cast_transpose(_long)?.norm_cast_transpose [ FP8=0 KIND={kind} ",),
            "norm_backward": backward,
            "norm_backward + residual": backward,
        },
        "kind", kinds, lambda case: 2 * case["rows"] * case["hidden"], 3,
        lambda case: {"kind": int(case["kind"] == "rmsnorm")},
    )  # fmt: skip


def of_activations() -> Benchmark:
    def moved(op: str, case: Row) -> int:
        size, n = SIZES[case["dtype"]], case["x_columns"]
        m = n // 2 if case["kind"] in GATED else n
        read = {"activation": n, "activation_cast_transpose": n}.get(op, m + n) * size
        written = {"activation": m * size, "activation_backward": n * size, "activation_cast_transpose": 2 * m}
        return int(case["rows"] * (read + written.get(op, 2 * n)))

    cases = [
        {"kind": kind, "dtype": dtype, "rows": 8192, "x_columns": m * (1 + (kind in GATED))}
        for dtype, m in (("bf16", 16384), ("bf16", 4096), ("fp32", 4096))
        for kind in ("gelu", "geglu", "relu", "silu", "swiglu")
    ]
    fused = "activation_cast_transpose.activation_cast_transpose [BACKWARD={{}} FP8={{}} WIDE={wide}]"
    return Benchmark(
        activation, 4, 11, cases, moved,
        {
            "activation": ("activation.forward_kernel [ WIDE={wide}]",),
            "activation_backward": ("activation.backward_kernel [ WIDE={wide}]",),
            "activation_cast_transpose": (fused.replace("{{}}", "0"),),
            "activation_backward_cast_transpose_dbias": (fused.replace("{{}}", "1"), "dbias.total ["),
        },
        "kind", {case["kind"]: case["kind"] for case in cases},
        lambda case: case["rows"] * case["x_columns"] // (1 + (case["kind"] in GATED)) * SIZES[case["dtype"]],
        hidden=lambda case: {"wide": int(case["dtype"] == "bf16")},
    )  # fmt: skip


def of_cross_entropy() -> Benchmark:
    listed = (("bf16", 50304), ("bf16", 50257), ("bf16", 128256), ("fp32", 50304))
    passes = {"forward": 1, "backward": 2}
    theirs = ("{wide}", "_log_softmax(", "nll_loss_forward(", "ones_like(", "nll_loss_backward(",
              "_log_softmax_backward_data(", "{wide}")  # fmt: skip
    forward, backward = (f"cross_entropy.cross_entropy{name} [SMOOTH=0 int64:-100, 0.0" for name in ("", "_backward"))
    names = [f"{dtype}, {classes:,}" for dtype, classes in listed]
    return Benchmark(
        cross_entropy, 2, 11,
        [{"case": name, "tokens": 8192, "classes": classes} for name, (_, classes) in zip(names, listed, strict=True)],
        lambda op, case: 8192 * case["classes"] * SIZES[case["case"][:4]] * passes.get(op, 3),
        {
            "forward": (forward,),
            "backward": (backward,),
            "forward + backward": (forward, "cross_entropy.cross_entropy_mean [", "ones_like(", backward),
            "PyTorch, eager": theirs,
            "PyTorch, compiled": theirs,
        },
        "case", {name: name for name in names},
        hidden=lambda case: {"wide": "_to_copy(" * (case["case"][:4] == "bf16")},
    )  # fmt: skip


def of_embedding() -> Benchmark:
    listed = ((8192, 50304, 2048), (65536, 50304, 2048), (8192, 128256, 4096))
    names = {f"{tokens} tokens, {rows:,} rows of {width}": (tokens, rows, width) for tokens, rows, width in listed}

    def moved(op: str, case: Row) -> int:
        tokens, rows, width = names[case["case"]]
        return 2 * width * (tokens + (tokens if "forward" in op else rows))

    sorts = ("clamp(", "sort(", "arange(", "searchsorted(")
    return Benchmark(
        embedding, 4, 11, [{"case": name} for name in names], moved,
        {
            "forward": ("embedding.embedding [",),
            "forward, PyTorch": ("embedding(",),
            "backward": (*sorts, "embedding.embedding_chunks [", "embedding.embedding_backward ["),
            "backward, PyTorch": (r"embedding_dense_backward\(.+, -1, False\)",),
        },
        "case", {name: name for name in names},
    )  # fmt: skip


BENCHMARKS = {one.__name__.removeprefix("of_"): one for one in (of_casts, of_norms, of_activations, of_cross_entropy,
                                                               of_embedding)}  # fmt: skip


def summary(samples: list[float], calls: int) -> dict[str, float]:
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    return {"median": statistics.median(samples) / calls, "p10": tenths[0] / calls, "p90": tenths[8] / calls}


def measured(found: Row, timed: Round, op: str, size: int, calls: int) -> None:
    """`found` is what these times mean for an op that moves `size` bytes."""
    assert found["ms"] == pytest.approx(summary(timed.samples[op], calls))
    seconds, copy = found["ms"]["median"] / 1e3, statistics.median(timed.samples["large copy"]) / 1e3
    same = statistics.median(timed.samples[f"copy {size}"])
    assert found["terabytes_per_second"] == pytest.approx(size / seconds / 1e12)
    assert found["copy_terabytes_per_second"] == pytest.approx(2 * 512 * MIB / copy / 1e12)
    assert found["of_copy"] == pytest.approx(size / seconds / (1024 * MIB / copy))
    assert found["of_copy_of_as_many_bytes"] == pytest.approx(same / statistics.median(timed.samples[op]))
    assert len(found) == 5


def is_fair(timed: Round, calls: int, repeats: int) -> None:
    """Warmed up, in turn, with what is in L2 flushed; the copies move what they are called by."""
    assert (timed.repeats, timed.flush, timed.ahead) == (repeats, True, False)
    assert timed.warmup >= 2
    for name, (first, *rest) in timed.noted.items():
        if name == "large copy":
            assert re.match(r"copy_\(bf16\[268435456\]", first)
            continue
        assert first == f"graph of {calls}"
        if name.startswith("copy "):
            pattern = rf"copy_\(bf16\[{int(name.split()[1]) // 4}\]&.+, bf16\[{int(name.split()[1]) // 4}\]&"
            assert len(rest) == calls
            assert all(re.match(pattern, line) for line in rest), name


def launches(wanted: Benchmark, case: Row, op: str, lines: list[str]) -> Iterator[str]:
    """The first argument of each call."""
    patterns = []
    for one in filter(None, (one.format(**wanted.hidden(case)) for one in wanted.launched[op])):
        kernel, bracket, macros = one.partition("[")
        kernel = kernel.replace("(", r"\(") if not bracket and kernel.endswith("(") else kernel
        patterns.append(kernel + r"\[.*" * bool(bracket) + ".*".join(map(re.escape, macros.strip().split(" "))))
    assert len(lines) == len(patterns) * wanted.calls, (op, lines)
    for i, line in enumerate(lines):
        assert re.match(patterns[i % len(patterns)], line), (patterns[i % len(patterns)], line)
        if r"\[" in patterns[i % len(patterns)]:  # a kernel of ours: no tensor stands for two
            given = re.findall(r"&\d+", line)
            assert len(given) == len(set(given)), line
        if i % len(patterns) == 0:
            address = re.search(r"&\d+", line)
            assert address is not None
            yield address[0]


def shares(rows: list[Row]) -> str:
    """A cell of a table."""
    least = min(row["of_copy"] for row in rows), min(row["of_copy_of_as_many_bytes"] for row in rows)
    median = statistics.median(row["of_copy"] for row in rows)
    return f"{100 * median:.0f} % ({100 * least[0]:.0f} %; {100 * least[1]:.0f} %)"


def run(module: Any) -> tuple[Row, DryBench, list[float]]:
    """A payload that a file can hold; its kernels are all that were launched."""
    told: list[float] = []
    with DryBench() as bench, mock.patch.object(torch, "_fused_sgd_", return_value=None):
        payload = module.run(told.append)
    assert json.loads(json.dumps(payload)) == payload
    is_what_was_recorded(module.NAME, payload)
    assert payload["what"]
    assert payload["provenance"]["date"].startswith("2026-01-02")
    assert told[-1] == 1.0
    assert told == sorted(told)
    return payload, bench, told


@pytest.mark.parametrize("name", BENCHMARKS)
def test_bandwidth_beside_copies(name: str) -> None:
    wanted = BENCHMARKS[name]()
    payload, bench, told = run(wanted.module)
    assert {one.kernel.kernel for one in bench.gpu.launches} <= payload["provenance"]["kernels"].keys()
    assert payload["provenance"]["kernels"].keys() == set(wanted.module.KERNELS)
    assert (payload["calls_per_sample"], payload["repeats"]) == (wanted.calls, wanted.repeats)
    assert told == [(i + 1) / len(wanted.cases) for i in range(len(wanted.cases))]
    rows = iter(payload["rows"])
    for case, timed in zip(wanted.cases, bench.rounds, strict=False):
        is_fair(timed, wanted.calls, wanted.repeats)
        sizes = {op: wanted.moved(op, case) for op in wanted.launched}
        assert set(timed.samples) == {*sizes, *(f"copy {size}" for size in sizes.values()), "large copy"}
        for op, size in sizes.items():
            row = next(rows)
            found = {key: row.pop(key) for key in ("op", *case)}
            assert found == {"op": op, **case}
            measured(row, timed, op, size, wanted.calls)
            row |= found
            inputs = list(launches(wanted, case, op, timed.noted[op][1:]))
            if wanted.input_bytes is not None:
                count = max(wanted.least, min(wanted.calls, -(-256 * MIB // wanted.input_bytes(case))))
                assert len(set(inputs)) == min(count, wanted.calls), "what was read last is not in L2"
                assert inputs == (inputs[:count] * wanted.calls)[: wanted.calls]
    assert next(rows, None) is None
    table = wanted.module.tables(payload)[0]
    of = {
        (op, column): shares([row for row in payload["rows"] if (row["op"], row[wanted.column]) == (op, column)])
        for op in wanted.launched
        for column in wanted.columns
    }
    cells = [(op.replace("_", " "), *(of[op, column] for column in wanted.columns)) for op in wanted.launched]
    is_table(table, ("kernel", *wanted.columns.values()), cells)


def test_weights_of_a_layer_are_cast_one_by_one_and_in_one_launch() -> None:
    payload, bench, _ = run(cast)
    rounds, rows = bench.rounds[12:], payload["weights_of_a_layer"]
    wanted = [(4096, "bfloat16", 2), (4096, "float32", 4), (1024, "bfloat16", 2), (1024, "float32", 4)]
    cells = []
    for (hidden, dtype, size), timed, row in zip(wanted, rounds, rows, strict=True):
        assert (row["hidden"], row["dtype"], len(row)) == (hidden, dtype, 4)
        is_fair(timed, 8, 20)
        shapes = [(3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)]
        moved = sum(a * b for a, b in shapes) * (size + 2)  # codes, and transposed codes
        assert set(timed.samples) == {"cast_transpose", "multi", f"copy {moved}", "large copy"}
        for op in ("cast_transpose", "multi"):
            measured(row[op], timed, op, moved, 8)
        apart, together = (timed.noted[op][1:] for op in ("cast_transpose", "multi"))
        assert len(apart) == 4 * 8
        assert [tuple(map(int, line.rstrip(")").split(", ")[-2:])) for line in apart] == shapes * 8
        assert len(together) == 8
        tensors = re.findall(r"\{x=(&\d+) .*?rows=(\d+) cols=(\d+)", together[0])
        assert [(int(a), int(b)) for _, a, b in tensors] == shapes
        layers = max(2, min(8, -(-256 * MIB // (moved // (size + 2) * size))))
        found = [re.findall(r"\{x=(&\d+)", line) for line in together]
        assert found == [found[i % layers] for i in range(8)]
        assert len({one for line in found for one in line}) == 4 * layers
        speeds = (f"{1e3 * row[op]['ms']['median']:.1f} ({100 * row[op]['of_copy']:.0f} %)" for op in row if "_" in op
                  or op == "multi")  # fmt: skip
        cells.append((str(hidden), dtype, *speeds))
    table = cast.tables(payload)[1]
    assert len(table.columns) == 4
    is_table(table, table.columns, cells)


# Bytes for each parameter that must move: gradients are read, all else is read and written.
MOMENTS, MASTERED = 4 * 4, 2 + 4 + 4 + 2  # fp32 moments; a bf16 gradient, an fp32 master, its bf16 copy
OPTIMIZERS = {
    "FusedAdam, fp32": (MOMENTS + 12, "adam.adam"),
    "torch.optim.AdamW(fused=True), fp32": (MOMENTS + 12, "_fused_adamw_"),
    "FusedAdam, bf16": (MOMENTS + 6, "adam.adam"),
    "FusedAdam, bf16, fp32 masters": (MOMENTS + MASTERED, "adam.adam"),
    "FusedAdam, FP8 weights, fp32 masters": (32, "multi_cast_transpose"),
    "… capturable": (MOMENTS + MASTERED, "adam_control"),
    "… remainders as masters": (MOMENTS + 10, "adam_states.adam_states"),
    "… moments in bf16": (8 + MASTERED, "adam_states.adam_states"),
    "… moments in fp16": (8 + MASTERED + 6, "adam_states.adam_states_scales"),
    "… moments in FP8": (4 + MASTERED + 4, "adam_states.adam_states_scales"),
    "… moments in FP8, masters in fp16": (18, "adam_states.adam_states_scales"),
    "FusedSGD with momentum, fp32": (20, "sgd.sgd"),
    "torch.optim.SGD(fused=True), fp32": (20, None),
    "FusedSGD with momentum, bf16": (10, "sgd.sgd"),
    "Adafactor, fp32": (24, "adafactor."),
    "torch.optim.Adafactor, fp32": (24, "lerp"),
    "clip_grad_norm_, bf16": (6, "clip_grads"),
    "torch.nn.utils.clip_grad_norm_, bf16": (6, "mul_(bf16[16384]"),
}


def test_optimizer_steps() -> None:
    payload, bench, _ = run(adam)
    (timed,) = bench.rounds
    launched = {one.kernel.kernel for one in bench.gpu.launches} - {"cast"}  # which draws its FP8 weights
    assert launched <= payload["provenance"]["kernels"].keys() == set(adam.KERNELS)
    numbers = 12 * 4096**2 + 9 * 4096  # weights of a layer, and biases
    assert (payload["numbers"], payload["repeats"]) == (numbers, 15)
    assert (timed.repeats, timed.flush, timed.ahead) == (15, True, False)
    assert timed.warmup >= 3
    assert list(timed.samples) == [*OPTIMIZERS, "copy"]
    copy = statistics.median(timed.samples["copy"])
    cells = []
    for row, (name, (size, noted)) in zip(payload["rows"], OPTIMIZERS.items(), strict=True):
        ms = summary(timed.samples[name], 1)
        assert row == {
            "optimizer": name,
            "bytes_a_number": size,
            "ms": pytest.approx(ms),
            "of_copy": pytest.approx(numbers * size / ms["median"] / (1024 * MIB / copy)),
        }
        assert noted is None or any(noted in line for line in timed.noted[name]), (name, timed.noted[name][-3:])
        cells.append((name, str(size), f"{ms['median']:.2f}", f"{100 * row['of_copy']:.0f} %"))
    (table,) = adam.tables(payload)
    is_table(table, ("optimizer", "bytes a parameter", "ms", "of a copy"), cells)
    assert "201 million parameters" in table.how
