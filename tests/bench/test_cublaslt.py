"""cuBLASLt called directly gives what torch gets from it; and what a made-up cuBLASLt is called with."""

import ctypes
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from shared.bits import assert_same_bits
from shared.dry_bench import DryBench

from optimized import measure
from optimized.bench.kernels import cublaslt
from optimized.bench.kernels.cublaslt import Product

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def product(m: int, n: int, k: int, a_format: torch.dtype, out_dtype: torch.dtype, accumulate: str) -> Product:
    a, b = (torch.randn(rows, k, device="cuda").to(dtype) for rows, dtype in ((m, a_format), (n, E4M3)))
    return Product(a, b, *(torch.full((1,), x, device="cuda") for x in (0.37, 1.7)), out_dtype, accumulate)


def torchs(p: Product) -> torch.Tensor:
    fast = p.accumulate == "fast"
    return torch._scaled_mm(p.a, p.b.t(), p.a_scale, p.b_scale, out_dtype=p.out_dtype, use_fast_accum=fast)


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", ["fast", "split"])
@pytest.mark.parametrize(("a_format", "out_dtype"), [(E4M3, torch.bfloat16), (E5M2, torch.float32)])
def test_every_algorithm_gives_torchs_words(a_format: torch.dtype, out_dtype: torch.dtype, accumulate: str) -> None:
    """On a problem with tiles for every multiprocessor, where no algorithm splits K."""
    p = product(2048, 4096, 1024, a_format, out_dtype, accumulate)
    expected, offered = torchs(p), cublaslt.algorithms(p)
    assert len(offered) >= 2
    for i, call in enumerate(offered):
        call().zero_()  # all algorithms write to one output
        assert_same_bits(call(), expected, f"algorithm {i}")


@pytest.mark.gpu
def test_the_fastest_is_one_of_them() -> None:
    p = product(256, 512, 512, E4M3, torch.bfloat16, "fast")
    call = cublaslt.fastest(p, repeats=3)
    assert_same_bits(call(), torchs(p), "the fastest")


@pytest.mark.gpu
def test_a_problem_that_cublaslt_refuses_is_an_error() -> None:
    p = product(64, 64, 64, E5M2, torch.bfloat16, "fast")
    refused = Product(p.a, p.a, p.a_scale, p.b_scale, p.out_dtype, p.accumulate)
    with pytest.raises(RuntimeError, match=r"^(cublasLtMatmulAlgoGetHeuristic returned|cuBLASLt offers no algorithm)"):
        cublaslt.algorithms(refused)


@pytest.fixture
def bench() -> Iterator[DryBench]:
    with DryBench() as found:
        yield found


def test_results_of_cublaslt_are_laid_out_as_in_its_header() -> None:
    fields = {name: getattr(cublaslt._Heuristic, name).offset for name, _ in cublaslt._Heuristic._fields_}
    assert fields == {"algorithm": 0, "workspace_bytes": 64, "state": 72, "waves": 76, "reserved": 80}
    assert ctypes.sizeof(cublaslt._Heuristic) == 96


def problem(accumulate: str = "fast") -> cublaslt.Product:
    a, b = (torch.empty(rows, 64, dtype=torch.float8_e4m3fn, device="cuda") for rows in (32, 48))
    scales = [torch.ones(1, device="cuda") for _ in range(2)]
    return cublaslt.Product(a, b, scales[0], scales[1], torch.bfloat16, accumulate)


def test_the_fastest_algorithm(bench: DryBench) -> None:
    """Of those whose state is 0: the first and the third."""
    for best in ("0", "1"):
        times = {"0": [2.0, 1.0, 3.0], "1": [2.0, 2.0, 2.0], best: [0.5, 0.5, 9.0]}
        with mock.patch.object(measure, "interleave", return_value=times) as timed:
            call = cublaslt.fastest(problem(), repeats=3)
        assert timed.call_args.kwargs == {"repeats": 3, "warmup": 2}
        assert list(timed.call_args.args[0]) == ["0", "1"]
        bench.gpu.lines.clear()
        assert call().shape == (32, 48)
        (line,) = bench.gpu.lines
        assert f"[{100 + 2 * int(best)}, 0, 0, 0, 0, 0, 0, 0]" in line


def test_calls_of_cublaslt(bench: DryBench) -> None:
    """Theirs is column-major: our b is its A, so that scales and layouts change places."""
    p = problem("split")
    (call, _) = cublaslt.algorithms(p)
    addresses = [bench.gpu._value(x.data_ptr()) for x in (p.a, p.b, p.a_scale, p.b_scale, call())]
    a, b, a_scale, b_scale, out = addresses
    workspace = bench.gpu._value(cublaslt._workspace().data_ptr())
    text = "\n".join(bench.gpu.lines)
    handles = {line.split("(")[0]: 0 for line in bench.gpu.lines}
    assert f"SetAttribute(4097, 17, &{b_scale}, 8)" in text
    assert f"SetAttribute(4097, 18, &{a_scale}, 8)" in text
    assert "SetAttribute(4097, 25, &0, 1)" in text
    assert "MatrixLayoutCreate(&0, 28, 64, 32, 64)" in text
    assert "MatrixLayoutCreate(&0, 28, 64, 48, 64)" in text
    assert "MatrixLayoutCreate(&0, 14, 48, 32, 48)" in text
    assert "cublasLtMatmulPreferenceSetAttribute(4101, 1, &67108864, 8)" in text
    assert "GetHeuristic(4102, 4097, 4099, 4098, 4100, 4100, 4101, 8, 8 results, &0)" in text
    product = f"cublasLtMatmul(4102, 4097, &1.0, {b}, 4099, {a}, 4098, &0.0, {out}, 4100, {out}, 4100, "
    assert f"{product}&[100, 0, 0, 0, 0, 0, 0, 0], {workspace}, 67108864, 7)" in text
    assert "cublasLtCreate" in handles


def test_cublaslt_that_refuses(bench: DryBench) -> None:
    bench.lt.offered = 0
    with pytest.raises(RuntimeError, match=r"^cuBLASLt offers no algorithm for torch\.float8_e4m3fn \(32, 64\) and "):
        cublaslt.algorithms(problem())
    bench.lt.status = 15
    with pytest.raises(RuntimeError, match=r"^cublasLtMatmulDescCreate returned cublasStatus_t 15\.$"):
        cublaslt.algorithms(problem())


def test_the_library_that_torch_has_loaded() -> None:
    cublaslt._library.cache_clear()
    with mock.patch.object(torch.cuda, "init") as init, mock.patch.object(ctypes, "CDLL", return_value=3) as load:
        assert cublaslt._library() == cublaslt._library() == 3  # type: ignore[comparison-overlap]
    cublaslt._library.cache_clear()
    init.assert_called_once_with()
    load.assert_called_once_with("libcublasLt.so.13")
