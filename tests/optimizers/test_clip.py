"""`twin::grad_norm`, `twin::clip_grads` and the functions of `te.optimizers` that call them.

On an H200 both ops equal their CPU definitions in every bit.
"""

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.adam_parameters import awkward
from shared.bits import assert_same_bits

import optimized  # noqa: F401  (registers the CUDA kernels)
import reference as te
from reference.ops.optimizers.grad_norm import CHUNK
from reference.optimizers import sharded_norm

twin = torch.ops.twin
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WIDE = (FP32, BF16, FP16)


def numbers(seed: int, *shape: int, dtype: torch.dtype = FP32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def halved(values: list[float]) -> float:
    """The first half plus the second, number by number, until one is left."""
    while len(values) > 1:
        half = len(values) // 2
        values = [a + b for a, b in zip(values[:half], values[half:], strict=True)]
    return values[0]


def in_the_written_order(grads: list[torch.Tensor]) -> np.float32:
    """The docstring of reference/ops/optimizers/grad_norm.py, number by number; Python's floats are float64."""
    chunks = []
    for grad in grads:
        x = [float(v) for v in grad.flatten().float()]
        for start in range(0, len(x), 32768):
            part = x[start : start + 32768] + [0.0] * max(0, start + 32768 - len(x))
            columns = []
            for c in range(2048):
                total = 0.0
                for i in range(16):
                    total += part[2048 * i + c] * part[2048 * i + c]
                columns.append(total)
            for count in (8, 32, 8):
                columns = [halved(columns[i : i + count]) for i in range(0, len(columns), count)]
            chunks.append(columns[0])
    lanes = []
    for lane in range(1024):
        total = 0.0
        for value in chunks[lane::1024]:
            total += value
        lanes.append(total)
    for count in (32, 32):
        lanes = [halved(lanes[i : i + count]) for i in range(0, len(lanes), count)]
    return np.float32(math.sqrt(lanes[0]))


def test_the_norm_is_summed_in_the_order_that_is_written() -> None:
    grads = [numbers(0, 33, 1000, scale=1e3), numbers(1, 7), torch.empty(0, 3), numbers(2, 32768)]
    for dtype in WIDE:
        found = [x.to(dtype) for x in grads]
        assert twin.grad_norm(found, "l2").item() == in_the_written_order(found)
    mixed = [grads[0], grads[1].to(BF16), grads[3].to(FP16)]
    assert twin.grad_norm(mixed, "l2").item() == in_the_written_order(mixed)


def test_more_chunks_than_lanes() -> None:
    grads = [numbers(i, 1 + i % 3, scale=2.0 ** (i % 40)) for i in range(2100)]
    lanes = np.zeros(1024)
    for i, grad in enumerate(grads):
        part = np.zeros(8)
        part[: grad.numel()] = grad.double().numpy() ** 2
        lanes[i % 1024] += halved(list(part))  # the chunk's other sums are of zeros
    total = halved([halved(list(lanes[i : i + 32])) for i in range(0, 1024, 32)])
    assert twin.grad_norm(grads, "l2").item() == np.float32(math.sqrt(total))


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_ranks_that_sum_the_chunks_that_begin_on_them_find_the_same_norm(ranks: int) -> None:
    """Each has some rows, and what a chunk lacks are the next ranks' first numbers."""
    grads = [numbers(0, 33, 5000, scale=1e3), numbers(1, 7), numbers(2, 5, 40000), numbers(3, 9, 240000)]
    sums = []
    for grad in grads:
        x, chunks = grad.flatten(), list[int]()
        for span in sharded_norm.spans(grad, ranks):
            chunks += span.begins
            if span.begins:
                own, end = x[span.start + span.before : span.stop], span.begins.stop * CHUNK
                sums.append(sharded_norm._sums(own, x[span.stop : end]))
        assert chunks == list(range(-(-len(x) // CHUNK))), "each chunk begins on one rank"
    total = sharded_norm._total(torch.cat(sums)).item()
    assert twin.grad_norm(grads, "l2").item() == np.float32(math.sqrt(total))


@pytest.mark.parametrize("dtype", WIDE)
def test_the_norm_is_torchs_but_for_roundings(dtype: torch.dtype) -> None:
    grads = [numbers(i, 50, 70, dtype=dtype) for i in range(5)]
    exact = torch.linalg.vector_norm(torch.cat([x.double().flatten() for x in grads]))
    ours = te.optimizers.get_total_norm(grads)
    assert ours.dtype == FP32
    assert ours.shape == ()
    assert ours.item() == exact.float().item(), "float64 sums leave one rounding"
    theirs = torch.nn.utils.get_total_norm(grads)
    assert theirs.dtype == dtype
    torch.testing.assert_close(ours, theirs.float(), rtol={FP32: 1e-6, FP16: 1e-3, BF16: 1e-2}[dtype], atol=0)


def test_nothing_overflows_or_vanishes() -> None:
    assert te.optimizers.get_total_norm([torch.full((4,), 1e38)]).item() == np.float32(2e38)
    assert te.optimizers.get_total_norm([torch.full((4,), 1e-45)]).item() == 2 * np.float32(1e-45)
    assert te.optimizers.get_total_norm([torch.full((4,), 3e38)]).item() == math.inf, "as fp32 the norm is infinite"
    assert te.optimizers.get_total_norm([torch.tensor([math.inf, 1.0])]).item() == math.inf
    assert math.isnan(te.optimizers.get_total_norm([torch.tensor([math.inf, math.nan])]).item())


@pytest.mark.parametrize("dtype", WIDE)
def test_the_largest_magnitude(dtype: torch.dtype) -> None:
    grads = [numbers(i, 40, 50, dtype=dtype) for i in range(3)]
    for norm_type in (math.inf, "inf"):
        ours = te.optimizers.get_total_norm(grads, norm_type)
        assert_same_bits(ours, torch.nn.utils.get_total_norm(grads, float(norm_type)).float())
    grads[1][3, 4] = -math.inf
    assert te.optimizers.get_total_norm(grads, math.inf).item() == math.inf
    grads[2][3, 4] = math.nan
    assert math.isnan(te.optimizers.get_total_norm(grads, math.inf).item())
    assert te.optimizers.get_total_norm([torch.tensor([-0.0])], math.inf).item() == 0


def test_without_numbers_the_norm_is_zero() -> None:
    for found in ([], [torch.empty(0)]):
        for norm_type in (2, math.inf):
            assert_same_bits(te.optimizers.get_total_norm(found, norm_type), torch.zeros(()))
    assert_same_bits(te.optimizers.clip_grad_norm_([torch.nn.Parameter(torch.ones(2))], 1.0), torch.zeros(()))
    with pytest.warns(UserWarning, match="clip_grad_norm_: parameters is an empty generator; no gradient is clipped"):
        te.optimizers.clip_grad_norm_((p for p in []), 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        te.optimizers.clip_grad_norm_([], 1.0)


def parameters(dtype: torch.dtype = FP32, count: int = 4) -> list[torch.nn.Parameter]:
    found = [torch.nn.Parameter(torch.zeros(30 + i, 7, dtype=dtype)) for i in range(count)]
    for i, p in enumerate(found):
        p.grad = numbers(i, *p.shape, dtype=dtype)
    return found


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1, 1e3, math.inf])
def test_fp32_gradients_are_scaled_with_torchs_bits(max_norm: float) -> None:
    ours, theirs = parameters(), parameters()
    ours.insert(1, torch.nn.Parameter(torch.zeros(3)))  # without a gradient
    norm = te.optimizers.clip_grad_norm_(ours, max_norm)
    torch.nn.utils.clip_grads_with_norm_(theirs, max_norm, norm)
    for a, b in zip((p for p in ours if p.grad is not None), theirs, strict=True):
        assert_same_bits(a.grad, b.grad)
    te.optimizers.clip_grads_with_norm_(theirs, max_norm / 2, norm)
    other = parameters()
    torch.nn.utils.clip_grads_with_norm_(other, max_norm, norm)
    torch.nn.utils.clip_grads_with_norm_(other, max_norm / 2, norm)
    for a, b in zip(theirs, other, strict=True):
        assert_same_bits(a.grad, b.grad)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_16_bit_gradients_are_rounded_once(dtype: torch.dtype) -> None:
    params = parameters(dtype)
    before = [p.grad.clone() for p in params]
    norm = te.optimizers.clip_grad_norm_(params, 0.3)
    c = (1 / (norm + 1e-6)) * np.float32(0.3)
    for p, grad in zip(params, before, strict=True):
        assert_same_bits(p.grad, (grad.float() * c).to(dtype))


def test_the_coefficient_is_torchs_for_any_norm() -> None:
    draw = np.random.default_rng(0)
    for norm in np.exp2(draw.uniform(-30, 30, 200)).astype(np.float32):
        grads = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
        for one in grads:
            one.grad = torch.ones(1)
        most = float(draw.uniform(0, 2) * norm)
        te.optimizers.clip_grads_with_norm_(grads[0], most, torch.tensor(norm))
        torch.nn.utils.clip_grads_with_norm_(grads[1], most, torch.tensor(norm))
        assert_same_bits(grads[0].grad, grads[1].grad, f"norm {norm}, at most {most}")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite(bad: float) -> None:
    ours, theirs = parameters(), parameters()
    for params in (ours, theirs):
        params[2].grad[0, 0] = bad
    before = [p.grad.clone() for p in ours]
    with pytest.raises(RuntimeError, match=f"clip_grad_norm_: the norm of order 2.0 is {bad}; a finite one is"):
        te.optimizers.clip_grad_norm_(ours, 1.0, error_if_nonfinite=True)
    for p, grad in zip(ours, before, strict=True):
        assert_same_bits(p.grad, grad)
    te.optimizers.clip_grad_norm_(ours, 1.0)
    torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    for a, b in zip(ours, theirs, strict=True):
        assert_same_bits(a.grad, b.grad)


def test_a_gradient_that_is_not_contiguous_is_scaled_where_it_lies() -> None:
    ours, theirs = parameters(count=1)[0], parameters(count=1)[0]
    ours.grad = ours.grad.t().contiguous().t()
    assert not ours.grad.is_contiguous()
    address = ours.grad.data_ptr()
    norms = [te.optimizers.clip_grad_norm_(p, 0.1) for p in (ours, theirs)]
    assert_same_bits(*norms)
    assert_same_bits(ours.grad.contiguous(), theirs.grad)
    assert ours.grad.data_ptr() == address


def with_gradient(grad: Any) -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.zeros(3, 2))
    p.grad = grad
    return p


SHARED = torch.ones(2, 3, 2)


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda p: te.optimizers.clip_grad_norm_(p, -1.0), ValueError, "max_norm=-1.0; a number >= 0"),
        (lambda p: te.optimizers.clip_grad_norm_(p, math.nan), ValueError, "max_norm=nan; a number >= 0"),
        (lambda p: te.optimizers.clip_grad_norm_(p, torch.ones(())), TypeError, "max_norm=tensor.*; a number >= 0"),
        (lambda p: te.optimizers.clip_grad_norm_(p, 1, 1.0), ValueError, "norm_type=1.0; 2 and infinity are accepted"),
        (lambda p: te.optimizers.clip_grad_norm_(p, 1, "l2"), ValueError, "norm_type='l2'; 2 and infinity"),
        (lambda p: te.optimizers.clip_grad_norm_(p, 1, 2, 1), TypeError, "error_if_nonfinite=1; one of"),
        (lambda p: te.optimizers.clip_grad_norm_(p, 1, foreach="no"), TypeError, "foreach='no'; one of"),
        (
            lambda p: te.optimizers.clip_grad_norm_([*p, with_gradient(SHARED[0]), with_gradient(SHARED[0])], 1),
            ValueError,
            "the gradient of parameter 4 and the gradient of parameter 5 share memory; separate",
        ),
        (
            lambda p: te.optimizers.clip_grad_norm_([*p, with_gradient(torch.ones(3, 2).to_sparse())], 1),
            TypeError,
            "the gradient of parameter 4 is torch.sparse_coo; dense, plain",
        ),
        (
            lambda p: te.optimizers.clip_grad_norm_([*p, with_gradient(torch.ones(1, 1).expand(3, 2))], 1e-3),
            ValueError,
            r"the gradient of parameter 4 is expanded \(\[3, 2\] with strides \[0, 0\]\), so .*; separate memory is",
        ),
        (
            lambda p: te.optimizers.clip_grad_norm_(torch.nn.Linear(2, 2).named_parameters(), 1),
            TypeError,
            "parameter 0 is a tuple; tensors are accepted",
        ),
        (lambda p: te.optimizers.clip_grad_norm_(torch.nn.Linear(2, 2), 1), TypeError, "parameters is a Linear; a ten"),
        (
            lambda p: te.optimizers.clip_grads_with_norm_(None, 1, None),
            TypeError,
            "parameters is a NoneType; a tensor or",
        ),
        (lambda p: te.optimizers.get_total_norm({"p": p}), TypeError, "tensors is a dict; a tensor or an iterable of"),
        (lambda p: te.optimizers.clip_grads_with_norm_(p, 1, 3.0), TypeError, "total_norm=3.0; a tensor of one number"),
        (
            lambda p: te.optimizers.clip_grads_with_norm_(p, 1, torch.ones((), dtype=BF16)),
            TypeError,
            r"total_norm=torch.bfloat16 \[\]; a tensor of one number in float32",
        ),
        (
            lambda p: te.optimizers.clip_grads_with_norm_(p, 1, torch.ones((), device="meta")),
            ValueError,
            "total_norm is on meta, the gradients on cpu; one is accepted",
        ),
        (
            lambda p: te.optimizers.get_total_norm([torch.ones(2), torch.ones(2, dtype=torch.int32)]),
            TypeError,
            "tensor 1 is torch.int32; float32, bfloat16 and float16",
        ),
        (
            lambda p: te.optimizers.get_total_norm([torch.ones(2), torch.ones(2, device="meta")]),
            ValueError,
            "tensor 1 is on meta, the first on cpu; one is accepted",
        ),
        (lambda p: te.optimizers.get_total_norm(torch.ones(2, device="meta")), ValueError, "a tensor is on meta; tens"),
    ],
)
def test_what_is_refused_changes_nothing(call: Any, error: type[Exception], sentence: str) -> None:
    params = parameters()
    before = [p.grad.clone() for p in params]
    with pytest.raises(error, match=f"^(clip_grad|get_total)[a-z_]*: .*{sentence}"):
        call(params)
    for p, grad in zip(params, before, strict=True):
        assert_same_bits(p.grad, grad)
    assert_same_bits(SHARED, torch.ones(2, 3, 2))


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda: twin.grad_norm([torch.ones(2)], "l1"), ValueError, r"twin::grad_norm: kind='l1'; one of"),
        (lambda: twin.grad_norm([torch.ones(2).double()], "l2"), TypeError, r"grads\[0\] is torch.float64; float32,"),
        (lambda: twin.grad_norm([torch.ones(4, 2).t()], "l2"), ValueError, r"grads\[0\] has strides \(1, 2\)"),
        (lambda: twin.clip_grads([torch.ones(2)], torch.ones(1), 1.0), ValueError, "norm must be contiguous .*float32"),
        (lambda: twin.clip_grads([torch.ones(2)], torch.ones(()), -1.0), ValueError, "max_norm=-1.0; a number >= 0"),
    ],
)
def test_refusals_of_the_ops(call: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        call()


def compare(sizes: list[int], dtypes: list[torch.dtype], offset: int = 0, special: bool = False, seed: int = 0) -> None:
    """Norms of both kinds and the clipped gradients, which begin `offset` elements after a multiple of 16 bytes."""
    values = [awkward(seed + i, size, dtypes[i % len(dtypes)], special, finite=True) for i, size in enumerate(sizes)]
    sides = []
    for device in ("cpu", "cuda"):
        rooms = [torch.full((x.numel() + offset + 9,), 7.0, dtype=x.dtype, device=device) for x in values]
        grads = [room[offset : offset + x.numel()].copy_(x) for room, x in zip(rooms, values, strict=True)]
        norms = [twin.grad_norm(grads, kind) for kind in ("l2", "max")]
        twin.clip_grads(grads, norms[0], 0.37)
        sides.append([*norms, *rooms])
    for i, (a, b) in enumerate(zip(*sides, strict=True)):
        assert_same_bits(b, a, f"result {i} of {sizes} at {offset}")


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("dtype", WIDE)
def test_every_dtype(dtype: torch.dtype) -> None:
    compare([1, 7, 8, 9, 2047, 2049, 0, 32767, 32768, 32769, 700001], [dtype])
    compare([70001, 3], [dtype], special=True)


@pytest.mark.gpu
@pytest.mark.simulated
def test_dtypes_side_by_side() -> None:
    compare([40000, 5, 32768, 9, 100000], list(WIDE))


@pytest.mark.gpu
@pytest.mark.simulated
@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 70000), min_size=1, max_size=7),
    dtypes=st.lists(st.sampled_from(WIDE), min_size=1, max_size=3),
    offset=st.integers(0, 9),
    seed=st.integers(0, 2**20),
)
def test_any_list_at_any_address(sizes: list[int], dtypes: list[torch.dtype], offset: int, seed: int) -> None:
    compare(sizes, dtypes, offset, True, seed)


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.sample(1)
@pytest.mark.parametrize("count", [64, 65, 513, 2100])
def test_around_the_capacity_of_a_launch_and_of_the_last_sum(count: int) -> None:
    compare([5 + i % 7 for i in range(count)], [torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", WIDE)
def test_what_is_not_finite(dtype: torch.dtype, bad: float) -> None:
    sides = []
    for device in ("cpu", "cuda"):
        grads = [awkward(i, 50000, dtype, False).to(device) for i in range(2)]
        grads[1][40001] = bad
        norms = [twin.grad_norm(grads, kind) for kind in ("l2", "max")]
        twin.clip_grads(grads, norms[0], 1.0)
        sides.append([*norms, *grads])
    for i, (a, b) in enumerate(zip(*sides, strict=True)):
        assert_same_bits(b, a, f"result {i}")


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_clipping_does_not_wait_for_the_gpu(norm_type: float) -> None:
    params = [torch.nn.Parameter(torch.zeros(300, 70, device="cuda")) for _ in range(3)]
    for i, p in enumerate(params):
        p.grad = awkward(i, 21000, torch.float32, False).view(300, 70).cuda()
    te.optimizers.clip_grad_norm_(params, 1.0, norm_type)  # compiles and loads
    try:
        with warnings.catch_warnings(action="ignore"):  # of the mode, that it is a prototype
            torch.cuda.set_sync_debug_mode("error")
        te.optimizers.clip_grad_norm_(params, 0.5, norm_type)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.nn.utils.get_total_norm([p.grad for p in params])


@pytest.mark.gpu
@pytest.mark.simulated
def test_clipping_is_captured_in_a_graph() -> None:
    grads = [awkward(i, 50000, torch.bfloat16, False) for i in range(2)]
    params = [torch.nn.Parameter(torch.zeros(50000, dtype=torch.bfloat16, device="cuda")) for _ in grads]
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad.cuda()
    te.optimizers.clip_grad_norm_(params, math.inf)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = te.optimizers.clip_grad_norm_(params, 0.5)
    for p, grad in zip(params, grads, strict=True):
        p.grad.copy_(grad)
    graph.replay()
    expected = twin.grad_norm(grads, "l2")
    twin.clip_grads(grads, expected, 0.5)
    assert_same_bits(norm, expected)
    for p, grad in zip(params, grads, strict=True):
        assert_same_bits(p.grad, grad)
