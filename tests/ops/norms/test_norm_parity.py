"""The norms' kernels against their definition, bit for bit."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared.bits import assert_same_bits

import optimized  # noqa: F401  (registers the CUDA kernels)
from optimized.ops.norms import norm, norm_backward, norm_cast_transpose
from reference.numbers import formats
from reference.ops.norms.norm import KINDS

pytestmark = pytest.mark.gpu

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP32, BF16, FP16 = formats.WIDE_DTYPES
twin = torch.ops.twin

# One hidden of each way through the selectors, and neighbours of their limits.
HIDDEN = (
    *(1, 7, 8, 100, 256, 1000, 1016, 1024, 1032, 2048, 2056, 3072, 4096, 4104, 5120, 8192, 8208, 9001),
    *(5744, 5760, 9584, 9600, 12288, 16384, 16392),
)


def values(rows, hidden, dtype, seed):
    """Rows of very different sizes and offsets, so that another order of adding gives other bits."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, hidden, generator=generator)
    size = (torch.randn(rows, 1, generator=generator) * 2).exp()
    offset = torch.randn(rows, 1, generator=generator) * 3
    return (x * size + offset * (torch.arange(rows)[:, None] % 3)).to(dtype)


def parameters(hidden, dtype, kind, seed):
    generator = torch.Generator().manual_seed(seed + 1000)
    weight = (torch.randn(hidden, generator=generator) + 0.5).to(dtype)
    bias = torch.randn(hidden, generator=generator).to(dtype) if kind == "layernorm" else None
    return weight, bias


def poison():
    """Leave 0xFF in the memory that the next outputs will be made of, and NaN for whoever reads it."""
    blocks = [torch.full((1 << size,), 0xFF, dtype=torch.uint8, device="cuda") for size in range(9, 27)]
    small = [torch.full((512,), 0xFF, dtype=torch.uint8, device="cuda") for _ in range(16)]
    del blocks, small


def on_gpu(arguments):
    return [a.cuda() if isinstance(a, torch.Tensor) else a for a in arguments]


def check(op, *arguments):
    """Call `op` on both devices; every output and every tensor argument must have equal bits afterwards."""
    there = on_gpu(arguments)
    poison()
    ours, theirs = op(*arguments), op(*there)
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert_same_bits(a, b, f"output {number}")
    for number, (a, b) in enumerate(zip(arguments, there, strict=True)):
        if isinstance(a, torch.Tensor):
            assert_same_bits(a, b, f"argument {number}")


def check_all(x, grad, weight, bias, kind, zero_centered, out, residual=None, eps=1e-5):
    check(twin.norm, x, weight, bias, eps, zero_centered, kind, out)
    if x.shape[1] % 16 == 0:
        scale = torch.tensor([3.0, 0.37])
        history = torch.full((4, 2), 0.125)
        check(twin.norm_cast_transpose, x, weight, bias, eps, zero_centered, kind, scale, history, 1, E4M3)
        check(twin.norm_cast_transpose, x, weight, bias, eps, zero_centered, kind, scale, None, 0, E5M2)
    _, mean, rstd = twin.norm(x, weight, bias, eps, zero_centered, kind, out)
    check(twin.norm_backward, grad, x, weight, mean, rstd, zero_centered, kind, residual)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_every_way_through_the_selectors(hidden, kind):
    for seed, (rows, dtype, parameter, out) in enumerate(
        ((37, BF16, FP32, BF16), (261, FP16, FP16, FP32), (3, FP32, BF16, FP16), (1, BF16, BF16, BF16))
    ):
        x, grad, residual = (values(rows, hidden, dtype, 10 * seed + n) for n in range(3))
        weight, bias = parameters(hidden, parameter, kind, seed)
        check_all(x, grad, weight, bias, kind, seed % 2 == 1, out, residual if seed < 2 else None)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=st.integers(0, 600),
    hidden=st.one_of(st.integers(1, 80), st.integers(1, 600).map(lambda n: 16 * n)),
    dtype=st.sampled_from(formats.WIDE_DTYPES),
    parameter=st.sampled_from(formats.WIDE_DTYPES),
    zero_centered=st.booleans(),
    with_bias=st.booleans(),
    with_residual=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape(kind, rows, hidden, dtype, parameter, zero_centered, with_bias, with_residual, seed):
    rows = min(rows, 400_000 // hidden + 1)
    x, grad, residual = (values(rows, hidden, dtype, seed + n) for n in range(3))
    weight, bias = parameters(hidden, parameter, kind, seed)
    check_all(
        x,
        grad,
        weight,
        bias if with_bias else None,
        kind,
        zero_centered,
        dtype,
        residual if with_residual else None,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", formats.WIDE_DTYPES)
def test_every_configuration_on_ragged_shapes(kind, dtype, monkeypatch):
    weight, bias = parameters(208, BF16, kind, 3)
    x = values(83, 208, dtype, 5)
    scale, history = torch.tensor([5.0]), torch.zeros(1, 1)
    y = twin.norm(x, weight, bias, 1e-5, False, kind, BF16)
    cast = twin.norm_cast_transpose(x, weight, bias, 1e-5, False, kind, scale, history, 0, E4M3)
    there = [None if t is None else t.cuda() for t in (x, weight, bias, scale)]
    for warps in norm.ROW_WARPS:
        monkeypatch.setattr(norm, "row_warps", lambda hidden, warps=warps: warps)
        poison()
        for a, b in zip(y, twin.norm(*there[:3], 1e-5, False, kind, BF16), strict=True):
            assert_same_bits(a, b, f"norm, {warps} warps")
    shapes = [
        norm_cast_transpose.tile_shape(dtype, kind, 512 * n * cluster - 16) for n, cluster in norm_cast_transpose.SHAPES
    ]
    for shape in shapes:
        monkeypatch.setattr(norm_cast_transpose, "tile_shape", lambda dtype, kind, hidden, shape=shape: shape)
        poison()
        found = torch.zeros(1, 1, device="cuda")
        for a, b in zip(
            cast, twin.norm_cast_transpose(*there[:3], 1e-5, False, kind, there[3], found, 0, E4M3), strict=True
        ):
            assert_same_bits(a, b, f"norm_cast_transpose, {shape}")
        assert_same_bits(history, found, "amax")
    # The kernels for rows of any length, on this one.
    monkeypatch.setattr(norm, "row_warps", lambda hidden: None)
    monkeypatch.setattr(norm_cast_transpose, "tile_shape", lambda dtype, kind, hidden: None)
    check(twin.norm, x, weight, bias, 1e-5, False, kind, FP32)
    check(twin.norm_cast_transpose, x, weight, bias, 1e-5, False, kind, scale, history, 0, E5M2)
    monkeypatch.setattr(norm_backward, "backward_shape", lambda dtype, hidden: None)
    check(twin.norm_backward, x, x, weight, y[1], y[2], False, kind, x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", formats.WIDE_DTYPES)
@pytest.mark.parametrize("short", [0, 48])
def test_every_configuration_to_its_end(kind, dtype, short):
    """Rows that fill a configuration, and that end 48 elements before; 83 rows: a whole tile and a ragged one."""
    for warps in norm.ROW_WARPS:
        hidden = 1024 * warps - short
        assert norm.row_warps(hidden) == warps
        x = values(83, hidden, dtype, warps)
        weight, bias = parameters(hidden, BF16, kind, warps)
        check(twin.norm, x[:9], weight, bias, 1e-5, False, kind, dtype)
    for stripes, cluster in norm_cast_transpose.SHAPES:
        hidden = 512 * stripes * cluster - short
        assert norm_cast_transpose.tile_shape(dtype, kind, hidden)[:2] == (stripes, cluster)
        x = values(83, hidden, dtype, stripes)
        weight, bias = parameters(hidden, BF16, kind, cluster)
        check(twin.norm_cast_transpose, x, weight, bias, 1e-5, False, kind, torch.tensor([5.0]), None, 0, E4M3)
    for shape in norm_backward.SHAPES:
        hidden = 256 * shape[0] * shape[1] - short
        assert norm_backward.backward_shape(BF16, hidden) == shape
        rows = 300 if hidden < 2500 else 35
        x, grad = values(rows, hidden, dtype, 1), values(rows, hidden, dtype, 2)
        weight, _ = parameters(hidden, BF16, kind, 3)
        _, mean, rstd = twin.norm(x, weight, None, 1e-5, False, kind, dtype)
        for residual in (None, grad):
            check(twin.norm_backward, grad, x, weight, mean, rstd, True, kind, residual)


@pytest.mark.sample(4)
@pytest.mark.simulated
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 17, 33, 64, 65, 131, 200])
def test_tiles_shared_by_blocks(rows, kind):
    for seed, hidden in enumerate((16, 256, 976, 1024, 1040, 2000, 2048, 4112)):
        x = values(rows, hidden, BF16, seed)
        weight, bias = parameters(hidden, BF16, kind, seed)
        scale, history = torch.tensor([5.0]), torch.zeros(1, 1)
        check(twin.norm_cast_transpose, x, weight, bias, 1e-5, False, kind, scale, history, 0, E4M3)


@pytest.mark.parametrize("kind", KINDS)
def test_several_tiles_to_a_block(kind):
    """More tiles than multiprocessors: blocks go on to a second and a third."""
    for seed, (rows, hidden) in enumerate(((17000, 16), (9000, 256), (4300, 4112), (8500, 1040))):
        x = values(rows, hidden, BF16, seed)
        weight, bias = parameters(hidden, BF16, kind, seed)
        check(twin.norm_cast_transpose, x, weight, bias, 1e-5, False, kind, torch.tensor([5.0]), None, 0, E4M3)


@pytest.mark.sample(7)
@pytest.mark.simulated
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", formats.WIDE_DTYPES)
@pytest.mark.parametrize("hidden", [1, 48, 1024, 4096, 8200])
def test_special_values(hidden, dtype, kind):
    nan, inf = float("nan"), float("inf")
    x = values(24, hidden, dtype, 7)
    largest = torch.finfo(dtype).max
    for row, fill in enumerate((0.0, -0.0, 1.0, -3.14, largest, -largest, inf, -inf, nan, torch.finfo(dtype).tiny)):
        x[row] = fill
    x[10, 0], x[11, -1], x[12, hidden // 2] = nan, inf, -inf
    x[13] = torch.finfo(dtype).smallest_normal / 4
    x[14, 0] = largest
    x[15] *= 1e-30
    grad = values(24, hidden, dtype, 8)
    grad[1], grad[2, 0], grad[3, -1], grad[4] = -0.0, nan, inf, largest
    x[16:20], grad[16:20] = -0.0, -0.0
    weight, bias = parameters(hidden, BF16, kind, 9)
    weight[0], weight[-1] = -0.0, 1e30
    for eps in (1e-5, 1e-38, 1e30):
        check_all(x, grad, weight, bias, kind, False, dtype, grad, eps)
    check_all(-torch.zeros_like(x), -torch.zeros_like(x), -torch.zeros_like(weight), None, kind, False, dtype)


@pytest.mark.parametrize("shape", [(8192, 1024), (2048, 4096), (300, 12288)])
def test_shapes_of_layers(shape):
    rows, hidden = shape
    x, grad, residual = (values(rows, hidden, BF16, n) for n in range(3))
    weight, bias = parameters(hidden, BF16, "layernorm", 1)
    check_all(x, grad, weight, bias, "layernorm", False, BF16, residual)


def test_views_that_start_anywhere():
    for dtype in formats.WIDE_DTYPES:
        flat = torch.randn(1 + 33 * 48, device="cuda").to(dtype)
        x = flat[1:].view(33, 48)
        weight = torch.randn(49, device="cuda").to(dtype)[1:]
        scale = torch.tensor([9.0, 2.0, 7.0], device="cuda")[1:]
        arguments = (x, weight, weight, 1e-5, True, "layernorm")
        here = [a.cpu() if isinstance(a, torch.Tensor) else a for a in arguments]
        check(twin.norm, *here, dtype)
        for a, b in zip(twin.norm(*arguments, dtype), twin.norm(*here, dtype), strict=True):
            assert_same_bits(a, b)
        for a, b in zip(
            twin.norm_cast_transpose(*arguments, scale, None, 0, E4M3),
            twin.norm_cast_transpose(*here, scale.cpu(), None, 0, E4M3),
            strict=True,
        ):
            assert_same_bits(a, b)
        _, mean, rstd = twin.norm(*here, dtype)
        for a, b in zip(
            twin.norm_backward(x, x, weight, mean.cuda(), rstd.cuda(), True, "layernorm", x),
            twin.norm_backward(here[0], here[0], here[1], mean, rstd, True, "layernorm", here[0]),
            strict=True,
        ):
            assert_same_bits(a, b)


def test_cuda_graph_replay():
    x, grad = values(100, 1024, BF16, 1).cuda(), values(100, 1024, BF16, 2).cuda()
    weight, bias = (t.cuda() for t in parameters(1024, BF16, "layernorm", 1))
    scale, history = torch.ones(1, device="cuda"), torch.zeros(1, 1, device="cuda")

    def step():
        q = twin.norm_cast_transpose(x, weight, bias, 1e-5, False, "layernorm", scale, history, 0, E4M3)
        return (*q, *twin.norm_backward(grad, x, weight, q[3], q[4], False, "layernorm", x))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    x.copy_(values(100, 1024, BF16, 3))
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        assert_same_bits(a, b)
