"""`twin::softmax` and its backward: float64, the written order, masks, refusals.

On an H200 they have every bit of the CPU's.
"""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared.bits import assert_same_bits
from shared.numba_code import assert_no_double

import optimized  # noqa: F401  (registers the CUDA ops)
from reference.numbers import elementary
from reference.ops.attentions import softmax
from reference.ops.attentions.attention import MASK_TYPES

twin = torch.ops.twin
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
TINY = {torch.float32: 2.0**-126, torch.bfloat16: 2.0**-126, torch.float16: 2.0**-24}


def scores(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def hidden_pairs(shape: tuple[int, ...], mask_type: str, mask: torch.Tensor | None) -> torch.Tensor:
    sq, skv = shape[2:]
    shift = {"none": skv, "causal": 0, "causal_bottom_right": skv - sq}[mask_type]
    hidden = (torch.arange(skv)[None, :] > torch.arange(sq)[:, None] + shift) & (mask_type != "none")
    return (hidden if mask is None else hidden | mask).expand(shape)


@settings(max_examples=40, deadline=None)
@given(
    sq=st.integers(1, 20),
    skv=st.integers(1, 600),
    dtype=st.sampled_from(DTYPES),
    mask_type=st.sampled_from(MASK_TYPES),
    masked=st.booleans(),
    scale=st.sampled_from((0.1, 1.0, 4.0)),
    seed=st.integers(0, 2**30),
)
def test_against_float64(sq, skv, dtype, mask_type, masked, scale, seed) -> None:  # type: ignore[no-untyped-def]
    """exp is good to 1.3 ulp (2^-22.6) of an argument rounded twice (2^-24 of |s| <= 2^7 and of the difference);
    the sum of skv numbers to skv/256 + 8 roundings; division and product two more; then one to the type.
    The backward's terms are y (g - Σ): each sum adds its own roundings to Σ |y g|.
    """
    shape = (1, 2, sq, skv)
    x, g = scores(shape, dtype, seed), scores(shape, dtype, seed + 1)
    mask = torch.rand(1, 1, sq, skv, generator=torch.Generator().manual_seed(seed)) < 0.3 if masked else None
    hidden = hidden_pairs(shape, mask_type, mask)
    y, dx = twin.softmax(x, scale, mask_type, mask), None
    wide = x.double()
    expected = torch.where(hidden, 0.0, torch.softmax((wide * scale).masked_fill(hidden, -math.inf), -1))
    largest = (wide.abs() * scale).amax(-1, keepdim=True)
    relative = (skv / 256 + 16) * 2.0**-23 + largest * 2.0**-22
    assert bool(((y.double() - expected).abs() <= expected * (relative + UNIT[dtype]) + TINY[dtype]).all())
    dx = twin.softmax_backward(g, y, scale)
    p, g = y.double(), g.double()
    total = (p * g).sum(-1, keepdim=True)
    expected = scale * p * (g - total)
    error = scale * p * ((p * g).abs().sum(-1, keepdim=True) + g.abs() + total.abs()) * (skv / 256 + 16) * 2.0**-23
    bound = error + UNIT[dtype] * expected.abs() + TINY[dtype]
    assert bool(((dx.double() - expected).abs() <= bound).all())


@pytest.mark.parametrize("skv", [1, 8, 100, 256, 257, 700])
def test_the_order_is_the_written_one(skv: int) -> None:
    x, g = scores((1, 1, 2, skv), torch.float32, 5), scores((1, 1, 2, skv), torch.float32, 6)
    y = twin.softmax(x, 0.3, "none", None)
    dx = twin.softmax_backward(g, y, 0.3)

    def total(terms: list) -> np.float32:
        lanes = [[np.float32(0)] * 8 for _ in range(32)]
        for at, add in enumerate(terms):
            lanes[at // 8 % 32][at % 8] = add(lanes[at // 8 % 32][at % 8])
        for h in (4, 2, 1):
            for lane in lanes:
                for j in range(h):
                    lane[j] = np.float32(lane[j] + lane[j + h])
        sums = [lane[0] for lane in lanes]
        for h in (16, 8, 4, 2, 1):
            for lane in range(h):
                sums[lane] = np.float32(sums[lane] + sums[lane + h])
        return sums[0]

    for row in range(2):
        s = [np.float32(v * np.float32(0.3)) for v in x[0, 0, row].numpy()]
        e = elementary.exp(torch.tensor(np.array([np.float32(v - max(s)) for v in s]))).numpy()
        inverse = np.float32(np.float32(1) / total([lambda a, v=v: np.float32(a + v) for v in e]))
        assert_same_bits(torch.tensor(np.array([np.float32(v * inverse) for v in e])), y[0, 0, row])
        yr, gr = y[0, 0, row].numpy(), g[0, 0, row].numpy()
        exact = [(np.longdouble(a), np.longdouble(b)) for a, b in zip(yr, gr, strict=True)]
        dot = total([lambda acc, a=a, b=b: np.float32(a * b + np.longdouble(acc)) for a, b in exact])
        one = [np.float32(np.float32(0.3) * np.float32(a * np.float32(b - dot))) for a, b in zip(yr, gr, strict=True)]
        assert_same_bits(torch.tensor(np.array(one)), dx[0, 0, row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_see_nothing(dtype: torch.dtype) -> None:
    x = scores((1, 1, 3, 5), dtype)
    y = twin.softmax(x, 1.0, "causal", torch.tensor([True, True, False, False, False])[None, None, None])
    assert not y[0, 0, :2].any()
    assert y[0, 0, 2, 2] == 1
    assert not twin.softmax(torch.full_like(x, -math.inf), 1.0, "none", None).any()


def test_nan_and_infinity_stay_in_their_rows() -> None:
    x = scores((1, 1, 4, 9), torch.float32)
    x[0, 0, 1, 3], x[0, 0, 2, 4], x[0, 0, 3, 5] = math.nan, math.inf, -math.inf
    y = twin.softmax(x, 1.0, "none", None)[0, 0]
    assert y[1].isnan().all()
    assert y[2].isnan().any()
    assert not y[[0, 3]].isnan().any()
    assert y[3, 5] == 0


@pytest.mark.parametrize("shape", [(0, 1, 2, 3), (1, 1, 0, 3), (1, 1, 2, 0)])
def test_nothing(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape)
    y = twin.softmax(x, 1.0, "causal", None)
    assert y.shape == shape
    assert twin.softmax_backward(x, y, 1.0).shape == shape


def test_no_double_arithmetic() -> None:
    y = twin.softmax(scores((1, 1, 2, 3), torch.float32), 1.0, "none", None)
    twin.softmax_backward(y, y, 1.0)
    for function in (softmax.softmax_rows, softmax.softmax_backward_rows):
        assert_no_double(function)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ((torch.zeros(2, 3), 1.0, "none", None), "x must be contiguous [b, h, sq, skv]"),
        ((torch.zeros(1, 1, 2, 3).double(), 1.0, "none", None), "x must be torch.float32"),
        ((torch.zeros(1, 1, 2, 3), -1.0, "none", None), "scale must be a positive number"),
        ((torch.zeros(1, 1, 2, 3), 1.0, "arbitrary", None), "mask_type must be one of"),
        ((torch.zeros(1, 1, 2, 3), 1.0, "none", torch.zeros(1, 1, 2, 2, dtype=torch.bool)), "mask must be 4-D"),
    ],
)
def test_refusals(args: tuple, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        twin.softmax(*args)


def test_refusals_of_the_backward() -> None:
    x = torch.zeros(1, 1, 2, 3)
    wrong = r"grad must be contiguous .* \[1, 1, 2, 3\] on cpu; got"
    for grad, y, sentence in ((x, x[0], "y must be contiguous"), (x[0], x, wrong), (x, x.half(), wrong)):
        with pytest.raises(ValueError, match=sentence):
            twin.softmax_backward(grad, y, 1.0)


def compare(b, h, sq, skv, dtype, mask_type, mask_shape, scale, seed, specials=False) -> None:  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(b, h, sq, skv, generator=generator) * 4).to(dtype)
    if specials:
        x.view(-1)[::31] = float("-inf")
        x.view(-1)[5::97] = float("inf")
        x.view(-1)[9::89] = float("nan")
    g = torch.randn(b, h, sq, skv, generator=generator).to(dtype)
    sizes = {"none": None, "keys": (b, 1, 1, skv), "pairs": (1, 1, sq, skv), "all": (b, h, sq, skv)}[mask_shape]
    mask = None if sizes is None else torch.rand(sizes, generator=generator) < 0.4
    results = []
    for device in ("cpu", "cuda"):
        y = twin.softmax(x.to(device), scale, mask_type, None if mask is None else mask.to(device))
        results.append((y, twin.softmax_backward(g.to(device), y, scale)))
    for name, a, c in zip(("y", "dx"), *results, strict=True):
        assert_same_bits(a, c, f"{name} of {(b, h, sq, skv)}, {dtype}, {mask_type}, {mask_shape}, scale={scale}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask_type", MASK_TYPES)
@pytest.mark.parametrize("mask_shape", ["none", "keys", "pairs", "all"])
@pytest.mark.parametrize("specials", [False, True])
def test_masks(dtype: torch.dtype, mask_type: str, mask_shape: str, specials: bool) -> None:
    compare(2, 3, 33, 200, dtype, mask_type, mask_shape, 0.125, 0, specials)


@pytest.mark.gpu
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    b=st.integers(0, 2),
    h=st.integers(1, 3),
    sq=st.integers(0, 60),
    skv=st.integers(1, 600),
    dtype=st.sampled_from(DTYPES),
    mask_type=st.sampled_from(MASK_TYPES),
    mask_shape=st.sampled_from(("none", "keys", "pairs", "all")),
    scale=st.sampled_from((1.0, 0.088, 10.0)),
    seed=st.integers(0, 2**30),
)
def test_any_shape(b, h, sq, skv, dtype, mask_type, mask_shape, scale, seed) -> None:  # type: ignore[no-untyped-def]
    compare(b, h, sq, skv, dtype, mask_type, mask_shape, scale, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("skv", [8, 250, 256, 504, 510, 1000, 1001, 1500, 2048, 2049, 2056, 4099])
def test_every_configuration(dtype: torch.dtype, skv: int) -> None:
    for mask_type, mask_shape in (("causal_bottom_right", "none"), ("causal", "pairs"), ("none", "none")):
        compare(1, 2, 9, skv, dtype, mask_type, mask_shape, 1.0, 3, specials=True)


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_view_off_the_16_byte_boundary(dtype: torch.dtype) -> None:
    whole = torch.randn(3 * 264 + 1).to(dtype)
    x, there = whole[1:].view(1, 1, 3, 264), whole.cuda()[1:].view(1, 1, 3, 264)
    assert there.data_ptr() % 16 != 0
    y = twin.softmax(x, 1.0, "none", None)
    assert_same_bits(y, twin.softmax(there, 1.0, "none", None))
    assert_same_bits(twin.softmax_backward(x, y, 1.0), twin.softmax_backward(there, y.cuda(), 1.0))
