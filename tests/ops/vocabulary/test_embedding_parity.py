"""Embedding on a GPU: every bit of the CPU's, forward and backward."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared.bits import assert_same_bits
from shared.embedding_cases import DTYPES, lookups

import optimized

pytestmark = pytest.mark.gpu  # tests/ops/test_ops.py asks the simulator
twin = torch.ops.twin


def compare(count: int, rows: int, width: int, dtype: torch.dtype, padding: int, seed: int, start: int = 0) -> None:
    grad, ids = lookups(count, rows, width, dtype, seed)
    weight = torch.randn(rows, width).to(dtype)
    weight.view(-1)[::17], grad.view(-1)[::29] = math.nan, math.inf
    weight.view(-1)[3::19], grad.view(-1)[3::31] = -0.0, -0.0
    there = [torch.empty(x.numel() + start, dtype=dtype, device="cuda")[start:].view(x.shape) for x in (weight, grad)]
    for x, y in zip((weight, grad), there, strict=True):
        y.copy_(x)
    what = f"{count} of {rows} rows of {width}, {dtype}, padding {padding}"
    assert_same_bits(twin.embedding(weight, ids), twin.embedding(there[0], ids.cuda()), what)
    here = twin.embedding_backward(grad, ids, rows, padding)
    assert_same_bits(here, twin.embedding_backward(there[1], ids.cuda(), rows, padding), what)


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("count", "rows", "width"),
    [(1, 1, 1), (63, 2, 8), (64, 1, 8), (65, 1, 16), (1000, 3, 264), (2000, 50304, 64), (4096, 700, 1100)],
)
def test_sizes(dtype: torch.dtype, count: int, rows: int, width: int) -> None:
    for padding in (-1, 0):
        compare(count, rows, width, dtype, padding, 1)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    count=st.integers(0, 3000),
    rows=st.integers(1, 300),
    width=st.integers(1, 1100),
    dtype=st.sampled_from(DTYPES),
    padding=st.integers(-1, 2),
    seed=st.integers(0, 2**30),
)
def test_any_shape(count, rows, width, dtype, padding, seed) -> None:  # type: ignore[no-untyped-def]
    compare(count, rows, width, dtype, min(padding, rows - 1), seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 40, 1032, 2048])
def test_views_off_the_16_byte_boundary(dtype: torch.dtype, width: int) -> None:
    for start in (0, 1):
        compare(700, 20, width, dtype, -1, 2, start)


def test_a_number_outside_the_table() -> None:
    """Its row is NaN; its gradient goes nowhere, 2^32 + 1 not to row 1 either."""
    ids = torch.tensor([1, 5, -1, 2**32 + 1, 0, *([7] * 200)], device="cuda")
    weight = torch.randn(5, 16, device="cuda")
    out = twin.embedding(weight, ids)
    assert out.isnan().all(1).tolist() == [False, True, True, True, False, *([True] * 200)]
    grad = torch.ones(len(ids), 16, device="cuda")
    assert twin.embedding_backward(grad, ids, 5, -1).sum(1).tolist() == [16, 16, 0, 0, 0]


def test_nothing_waits_for_the_gpu() -> None:
    """So a CUDA graph holds a step of it."""
    layer = optimized.Embedding(500, 64, padding_idx=3, params_dtype=torch.bfloat16)
    grad, ids = (x.cuda() for x in lookups(1000, 500, 64, torch.bfloat16, 1))

    def step() -> torch.Tensor:
        return torch.autograd.grad(layer(ids), layer.weight, grad)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    ids.copy_(ids.roll(5))
    graph.replay()
    assert_same_bits(found, step())
