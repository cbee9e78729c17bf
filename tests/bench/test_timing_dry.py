"""How times are taken, with events and a clock that count what is noted."""

import itertools
import math
import re
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from shared.dry_bench import MS_PER_NOTE, DryBench, samples

from optimized import measure
from optimized.bench import memory_bound
from optimized.bench.kernels import activation, adam, cast, gemm, gemm_equality, norm
from optimized.bench.layers import ladder, layer, layer_models, tutorial_layers
from optimized.cuda import compiler

REAL = {"interleave": measure.interleave, "graph": measure.graph, "timed": layer.timed}


@pytest.fixture
def bench() -> Iterator[DryBench]:
    with DryBench() as found:
        yield found


def notes(bench: DryBench, name: str, count: int = 1) -> Callable[..., None]:
    return lambda *_: bench.gpu.lines.extend([name] * count)


@pytest.mark.parametrize("ahead", [False, True])
def test_interleave(bench: DryBench, ahead: bool) -> None:
    """Warm-ups, then rounds in which each variant is timed once, after an untimed flush."""
    variants = {"a": notes(bench, "a"), "b": notes(bench, "b", 3)}
    found = REAL["interleave"](variants, repeats=4, warmup=2, flush=notes(bench, "flush"), ahead=ahead)
    half = MS_PER_NOTE / 2  # what the event itself takes
    assert found == {"a": [MS_PER_NOTE + half] * 4, "b": [3 * MS_PER_NOTE + half] * 4}
    lines = bench.gpu.lines
    assert lines[:8] == ["a", *["b"] * 3] * 2
    assert lines[8:10] == ["synchronize", *(["sleep 4194304"] if ahead else ["flush"])]
    timed = [line for line, _ in itertools.groupby(lines[9 + ahead : -1])]
    assert timed[::2] == ["flush"] * 8
    assert timed[1::2] == [name for order in measure.rounds(variants, 4) for name in order]
    assert lines[-1] == "synchronize"


def test_interleave_sleeps_longer_until_the_host_is_ahead(bench: DryBench) -> None:
    with mock.patch.object(torch.cuda.Event, "query", side_effect=[True, True, False]):
        REAL["interleave"]({"a": notes(bench, "a")}, repeats=1, warmup=0, ahead=True)
    assert [line for line in bench.gpu.lines if "sleep" in line] == [f"sleep {1 << n}" for n in (22, 23, 24)]
    with (
        mock.patch.object(torch.cuda.Event, "query", return_value=True),
        pytest.raises(RuntimeError, match=r"^repeats=1: the host is behind a GPU that sleeps for 268435456 cycles; "),
    ):
        REAL["interleave"]({"a": notes(bench, "a")}, repeats=1, ahead=True)


def test_a_graph_is_captured_once_and_replayed(bench: DryBench) -> None:
    class Graph:
        replay = staticmethod(notes(bench, "replay"))

    called: list[int] = []
    captured = mock.MagicMock()
    with mock.patch.object(torch.cuda, "CUDAGraph", Graph), mock.patch.object(torch.cuda, "graph", captured):
        replay = REAL["graph"](called.append, 3)
        assert called == [0, 0, 1, 2]  # one call loads modules
        assert replay() == called.append
        replay()
    assert captured.call_count == 1
    assert bench.gpu.lines == ["synchronize", "replay", "replay"]


@pytest.mark.parametrize(("size", "calls", "pairs"), [(1 << 20, 4, 4), (1 << 28, 4, 2), (3 << 28, 4, 1)])
def test_a_copy_of_as_many_bytes(bench: DryBench, size: int, calls: int, pairs: int) -> None:
    measure.copy_of(size, calls)()
    lines = bench.gpu.lines
    assert sum(line.startswith("normal_") for line in lines) == pairs
    copies_made = [re.sub(r"&\d+(\+\d+)?", "", line) for line in lines[-calls:]]  # without addresses
    assert copies_made == [f"copy_(bf16[{size // 4}], bf16[{size // 4}]) -> bf16[{size // 4}]"] * calls


def test_a_flush_reads_its_buffer(bench: DryBench) -> None:
    measure.Flush(1 << 10)()
    assert bench.gpu.lines[-1].startswith("amax(int32[256]")


def test_how_many_inputs_exceed_l2(bench: DryBench) -> None:
    four = memory_bound.Copies(4, 5)
    assert [four.inputs(size) for size in (1, 64 << 20, (64 << 20) + 1, 128 << 20, 1 << 30)] == [4, 4, 4, 2, 1]
    assert four.inputs(1 << 30, least=3) == 3


def test_a_share_is_a_bandwidth_over_the_copys(bench: DryBench) -> None:
    """4 calls in 2 ms that move 1 GB each; the large copy moves 2^30 bytes in 1 ms, a copy of as many bytes takes 3."""
    times = {"op": 2.0, "large copy": 1.0, f"copy {10**9}": 3.0}
    with mock.patch.object(measure, "interleave", lambda timed, **_: {name: [times[name]] * 3 for name in timed}):
        found = memory_bound.Copies(4, 3).beside({"op": lambda i: None}, {"op": 10**9})
    (one,) = found.values()
    assert one["ms"]["median"] == 0.5
    assert one["terabytes_per_second"] == pytest.approx(2.0)
    assert one["copy_terabytes_per_second"] == pytest.approx(2**30 / 1e9)
    assert one["of_copy"] == pytest.approx(2e12 / (2**30 / 1e-3))
    assert one["of_copy_of_as_many_bytes"] == 1.5


def test_blocks_in_turn(bench: DryBench) -> None:
    """One round is not counted, and of each block the first steps."""
    asked: list[tuple[str, int]] = []

    def block(name: str, each: int) -> Callable[[int], None]:
        def steps(count: int) -> None:
            asked.append((name, count))
            bench.gpu.lines.extend([name] * (count * each if len(asked) > 4 else 1000))

        return steps

    found = REAL["timed"]({"a": block("a", 1), "b": block("b", 2)}, repeats=3, inner=8, before=4)
    assert asked == [(name, n) for order in measure.rounds("ab", 4) for name in order for n in (4, 8)]
    step = {"a": 8 * MS_PER_NOTE, "b": 16 * MS_PER_NOTE}
    for name, times in found.items():  # the synchronisation after it is noted too
        assert times == pytest.approx([(step[name] + MS_PER_NOTE) / 8] * 3)


def test_sustained_blocks(bench: DryBench) -> None:
    """0.15 s a block, ten calls at least; five calls before are not counted. Three blocks each, in turn."""
    calls = {"short": notes(bench, "short"), "long": notes(bench, "long")}
    found = gemm.sustained(calls, {"short": 1.0, "long": 50.0})
    runs = [(line, len(list(same))) for line, same in itertools.groupby(bench.gpu.lines)]
    assert runs == [("short", 155), ("synchronize", 1), ("long", 15), ("synchronize", 1)] * 3
    assert found["short"] == pytest.approx(MS_PER_NOTE * (150 + 0.5) / 150)
    assert found["long"] == pytest.approx(MS_PER_NOTE * (10 + 0.5) / 10)


def test_the_geometric_mean_of_products() -> None:
    rows = [
        {"kind": kind, "speed_over_theirs": {"median": speed}} for kind, speed in (("b", 2.0), ("a", 3.0), ("b", 8.0))
    ]
    assert gemm.geometric_means(rows) == {"a": pytest.approx(3.0), "b": pytest.approx(4.0)}
    assert gemm.geometric_means(rows, "best") == {}


def test_words_that_differ() -> None:
    a = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    assert gemm_equality.differing(a, a.clone()) == 0
    assert gemm_equality.differing(a, torch.tensor([[-0.0, 1.0], [2.0, 4.0]])) == 2


@pytest.mark.parametrize("pieces", [1, 2, 3, 64])
def test_a_split_of_k_is_found(bench: DryBench, pieces: int) -> None:
    """Theirs, as it were: what ours gives for `pieces` pieces."""
    seen: list[list[int]] = []

    def product(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen[-1].append(a.shape[1])
        assert a.shape[1] == b.shape[1]
        return torch.zeros(1, device="meta")

    def differing(total: torch.Tensor, theirs: torch.Tensor) -> int:
        found = len(seen[-1])
        seen.append([])
        return int(found != pieces)

    seen.append([])
    with (
        mock.patch.object(gemm_equality, "twin", types.SimpleNamespace(gemm_fp8=product)),
        mock.patch.object(gemm_equality, "differing", differing),
    ):
        a, b = (torch.empty(rows, 8192 + 64, dtype=torch.uint8, device="cuda") for rows in (3, 4))
        found = gemm_equality.split_k(a, b, "split", torch.empty(1, device="cuda"))
    step = 128 * -(-65 // pieces)
    if pieces in (1, 64):  # one piece is no split; 64 of 65 blocks of 128 are 33 pieces of two
        assert found is None
        assert len(seen) == 64  # 2 to 64 pieces
        return
    assert found == f"cuBLASLt splits K into {pieces} pieces of {step} and adds them in fp32, in order"
    assert seen[pieces - 2] == [step] * (pieces - 1) + [8256 - step * (pieces - 1)]


@pytest.mark.parametrize("permuted", [False, True])
def test_maps_of_the_ladder_have_each_row_once(permuted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "encode", lambda *given: given)
    n, k = 96, 128
    _, _, shape, strides, box, _, _ = ladder._map(torch.empty(n, k, dtype=torch.uint8), 64, permuted)
    assert math.prod(box) == 64 * k
    places = [range(0, count * step, step) for count, step in zip(shape[1:], strides, strict=True)]
    rows = [sum(place) for place in itertools.product(*places)]
    assert sorted(rows) == list(range(0, n * k, k))


def test_rungs_of_the_ladder() -> None:
    """Their shared memory: the stages of A and B, 128 bytes of K each, and two barriers of 8 bytes a stage."""
    assert [str(rung) for rung in ladder.RUNGS] == [rung.name for rung in ladder.RUNGS]
    assert [rung.shared_bytes for rung in ladder.RUNGS] == [
        *[(64 + 128) * 128 + 16] * 2,
        4 * ((64 + 128) * 128 + 16),
        *[4 * ((128 + 256) * 128 + 16)] * 5,
    ]
    assert all(compiler.source_hash(rung.kernel) for rung in ladder.RUNGS)
    tiny = ladder.RUNGS[0]
    ladder.check(tiny, 64, 128, 128)
    for sizes, sentence in (((-64, 128, 128), "M = -64; ladder kernel 1_naive_wgmma takes positive multiples of 64."),
                            ((64, 0, 128), "N = 0; .*128.$"), ((64, 128, 64), "K = 64; .*128.$")):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{sentence}"):
            ladder.check(tiny, *sizes)


def test_transformer_engine_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_models.importlib.util, "find_spec", lambda name: None)
    assert layer_models.engine() is None
    names = []
    monkeypatch.setattr(layer_models.importlib.util, "find_spec", lambda name: names.append(name) or 1)
    monkeypatch.setattr(layer_models.importlib, "import_module", lambda name: name)
    assert layer_models.engine() == "transformer_engine.pytorch"
    assert names == ["transformer_engine"]


def test_the_plain_layer_drops_its_weights_and_its_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[int], float]] = []
    monkeypatch.setattr(tutorial_layers, "dropout", lambda x, p: seen.append((list(x.shape), p)) or x)
    tutorial_layers.BasicTransformerLayer(64, 128, 4, p=0.25)(torch.randn(16, 2, 64))
    assert seen == [([2, 4, 16, 16], 0.25), ([16, 2, 64], 0.25)]


def test_a_contestants_steps() -> None:
    """Gradients are those of the last step alone."""
    case = layer_models.Case("tiny", 8, 16, 2, 4, 2, torch.float32, True, 0.0)

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.calls = torch.nn.Parameter(torch.ones(())), 0

        def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
            self.calls += 1
            return x * self.w * factor

    module = Scaled()
    with mock.patch.object(torch, "randn", lambda shape, device, **rest: torch.ones(shape, **rest)):
        one = layer_models.Contestant("us", "exact", module, case, factor=2.0)
    assert one.title == "us / exact"
    one.block(3)
    assert module.calls == 3
    assert one.x.grad is not None
    assert one.x.grad.tolist() == torch.full((4, 2, 8), 2.0).tolist()
    assert module.w.grad is not None
    assert module.w.grad == 2 * 64
    one.step(factor=3.0)
    assert module.w.grad == 3 * 64
    one.forget()
    assert one.x.grad is module.w.grad is None


def moved(op: Callable[..., Any], *given: Any) -> int:
    """Bytes of the matrices that an op takes and gives."""
    results = op(*given)
    tensors = [*given, *(results if isinstance(results, (tuple, list)) else [results])]
    return sum(x.numel() * x.element_size() for x in tensors if isinstance(x, torch.Tensor) and x.dim() == 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_bytes_that_activations_move(kind: str, dtype: torch.dtype) -> None:
    """Counted at tensors on the CPU; scales, histories and the bias's gradient are too small to count."""
    rows, m = 16, 32
    n = m * (2 if kind == "swiglu" else 1)
    x, g = torch.randn(rows, n).to(dtype), torch.randn(rows, m).to(dtype)

    def cast(op: Any, *given: Any) -> Any:
        return lambda *matrices: op(*matrices, kind, torch.ones(1), torch.zeros(16, 1), 0, *given)

    twin = torch.ops.twin
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    found = {
        "activation": moved(lambda x: twin.activation(x, kind), x),
        "activation_backward": moved(lambda g, x: twin.activation_backward(g, x, kind), g, x),
        "activation_cast_transpose": moved(cast(twin.activation_cast_transpose, e4m3), x),
        "activation_backward_cast_transpose_dbias": moved(
            cast(twin.activation_backward_cast_transpose_dbias, e5m2), g, x
        ),
    }
    assert found == {op: activation.bytes_moved(op, rows, n, m, dtype.itemsize) for op in found}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_that_casts_move(dtype: torch.dtype) -> None:
    x, twin, rest = torch.randn(16, 32).to(dtype), torch.ops.twin, (0, torch.float8_e4m3fn)

    def state() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(3), torch.zeros(16, 3)

    found = {
        op: moved(lambda x, op=op: getattr(twin, op)(x, *state(), *rest), x)
        for op in ("cast", "cast_transpose", "cast_transpose_dbias")
    }
    found["dbias"] = moved(twin.dbias, x)
    found["amax"] = moved(lambda x: (), x)
    assert found == {op: cast.bytes_moved(op, 16, 32, dtype.itemsize) for op in found}


def test_bytes_that_norms_move() -> None:
    x, weight, twin = torch.randn(16, 32).bfloat16(), torch.ones(32).bfloat16(), torch.ops.twin
    out = twin.norm(x, weight, None, 1e-5, False, "rmsnorm", torch.bfloat16)

    def backward(g: torch.Tensor, x: torch.Tensor, *residual: torch.Tensor) -> Any:
        return twin.norm_backward(g, x, weight, *out[1:], False, "rmsnorm", residual[0] if residual else None)

    def to_fp8(x: torch.Tensor) -> Any:
        state = (torch.ones(1), torch.zeros(16, 1), 0, torch.float8_e4m3fn)
        return twin.norm_cast_transpose(x, weight, None, 1e-5, False, "rmsnorm", *state)

    found = {
        "norm": moved(lambda x: twin.norm(x, weight, None, 1e-5, False, "rmsnorm", torch.bfloat16), x),
        "norm_cast_transpose": moved(to_fp8, x),
        "norm_backward": moved(backward, x, x),
        "norm_backward + residual": moved(backward, x, x, x),
    }
    assert found == {op: size * 16 * 32 for op, size in norm.BYTES.items()}


def test_bytes_a_number_of_optimizers(bench: DryBench) -> None:
    """A gradient is read; weights, moments and masters are read and written; of FP8 weights codes are only written."""
    grad, moments, fp32 = 4, 2 * (4 + 4), 4 + 4
    found = {name: size for name, (_, size) in adam.contestants().items()}
    assert found == {
        "FusedAdam, fp32": grad + moments + fp32,
        "torch.optim.AdamW(fused=True), fp32": grad + moments + fp32,
        "FusedAdam, bf16": 2 + moments + 2 + 2,
        "FusedAdam, bf16, fp32 masters": 2 + moments + fp32 + 2,  # the weight is a rounded master: only written
        "FusedAdam, FP8 weights, fp32 masters": 2 + moments + fp32 + 4 + 1 + 1,
        "… capturable": 2 + moments + fp32 + 2,
        "… remainders as masters": 2 + moments + 2 * (2 + 2),  # 16 bits of a master beside those of the weight
        "… moments in bf16": 2 + 2 * (2 + 2) + fp32 + 2,
        # What has scales is read twice: for the largest magnitudes, then for the step.
        "… moments in fp16": 2 * 2 + 2 * (2 * 2 + 2) + fp32 + 2,
        "… moments in FP8": 2 * 2 + 2 * (2 * 1 + 1) + fp32 + 2,
        "… moments in FP8, masters in fp16": 2 * 2 + 2 * (2 * 1 + 1) + (2 * 2 + 2) + 2,
    }


def test_speeds_of_a_product(bench: DryBench) -> None:
    """2 M N K operations over the median, and the others' times over ours."""
    row = gemm.measure_one("fast", "fc1.fprop", 1024, 512, 256, 20, True)
    tflops = {side: 2 * 1024 * 512 * 256 / ms["median"] / 1e9 for side, ms in row["ms"].items()}
    assert row["tflops"] == pytest.approx(tflops, rel=1e-12)
    assert set(row["ms"]) == {"ours", "theirs", "best"}
    assert row["best"].endswith(" of 2")
    ratios = [b / a for a, b in zip(samples("1 ours", 20), samples("1 theirs", 20), strict=True)]
    assert row["speed_over_theirs"] == measure.spread(ratios)
    sustained = row["sustained_ms"]
    assert row["sustained_speed_over_best"] == sustained["best"] / sustained["ours"]
    wide = gemm.measure_one("bf16", "fc1.wgrad", 1024, 512, 256, 20, False)
    assert set(wide["ms"]) == {"ours", "theirs"}
    assert "best" not in wide
    assert "sustained_ms" not in wide
