"""`twin::norm`, `twin::norm_cast_transpose`, `twin::norm_backward`: formulas, written orders.

Their kernels equal this definition bit for bit.
"""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared.bits import assert_same_bits, torch_threads

import optimized  # noqa: F401  (registers the CUDA kernels)
import reference.ops.norms.norm
from optimized.ops.norms import norm, norm_backward, norm_cast_transpose
from reference.numbers import formats
from reference.ops.norms.norm import KINDS

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP32, BF16, FP16 = formats.WIDE_DTYPES
EPS32 = 2.0**-24  # fp32's unit roundoff
twin = torch.ops.twin
f32 = np.float32

# One hidden of each way through the selectors, and neighbours of their limits.
HIDDEN = (
    *(1, 7, 8, 100, 256, 1000, 1016, 1024, 1032, 2048, 2056, 3072, 4096, 4104, 5120, 8192, 8208, 9001),
    *(5744, 5760, 9584, 9600, 12288, 16384, 16392),
)


def values(rows, hidden, dtype=FP32, seed=0):
    """Rows of very different sizes and offsets, so that another order of adding gives other bits."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, hidden, generator=generator)
    return (x * torch.randn(rows, 1, generator=generator).exp() + torch.randn(rows, 1, generator=generator)).to(dtype)


def parameters(hidden, kind, dtype=FP32, seed=0):
    generator = torch.Generator().manual_seed(seed + 1000)
    weight = torch.randn(hidden, generator=generator).to(dtype)
    return weight, torch.randn(hidden, generator=generator).to(dtype) if kind == "layernorm" else None


def tree(numbers):
    """The sum of fp32 scalars: neighbours in pairs, padded with +0.0 to a power of two, 1024 at least."""
    width = 1024
    while width < len(numbers):
        width *= 2
    v = [*numbers, *[f32(0)] * (width - len(numbers))]
    while len(v) > 1:
        v = [a + b for a, b in zip(v[0::2], v[1::2], strict=True)]
    return v[0]


def columns(products, hidden=None):
    """The sum of the rows of fp32 `products` in the written order, one scalar addition after the other.

    `products` may be some columns of a matrix of `hidden`, which decides about the order.
    """
    rows, hidden = products.shape[0], products.shape[1] if hidden is None else hidden
    count = max(1, (rows + 255) // 256)
    chains = 4 if hidden <= 1024 else 2 if hidden <= 2048 else 1
    sums = []
    for c in range(products.shape[1]):
        blocks = []
        for start in range(0, rows, count):
            chain = [f32(0)] * chains
            for k, row in enumerate(range(start, min(start + count, rows))):
                chain[k % chains] = chain[k % chains] + products[row, c]
            while len(chain) > 1:
                chain = [a + b for a, b in zip(chain[0::2], chain[1::2], strict=True)]
            blocks.append(chain[0])
        total = f32(0)
        for first in range(0, len(blocks), 16):
            run = f32(0)
            for block in blocks[first : first + 16]:
                run = run + block
            total = total + run
        sums.append(total)
    return np.array(sums, np.float32)


def scalar_forward(x, weight, bias, eps, zero_centered, kind):
    """fp32 (y, mean, rstd) of fp32 `x` `[rows, hidden]`, scalar by scalar."""
    rows, hidden = x.shape
    y, mean, rstd = np.empty_like(x), [], []
    for r in range(rows):
        center = tree(list(x[r])) / f32(hidden) if kind == "layernorm" else None
        xc = [v - center for v in x[r]] if kind == "layernorm" else list(x[r])
        inverse = f32(1) / np.sqrt(tree([v * v for v in xc]) / f32(hidden) + f32(eps))
        mean += [center] if kind == "layernorm" else []
        rstd.append(inverse)
        for c in range(hidden):
            gamma = weight[c] + f32(1) if zero_centered else weight[c]
            y[r, c] = (xc[c] * inverse) * gamma
            if bias is not None:
                y[r, c] = y[r, c] + bias[c]
    return y, np.array(mean, np.float32), np.array(rstd, np.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hidden", [1, 3, 16, 100, 1023, 1024, 1025, 2048, 2500, 3072, 4096])
def test_forward_in_the_written_order(hidden, kind):
    x = values(3, hidden, seed=hidden)
    weight, bias = parameters(hidden, kind, seed=hidden)
    for zero_centered in (False, True):
        found = twin.norm(x, weight, bias, 1e-5, zero_centered, kind, FP32)
        expected = scalar_forward(
            x.numpy(), weight.numpy(), None if bias is None else bias.numpy(), 1e-5, zero_centered, kind
        )
        for name, a, b in zip(("y", "mean", "rstd"), found, expected, strict=True):
            assert_same_bits(a, torch.from_numpy(b), name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "hidden"), [(0, 8), (1, 8), (2, 1), (7, 20), (256, 3), (257, 3), (700, 5), (1030, 2), (9, 1040), (3, 2060)]
)
def test_backward_in_the_written_order(rows, hidden, kind):
    x, grad = values(rows, hidden, seed=rows), values(rows, hidden, seed=rows + 1)
    weight, _ = parameters(hidden, kind, seed=rows)
    _, mean, rstd = twin.norm(x, weight, None, 1e-5, True, kind, FP32)
    dx, dweight, dbias = twin.norm_backward(grad, x, weight, mean, rstd, True, kind, None)
    n, gamma = f32(hidden), weight.numpy() + f32(1)
    xhat = x.numpy() - mean.numpy()[:, None] if kind == "layernorm" else x.numpy()
    xhat = xhat * rstd.numpy()[:, None]
    assert_same_bits(dweight, torch.from_numpy(columns(grad.numpy() * xhat)), "dweight")
    if kind == "layernorm":
        assert_same_bits(dbias, torch.from_numpy(columns(grad.numpy())), "dbias")
    else:
        assert dbias.shape == (0,)
    for r in range(min(rows, 5)):
        g = grad.numpy()[r] * gamma
        c2 = tree(list(g * xhat[r])) / n
        if kind == "layernorm":
            g = g - tree(list(g)) / n
        row = [rstd.numpy()[r] * (a - b * c2) for a, b in zip(g, xhat[r], strict=True)]
        assert_same_bits(dx[r], torch.from_numpy(np.array(row, np.float32)), f"dx[{r}]")


@pytest.mark.sample(8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hidden", [1023, 1024, 1025, 2047, 2048, 2049, 4096])
def test_backward_in_the_written_order_where_it_changes(hidden, kind):
    """Wide rows, 5 of them in a block, so that 4, 2 and 1 chains give different sums; 3 rows and 16 columns of it."""
    rows, some = 1030, [*range(8), *range(hidden - 8, hidden)]
    x, grad = values(rows, hidden, seed=hidden), values(rows, hidden, seed=hidden + 1)
    weight, _ = parameters(hidden, kind, seed=hidden)
    _, mean, rstd = twin.norm(x, weight, None, 1e-5, False, kind, FP32)
    dx, dweight, dbias = twin.norm_backward(grad, x, weight, mean, rstd, False, kind, None)
    xhat = x.numpy() - mean.numpy()[:, None] if kind == "layernorm" else x.numpy()
    xhat = xhat * rstd.numpy()[:, None]
    products = grad.numpy()[:, some] * xhat[:, some]
    expected = columns(products, hidden)
    assert_same_bits(dweight[some], torch.from_numpy(expected), "dweight")
    others = [columns(products, other) for other in (1024, 2048, 4096)]
    assert sum(bool((one != expected).any()) for one in others) == 2, "the others' orders give other bits"
    if kind == "layernorm":
        assert_same_bits(dbias[some], torch.from_numpy(columns(grad.numpy()[:, some], hidden)), "dbias")
    for r in (0, 7, rows - 1):
        g = grad.numpy()[r] * weight.numpy()
        c2 = tree(list(g * xhat[r])) / f32(hidden)
        if kind == "layernorm":
            g = g - tree(list(g)) / f32(hidden)
        row = [rstd.numpy()[r] * (a - b * c2) for a, b in zip(g, xhat[r], strict=True)]
        assert_same_bits(dx[r], torch.from_numpy(np.array(row, np.float32)), f"dx[{r}]")


@pytest.mark.parametrize("hidden", [1, 512, 1000, 1023, 1024, 1025, 1536, 2048, 4096])
def test_a_row_of_negative_zeros(hidden):
    """The padding is +0.0: a row that has any sums to +0.0, one that has none to -0.0."""
    x = torch.full((2, hidden), -0.0)
    _, mean, rstd = twin.norm(x, torch.ones(hidden), None, 1e-5, False, "layernorm", FP32)
    padded = hidden < 1024 or hidden & (hidden - 1) != 0
    assert_same_bits(mean, torch.full((2,), 0.0 if padded else -0.0), "mean")
    assert_same_bits(mean[:1], torch.from_numpy(np.array([tree(list(x[0].numpy())) / f32(hidden)])), "the tree")
    assert (rstd > 0).all()


def test_another_order_would_be_noticed():
    x = values(64, 4096)
    sums = torch.from_numpy(reference.ops.norms.norm.row_sums(x.numpy()))[:, 0]
    assert (sums != x.sum(1)).any()
    halving = x
    while halving.shape[1] > 1:
        halving = halving[:, : halving.shape[1] // 2] + halving[:, halving.shape[1] // 2 :]
    assert (sums != halving[:, 0]).any()
    assert torch.allclose(sums.double(), x.double().sum(1), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero_centered", [False, True])
@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 20), hidden=st.integers(2, 1500), seed=st.integers(0, 1000))
def test_forward_against_float64(kind, zero_centered, rows, hidden, seed):
    x = values(rows, hidden, seed=seed)
    weight, bias = parameters(hidden, kind, seed=seed)
    y, _, rstd = twin.norm(x, weight, bias, 1e-5, zero_centered, kind, FP32)
    x64, gamma = x.double(), weight.double() + zero_centered
    center = x64.mean(1, keepdim=True) if kind == "layernorm" else 0.0
    inverse = 1 / ((x64 - center).square().mean(1, keepdim=True) + 1e-5).sqrt()
    expected = (x64 - center) * inverse * gamma + (0.0 if bias is None else bias.double())
    # With u = 2^-24 and a tree of depth d: a sum is wrong by at most d·u·Σ|x|, the mean by (d + 1)·u·mean|x|, xc by
    # that and u·|xc|. Relative to rms(xc), to first order: m = (d + 1)·u·mean|x| / rms. The mean of xc² moves by
    # 2·m + (d + 3)·u relative, rstd by half of that and 3 u; xhat by m·rms·rstd absolutely and rstd's part of it; then
    # three roundings.
    depth = max(10, int(np.ceil(np.log2(hidden))))
    m = (depth + 1) * EPS32 * x64.abs().mean(1, keepdim=True) * inverse if kind == "layernorm" else 0.0
    relative = m + (depth / 2 + 8) * EPS32
    size = (((x64 - center) * inverse).abs() * relative + m) * gamma.abs()
    if bias is not None:
        size = size + 2 * EPS32 * (bias.double().abs() + expected.abs())
    assert ((y.double() - expected).abs() <= 1.01 * size + 1e-30).all()
    assert ((rstd[:, None].double() / inverse - 1).abs() <= 1.01 * relative).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(("rows", "hidden"), [(5, 40), (300, 64), (40, 1500)])
def test_gradients_against_float64_autograd(kind, zero_centered, rows, hidden):
    x, grad, residual = (values(rows, hidden, seed=n) for n in range(3))
    weight, bias = parameters(hidden, kind)
    _, mean, rstd = twin.norm(x, weight, bias, 1e-5, zero_centered, kind, FP32)
    dx, dweight, dbias = twin.norm_backward(grad, x, weight, mean, rstd, zero_centered, kind, residual)
    x64, w64 = (t.double().requires_grad_() for t in (x, weight))
    gamma = w64 + 1 if zero_centered else w64
    if kind == "layernorm":
        y = torch.nn.functional.layer_norm(x64, (hidden,), gamma, bias.double(), 1e-5)
    else:
        y = torch.nn.functional.rms_norm(x64, (hidden,), gamma, 1e-5)
    (y * grad.double()).sum().backward()
    # First order, u = 2^-24: xhat is off by m + relative·|xhat| as above; then dx is a sum of three terms, each off by
    # the trees' (depth + a few) u and by xhat's error; a column's sum adds rows of them through a chain no longer
    # than rows / 256 + 2 + 32.
    with torch.no_grad():
        center = x64.mean(1, keepdim=True) if kind == "layernorm" else torch.zeros(rows, 1)
        xhat = (x64 - center) * rstd.double()[:, None]
        depth = max(10, int(np.ceil(np.log2(hidden))))
        m = (depth + 1) * EPS32 * x64.abs().mean(1, keepdim=True) * rstd.double()[:, None]
        relative = m + (depth / 2 + 8) * EPS32
        error = m + relative * xhat.abs()
        g = (grad.double() * gamma).abs()
        c1, c2 = g.mean(1, keepdim=True), (g * xhat.abs()).mean(1, keepdim=True)
        trees = (depth + 6) * EPS32
        c2_error = trees * c2 + (g * error).mean(1, keepdim=True)
        bound = trees * (g + c1) + xhat.abs() * c2_error + error * c2 + (relative + trees) * (g + c1 + xhat.abs() * c2)
        bound = bound * rstd.double()[:, None] + 2 * EPS32 * (residual.double().abs() + x64.grad.abs())
        assert ((dx.double() - (x64.grad + residual.double())).abs() <= bound).all()
        chain = (rows / 256 + 2 + 32 + 2) * EPS32
        columns_bound = (grad.double().abs() * (error + chain * xhat.abs())).sum(0)
        assert ((dweight.double() - w64.grad).abs() <= columns_bound).all()
        if kind == "layernorm":
            assert ((dbias.double() - grad.double().sum(0)).abs() <= chain * grad.double().abs().sum(0)).all()


@pytest.mark.parametrize("dtype", formats.WIDE_DTYPES)
@pytest.mark.parametrize("out", formats.WIDE_DTYPES)
def test_one_rounding_from_fp32(dtype, out):
    x = values(9, 48, dtype)
    weight, bias = parameters(48, "layernorm", dtype)
    y, mean, rstd = twin.norm(x, weight, bias, 1e-5, False, "layernorm", out)
    wide = twin.norm(x.float(), weight.float(), bias.float(), 1e-5, False, "layernorm", FP32)
    assert_same_bits(y, wide[0].to(out), "y")
    assert_same_bits(mean, wide[1], "mean")
    assert_same_bits(rstd, wide[2], "rstd")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [0, 1, 7, 16, 33])
@pytest.mark.parametrize("out", [E4M3, E5M2])
def test_the_cast_is_of_the_fp32_result(kind, rows, out):
    x = values(rows, 64, BF16)
    weight, bias = parameters(64, kind, BF16)
    scale, histories = torch.tensor([1.0, 37.0]), [torch.full((3, 2), 0.25) for _ in range(2)]
    q, q_t, scale_inv, mean, rstd = twin.norm_cast_transpose(
        x, weight, bias, 1e-5, False, kind, scale, histories[0], 1, out
    )
    y, mean_there, rstd_there = twin.norm(x, weight, bias, 1e-5, False, kind, FP32)
    expected = twin.cast_transpose(y, scale, histories[1], 1, out)
    for name, a, b in zip(("q", "q_t", "scale_inv"), (q, q_t, scale_inv), expected, strict=True):
        assert_same_bits(a, b, name)
    assert q_t.shape == (64, (rows + 15) // 16 * 16)
    assert_same_bits(mean, mean_there)
    assert_same_bits(rstd, rstd_there)
    assert_same_bits(histories[0], histories[1])
    if rows > 1:
        through_bf16 = twin.cast(y.to(BF16), scale, None, 1, out)[0]
        assert not torch.equal(q.view(torch.uint8), through_bf16.view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out", formats.WIDE_DTYPES)
def test_the_scale_is_that_of_the_rounded_numbers(kind, out):
    for rows, how in ((33, (E4M3, False, 0.0)), (5, (E5M2, True, 1e-3)), (0, (E4M3, False, 2.0))):
        x = values(rows, 48, FP32, seed=rows)
        weight, bias = parameters(48, kind, BF16)
        *found, scale = twin.norm_scale(x, weight, bias, 1e-5, True, kind, out, *how)
        expected = twin.norm(x, weight, bias, 1e-5, True, kind, out)
        for name, a, b in zip(("y", "mean", "rstd"), found, expected, strict=True):
            assert_same_bits(a, b, name)
        assert_same_bits(scale, twin.current_scale(expected[0], *how), "scale")


def test_the_residuals_gradient_is_added_after_a_rounding():
    x, grad, residual = (values(40, 64, BF16, seed=n) for n in range(3))
    weight, _ = parameters(64, "rmsnorm", BF16)
    _, mean, rstd = twin.norm(x, weight, None, 1e-5, False, "rmsnorm", BF16)
    alone = twin.norm_backward(grad, x, weight, mean, rstd, False, "rmsnorm", None)
    together = twin.norm_backward(grad, x, weight, mean, rstd, False, "rmsnorm", residual)
    assert_same_bits(together[0], (alone[0].float() + residual.float()).to(BF16))
    assert_same_bits(together[1], alone[1])


def test_special_rows():
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[2.5] * 16, [0.0] * 16, [-0.0] * 16, [3e38, -3e38] * 8, [inf] + [1.0] * 15, [nan] * 16])
    weight, bias = torch.ones(16), torch.full((16,), 0.5)
    y, mean, rstd = twin.norm(x, weight, bias, 1e-5, False, "layernorm", FP32)
    assert (y[:3] == 0.5).all()  # constant rows: var = 0
    assert (rstd[:3] == np.float32(1) / np.sqrt(np.float32(1e-5))).all()
    assert rstd[3] == 0.0  # the squares overflow
    assert (y[3] == 0.5).all()
    assert y[4:].isnan().all()
    assert mean[4] == inf
    y, mean, rstd = twin.norm(x, weight, None, 1e-5, False, "rmsnorm", FP32)
    assert mean.shape == (0,)
    assert torch.signbit(y[2]).all()  # -0 · rstd
    assert rstd[3:5].tolist() == [0.0, 0.0]
    assert y[4, 0].isnan()  # inf · 0
    assert (y[4, 1:] == 0).all()


def test_it_does_not_depend_on_threads_or_on_how_the_work_is_cut(monkeypatch):
    x, grad = values(530, 80, BF16), values(530, 80, BF16, 1)
    weight, bias = parameters(80, "layernorm", BF16)

    def results():
        y, mean, rstd = twin.norm(x, weight, bias, 1e-5, False, "layernorm", BF16)
        return y, mean, rstd, *twin.norm_backward(grad, x, weight, mean, rstd, False, "layernorm", x)

    whole = results()
    with torch_threads(1):
        for a, b in zip(results(), whole, strict=True):
            assert_same_bits(a, b, "one thread")
    for elements in (1, 80 * 9):
        monkeypatch.setattr(reference.ops.norms.norm, "_CHUNK", elements)
        for a, b in zip(results(), whole, strict=True):
            assert_same_bits(a, b, f"{elements} elements at a time")


@pytest.mark.parametrize("hidden", [1024, 4096, 12288])
def test_blocks_have_as_many_rows_each_where_few_of_them_must_stay_away(hidden, monkeypatch):
    """No block has more turns than it would with all that run at once; at most one in sixteen of those is left out."""
    monkeypatch.setattr(norm.launch, "processors", lambda index: 132)
    kernel = norm.rows_kernel(BF16, "rmsnorm", norm.row_warps(hidden), hidden)
    at_once, seen = 132 * kernel.defines["BLOCKS"], set()
    for rows in range(0, 5 * at_once * kernel.defines["ROWS"], 7):
        parts = -(-rows // kernel.defines["ROWS"])
        turns, blocks = -(-parts // at_once), norm.blocks_of(kernel, rows, 0)
        assert blocks <= min(parts, at_once)
        assert parts <= turns * blocks
        even = [n for n in range(-(-15 * at_once // 16), at_once + 1) if n * turns == parts]
        if turns > 1:
            assert blocks == (even[0] if even else at_once), rows
            seen.add(bool(even) and even[0] < at_once)
    assert seen == {False, True}


def wide_values(rows, hidden, dtype, seed):
    """Rows of very different sizes and offsets, so that another order of adding gives other bits."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, hidden, generator=generator)
    size = (torch.randn(rows, 1, generator=generator) * 2).exp()
    offset = torch.randn(rows, 1, generator=generator) * 3
    return (x * size + offset * (torch.arange(rows)[:, None] % 3)).to(dtype)


def shifted_parameters(hidden, dtype, kind, seed):
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
    check(twin.norm_scale, x, weight, bias, eps, zero_centered, kind, out, E4M3, False, 0.0)
    if x.shape[1] % 16 == 0:
        scale = torch.tensor([3.0, 0.37])
        history = torch.full((4, 2), 0.125)
        check(twin.norm_cast_transpose, x, weight, bias, eps, zero_centered, kind, scale, history, 1, E4M3)
        check(twin.norm_cast_transpose, x, weight, bias, eps, zero_centered, kind, scale, None, 0, E5M2)
    _, mean, rstd = twin.norm(x, weight, bias, eps, zero_centered, kind, out)
    check(twin.norm_backward, grad, x, weight, mean, rstd, zero_centered, kind, residual)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_every_way_through_the_selectors(hidden, kind):
    for seed, (rows, dtype, parameter, out) in enumerate(
        ((37, BF16, FP32, BF16), (261, FP16, FP16, FP32), (3, FP32, BF16, FP16), (1, BF16, BF16, BF16))
    ):
        x, grad, residual = (wide_values(rows, hidden, dtype, 10 * seed + n) for n in range(3))
        weight, bias = shifted_parameters(hidden, parameter, kind, seed)
        check_all(x, grad, weight, bias, kind, seed % 2 == 1, out, residual if seed < 2 else None)


@pytest.mark.gpu
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
    x, grad, residual = (wide_values(rows, hidden, dtype, seed + n) for n in range(3))
    weight, bias = shifted_parameters(hidden, parameter, kind, seed)
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


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", formats.WIDE_DTYPES)
def test_every_configuration_on_ragged_shapes(kind, dtype, monkeypatch):
    weight, bias = shifted_parameters(208, BF16, kind, 3)
    x = wide_values(83, 208, dtype, 5)
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


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", formats.WIDE_DTYPES)
@pytest.mark.parametrize("short", [0, 48])
def test_every_configuration_to_its_end(kind, dtype, short):
    """Rows that fill a configuration, and that end 48 elements before; 83 rows: a whole tile and a ragged one."""
    for warps in norm.ROW_WARPS:
        hidden = 1024 * warps - short
        assert norm.row_warps(hidden) == warps
        x = wide_values(83, hidden, dtype, warps)
        weight, bias = shifted_parameters(hidden, BF16, kind, warps)
        check(twin.norm, x[:9], weight, bias, 1e-5, False, kind, dtype)
        check(twin.norm_scale, x[:9], weight, bias, 1e-5, False, kind, dtype, E4M3, False, 0.0)
    for stripes, cluster in norm_cast_transpose.SHAPES:
        hidden = 512 * stripes * cluster - short
        assert norm_cast_transpose.tile_shape(dtype, kind, hidden)[:2] == (stripes, cluster)
        x = wide_values(83, hidden, dtype, stripes)
        weight, bias = shifted_parameters(hidden, BF16, kind, cluster)
        check(twin.norm_cast_transpose, x, weight, bias, 1e-5, False, kind, torch.tensor([5.0]), None, 0, E4M3)
    for shape in norm_backward.SHAPES:
        hidden = 256 * shape[0] * shape[1] - short
        assert norm_backward.backward_shape(BF16, hidden) == shape
        rows = 300 if hidden < 2500 else 35
        x, grad = wide_values(rows, hidden, dtype, 1), wide_values(rows, hidden, dtype, 2)
        weight, _ = shifted_parameters(hidden, BF16, kind, 3)
        _, mean, rstd = twin.norm(x, weight, None, 1e-5, False, kind, dtype)
        for residual in (None, grad):
            check(twin.norm_backward, grad, x, weight, mean, rstd, True, kind, residual)


@pytest.mark.gpu
@pytest.mark.sample(4)
@pytest.mark.simulated
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 17, 33, 64, 65, 131, 200])
def test_tiles_shared_by_blocks(rows, kind):
    for seed, hidden in enumerate((16, 256, 976, 1024, 1040, 2000, 2048, 4112)):
        x = wide_values(rows, hidden, BF16, seed)
        weight, bias = shifted_parameters(hidden, BF16, kind, seed)
        scale, history = torch.tensor([5.0]), torch.zeros(1, 1)
        check(twin.norm_cast_transpose, x, weight, bias, 1e-5, False, kind, scale, history, 0, E4M3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_several_tiles_to_a_block(kind):
    """More tiles than multiprocessors: blocks go on to a second and a third."""
    for seed, (rows, hidden) in enumerate(((17000, 16), (9000, 256), (4300, 4112), (8500, 1040))):
        x = wide_values(rows, hidden, BF16, seed)
        weight, bias = shifted_parameters(hidden, BF16, kind, seed)
        check(twin.norm_cast_transpose, x, weight, bias, 1e-5, False, kind, torch.tensor([5.0]), None, 0, E4M3)


@pytest.mark.gpu
@pytest.mark.sample(7)
@pytest.mark.simulated
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", formats.WIDE_DTYPES)
@pytest.mark.parametrize("hidden", [1, 48, 1024, 4096, 8200])
def test_special_values(hidden, dtype, kind):
    nan, inf = float("nan"), float("inf")
    x = wide_values(24, hidden, dtype, 7)
    largest = torch.finfo(dtype).max
    for row, fill in enumerate((0.0, -0.0, 1.0, -3.14, largest, -largest, inf, -inf, nan, torch.finfo(dtype).tiny)):
        x[row] = fill
    x[10, 0], x[11, -1], x[12, hidden // 2] = nan, inf, -inf
    x[13] = torch.finfo(dtype).smallest_normal / 4
    x[14, 0] = largest
    x[15] *= 1e-30
    grad = wide_values(24, hidden, dtype, 8)
    grad[1], grad[2, 0], grad[3, -1], grad[4] = -0.0, nan, inf, largest
    x[16:20], grad[16:20] = -0.0, -0.0
    weight, bias = shifted_parameters(hidden, BF16, kind, 9)
    weight[0], weight[-1] = -0.0, 1e30
    for eps in (1e-5, 1e-38, 1e30):
        check_all(x, grad, weight, bias, kind, False, dtype, grad, eps)
    check_all(-torch.zeros_like(x), -torch.zeros_like(x), -torch.zeros_like(weight), None, kind, False, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8192, 1024), (2048, 4096), (300, 12288)])
def test_shapes_of_layers(shape):
    rows, hidden = shape
    x, grad, residual = (wide_values(rows, hidden, BF16, n) for n in range(3))
    weight, bias = shifted_parameters(hidden, BF16, "layernorm", 1)
    check_all(x, grad, weight, bias, "layernorm", False, BF16, residual)


@pytest.mark.gpu
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


@pytest.mark.gpu
def test_cuda_graph_replay():
    x, grad = wide_values(100, 1024, BF16, 1).cuda(), wide_values(100, 1024, BF16, 2).cuda()
    weight, bias = (t.cuda() for t in shifted_parameters(1024, BF16, "layernorm", 1))
    scale, history = torch.ones(1, device="cuda"), torch.zeros(1, 1, device="cuda")

    def step():
        q = twin.norm_cast_transpose(x, weight, bias, 1e-5, False, "layernorm", scale, history, 0, E4M3)
        return (*q, *twin.norm_backward(grad, x, weight, q[3], q[4], False, "layernorm", x))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    x.copy_(wide_values(100, 1024, BF16, 3))
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        assert_same_bits(a, b)
