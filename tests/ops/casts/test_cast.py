"""`twin::cast` and `twin::amax`: results, the state they write, and what they refuse.

Which code a number gets is tests/numbers/test_formats.py's subject; here the op around it. On an H200 the kernels of
all casts equal their CPU definitions in every bit: codes, transposed codes, amax, sums.
"""

import itertools
import math
import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import cast_values
from shared.bits import assert_same_bits
from shared.cast_values import poison
from shared.determinism import assert_same_again

import optimized  # noqa: F401  (registers the CUDA kernels)
import reference.ops.casts.cast
import reference.ops.checks
from reference.numbers import formats
from reference.ops.casts.cast_transpose import cast_outputs

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
twin = torch.ops.twin
WIDE = formats.WIDE_DTYPES
FP8 = (E4M3, E5M2)
ROWS = (0, 1, 7, 16, 17, 63, 64, 65, 127, 128, 129, 1000)
COLS = (16, 48, 64, 80, 144, 272, 4096)
NAMES = {"cast_transpose_dbias": ("q", "q_t", "scale_inv", "dbias"), "cast": ("q", "scale_inv")}
NAMES["cast_transpose"] = NAMES["cast_transpose_dbias"][:3]


def numbers(rows, cols, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator) * torch.randn(rows, 1, generator=generator).exp()
    return x.to(dtype)


@pytest.mark.parametrize("dtype", formats.WIDE_DTYPES)
@pytest.mark.parametrize("out", [E4M3, E5M2])
@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(0, 70),
    cols=st.integers(0, 9).map(lambda n: 16 * n),
    column=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_cast_of_any_shape(dtype, out, rows, cols, column, seed):
    x = numbers(rows, cols, dtype, seed)
    scale = torch.tensor([0.37, 56.0, 1e3])
    history = torch.zeros(4, 3)
    q, scale_inv = twin.cast(x, scale, history, column, out)
    assert (q.shape, q.dtype) == ((rows, cols), out)
    products = torch.from_numpy(x.float().numpy() * scale[column].numpy())
    expected = formats.encode_by_integers(products, formats.format_of(out))
    assert torch.equal(q.view(torch.uint8), expected)
    assert (scale_inv.shape, scale_inv.dtype) == ((1,), torch.float32)
    assert scale_inv.numpy()[0] == np.float32(1) / scale[column].numpy()
    expected_history = np.zeros((4, 3), dtype=np.float32)
    expected_history[0, column] = np.abs(x.float().numpy()).max(initial=0)
    assert np.array_equal(history.numpy(), expected_history)


def test_scale_inv_is_the_correctly_rounded_quotient_and_its_own_tensor():
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0x00800000, 0x7F000000, (300,), generator=generator, dtype=torch.int32)
    scale = words.view(torch.float32)
    x = torch.zeros(1, 16)
    for column in range(scale.numel()):
        _, scale_inv = twin.cast(x, scale, None, column, E4M3)
        # The double quotient of two fp32 numbers, rounded again, is their fp32 quotient (Figueroa).
        assert scale_inv.item() == np.float32(1.0 / float(scale[column]))
    scale.fill_(1.0)
    assert scale_inv.item() != 1.0


def test_amax_is_of_the_unscaled_value_and_only_grows():
    scale, history = torch.tensor([1e4, 1.0]), torch.zeros(3, 2)
    for peak, expected in ((2.5, 2.5), (-7.0, 7.0), (1.0, 7.0), (math.nan, 7.0), (-math.inf, math.inf)):
        x = torch.zeros(2, 16)
        x[1, 3] = peak
        twin.cast(x, scale, history, 0, E4M3)
        assert history[0, 0].item() == expected
    assert not history[1:].any()
    assert not history[:, 1].any()


def test_amax_is_taken_before_any_rounding_to_16_bits():
    x = torch.full((1, 16), 1.0 + 2.0**-23)
    history = torch.zeros(1, 1)
    twin.cast(x, torch.ones(1), history, 0, E4M3)
    assert history.item() == 1.0 + 2.0**-23


@pytest.mark.parametrize("dtype", formats.WIDE_DTYPES)
def test_amax_op_writes_what_the_cast_writes(dtype):
    x = numbers(33, 48, dtype)
    x[5, 7] = math.nan
    ours, casts = torch.zeros(3, 2), torch.zeros(3, 2)
    assert twin.amax(x, ours, 1) is None
    twin.cast(x, torch.ones(2), casts, 1, E5M2)
    assert torch.equal(ours, casts)
    assert ours[0, 1] == x.float().nan_to_num(0.0).abs().max()
    twin.amax(x[:0], ours, 0)
    assert ours[0, 0] == 0
    twin.amax(numbers(3, 5), ours, 0)  # calibration takes any number of columns


def test_without_a_history_nothing_is_written_and_the_codes_are_the_same():
    x, scale = numbers(20, 32), torch.tensor([3.0])
    q, scale_inv = twin.cast(x, scale, None, 0, E4M3)
    with_history, inverse = twin.cast(x, scale, torch.zeros(2, 1), 0, E4M3)
    assert torch.equal(q.view(torch.uint8), with_history.view(torch.uint8))
    assert torch.equal(scale_inv, inverse)
    assert scale.item() == 3.0


def test_the_historys_version_is_bumped_and_the_others_are_not():
    x, scale, history = numbers(4, 16), torch.ones(1), torch.zeros(2, 1)
    versions = x._version, scale._version, history._version
    twin.cast(x, scale, history, 0, E4M3)
    twin.amax(x, history, 0)
    assert (x._version, scale._version) == versions[:2]
    assert history._version >= versions[2] + 2


def test_a_history_that_is_a_strided_view_is_written_in_place():
    storage = torch.zeros(4, 6)
    twin.amax(numbers(3, 16), storage[:, ::2], 1)
    assert storage[0, 2] > 0
    assert storage.count_nonzero() == 1


def test_cast_where_a_gradient_would_be_recorded_is_refused():
    x = numbers(4, 16).requires_grad_()
    with pytest.raises(RuntimeError, match=r"twin::cast has no derivative of its own"):
        twin.cast(x, torch.ones(1), None, 0, E4M3)
    with torch.no_grad():
        twin.cast(x, torch.ones(1), None, 0, E4M3)


GOOD = {
    "x": torch.zeros(4, 32),
    "scale": torch.ones(3),
    "amax_history": torch.zeros(5, 3),
    "column": 1,
    "dtype": E4M3,
}
REFUSED = {
    "x of one dimension": (
        {"x": torch.zeros(32)},
        "x must be 2-D, [rows, cols]; got shape (32,).",
    ),
    "x of integers": (
        {"x": torch.zeros(4, 32, dtype=torch.int32)},
        "x must be torch.float32, torch.bfloat16 or torch.float16; got torch.int32.",
    ),
    "x transposed": (
        {"x": torch.zeros(32, 16).t()},
        "x must be contiguous (row-major); got strides (1, 16) for shape (16, 32): call .contiguous() first.",
    ),
    "odd columns": (
        {"x": torch.zeros(4, 24)},
        "the columns of x must be a multiple of 16, which FP8 tensor cores need; got 24 (shape (4, 24)).",
    ),
    "dtype": (
        {"dtype": torch.float16},
        "dtype must be torch.float8_e4m3fn or torch.float8_e5m2; got torch.float16.",
    ),
    "another float8": (
        {"dtype": torch.float8_e4m3fnuz},
        "dtype must be torch.float8_e4m3fn or torch.float8_e5m2; got torch.float8_e4m3fnuz.",
    ),
    "scale of no dimension": (
        {"scale": torch.tensor(1.0)},
        "scale must be 1-D, [columns]; got shape ().",
    ),
    "scale in float64": (
        {"scale": torch.ones(3, dtype=torch.float64)},
        "scale must be torch.float32; got torch.float64.",
    ),
    "column of the scale": (
        {"column": 3},
        "column must be from 0 to 2, the columns of scale; got 3.",
    ),
    "negative column": (
        {"column": -1},
        "column must be from 0 to 2, the columns of scale; got -1.",
    ),
    "history of one dimension": (
        {"amax_history": torch.zeros(5)},
        "amax_history must be [length >= 1, columns]; got shape (5,).",
    ),
    "history without rows": (
        {"amax_history": torch.zeros(0, 3)},
        "amax_history must be [length >= 1, columns]; got shape (0, 3).",
    ),
    "history in bf16": (
        {"amax_history": torch.zeros(5, 3, dtype=torch.bfloat16)},
        "amax_history must be torch.float32; got torch.bfloat16.",
    ),
    "column of the history": (
        {"amax_history": torch.zeros(5, 1)},
        "column must be from 0 to 0, the columns of amax_history; got 1.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    wrong, sentence = REFUSED[case]
    arguments = {**GOOD, **wrong}
    before = arguments["amax_history"].clone()
    with pytest.raises(ValueError, match=re.escape("twin::cast: " + sentence)):
        twin.cast(*arguments.values())
    assert torch.equal(arguments["amax_history"], before)


def test_amax_refusals():
    for wrong, sentence in (
        ((torch.zeros(4), torch.zeros(5, 3), 1), "x must be 2-D"),
        ((torch.zeros(4, 4, dtype=torch.float64), torch.zeros(5, 3), 1), "x must be torch.float32"),
        ((torch.zeros(4, 4), torch.zeros(5, 3), 3), "column must be from 0 to 2"),
        ((torch.zeros(4, 4), torch.zeros(5), 0), "amax_history must be [length >= 1"),
    ):
        with pytest.raises(ValueError, match=re.escape("twin::amax: " + sentence)):
            twin.amax(*wrong)


def test_another_device_is_named():
    # The meta device stands for any other: no data, but a device to disagree about.
    with pytest.raises(ValueError, match=r"twin::cast: scale is on meta, the data on cpu"):
        reference.ops.casts.cast.check_cast("twin::cast", GOOD["x"], torch.ones(3, device="meta"), None, 0, E4M3)
    with pytest.raises(ValueError, match=r"twin::amax: amax_history is on meta, the data on cpu"):
        reference.ops.checks.check_history("twin::amax", GOOD["x"], torch.zeros(2, 3, device="meta"), 0)


def compare(op: str, x: torch.Tensor, out: torch.dtype, scale: float = 4.0, history: bool = True) -> None:
    """Run an op on both sides and compare everything it returns or writes."""
    results = []
    for device in ("cpu", "cuda"):
        scales = torch.tensor([1.0, scale, 1.0], device=device)
        amax = torch.full((4, 3), 2.0**-20, device=device) if history else None
        here = x.to(device)
        if device == "cuda":
            poison(x.numel() + 4096)
        results.append((getattr(twin, op)(here, scales, amax, 1, out), amax))
    (expected, expected_amax), (found, found_amax) = results
    where = f"{op} of {x.dtype} {list(x.shape)} to {out}"
    for name, a, b in zip(NAMES[op], found, expected, strict=True):
        assert_same_bits(a, b, f"{name} of {where}")
    if history:
        assert_same_bits(found_amax, expected_amax, f"amax of {where}")


@pytest.mark.gpu
@pytest.mark.parametrize("op", list(NAMES))
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("out", FP8)
def test_every_shape(op: str, dtype: torch.dtype, out: torch.dtype) -> None:
    for seed, (rows, cols) in enumerate(itertools.product(ROWS, COLS)):
        compare(op, cast_values.numbers(rows, cols, dtype, seed), out)


@pytest.mark.gpu
@pytest.mark.parametrize("op", list(NAMES))
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 300),
    groups=st.integers(0, 40),
    dtype=st.sampled_from(WIDE),
    out=st.sampled_from(FP8),
    scale=st.floats(2.0**-126, 2.0**100, width=32),
    history=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_any_shape_and_scale(op, rows, groups, dtype, out, scale, history, seed) -> None:  # type: ignore[no-untyped-def]
    compare(op, cast_values.numbers(rows, 16 * groups, dtype, seed), out, scale, history)


@pytest.mark.gpu
@pytest.mark.parametrize("op", list(NAMES))
@pytest.mark.parametrize("scale", [float("inf"), float("nan"), 2.0**-149, 3.4028234663852886e38])
def test_a_scale_that_is_hardly_one(op: str, scale: float) -> None:
    # The padding of q_t stays zero even where 0 * scale is NaN.
    for dtype, out in itertools.product(WIDE, FP8):
        compare(op, cast_values.numbers(17, 48, dtype), out, scale)


@pytest.mark.gpu
@pytest.mark.parametrize("op", list(NAMES))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out", FP8)
def test_all_16_bit_words(op: str, dtype: torch.dtype, out: torch.dtype) -> None:
    words = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    for scale in (1.0, 0.37, 448.0, 2.0**-8):
        compare(op, words.reshape(256, 256), out, scale)


def by_torch(x: torch.Tensor, scale: float, out: torch.dtype) -> torch.Tensor:
    """An independent cast on the GPU: clamp (letting NaN through), torch's conversion; 0x7F for NaN and infinities."""
    largest = formats.format_of(out).largest
    product = x.float() * scale
    codes = product.clamp(-largest, largest).to(out).view(torch.uint8)
    return torch.where(product.isnan() | x.isinf(), torch.tensor(0x7F, dtype=torch.uint8, device=x.device), codes)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("out", FP8)
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_all_fp32_words(out: torch.dtype, scale: float) -> None:
    chunk = 1 << 26
    scales = torch.full((1,), scale, device="cuda")
    for start in range(-(2**31), 2**31, chunk):
        words = torch.arange(start, start + chunk, dtype=torch.int64, device="cuda").to(torch.int32)
        x = words.view(torch.float32).view(-1, 64)
        expected = by_torch(x, scale, out)
        found, _ = twin.cast(x, scales, None, 0, out)
        assert torch.equal(found.view(torch.uint8), expected), f"cast of the words from {start:#x}"
        found, transposed, _ = twin.cast_transpose(x, scales, None, 0, out)
        assert torch.equal(found.view(torch.uint8), expected), f"cast_transpose of the words from {start:#x}"
        assert torch.equal(transposed.view(torch.uint8), expected.t()), f"q_t of the words from {start:#x}"


def of_any_size(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Numbers of any width, every other time without infinities."""
    for seed, (rows, cols) in enumerate(itertools.product((0, 1, 3, 700), (0, 1, 5, 16, 1001))):
        x = cast_values.numbers(rows, cols, dtype, seed)
        yield torch.where(x.isinf(), 0.0, x) if seed % 2 else x


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("dtype", WIDE)
def test_amax(dtype: torch.dtype) -> None:
    for x in of_any_size(dtype):
        expected, found = torch.full((2, 3), 1e-3), torch.full((2, 3), 1e-3, device="cuda")
        twin.amax(x, expected, 2)
        twin.amax(x.cuda(), found, 2)
        assert_same_bits(found, expected, f"amax of {dtype} {list(x.shape)}")


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("dtype", WIDE)
def test_current_scale(dtype: torch.dtype) -> None:
    for x in of_any_size(dtype):
        for how in ((FP8[0], False, 0.0), (FP8[1], True, 1e-3)):
            expected, found = twin.current_scale(x, *how), twin.current_scale(x.cuda(), *how)
            assert_same_bits(found, expected, f"scale of {dtype} {list(x.shape)}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", WIDE)
def test_dbias(dtype: torch.dtype) -> None:
    for seed, (rows, cols) in enumerate(itertools.product((*ROWS, 8192 + 65), (0, 1, 7, 8, 16, 33, 520))):
        x = cast_values.numbers(rows, cols, dtype, seed)
        poison(4 * x.numel())
        assert_same_bits(twin.dbias(x.cuda()), twin.dbias(x), f"dbias of {dtype} {[rows, cols]}")


@pytest.mark.gpu
def test_dbias_keeps_the_sign_of_zero() -> None:
    for rows in (1, 63, 64, 128):
        x = torch.full((rows, 16), -0.0, dtype=torch.bfloat16)
        assert_same_bits(twin.dbias(x.cuda()), twin.dbias(x), f"{rows} rows of -0")


@pytest.mark.gpu
def test_a_tall_and_a_wide_matrix() -> None:
    for rows, cols in ((70001, 16), (16, 70000)):
        for op in NAMES:
            compare(op, cast_values.numbers(rows, cols, torch.bfloat16), FP8[0])


@pytest.mark.gpu
@pytest.mark.simulated
def test_a_view_off_the_16_byte_boundary() -> None:
    whole = cast_values.numbers(1, 33 * 48 + 1, torch.bfloat16)[0]
    view, on_gpu = whole[1:].view(33, 48), whole.cuda()[1:].view(33, 48)
    assert on_gpu.data_ptr() % 16 != 0
    for device_x, x in ((on_gpu, view),):
        found = twin.cast_transpose_dbias(device_x, torch.ones(1, device="cuda"), None, 0, FP8[0])
        expected = twin.cast_transpose_dbias(x, torch.ones(1), None, 0, FP8[0])
        for a, b in zip(found, expected, strict=True):
            assert_same_bits(a, b)
        assert_same_bits(twin.dbias(device_x), twin.dbias(x))


@pytest.mark.gpu
@pytest.mark.simulated
def test_strided_state_is_read_and_written_in_place() -> None:
    x = cast_values.numbers(20, 32, torch.float32)
    for device in ("cpu", "cuda"):
        state = torch.zeros(4, 6, device=device)
        state[1] = 3.0
        scale = state[:, 1]  # stride 6
        history = state[2:, ::2]
        q, scale_inv = twin.cast(x.to(device), scale, history, 1, FP8[0])
        if device == "cpu":
            expected = (q, scale_inv, state)
    for a, b in zip((q, scale_inv, state), expected, strict=True):
        assert_same_bits(a, b)


@pytest.mark.gpu
def test_two_runs_two_streams_and_a_graph_give_the_same_bits() -> None:
    x = cast_values.numbers(4096, 1024, torch.bfloat16).cuda()
    scale = torch.full((1,), 2.0, device="cuda")
    assert_same_again(lambda: twin.cast_transpose_dbias(x, scale, None, 0, FP8[1]))


@pytest.mark.gpu
def test_sums_wait_for_their_parts() -> None:
    """The second kernel of dbias starts early: many calls in a row, each over the memory of the one before."""
    xs = [cast_values.numbers(8192, 256, torch.bfloat16, seed).nan_to_num(0.0, 0.0, 0.0).cuda() for seed in range(2)]
    expected = [twin.dbias(x.cpu()) for x in xs]
    scale = torch.ones(1, device="cuda")
    for i in range(200):
        assert_same_bits(twin.dbias(xs[i % 2]), expected[i % 2], f"dbias, call {i}")
        found = twin.cast_transpose_dbias(xs[i % 2], scale, None, 0, FP8[0])[3]
        assert_same_bits(found, expected[i % 2], f"cast_transpose_dbias, call {i}")


def all_of(xs: list[torch.Tensor], out: torch.dtype, history: torch.Tensor | None, scale: torch.Tensor) -> list[object]:
    """Every word that `twin::multi_cast_transpose` writes for `xs`, whose columns are their numbers."""
    if xs[0].is_cuda:
        poison(4 * max(x.numel() for x in xs) + 4096)
    made = [cast_outputs(x, x.shape[1], out) for x in xs]
    histories = [] if history is None else [history] * len(xs)
    twin.multi_cast_transpose(
        xs, [scale] * len(xs), histories, list(range(len(xs))), *map(list, zip(*made, strict=True))
    )
    return [*itertools.chain(*made), history]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("out", FP8)
def test_multi_cast_transpose(dtype: torch.dtype, out: torch.dtype) -> None:
    shapes = [*itertools.product((0, 1, 17, 64, 129), (16, 80, 272)), (300, 0), (1000, 1024)]
    for count in (1, 3, 4, 5, len(shapes)):  # both capacities
        xs = [cast_values.numbers(*shape, dtype, seed) for seed, shape in enumerate(shapes[-count:])]
        for noted in (True, False):
            results = []
            for device in ("cpu", "cuda"):
                scale = torch.linspace(0.5, 40.0, count, device=device)
                history = torch.full((2, count), 2.0**-20, device=device) if noted else None
                results.append(all_of([x.to(device) for x in xs], out, history, scale))
            for a, b in zip(*results, strict=True):
                if a is not None:
                    assert_same_bits(a, b, f"{count} matrices of {dtype} to {out}")


@pytest.mark.gpu
def test_multi_cast_transpose_of_more_matrices_than_a_launch_takes() -> None:
    xs = [cast_values.numbers(3, 16, torch.bfloat16, seed) for seed in range(300)]
    results = []
    for device in ("cpu", "cuda"):
        scale, history = torch.ones(300, device=device), torch.zeros(1, 300, device=device)
        results.append(all_of([x.to(device) for x in xs], FP8[0], history, scale))
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


@pytest.mark.gpu
def test_multi_cast_transpose_in_a_graph() -> None:
    xs = [cast_values.numbers(64, 48, torch.bfloat16, seed).cuda() for seed in range(3)]
    made = [cast_outputs(x, x.shape[1], FP8[0]) for x in xs]
    scale, history = torch.ones(3, device="cuda"), torch.zeros(1, 3, device="cuda")
    args = (xs, [scale] * 3, [history] * 3, [0, 1, 2], *map(list, zip(*made, strict=True)))
    twin.multi_cast_transpose(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        twin.multi_cast_transpose(*args)
    for seed, x in enumerate(xs):
        x.copy_(cast_values.numbers(64, 48, torch.bfloat16, seed + 10))
    history.zero_()
    graph.replay()
    expected = all_of([x.cpu() for x in xs], FP8[0], torch.zeros(1, 3), torch.ones(3))
    for a, b in zip([*itertools.chain(*made), history], expected, strict=True):
        assert_same_bits(a, b)


@pytest.mark.gpu
def test_multi_cast_transpose_refuses_outputs_off_the_16_byte_boundary() -> None:
    x = torch.randn(1, 16, device="cuda")
    q, q_t, scale_inv = cast_outputs(x, x.shape[1], FP8[0])
    q = torch.empty(17, dtype=FP8[0], device="cuda")[1:].view(1, 16)
    with pytest.raises(ValueError, match=r"q\[0\] and q_t\[0\] must start at multiples of 16 bytes"):
        twin.multi_cast_transpose([x], [torch.ones(1, device="cuda")], [], [0], [q], [q_t], [scale_inv])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("out", FP8)
@pytest.mark.parametrize(
    ("rows", "groups", "widths"),
    [
        (1, 1, (16,)),
        (0, 1, (16, 16)),
        (130, 3, (16, 8, 8)),
        (65, 1, (64, 8, 24)),
        (200, 4, (40, 8)),
        (64, 2, (128, 128, 128)),
    ],
)
def test_parts_side_by_side(
    dtype: torch.dtype, out: torch.dtype, rows: int, groups: int, widths: tuple[int, ...]
) -> None:
    """The second call reads parts that begin off the 16-byte boundary."""
    xs = [cast_values.numbers(rows, groups * w, dtype, seed) for seed, w in enumerate(widths)]
    scale, history = torch.tensor([4.0, 0.5]), torch.zeros(2, 2)
    expected = (*twin.cat_cast_transpose_dbias(xs, groups, scale, history, 1, out), history)
    aligned = [x.cuda() for x in xs]
    shifted = [torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in aligned]
    for there in (aligned, shifted):
        noted = torch.zeros(2, 2, device="cuda")
        poison(rows * sum(widths) * groups)
        found = (*twin.cat_cast_transpose_dbias(there, groups, scale.cuda(), noted, 1, out), noted)
        for name, a, b in zip((*NAMES["cast_transpose_dbias"], "history"), found, expected, strict=True):
            assert_same_bits(a, b, name)
