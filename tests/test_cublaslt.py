"""cuBLASLt called directly gives what torch gets from it."""

import pytest
import torch
from conftest import assert_same_bits

from optimized.bench import cublaslt
from optimized.bench.cublaslt import Product

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
def test_the_fastest_is_one_of_them_and_its_kernel_has_a_name() -> None:
    p = product(256, 512, 512, E4M3, torch.bfloat16, "fast")
    call = cublaslt.fastest(p, repeats=3)
    assert_same_bits(call(), torchs(p), "the fastest")
    assert "nvjet" in cublaslt.kernel_name(call)


@pytest.mark.gpu
def test_a_problem_that_cublaslt_refuses_is_an_error() -> None:
    p = product(64, 64, 64, E5M2, torch.bfloat16, "fast")
    refused = Product(p.a, p.a, p.a_scale, p.b_scale, p.out_dtype, p.accumulate)
    with pytest.raises(RuntimeError, match=r"^(cublasLtMatmulAlgoGetHeuristic returned|cuBLASLt offers no algorithm)"):
        cublaslt.algorithms(refused)
