"""Dropout between bias and residual on the H200: every bit of the CPU's, the mask included."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared.bits import assert_same_bits

import optimized  # noqa: F401  (registers the CUDA ops)
from reference.numbers import philox

pytestmark = pytest.mark.gpu  # tests/ops/test_ops.py asks the simulator
twin = torch.ops.twin
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def compare(rows, hidden, dtype, p, bias, residual, seed, offset=0) -> None:  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(seed)
    x, r, g = (torch.randn(rows * hidden + offset, generator=generator).to(dtype) for _ in range(3))
    x, r, g = (t[offset:].view(rows, hidden) for t in (x, r, g))
    x.view(-1)[::97] = float("nan")
    x.view(-1)[1::89] = float("inf")
    g.view(-1)[2::83], g.view(-1)[3::79] = float("-inf"), float("nan")
    b = torch.randn(hidden, generator=generator).to(dtype) if bias else None
    r = r if residual else None
    state = torch.tensor([seed * 2**32 + 5, 2**32 - 1])  # the offset carries into its upper half
    results = []
    for device in ("cpu", "cuda"):
        here = [None if t is None else t.to(device) for t in (x, b, r, g)]
        if offset and device == "cuda":  # a view that starts off 16 bytes there too
            here[0] = torch.cat([x.new_zeros(offset), x.reshape(-1)]).to(device)[offset:].view(rows, hidden)
        own = state.clone().to(device)
        before = own.clone()
        out = twin.bias_dropout_add(here[0], here[1], here[2], p, own)
        results.append((out, twin.dropout_backward(here[3], p, before), own))
    for name, a, c in zip(("out", "gradient", "state"), *results, strict=True):
        assert_same_bits(a, c, f"{name}, {rows} x {hidden}, {dtype}, p={p}, bias={bias}, residual={residual}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_parts(dtype: torch.dtype, p: float, bias: bool, residual: bool) -> None:
    compare(77, 208, dtype, p, bias, residual, 1)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=st.integers(0, 70),
    hidden=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    p=st.sampled_from((0.0, 1e-5, 0.1, 0.5, 0.999)),
    bias=st.booleans(),
    residual=st.booleans(),
    seed=st.integers(0, 2**30),
    offset=st.sampled_from((0, 0, 1, 8)),
)
def test_any_shape(rows, hidden, dtype, p, bias, residual, seed, offset) -> None:  # type: ignore[no-untyped-def]
    compare(rows, hidden, dtype, p, bias, residual, seed, offset)


def test_a_graph_draws_a_new_mask_at_each_replay() -> None:
    x = torch.ones(64, 64, device="cuda")
    state = philox.new_state("cuda")
    twin.bias_dropout_add(x, None, None, 0.5, state.clone())
    cpu = state.cpu()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = twin.bias_dropout_add(x, None, None, 0.5, state)
    for _ in range(3):
        graph.replay()
        assert_same_bits(twin.bias_dropout_add(x.cpu(), None, None, 0.5, cpu), out)
