"""`optimized.bench.elementary` and what belongs to it, without a GPU.

What it launches and writes is recorded on a GPU that only takes notes (tests/golden/benchmarks/elementary.txt); facts
about numbers are found on the CPU, from functions that are right, and from some that are wrong in a known way.
"""

import contextlib
import io
import itertools
import json
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import snapshots
import torch
from dry_bench import MS_PER_NOTE, DryBench
from torch.overrides import TorchFunctionMode

from optimized import measure
from optimized.bench import elementary, elementary_digest, elementary_error, elementary_plot, elementary_table
from reference import elementary as definition

FOLDER = "benchmarks"


class OnTheCpu(TorchFunctionMode):
    """Tensors on "cuda" are on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*args, **{**(kwargs or {}), **({"device": "cpu"} if "device" in (kwargs or {}) else {})})


def right(function: str, x: torch.Tensor) -> torch.Tensor:
    """What a device function gives, by the definition."""
    if function == "reciprocal_1_2":
        return 1 / x
    if function in ("rsqrt", "rsqrt_normal"):
        return definition.rsqrt(x)
    if function == "rsqrt_refined":
        return (1 / torch.sqrt(x.double())).float()
    return torch.from_numpy(definition.evaluate(function, x.numpy()))


class FakePool:
    """In place of `ProcessPoolExecutor`: in this process."""

    def __init__(self, workers: int, mp_context: Any) -> None:
        self.workers = (workers, mp_context.get_start_method())

    def __enter__(self) -> "FakePool":
        noted.append(f"pool of {self.workers}")
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    map = staticmethod(map)


noted: list[str] = []


def built(kernel: str, defines: dict[str, Any]) -> Any:
    noted.append(f"built: {kernel} {sorted(defines.items())}")
    return types.SimpleNamespace(complaints=())


@contextlib.contextmanager
def program(folder: Path) -> Iterator[DryBench]:
    """What `main` needs: nothing is compiled, the CPU's sums are made up, and files are written elsewhere."""
    noted.clear()
    written = measure.write_result
    with DryBench() as bench, contextlib.ExitStack() as stack:
        clock = types.SimpleNamespace(perf_counter=lambda: len(bench.gpu.lines) * MS_PER_NOTE)

        def sums(name: str, threads: int) -> np.ndarray:
            bench.gpu.lines.append(f"sums of the reference: {name} by {threads}")
            found = np.ones(256, dtype=np.uint64)
            found[[3, 7, 8, 200] if name == "gelu" else []] = 0
            return found

        def errors(kind: str, name: str, apply: Callable[[torch.Tensor], Any], device: str) -> dict[str, str]:
            bench.gpu.lines.append(f"{kind} errors: {name} on {device}")
            apply(torch.empty(3, device="cuda"))
            return {"of": f"{kind} {name}"}

        def facts() -> tuple[np.ndarray, dict[str, int]]:
            return np.arange(65536, dtype=np.uint32), {"ex2": 1}

        for owner, name, value in (
            (elementary, "ProcessPoolExecutor", FakePool),
            (elementary.compiler, "build", built),
            (elementary, "os", types.SimpleNamespace(cpu_count=lambda: 64)),
            (elementary, "time", clock),
            (elementary, "track", lambda what, title: bench.gpu.lines.append(title) or what),
            (elementary, "DIGESTS", folder / "digests.npz"),
            (elementary, "grid_facts", facts),
            (definition, "TABLES", folder / "tables.npz"),
            (elementary_error, "fp32_errors", partial(errors, "fp32")),
            (elementary_error, "activation_errors", partial(errors, "activation")),
            (elementary_digest, "reference_digest", sums),
            (elementary_digest, "first_differences", lambda name, index: [f"{name} {index}", "and more"]),
            (measure, "write_result", lambda name, payload: written(name, payload, folder)),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield bench


def arrays(path: Path) -> list[str]:
    with np.load(path) as found:
        return [f"{path.name} {name}: {array.dtype} {array.shape}" for name, array in found.items()]


def run_of_main(folder: Path) -> snapshots.Sections:
    """`main --record`, and what it wrote."""
    with (
        program(folder) as bench,
        mock.patch.object(sys, "argv", ["elementary", "--record"]),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        elementary.main()
    files = [line for name in ("tables.npz", "digests.npz") for line in arrays(folder / name)]
    payload = json.loads((folder / "elementary.json").read_text("utf-8"))
    return {
        "payload": (snapshots.payload_lines(payload, 3), 130),
        "files": (files, 20),
        "printed": (printed.getvalue().splitlines(), 60),
        "built": (noted, 20),
        "notes": (snapshots.repeats(bench.gpu.lines), 60),
    }


def run() -> snapshots.Sections:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return run_of_main(Path(folder))


RUNS: dict[str, Callable[[], snapshots.Sections]] = {"elementary": run}


def test_the_program_measures_what_is_recorded(tmp_path: Path) -> None:
    snapshots.check(FOLDER, "elementary", run_of_main(tmp_path))


def test_nothing_is_recorded_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["elementary"])
    with program(tmp_path):
        elementary.main()
    assert [path.name for path in tmp_path.iterdir()] == ["elementary.json"]


def test_a_complaint_of_ptxas_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementary, "ProcessPoolExecutor", FakePool)
    monkeypatch.setattr(elementary.compiler, "build", lambda *_: types.SimpleNamespace(complaints=("a spill",)))
    with pytest.raises(RuntimeError, match=r"^\('elementary_bench', .*: ptxas says \['a spill'\]\.$"):
        elementary.build_all()


def test_an_epilogue_with_other_words_ends_it() -> None:
    h, codes = "gemm_fp8: the GEMM's bf16 words are not", "identity: the epilogue's FP8 codes are not"
    for wrong, sentence in ((torch.int16, h), (torch.uint8, codes)):
        with (
            DryBench(),
            mock.patch.object(torch, "equal", lambda a, b, wrong=wrong: a.dtype != wrong),
            pytest.raises(RuntimeError, match=f"^{sentence} "),
        ):
            elementary.gemm_variants()


def ex2(function: str, x: torch.Tensor, wrong_above: float = 1e9) -> torch.Tensor:
    """2^x to the nearest, as a GPU flushes it; one word too many above some x."""
    assert function == "ex2_approx"
    y = torch.exp2(x.double()).float()
    y = torch.where(x < -126, 0.0, y)
    return torch.where(x > wrong_above, (y.view(torch.int32) + 1).view(torch.float32), y)


def test_the_grid_of_ex2() -> None:
    with OnTheCpu(), mock.patch.object(elementary_digest, "apply", ex2):
        period, facts = elementary.grid_facts()
    j = np.arange(32768) / 32768
    assert np.array_equal(period, np.tile(np.exp2(j).astype(np.float32).view(np.uint32), 2))
    assert facts == {
        "ex2_grid_words": 256 * 32768,
        "ex2_grid_words_that_differ": 0,
        "ex2_words_not_nearest_above_0": 0,
        "ex2_words_not_nearest_below_0": 0,
        "ex2_largest_error_in_words": 0,
    }


def test_the_grid_of_ex2_with_a_period_that_is_another(capsys: pytest.CaptureFixture[str]) -> None:
    above = 1 - 4.5 / 32768  # the last four words of the period on [0, 1), and everything behind it
    with OnTheCpu(), mock.patch.object(elementary_digest, "apply", partial(ex2, wrong_above=above)):
        period, facts = elementary.grid_facts()
    assert facts["ex2_words_not_nearest_above_0"] == 4
    assert facts["ex2_words_not_nearest_below_0"] == 0
    assert facts["ex2_largest_error_in_words"] == 1
    assert facts["ex2_grid_words_that_differ"] == 127 * (32768 - 4) + 32768  # and behind infinity is NaN
    assert period[32767] == period[65535] + 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("ex2.approx is not periodic, first at tensor([1.0000, 1.0000, 1.0001, 1.0001])")
    assert printed[1] == str({**dict.fromkeys(range(1, 128), 32764), 128: 32768})


@pytest.mark.parametrize("wrong", [0, 3])
def test_the_reciprocal(wrong: int) -> None:
    def apply(function: str, x: torch.Tensor) -> torch.Tensor:
        y = right(function, x)
        y[:wrong] += 1
        return y

    with OnTheCpu(), mock.patch.object(elementary_digest, "apply", apply):
        facts = elementary.reciprocal_facts()
    assert facts == {"reciprocal_words": (1 << 23) + 1, "reciprocal_words_that_differ": wrong}


def test_rsqrt_over_some_words() -> None:
    """The loop's blocks are all of the positive normal words; counted is what differs, in each."""

    def apply(function: str, x: torch.Tensor) -> torch.Tensor:
        y = right(function, x)
        if function == "rsqrt_normal":
            y[0] = 0
        if function == "rsqrt_refined":
            y[:2] = 0
        return y

    spans = []

    def arange(start: int, stop: int, **options: Any) -> torch.Tensor:
        spans.append((start, stop))
        return real(start, start + 8, **options)

    real = torch.arange
    with OnTheCpu(), mock.patch.object(elementary_digest, "apply", apply), mock.patch.object(torch, "arange", arange):
        facts = elementary.rsqrt_facts()
    assert spans[0][0] == 0x00800000
    assert spans[-1][1] == 0x7F800000
    assert all(one[1] == other[0] for one, other in itertools.pairwise(spans))
    assert facts == {
        "rsqrt_normal_words": 8 * len(spans),
        "rsqrt_normal_words_that_differ": len(spans),
        "rsqrt_refined_words_not_nearest": 2 * len(spans),
    }


def test_tables_that_are_recorded_anew_are_those_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, period = definition._recorded(), definition._recorded()["exp2"]
    functions = {name: getattr(definition, name) for name in definition.ACTIVATIONS}

    def apply(name: str, x: torch.Tensor) -> torch.Tensor:
        half = torch.bfloat16 if len(calls) % 2 == 0 else torch.float16
        calls.append(name)
        return functions[name](x.to(half))

    calls: list[str] = []
    monkeypatch.setattr(definition, "TABLES", tmp_path / "tables.npz")
    with OnTheCpu(), mock.patch.object(elementary_digest, "apply", apply):
        elementary.record(period, {"of": "the day"})
    with np.load(tmp_path / "tables.npz") as found:
        assert json.loads(str(found["provenance"])) == {"of": "the day"}
        for name in found:
            if name != "provenance":
                assert np.array_equal(found[name], there[name]), name
        assert set(found) == set(there) | {"provenance"}


def splitmix64(z: int) -> int:
    """Its finaliser, in Python's integers."""
    mask = (1 << 64) - 1
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_the_sum_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementary_digest, "_WORDS", 64)
    monkeypatch.setattr(elementary_digest, "_CHUNK", 16)
    seen: list[str] = []

    def evaluate(name: str, x: np.ndarray) -> np.ndarray:
        seen.append(name)
        words = x.view(np.uint32) * np.uint32(0x01234567)
        words[:3] = [0x7F800001, 0xFFC12345, 0x7F800000]  # NaN, NaN, infinity
        return words.view(np.float32)

    expected = 0
    for start in range(5 * 64, 6 * 64, 16):
        for i, word in enumerate(range(start, start + 16)):
            result = (0x7FC00000, 0x7FC00000, 0x7F800000)[i] if i < 3 else word * 0x01234567 % (1 << 32)
            expected += splitmix64(word << 32 | result)
    assert elementary_digest.block("silu", 5, evaluate) == expected % (1 << 64)
    assert seen == ["silu"] * 4
    identity: Callable[[str, np.ndarray], np.ndarray] = lambda name, x: x  # noqa: E731
    monkeypatch.setattr(definition, "evaluate", identity)
    assert elementary_digest.block("exp", 1) == sum(splitmix64(i << 32 | i) for i in range(64, 128)) % (1 << 64)
    all_of_them = elementary_digest.reference_digest("exp", 2)
    assert all_of_them.dtype == np.uint64
    assert all_of_them.tolist() == [elementary_digest.block("exp", i) for i in range(256)]


def test_where_the_gpu_differs_from_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementary_digest, "_WORDS", 8)

    def wrong(function: str, x: torch.Tensor) -> torch.Tensor:
        y = right("gelu", x)
        y[[1, 3, 4, 5, 6, 7]] = torch.tensor([1.0, -2.0, float("nan"), 4.0, 5.0, 6.0])
        return y

    monkeypatch.setattr(elementary_digest, "apply", wrong)
    with OnTheCpu():
        found = elementary_digest.first_differences("gelu", 2)
        assert len(elementary_digest.first_differences("gelu", 2, 9)) == 6
        nan = elementary_digest.first_differences("gelu", 0x7FC00000 // 8)
    assert len(found) == 4
    y = definition.evaluate("gelu", np.array([17], dtype=np.uint32).view(np.float32)).view(np.uint32)[0]
    assert found[0] == f"gelu(0x00000011 = 2.38221e-44): reference 0x{y:08X}, H200 0x3F800000"
    assert found[2].endswith("H200 0x7FC00000")
    assert [line[:15] for line in nan] == [f"gelu(0x7FC0000{i}" for i in (1, 3, 5, 6)]  # at 4 both are NaN


def test_errors_over_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some words of each block of exp's and rsqrt's range, and two of 1.5 ulp in the last block but one."""
    spans: list[tuple[int, int]] = []

    def arange(start: int, stop: int, **options: Any) -> torch.Tensor:
        spans.append((start, stop))
        return real(start, stop, 65536 * 16, **options)

    def shifted(name: str, x: torch.Tensor) -> torch.Tensor:
        y = elementary_error.truth(name, x.double()).float()
        return torch.nextafter(y, torch.full_like(y, 1e30)) if len(spans) == at else y

    real, at = torch.arange, 5
    monkeypatch.setattr(elementary_error.torch, "arange", arange)
    for name, first, last in (("exp", 0x80000000, 0xC2AEAC50), ("rsqrt", 0x00800000, 0x7F7FFFFF)):
        spans.clear()
        found: Any = elementary_error.fp32_errors(name, partial(shifted, name), "cpu")
        assert spans[0][0] == first
        assert spans[-1][1] == last + 1
        assert all(one[1] == other[0] for one, other in itertools.pairwise(spans))
        assert {stop - start for start, stop in spans[:-1]} == {1 << 26}
        assert found["words"] == sum(-(-(stop - start) // (65536 * 16)) for start, stop in spans)
        assert 0.5 < found["max_ulp"] < 1.6
        assert 0.0 < found["mean_ulp"] < 0.4
        assert 2.0**-24 < found["max_relative"] < 2.0**-22
        words = np.array([found["worst_at"]], dtype=np.float32).view(np.uint32)
        assert spans[at - 1][0] <= words[0] < spans[at - 1][1]


def test_errors_of_what_is_nearest() -> None:
    found: Any = elementary_error.activation_errors(
        "silu", lambda x: elementary_error.truth("silu", x.double()).float(), "cpu"
    )
    for kind, count in (("bf16", 65536 - 2 * 128), ("fp16", 65536 - 2 * 1024)):
        assert found[kind]["words"] == count
        assert found[kind]["max_ulp_substantial"] <= 0.5
        assert found[kind]["words_of_dtype_that_differ"] == 0
        assert found[kind]["e4m3_codes_that_differ"] == [0] * 4
        assert found[kind]["not_finite"] == 0


def error_lines(name: str) -> list[str]:
    """Errors of an approximation in fp32: the same formula, each operation rounded."""

    def approximate(x: torch.Tensor) -> torch.Tensor:
        y = elementary_error.truth(name, x.double()).float() * (1 + 2.0**-20)
        return torch.where(x == 1, torch.inf, y + 2.0**-18)

    return snapshots.payload_lines(elementary_error.activation_errors(name, approximate, "cpu"))


def made_up() -> dict[str, Any]:
    """A result like docs/results/elementary.json, each number from its place."""
    at = iter(range(1, 10000))
    errors: dict[str, Any] = {}
    for name, candidates in elementary_error.CANDIDATES.items():
        for candidate in candidates:
            i = next(at)
            if name in ("exp", "rsqrt"):
                errors[candidate] = {"max_ulp": 0.7 * i, "mean_ulp": 0.31 * i, "max_relative": 1e-8 * i}
                continue
            errors[candidate] = {
                kind: {
                    "max_ulp_substantial": 1.7 * i * sign,
                    "mean_ulp_substantial": 0.13 * i / sign,
                    "max_absolute": 3e-7 * i * sign,
                    "e4m3_codes_that_differ": [i, 2 * i, 3, 4],
                }
                for kind, sign in (("bf16", 1.0), ("fp16", 1.5))
            }
    outs = [f"{name} {out}" for name in ("identity", *errors) for out in ("bf16", "e4m3")]
    return {
        "errors": errors,
        "stream": {"times": {name: {"median": 1 + next(at) / 100} for name in outs}},
        "gemm": {"times": {name: {"median": 1 + next(at) / 200} for name in ("plain", *elementary.IN_GEMM)}},
        "scheduler_cycles_per_warp": {name: 3 + next(at) / 10 for name in errors},
    }


def run_of_pages() -> snapshots.Sections:
    """The page's tables and the plot."""
    from test_benchmarks_dry import drawn

    with mock.patch.object(elementary_table, "instructions", lambda function: ("1", f"of {function}")):
        table = elementary_table.markdown(made_up()).splitlines()
    payload = made_up()
    payload["gemm"]["times"]["identity"] = {"median": 1.25}
    with mock.patch.object(measure, "read_result", return_value=payload):
        plot = drawn(elementary_plot.main)
    errors = [line for name in ("gelu", "dgelu", "silu", "dsilu") for line in error_lines(name)]
    return {"table": (table, 60), "errors": (errors, 20), "plot": plot}


RUNS["elementary_pages"] = run_of_pages


def test_the_pages_show_what_is_recorded() -> None:
    snapshots.check(FOLDER, "elementary_pages", run_of_pages())


def test_the_page_is_changed_between_its_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{elementary_table.MARKS[0]}\nold\n{elementary_table.MARKS[1]}\nbehind\n", "utf-8")
    monkeypatch.setattr(elementary_table, "PAGE", page)
    monkeypatch.setattr(elementary_table, "markdown", lambda result: f"table of {result}")
    monkeypatch.setattr(measure, "read_result", lambda name: name)
    elementary_table.main()
    marks = elementary_table.MARKS
    assert page.read_text("utf-8") == f"before\n{marks[0]}\ntable of elementary\n{marks[1]}\nbehind\n"


@pytest.mark.parametrize(
    ("function", "kind"),
    [("silu_tanh", "tanh"), ("exp", "grid"), ("gelu_grid15", "grid"), ("dgelu_f32", "grid"), ("exp_fast", "fast"),
     ("exp_poly6", "operations"), ("rsqrt_newton", "operations"), ("gelu_ieee", "operations"), ("gelu", "fast")],
)  # fmt: skip
def test_the_kind_of_a_candidate(function: str, kind: str) -> None:
    assert elementary_plot.kind(function) == kind
