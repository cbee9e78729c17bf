"""Cross-entropy on a GPU: every bit of the CPU's, forward, backward and mean."""

import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared.bits import assert_same_bits
from shared.cross_entropy_cases import DTYPES, IGNORED, batch

import optimized

pytestmark = pytest.mark.gpu
twin = torch.ops.twin


def compare(
    logits: torch.Tensor, target: torch.Tensor, smoothing: float, there: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """All three ops on both devices; what the GPU gave. `there`: the logits on the GPU."""
    grads = torch.randn(len(target)), torch.tensor(0.37)
    results = []
    for device in ("cpu", "cuda"):
        x = logits if device == "cpu" else logits.cuda() if there is None else there
        t = target.to(device)
        loss, m, inverse = twin.cross_entropy(x, t, IGNORED, smoothing)
        found = [loss, m, inverse]
        for kind, grad in itertools.product(("mean", "sum", "mean_or_zero"), grads):
            mean, divisor = twin.cross_entropy_mean(loss, t, IGNORED, kind)
            dx = twin.cross_entropy_backward(grad.to(device), divisor, x, t, m, inverse, IGNORED, smoothing)
            found += [mean, divisor, dx]
        found.append(twin.cross_entropy_backward(grads[0].to(device), None, x, t, m, inverse, IGNORED, smoothing))
        results.append(found)
    what = f"{list(logits.shape)}, {logits.dtype}, smoothing={smoothing}"
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        assert_same_bits(a, b, f"result {i} of {what}")
    return tuple(results[1])


CLASSES = (1, 7, 8, 250, 2048, 2050, 8184, 8192, 8193, 8200, 8208, 16384, 16391, 50257, 50304)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", CLASSES)
def test_every_size(dtype: torch.dtype, classes: int) -> None:
    for smoothing in (0.0, 0.1):
        compare(*batch(17, classes, dtype, classes), smoothing)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_large_vocabulary(dtype: torch.dtype) -> None:
    compare(*batch(40, 128256, dtype, 5), 0.0)


@pytest.mark.simulated
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("classes", [4, 12, 260])
def test_rows_that_end_with_half_a_group(classes: int, smoothing: float) -> None:
    """Of eight fp32 logits that are loaded at a time, the last four belong to the next row, or to nobody."""
    compare(*batch(3, classes, torch.float32, 0, 3.0), smoothing)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=st.integers(0, 40),
    classes=st.integers(1, 20000),
    dtype=st.sampled_from(DTYPES),
    smoothing=st.sampled_from((0.0, 0.1, 1.0)),
    scale=st.sampled_from((0.01, 3.0, 60.0)),
    seed=st.integers(0, 2**30),
)
def test_any_shape(rows, classes, dtype, smoothing, scale, seed) -> None:  # type: ignore[no-untyped-def]
    compare(*batch(rows, classes, dtype, seed, scale), smoothing)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [1, 3, 4])
def test_a_view_off_the_16_byte_boundary(dtype: torch.dtype, start: int) -> None:
    whole = (torch.randn(5 * 9000 + start) * 3).to(dtype)
    logits, there = whole[start:].view(5, 9000), whole.cuda()[start:].view(5, 9000)
    assert (there.data_ptr() % 16 != 0) == (start * dtype.itemsize % 16 != 0)
    compare(logits, torch.tensor([0, 8999, 17, IGNORED, 8192]), 0.1, there)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [3000, 8195, 20000])
def test_special_values(dtype: torch.dtype, classes: int) -> None:
    logits, target = batch(24, classes, dtype, 3)
    logits[1, 5], logits[2, classes - 1], logits[3, 9] = math.nan, math.inf, -math.inf
    logits[4, :], logits[5, 1:], logits[6, : classes // 2] = -math.inf, -math.inf, -math.inf
    logits[7, :], logits[8, ::2], logits[9, 1::2] = 0.0, -0.0, -0.0
    logits[10, :], logits[11, classes - 1] = math.inf, torch.finfo(dtype).max
    for smoothing in (0.0, 0.1):
        compare(logits, target, smoothing)


@pytest.mark.simulated
@pytest.mark.parametrize("rows", [0, 1, 31, 1023, 1025, 70000])
def test_the_mean_of_many_rows(rows: int) -> None:
    loss = torch.rand(rows)
    target = torch.zeros(rows, dtype=torch.int64)
    target[::3] = IGNORED
    for kind in ("mean", "sum", "mean_or_zero"):
        here = twin.cross_entropy_mean(loss, target, IGNORED, kind)
        there = twin.cross_entropy_mean(loss.cuda(), target.cuda(), IGNORED, kind)
        for a, b in zip(here, there, strict=True):
            assert_same_bits(a, b, kind)


@pytest.mark.simulated
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_target_that_is_no_class_makes_its_row_nan(smoothing: float) -> None:
    logits = torch.randn(4, 9001, device="cuda", dtype=torch.bfloat16)
    target = torch.tensor([3, 9001, -1, 2**40], device="cuda")
    loss, *stats = twin.cross_entropy(logits, target, IGNORED, smoothing)
    assert loss.isnan().tolist() == [False, True, True, True]
    dx = twin.cross_entropy_backward(torch.ones((), device="cuda"), None, logits, target, *stats, IGNORED, smoothing)
    assert dx.isnan().all(1).tolist() == [False, True, True, True]
    assert dx[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_fused_loss_has_the_cpus_bits(dtype: torch.dtype) -> None:
    """Several chunks, the last one shorter; two vocabularies, of which one has rows that are not aligned."""
    for classes, smoothing in ((264, 0.0), (257, 0.1)):
        target = batch(300, classes, dtype, 2)[1]
        start = torch.randn(300, 64).to(dtype), (torch.randn(classes, 64) * 0.2).to(dtype)
        results = []
        for device in ("cpu", "cuda"):
            hidden, weight = (x.to(device, copy=True).requires_grad_() for x in start)
            loss = optimized.fused_linear_cross_entropy(
                hidden, weight, target.to(device), label_smoothing=smoothing, chunk_size=128
            )
            (loss * 3).backward()
            results.append((loss.detach(), hidden.grad, weight.grad))
        for name, a, b in zip(("loss", "dh", "dw"), *results, strict=True):
            assert_same_bits(a, b, f"{name}, {classes} classes")


def test_a_captured_graph_replays_it() -> None:
    """Forward and backward wait for nothing, so a CUDA graph holds them."""
    logits, target = (x.cuda() for x in batch(64, 5000, torch.bfloat16, 8))

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        leaf = logits.detach().requires_grad_()  # of the stream that is current now
        loss = optimized.cross_entropy(leaf, target)
        return loss, torch.autograd.grad(loss, leaf)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    logits.mul_(0.5)
    target.copy_(target.roll(1))
    graph.replay()
    for a, b in zip(found, step(), strict=True):
        assert_same_bits(a, b)
