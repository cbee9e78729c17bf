"""The activation kernels on an H200 equal their CPU definitions in every bit: values, codes, amax, sums."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.activation_values import every_word
from shared.bits import assert_same_bits
from shared.cast_values import numbers, poison
from shared.determinism import assert_same_again

import optimized  # noqa: F401  (registers the CUDA kernels)
from reference.numbers import formats
from reference.ops.activations import activation
from reference.ops.activations.activation import Clamp, width

pytestmark = pytest.mark.gpu

twin = torch.ops.twin
TIGHT = Clamp(1.5, 0.5, -0.25).kind
KINDS, GATED = (*activation.KINDS, TIGHT), (*activation.GATED, TIGHT)
WIDE = formats.WIDE_DTYPES
SIXTEEN = (torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
ROWS = (0, 1, 7, 16, 65, 130)
COLS = (16, 48, 272, 1040)  # of y


def compare_plain(grad: torch.Tensor, x: torch.Tensor, kind: str) -> None:
    """y and dx on both sides."""
    where = f"of {kind}, {x.dtype} {list(x.shape)}"
    expected = twin.activation(x, kind), twin.activation_backward(grad, x, kind)
    poison(x.numel() * x.element_size())
    assert_same_bits(twin.activation(x.cuda(), kind), expected[0], f"y {where}")
    poison(x.numel() * x.element_size())
    assert_same_bits(twin.activation_backward(grad.cuda(), x.cuda(), kind), expected[1], f"dx {where}")
    compare_scales(x, kind)


def compare_scales(x: torch.Tensor, kind: str) -> None:
    """y with its scale on both sides; also of numbers without infinities, whose scale is not 1."""
    for one in (x, torch.where(x.isfinite(), x, 0.0)):
        for how in ((FP8[0], False, 0.0), (FP8[1], True, 1e-3)):
            poison(x.numel() * x.element_size())
            found, expected = twin.activation_scale(one.cuda(), kind, *how), twin.activation_scale(one, kind, *how)
            for name, a, b in zip(("y", "scale"), found, expected, strict=True):
                assert_same_bits(a, b, f"{name} of {kind}, {x.dtype} {list(x.shape)}")


def compare_casts(
    grad: torch.Tensor, x: torch.Tensor, kind: str, out: torch.dtype, scale: float = 4.0, history: bool = True
) -> None:
    """Both casts on both sides: everything that they return or write."""
    results: list[list[torch.Tensor]] = []
    for device in ("cpu", "cuda"):
        scales = torch.tensor([1.0, scale, 1.0], device=device)
        amax = [torch.full((4, 3), 2.0**-20, device=device) for _ in range(2)]
        g_here, x_here = grad.to(device), x.to(device)
        if device == "cuda":
            poison(x.numel() + 4096)
        state = (scales, amax[0] if history else None, 1, out)
        forward = twin.activation_cast_transpose(x_here, kind, *state)
        state = (scales, amax[1] if history else None, 1, out)
        backward = twin.activation_backward_cast_transpose_dbias(g_here, x_here, kind, *state)
        results.append([*forward, amax[0], *backward, amax[1]])
    names = [f"{name} of {op}" for op in ("y", "dx") for name in ("q", "q_t", "scale_inv", "dbias", "amax")]
    names.remove("dbias of y")
    for name, found, expected in zip(names, results[1], results[0], strict=True):
        assert_same_bits(found, expected, f"{name}, {kind} of {x.dtype} {list(x.shape)} to {out}")


def case(rows: int, cols: int, kind: str, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """grad and x for a y of `rows` and `cols`: numbers of very different sizes, some of them special."""
    n = 2 * cols if kind in GATED else cols
    return numbers(rows, cols, dtype, seed), numbers(rows, n, dtype, seed + 1)


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("kind", KINDS)
def test_every_shape(kind: str, dtype: torch.dtype) -> None:
    for seed, (rows, cols) in enumerate(itertools.product(ROWS, COLS)):
        grad, x = case(rows, cols, kind, dtype, seed)
        compare_plain(grad, x, kind)
        for out in FP8:
            compare_casts(grad, x, kind, out)


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_columns(kind: str, dtype: torch.dtype) -> None:
    for seed, (rows, cols) in enumerate(itertools.product((1, 5), (0, 1, 3, 4, 8, 20, 129, 513))):
        compare_plain(*case(rows, cols, kind, dtype, seed), kind)


@pytest.mark.simulated
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("kind", ["gelu", "swiglu", TIGHT])
def test_the_scale_of_any_shape(kind: str, dtype: torch.dtype) -> None:
    for seed, (rows, cols) in enumerate(itertools.product((0, 1, 5), (0, 3, 16, 513))):
        compare_scales(case(rows, cols, kind, dtype, seed)[1], kind)


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(0, 300),
    groups=st.integers(0, 40),
    dtype=st.sampled_from(WIDE),
    out=st.sampled_from(FP8),
    scale=st.floats(2.0**-126, 2.0**100, width=32),
    history=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_any_shape_and_scale(kind, rows, groups, dtype, out, scale, history, seed) -> None:  # type: ignore[no-untyped-def]
    compare_casts(*case(rows, 16 * groups, kind, dtype, seed), kind, out, scale, history)


@pytest.mark.parametrize("scale", [float("inf"), float("nan"), 2.0**-149, 3.4028234663852886e38])
def test_a_scale_that_is_hardly_one(scale: float) -> None:
    # The padding of q_t stays zero even where 0 * scale is NaN.
    for kind, dtype, out in itertools.product(KINDS, WIDE, FP8):
        compare_casts(*case(17, 48, kind, dtype, 0), kind, out, scale)


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("kind", KINDS)
def test_every_16_bit_word(kind: str, dtype: torch.dtype) -> None:
    words = every_word(dtype)
    other, ones = numbers(256, 256, dtype), torch.ones(256, 256, dtype=dtype)
    if kind not in GATED:
        arguments = [(ones, words), (other, words), (words, other)]
    else:
        halves = [(words, ones), (words, other), (other, words)]
        arguments = [(grad, torch.cat(pair, 1)) for grad in (ones, other) for pair in halves]
        arguments.append((words, torch.cat((other, ones), 1)))
    for grad, x in arguments:
        compare_plain(grad, x, kind)
        for out, scale in itertools.product(FP8, (1.0, 64.0)):
            compare_casts(grad, x, kind, out, scale)


@pytest.mark.parametrize("kind", KINDS)
def test_fp32_words_of_every_size(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (4, 512, 512), generator=generator).int().view(torch.float32)
    # As many of the sizes at which the activations bend.
    words[::2] = torch.randn(2, 512, 512, generator=generator) * 4
    grad, x = (torch.cat([words[i], words[i + 1]], 0) for i in (0, 2))
    grad = grad[:, : width(kind, 512)].contiguous()
    compare_plain(grad, x, kind)
    compare_casts(grad, x, kind, FP8[0])


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_the_sums_of_many_blocks(kind: str) -> None:
    for rows in (8192 + 65, 20000):
        compare_casts(*case(rows, 32, kind, torch.bfloat16, 3), kind, FP8[1])
    compare_casts(*case(16, 20000, kind, torch.bfloat16, 4), kind, FP8[0])


@pytest.mark.parametrize("kind", KINDS)
def test_views_off_the_16_byte_boundary(kind: str) -> None:
    grad, x = case(33, 48, kind, torch.bfloat16, 0)
    cuda = []
    for tensor in (grad, x):
        room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")
        cuda.append(room[1:].view(tensor.shape).copy_(tensor))
        assert cuda[-1].data_ptr() % 16
    one = torch.ones(1)
    assert_same_bits(twin.activation(cuda[1], kind), twin.activation(x, kind))
    assert_same_bits(twin.activation_backward(*cuda, kind), twin.activation_backward(grad, x, kind))
    found = twin.activation_backward_cast_transpose_dbias(*cuda, kind, one.cuda(), None, 0, FP8[0])
    expected = twin.activation_backward_cast_transpose_dbias(grad, x, kind, one, None, 0, FP8[0])
    for a, b in zip(found, expected, strict=True):
        assert_same_bits(a, b)


def test_two_runs_two_streams_and_a_graph_give_the_same_bits() -> None:
    grad, x = (t.cuda() for t in case(1000, 1024, "geglu", torch.bfloat16, 0))
    scale, history = torch.full((1,), 2.0, device="cuda"), torch.zeros(2, 1, device="cuda")

    def run() -> list[torch.Tensor]:
        state = (scale, history, 0, FP8[1])
        return [
            twin.activation(x, "geglu"),
            *twin.activation_scale(x, "geglu", FP8[0], False, 0.0),
            twin.activation_backward(grad, x, "geglu"),
            *twin.activation_cast_transpose(x, "geglu", *state),
            *twin.activation_backward_cast_transpose_dbias(grad, x, "geglu", *state),
        ]

    assert_same_again(run)


def test_refusals_are_those_of_the_cpu() -> None:
    x = torch.zeros(4, 32, device="cuda")
    with pytest.raises(ValueError, match=r"twin::activation: kind must be one of 'gelu', 'geglu'.*; got 'elu'\."):
        twin.activation(x, "elu")
    with pytest.raises(ValueError, match=r"twin::activation_backward: grad must be .* \[4, 16\] on cuda:0; got"):
        twin.activation_backward(x, x, "swiglu")
    with pytest.raises(ValueError, match=r"twin::activation_backward: grad must be .* on cuda:0; got .* on cpu"):
        twin.activation_backward(x.cpu(), x, "gelu")
