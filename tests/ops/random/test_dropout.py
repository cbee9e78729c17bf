"""`twin::bias_dropout_add` and `twin::dropout_backward`: rounding points, the mask, statistics, refusals.

On an H200 they have every bit of the CPU's, the mask included; tests/ops/test_ops.py asks the simulator.
"""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared.bits import assert_same_bits

import optimized  # noqa: F401  (registers the CUDA ops)
from reference.numbers import philox
from reference.ops.random import dropout

twin = torch.ops.twin
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def in_the_written_order(x, bias, residual, p, state, kept=None, backward=False):  # type: ignore[no-untyped-def]
    """Element by element, from the docstring."""
    out = torch.empty_like(x)
    seed, offset = state.tolist()
    threshold = round(p * 65536)
    scale = np.float32(65536 / (65536 - threshold)) if threshold < 65536 else np.float32(0)

    def rounded(value) -> torch.Tensor:  # type: ignore[no-untyped-def]
        return torch.tensor(float(value), dtype=torch.float32).to(x.dtype)

    def times_m(t: torch.Tensor, row: int) -> torch.Tensor:
        return t if kept is None else rounded(np.float32(t.float()) * kept[row * len(kept) // len(x)].numpy())

    for row, column in np.ndindex(*x.shape):
        t = times_m(x[row, column], row) if backward else x[row, column]
        if bias is not None:
            t = rounded(np.float32(t.float()) + np.float32(bias[column].float()))
        if threshold:
            element = row * x.shape[1] + column
            words = philox.element_words(seed, element // 8, 1, offset)
            half = element % 8
            u = int(words[half // 2][0]) >> (16 * (half % 2)) & 0xFFFF
            dropped = t.abs() * 0 if backward else torch.zeros((), dtype=x.dtype)
            t = rounded(np.float32(t.float()) * scale) if u >= threshold else dropped
        t = t if backward else times_m(t, row)
        if residual is not None:
            t = rounded(np.float32(t.float()) + np.float32(residual[row, column].float()))
        out[row, column] = t
    return out


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(0, 9),
    entries=st.sampled_from((None, 1, 3)),
    hidden=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    p=st.sampled_from((0.0, 0.1, 0.5, 1.0)),
    bias=st.booleans(),
    residual=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_the_order_is_the_written_one(rows, entries, hidden, dtype, p, bias, residual, seed) -> None:  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(seed)
    x, r = (torch.randn(rows, hidden, generator=generator).to(dtype) for _ in range(2))
    b = torch.randn(hidden, generator=generator).to(dtype) if bias else None
    r = r if residual else None
    state = torch.tensor([seed * 2**31 + 1, seed])
    entries = entries if entries is not None and rows % entries == 0 else None
    kept = (
        None if entries is None else torch.randn(entries, generator=generator) * torch.tensor([1.0, 0.0, 1.0])[:entries]
    )
    expected = in_the_written_order(x, b, r, p, state, kept)
    gradient = in_the_written_order(x, None, None, p, state, kept, backward=True)
    assert_same_bits(twin.dropout_backward(x, p, state, kept), gradient, "gradient")
    assert_same_bits(twin.bias_dropout_add(x, b, r, p, state, kept), expected, "out")
    assert state.tolist() == [seed * 2**31 + 1, seed + (p > 0)]


def test_the_result_is_no_alias() -> None:
    x = torch.ones(2, 3)
    assert twin.bias_dropout_add(x, None, None, 0.0, None).data_ptr() != x.data_ptr()
    assert twin.dropout_backward(x, 0.0, None).data_ptr() != x.data_ptr()


@pytest.mark.parametrize("p", [1e-3, 0.1, 0.5, 0.9])
def test_statistics(p: float) -> None:
    """Share of zeros and mean over a million ones, each place of a counter's eight: within five deviations."""
    out = twin.bias_dropout_add(torch.ones(1024, 1024), None, None, p, torch.tensor([3, 5]))
    kept = 1 - round(p * 65536) / 65536
    eight = (out != 0).double().view(-1, 8).mean(0)
    deviation = math.sqrt(kept * (1 - kept) / (1024 * 128))
    assert bool(((eight - kept).abs() < 5 * deviation).all())
    assert abs(out.double().mean().item() - 1) < 5 * deviation / kept


def test_masks_differ_from_call_to_call_and_from_seed_to_seed() -> None:
    x = torch.ones(64, 64)
    state = torch.tensor([1, 0])
    first, second = (twin.bias_dropout_add(x, None, None, 0.5, state) for _ in range(2))
    other = twin.bias_dropout_add(x, None, None, 0.5, torch.tensor([2, 0]))
    for a, b in ((first, second), (first, other), (second, other)):
        assert abs((a == b).double().mean().item() - 0.5) < 5 * 0.5 / 64


def test_backward_is_the_gradient() -> None:
    """Ones where something was kept, times the scale: the derivative of the forward."""
    state = torch.tensor([4, 4])
    out = twin.bias_dropout_add(torch.ones(50, 50), None, None, 0.3, state.clone())
    assert_same_bits(twin.dropout_backward(torch.ones(50, 50), 0.3, state), out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_no_gradient_that_overflowed_is_dropped_unseen(bad: float, dtype: torch.dtype) -> None:
    """As with PyTorch's dropout, which multiplies by a mask."""
    grad = torch.full((16, 16), -1.0, dtype=dtype)
    for p in (0.1, 0.9, 1.0):
        for column in range(16):
            one = grad.clone()
            one[3, column] = bad
            found = twin.dropout_backward(one, p, torch.tensor([1, 2]))
            assert not found[3, column].isfinite()
            found[3, column] = one[3, column] = -1.0
            expected = twin.bias_dropout_add(grad, None, None, p, torch.tensor([1, 2]))
            found[3, column] = expected[3, column]
            assert_same_bits(found, expected)


def test_new_state() -> None:
    torch.manual_seed(0)
    first, second = philox.new_state(), philox.new_state()
    torch.manual_seed(0)
    assert torch.equal(first, philox.new_state())
    assert not torch.equal(first, second)
    assert first.dtype == torch.int64
    assert first[1] == 0


def test_keep_scale() -> None:
    assert dropout.keep_scale(0.5) == 2.0
    assert dropout.keep_scale(0.0) == 1.0
    assert dropout.keep_scale(1.0) == 0.0
    assert dropout.threshold(0.1) == 6554


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"x": torch.ones(4)}, "x must be 2-D, [rows, cols]"),
        ({"x": torch.ones(4, 4).t()[:3]}, "x must be contiguous (row-major)"),
        ({"x": torch.ones(4, 4).double()}, "x must be torch.float32"),
        ({"bias": torch.ones(5)}, "bias must be contiguous torch.float32 [4] on cpu; got"),
        ({"residual": torch.ones(4, 5)}, "residual must be contiguous torch.float32 [4, 4] on cpu; got"),
        ({"residual": torch.ones(4, 4).half()}, "on cpu; got torch.float16 [4, 4]"),
        ({"p": -0.1}, "must be from 0 to 1; got -0.1"),
        (
            {"kept": torch.ones(4, 1)},
            "kept must be contiguous torch.float32 [entries] on cpu; got torch.float32 [4, 1]",
        ),
        ({"kept": torch.ones(4).half()}, "on cpu; got torch.float16 [4] on cpu"),
        ({"kept": torch.ones(3)}, "x has 4 rows, which are no multiple of kept's 3 entries"),
        ({"kept": torch.ones(0)}, "x has 4 rows, which are no multiple of kept's 0 entries"),
        ({"p": 0.5, "rng_state": None}, "needs rng_state"),
        ({"p": 0.5, "rng_state": torch.zeros(4, dtype=torch.int64)}, "rng_state must be a contiguous int64 [2]"),
    ],
)
def test_refusals(change: dict, sentence: str) -> None:
    given = {"x": torch.ones(4, 4), "bias": None, "residual": None, "p": 0.0, "rng_state": None, "kept": None, **change}
    with pytest.raises(ValueError, match=re.escape(sentence)):
        twin.bias_dropout_add(*given.values())
    if change.keys() & {"x", "p", "kept"}:
        with pytest.raises(ValueError, match=re.sub(r"^x\\ ", r"(x|grad)\\ ", re.escape(sentence))):
            twin.dropout_backward(given["x"], given["p"], given["rng_state"], given["kept"])


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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_parts(dtype: torch.dtype, p: float, bias: bool, residual: bool) -> None:
    compare(77, 208, dtype, p, bias, residual, 1)


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.parametrize("rows", [0, 1, 4, 7])
def test_some_rows_have_the_mask_of_their_place(rows: int) -> None:
    """A state's third number is that of their first element in the whole tensor."""
    x, residual, state = torch.randn(9, 13), torch.randn(9, 13), torch.tensor([5, 2])
    whole = torch.ops.twin.bias_dropout_add(x, None, residual, 0.4, state.clone())
    backward = torch.ops.twin.dropout_backward(x, 0.4, state)
    placed = torch.tensor([5, 2, rows * 13])
    assert_same_bits(torch.ops.twin.dropout_backward(x[rows:], 0.4, placed), backward[rows:], "backward")
    part = torch.ops.twin.bias_dropout_add(x[rows:].contiguous(), None, residual[rows:].contiguous(), 0.4, placed)
    assert_same_bits(part, whole[rows:], "forward")
    assert placed.tolist() == [5, 3, rows * 13]
