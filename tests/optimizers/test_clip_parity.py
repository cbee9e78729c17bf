"""On an H200 `twin::grad_norm` and `twin::clip_grads` equal their CPU definitions in every bit."""

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.adam_parameters import awkward
from shared.bits import assert_same_bits

import optimized  # noqa: F401  (registers the CUDA kernels)
import reference as te

pytestmark = [pytest.mark.gpu, pytest.mark.simulated]

twin = torch.ops.twin
WIDE = (torch.float32, torch.bfloat16, torch.float16)


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


@pytest.mark.parametrize("dtype", WIDE)
def test_every_dtype(dtype: torch.dtype) -> None:
    compare([1, 7, 8, 9, 2047, 2049, 0, 32767, 32768, 32769, 700001], [dtype])
    compare([70001, 3], [dtype], special=True)


def test_dtypes_side_by_side() -> None:
    compare([40000, 5, 32768, 9, 100000], list(WIDE))


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 70000), min_size=1, max_size=7),
    dtypes=st.lists(st.sampled_from(WIDE), min_size=1, max_size=3),
    offset=st.integers(0, 9),
    seed=st.integers(0, 2**20),
)
def test_any_list_at_any_address(sizes: list[int], dtypes: list[torch.dtype], offset: int, seed: int) -> None:
    compare(sizes, dtypes, offset, True, seed)


@pytest.mark.sample(1)
@pytest.mark.parametrize("count", [64, 65, 513, 2100])
def test_around_the_capacity_of_a_launch_and_of_the_last_sum(count: int) -> None:
    compare([5 + i % 7 for i in range(count)], [torch.bfloat16])


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
