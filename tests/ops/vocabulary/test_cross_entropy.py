"""`twin::cross_entropy`, its backward and its mean: float64, the written order, special rows, refusals.

On a GPU they have every bit of the CPU's, forward, backward and mean.
"""

import itertools
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared.bits import assert_same_bits
from shared.cross_entropy_cases import DTYPES, IGNORED, batch
from shared.numba_code import assert_no_double

import optimized
from reference.numbers import elementary
from reference.ops.vocabulary import cross_entropy as definition

twin = torch.ops.twin
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
TINY = {torch.float32: 2.0**-126, torch.bfloat16: 2.0**-126, torch.float16: 2.0**-24}
F = np.float32


@settings(max_examples=10, deadline=None)
@given(
    rows=st.integers(1, 12),
    classes=st.sampled_from((1, 2, 7, 8, 100, 2047, 2048, 2056, 8192, 8193, 20000)),
    dtype=st.sampled_from(DTYPES),
    smoothing=st.sampled_from((0.0, 0.1, 1.0)),
    scale=st.sampled_from((0.01, 3.0, 40.0)),
    seed=st.integers(0, 2**30),
)
def test_against_float64(rows, classes, dtype, smoothing, scale, seed) -> None:  # type: ignore[no-untyped-def]
    """exp errs by 2.7 ulp and x - m by half of one, of |x - m|. A lane's sum is rescaled once for each tile at most,
    each time with such an error. Of the sums' roundings a lane has 2 for each group and 3 in a tree, and 8 come after.
    """
    logits, target = batch(rows, classes, dtype, seed, scale)
    grad = torch.randn(rows, generator=torch.Generator().manual_seed(seed))
    loss, maximum, inverse = twin.cross_entropy(logits, target, IGNORED, smoothing)
    dx = twin.cross_entropy_backward(grad, None, logits, target, maximum, inverse, IGNORED, smoothing)
    x = logits.double().requires_grad_()
    truth = torch.nn.functional.cross_entropy(x, target, reduction="none", label_smoothing=smoothing)
    truth.backward(grad.double())
    wide = x.detach()
    spread = (wide.amax(1) - wide.amin(1)).clamp(min=1)
    tiles, groups = -(-classes // 8192), -(-classes // 2048)
    relative = (2 * groups + 11 + 8 * (tiles + 1)) * 2.0**-24 + 2 * spread * 2.0**-24  # of S, and of p
    size = wide.abs().amax(1) + math.log(classes)
    assert bool(((loss.double() - truth).abs() <= relative + (groups + 16) * size * 2.0**-23).all())
    p = torch.softmax(wide, 1)
    assert x.grad is not None
    share = smoothing / classes
    error = grad.abs().double()[:, None] * ((2 * relative[:, None] + 4 * 2.0**-23) * p + (share + 1e-30) * 2.0**-23)
    hit = torch.zeros_like(wide)
    hit[torch.arange(rows), target.clamp(min=0)] = 2.0**-23
    error = error + grad.abs().double()[:, None] * hit
    bound = (1 + UNIT[dtype]) * error + UNIT[dtype] * x.grad.abs() + TINY[dtype]
    assert bool(((dx.double() - x.grad).abs() <= bound).all())


def halving(v: list[F]) -> F:
    v, h = list(v), len(v) // 2
    while h:
        v = [F(v[j] + v[j + h]) for j in range(h)]
        h //= 2
    return v[0]


def exp(x: F) -> F:
    return F(elementary.exp(torch.tensor([float(x)]))[0])


def by_hand(x: list[F], target: int, smoothing: F) -> tuple[F, F, F]:
    """Loss, m and 1 / S of a row, as the definition's docstring says it."""
    tops, sums, straight = [], [], []
    for lane in range(256):
        top, total, plain = -np.inf, F(0), F(0)
        groups = {i: x[8 * (256 * i + lane) : 8 * (256 * i + lane) + 8] for i in range(-(-len(x) // 2048))}
        for n in range(-(-len(x) // 8192)):
            tile = [groups[i] for i in range(4 * n, 4 * n + 4) if groups.get(i)]
            before, top = top, max([top, *(v for group in tile for v in group)])
            origin = F(0) if top == -np.inf else top
            total = F(total * exp(F(before - origin)))
            for group in tile:
                missing = [F(0)] * (8 - len(group))
                total = F(total + halving([exp(F(v - origin)) for v in group] + missing))
                plain = F(plain + halving([*group, *missing]))
        tops.append(top), sums.append(total), straight.append(plain)
    m = F(max(tops))
    sums = [F(s * exp(F(t - m))) for s, t in zip(sums, tops, strict=True)]
    total, plain = (halving([halving(v[w : w + 32]) for w in range(0, 256, 32)]) for v in (sums, straight))
    at_target = F(x[target] - m)
    if smoothing:
        rest = F(smoothing * F(F(plain / F(len(x))) - m))
        at_target = F(F(F(1 - smoothing) * at_target) + rest)
    log = F(elementary.log(torch.tensor([float(total)]))[0])
    return F(log - at_target), m, F(F(1) / total)


@pytest.mark.parametrize(
    ("classes", "smoothing"),
    [
        pytest.param(*one, marks=[] if one in ((8200, 0.3), (100, 0.0)) else pytest.mark.slow)
        for one in itertools.product((1, 8, 100, 2049, 8200, 17000), (0.0, 0.3))
    ],
)
def test_the_order_is_the_written_one(classes: int, smoothing: float) -> None:
    # Rising, so that sums are rescaled again and again, and of one size: in some row each rounding of them shows.
    rows, hit = 5, classes // 3
    logits = batch(rows, classes, torch.float32, classes, 0.5)[0] + torch.linspace(0, 3, classes)
    target = torch.full((rows,), hit)
    found = twin.cross_entropy(logits, target, IGNORED, smoothing)
    expected = np.array([by_hand(list(row), hit, F(smoothing)) for row in logits.numpy()])
    assert_same_bits(torch.tensor(expected.T.copy()), torch.stack(found))
    g, count = torch.tensor(0.7), torch.tensor(3.0)
    dx = twin.cross_entropy_backward(g, count, logits, target, *found[1:], IGNORED, smoothing)
    scale, share, keep = F(F(0.7) / F(3)), F(F(smoothing) / F(classes)), F(1 - F(smoothing))
    for row, c in itertools.product(range(rows), (0, hit, classes - 1)):
        weight = F(keep + share) if c == hit else share
        p = F(exp(F(logits[row, c].numpy() - expected[row, 1])) * expected[row, 2])
        assert F(dx[row, c]) == F(scale * F(p - weight)), (row, c)


@pytest.mark.parametrize("rows", [1, 31, 1024, 2500])
def test_the_mean_has_the_written_order(rows: int) -> None:
    loss = torch.rand(rows, generator=torch.Generator().manual_seed(rows))
    target = torch.zeros(rows, dtype=torch.int64)
    target[::7], loss[::7] = IGNORED, 0
    lanes = [F(0)] * 1024
    for i, one in enumerate(loss.numpy()):
        lanes[i % 1024] = F(lanes[i % 1024] + one)
    total = halving([halving(lanes[warp : warp + 32]) for warp in range(0, 1024, 32)])
    count = int((target != IGNORED).sum())
    for kind, divisor in (("sum", 1), ("mean", count), ("mean_or_zero", max(count, 1))):
        mean, found = twin.cross_entropy_mean(loss, target, IGNORED, kind)
        assert found == divisor
        with np.errstate(invalid="ignore"):
            assert_same_bits(torch.tensor(total / F(divisor)), mean, kind)


def test_a_mean_of_nothing() -> None:
    for rows in (0, 5):
        loss, target = torch.zeros(rows), torch.full((rows,), IGNORED)
        means = {kind: twin.cross_entropy_mean(loss, target, IGNORED, kind)[0] for kind in definition.KINDS}
        assert means["mean"].isnan()  # as PyTorch's
        assert means["sum"] == means["mean_or_zero"] == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_ignored_rows_count_for_nothing(dtype: torch.dtype) -> None:
    logits, target = batch(9, 40, dtype, 1)
    logits[2], target[2] = math.nan, IGNORED
    for ignored in (IGNORED, 5, 2**40):
        target[target < 0], target[2] = ignored, ignored
        loss, m, inverse = twin.cross_entropy(logits, target, ignored, 0.1)
        dx = twin.cross_entropy_backward(torch.ones(()), None, logits, target, m, inverse, ignored, 0.1)
        skipped = target == ignored
        assert not loss[skipped].any()
        assert not dx[skipped].any()
        assert not dx[skipped].float().signbit().any()
        assert loss[~skipped].all()
        assert dx[~skipped].any()


def test_a_scale_acts_before_the_rounding() -> None:
    """A gradient that underflows in fp16 survives a loss scale."""
    logits = torch.zeros(1, 60000, dtype=torch.float16)
    target = torch.zeros(1, dtype=torch.int64)
    _, *stats = twin.cross_entropy(logits, target, IGNORED, 0.0)
    count = torch.tensor(4096.0)
    one, many = (
        twin.cross_entropy_backward(g, count, logits, target, *stats, IGNORED, 0.0)
        for g in (torch.tensor(1.0), torch.tensor(2.0**16))
    )
    assert one[0, 1] == 0
    assert many[0, 1].item() == pytest.approx(2**16 / 4096 / 60000, rel=1e-3)


def test_nan_and_infinity() -> None:
    logits, target = batch(5, 3000, torch.float32, 4)[0], torch.arange(5)
    logits[1, 2500], logits[2, 2500], logits[3, :] = math.nan, math.inf, -math.inf
    logits[4, 5:] = -math.inf  # classes that are masked
    loss, m, inverse = twin.cross_entropy(logits, target, IGNORED, 0.0)
    assert loss[1:4].isnan().all()
    assert loss[[0, 4]].isfinite().all()
    assert m[3] == 0
    dx = twin.cross_entropy_backward(torch.ones(5), None, logits, target, m, inverse, IGNORED, 0.0)
    assert dx[1:4].isnan().any(1).all()
    assert dx[[0, 4]].isfinite().all()
    assert not dx[4, 5:].any()


def test_the_maximum_is_never_minus_zero() -> None:
    logits = torch.tensor([[-0.0, -0.0], [-0.0, 0.0]])
    _, m, _ = twin.cross_entropy(logits, torch.zeros(2, dtype=torch.int64), IGNORED, 0.0)
    assert not m.signbit().any()


def test_a_target_that_is_no_class_is_refused() -> None:
    logits = torch.zeros(3, 4)
    stats = torch.zeros(3), torch.ones(3)
    for wrong in (4, -1):
        target = torch.tensor([0, wrong, 9])
        sentence = rf"target\[1\] is {wrong}; 0 to 3 and ignore_index=-100 are accepted"
        with pytest.raises(IndexError, match=sentence):
            twin.cross_entropy(logits, target, IGNORED, 0.0)
        with pytest.raises(IndexError, match=sentence):
            twin.cross_entropy_backward(torch.ones(()), None, logits, target, *stats, IGNORED, 0.0)


TARGET = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ((torch.zeros(2, 3, 4), TARGET, 0, 0.0), "logits must be 2-D"),
        ((torch.zeros(2, 3).double(), TARGET, 0, 0.0), "logits must be torch.float32"),
        ((torch.zeros(3, 2).t(), TARGET, 0, 0.0), "logits must be contiguous"),
        ((torch.zeros(2, 0), TARGET, 0, 0.0), "1 to 1073741824 classes are accepted"),
        ((torch.zeros(2, 3), TARGET.int(), 0, 0.0), "target must be contiguous torch.int64 [2] on cpu"),
        ((torch.zeros(3, 3), TARGET, 0, 0.0), "target must be contiguous torch.int64 [3] on cpu"),
        ((torch.zeros(2, 3), TARGET, 0, 1.5), "label_smoothing must be from 0 to 1; got 1.5"),
        ((torch.zeros(2, 3), TARGET, 0, math.nan), "label_smoothing must be from 0 to 1; got nan"),
    ],
)
def test_refusals(args: tuple, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        twin.cross_entropy(*args)


def test_refusals_of_the_others() -> None:
    x, stats = torch.zeros(2, 3), (torch.zeros(2), torch.zeros(2))
    for grad, divisor, stat, name in (
        (torch.ones(3), None, stats[0], "grad"),
        (torch.ones(2).half(), None, stats[0], "grad"),
        (torch.ones(2), torch.ones(2), stats[0], "divisor"),
        (torch.ones(2), None, torch.zeros(3), "maximum"),
    ):
        with pytest.raises(ValueError, match=f"cross_entropy_backward: {name} must be contiguous"):
            twin.cross_entropy_backward(grad, divisor, x, TARGET, stat, stats[1], 0, 0.0)
    with pytest.raises(ValueError, match="kind must be one of"):
        twin.cross_entropy_mean(torch.zeros(2), TARGET, 0, "median")
    with pytest.raises(ValueError, match="loss must be contiguous"):
        twin.cross_entropy_mean(torch.zeros(3), TARGET, 0, "mean")


def test_no_double_arithmetic() -> None:
    logits, target = batch(2, 50, torch.float32, 0)
    loss, *stats = twin.cross_entropy(logits, target, IGNORED, 0.1)
    twin.cross_entropy_backward(torch.ones(()), None, logits, target, *stats, IGNORED, 0.1)
    twin.cross_entropy_mean(loss, target, IGNORED, "mean")
    for function in (definition.loss_rows, definition.gradient_rows, definition.mean_lanes):
        assert_no_double(function)


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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", CLASSES)
def test_every_size(dtype: torch.dtype, classes: int) -> None:
    for smoothing in (0.0, 0.1):
        compare(*batch(17, classes, dtype, classes), smoothing)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_large_vocabulary(dtype: torch.dtype) -> None:
    compare(*batch(40, 128256, dtype, 5), 0.0)


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("classes", [4, 12, 260])
def test_rows_that_end_with_half_a_group(classes: int, smoothing: float) -> None:
    """Of eight fp32 logits that are loaded at a time, the last four belong to the next row, or to nobody."""
    compare(*batch(3, classes, torch.float32, 0, 3.0), smoothing)


@pytest.mark.gpu
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [1, 3, 4])
def test_a_view_off_the_16_byte_boundary(dtype: torch.dtype, start: int) -> None:
    whole = (torch.randn(5 * 9000 + start) * 3).to(dtype)
    logits, there = whole[start:].view(5, 9000), whole.cuda()[start:].view(5, 9000)
    assert (there.data_ptr() % 16 != 0) == (start * dtype.itemsize % 16 != 0)
    compare(logits, torch.tensor([0, 8999, 17, IGNORED, 8192]), 0.1, there)


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
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
