"""The cast kernels on an H200 equal their CPU definitions in every bit: codes, transposed codes, amax, sums."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.bits import assert_same_bits
from shared.cast_values import numbers, poison
from shared.determinism import assert_same_again

import optimized  # noqa: F401  (registers the CUDA kernels)
from reference.numbers import formats
from reference.ops.casts.cast_transpose import cast_outputs

pytestmark = pytest.mark.gpu

twin = torch.ops.twin
WIDE = formats.WIDE_DTYPES
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
ROWS = (0, 1, 7, 16, 17, 63, 64, 65, 127, 128, 129, 1000)
COLS = (16, 48, 64, 80, 144, 272, 4096)
NAMES = {"cast_transpose_dbias": ("q", "q_t", "scale_inv", "dbias"), "cast": ("q", "scale_inv")}
NAMES["cast_transpose"] = NAMES["cast_transpose_dbias"][:3]


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


@pytest.mark.parametrize("op", list(NAMES))
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("out", FP8)
def test_every_shape(op: str, dtype: torch.dtype, out: torch.dtype) -> None:
    for seed, (rows, cols) in enumerate(itertools.product(ROWS, COLS)):
        compare(op, numbers(rows, cols, dtype, seed), out)


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
    compare(op, numbers(rows, 16 * groups, dtype, seed), out, scale, history)


@pytest.mark.parametrize("op", list(NAMES))
@pytest.mark.parametrize("scale", [float("inf"), float("nan"), 2.0**-149, 3.4028234663852886e38])
def test_a_scale_that_is_hardly_one(op: str, scale: float) -> None:
    # The padding of q_t stays zero even where 0 * scale is NaN.
    for dtype, out in itertools.product(WIDE, FP8):
        compare(op, numbers(17, 48, dtype), out, scale)


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


@pytest.mark.simulated
@pytest.mark.parametrize("dtype", WIDE)
def test_amax(dtype: torch.dtype) -> None:
    for seed, (rows, cols) in enumerate(itertools.product((0, 1, 3, 700), (0, 1, 5, 16, 1001))):
        x = numbers(rows, cols, dtype, seed)
        if seed % 2:
            x = torch.where(x.isinf(), 0.0, x)
        expected, found = torch.full((2, 3), 1e-3), torch.full((2, 3), 1e-3, device="cuda")
        twin.amax(x, expected, 2)
        twin.amax(x.cuda(), found, 2)
        assert_same_bits(found, expected, f"amax of {dtype} {[rows, cols]}")


@pytest.mark.simulated
@pytest.mark.parametrize("dtype", WIDE)
def test_current_scale(dtype: torch.dtype) -> None:
    for seed, (rows, cols) in enumerate(itertools.product((0, 1, 3, 700), (0, 1, 5, 16, 1001))):
        x = numbers(rows, cols, dtype, seed)
        if seed % 2:
            x = torch.where(x.isinf(), 0.0, x)
        for how in ((FP8[0], False, 0.0), (FP8[1], True, 1e-3)):
            expected, found = twin.current_scale(x, *how), twin.current_scale(x.cuda(), *how)
            assert_same_bits(found, expected, f"scale of {dtype} {[rows, cols]}")


@pytest.mark.parametrize("dtype", WIDE)
def test_dbias(dtype: torch.dtype) -> None:
    for seed, (rows, cols) in enumerate(itertools.product((*ROWS, 8192 + 65), (0, 1, 7, 8, 16, 33, 520))):
        x = numbers(rows, cols, dtype, seed)
        poison(4 * x.numel())
        assert_same_bits(twin.dbias(x.cuda()), twin.dbias(x), f"dbias of {dtype} {[rows, cols]}")


def test_dbias_keeps_the_sign_of_zero() -> None:
    for rows in (1, 63, 64, 128):
        x = torch.full((rows, 16), -0.0, dtype=torch.bfloat16)
        assert_same_bits(twin.dbias(x.cuda()), twin.dbias(x), f"{rows} rows of -0")


def test_a_tall_and_a_wide_matrix() -> None:
    for rows, cols in ((70001, 16), (16, 70000)):
        for op in NAMES:
            compare(op, numbers(rows, cols, torch.bfloat16), FP8[0])


@pytest.mark.simulated
def test_a_view_off_the_16_byte_boundary() -> None:
    whole = numbers(1, 33 * 48 + 1, torch.bfloat16)[0]
    view, on_gpu = whole[1:].view(33, 48), whole.cuda()[1:].view(33, 48)
    assert on_gpu.data_ptr() % 16 != 0
    for device_x, x in ((on_gpu, view),):
        found = twin.cast_transpose_dbias(device_x, torch.ones(1, device="cuda"), None, 0, FP8[0])
        expected = twin.cast_transpose_dbias(x, torch.ones(1), None, 0, FP8[0])
        for a, b in zip(found, expected, strict=True):
            assert_same_bits(a, b)
        assert_same_bits(twin.dbias(device_x), twin.dbias(x))


@pytest.mark.simulated
def test_strided_state_is_read_and_written_in_place() -> None:
    x = numbers(20, 32, torch.float32)
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


def test_two_runs_two_streams_and_a_graph_give_the_same_bits() -> None:
    x = numbers(4096, 1024, torch.bfloat16).cuda()
    scale = torch.full((1,), 2.0, device="cuda")
    assert_same_again(lambda: twin.cast_transpose_dbias(x, scale, None, 0, FP8[1]))


def test_sums_wait_for_their_parts() -> None:
    """The second kernel of dbias starts early: many calls in a row, each over the memory of the one before."""
    xs = [numbers(8192, 256, torch.bfloat16, seed).nan_to_num(0.0, 0.0, 0.0).cuda() for seed in range(2)]
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


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("out", FP8)
def test_multi_cast_transpose(dtype: torch.dtype, out: torch.dtype) -> None:
    shapes = [*itertools.product((0, 1, 17, 64, 129), (16, 80, 272)), (300, 0), (1000, 1024)]
    for count in (1, 3, 4, 5, len(shapes)):  # both capacities
        xs = [numbers(*shape, dtype, seed) for seed, shape in enumerate(shapes[-count:])]
        for noted in (True, False):
            results = []
            for device in ("cpu", "cuda"):
                scale = torch.linspace(0.5, 40.0, count, device=device)
                history = torch.full((2, count), 2.0**-20, device=device) if noted else None
                results.append(all_of([x.to(device) for x in xs], out, history, scale))
            for a, b in zip(*results, strict=True):
                if a is not None:
                    assert_same_bits(a, b, f"{count} matrices of {dtype} to {out}")


def test_multi_cast_transpose_of_more_matrices_than_a_launch_takes() -> None:
    xs = [numbers(3, 16, torch.bfloat16, seed) for seed in range(300)]
    results = []
    for device in ("cpu", "cuda"):
        scale, history = torch.ones(300, device=device), torch.zeros(1, 300, device=device)
        results.append(all_of([x.to(device) for x in xs], FP8[0], history, scale))
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


def test_multi_cast_transpose_in_a_graph() -> None:
    xs = [numbers(64, 48, torch.bfloat16, seed).cuda() for seed in range(3)]
    made = [cast_outputs(x, x.shape[1], FP8[0]) for x in xs]
    scale, history = torch.ones(3, device="cuda"), torch.zeros(1, 3, device="cuda")
    args = (xs, [scale] * 3, [history] * 3, [0, 1, 2], *map(list, zip(*made, strict=True)))
    twin.multi_cast_transpose(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        twin.multi_cast_transpose(*args)
    for seed, x in enumerate(xs):
        x.copy_(numbers(64, 48, torch.bfloat16, seed + 10))
    history.zero_()
    graph.replay()
    expected = all_of([x.cpu() for x in xs], FP8[0], torch.zeros(1, 3), torch.ones(3))
    for a, b in zip([*itertools.chain(*made), history], expected, strict=True):
        assert_same_bits(a, b)


def test_multi_cast_transpose_refuses_outputs_off_the_16_byte_boundary() -> None:
    x = torch.randn(1, 16, device="cuda")
    q, q_t, scale_inv = cast_outputs(x, x.shape[1], FP8[0])
    q = torch.empty(17, dtype=FP8[0], device="cuda")[1:].view(1, 16)
    with pytest.raises(ValueError, match=r"q\[0\] and q_t\[0\] must start at multiples of 16 bytes"):
        twin.multi_cast_transpose([x], [torch.ones(1, device="cuda")], [], [0], [q], [q_t], [scale_inv])


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
    xs = [numbers(rows, groups * w, dtype, seed) for seed, w in enumerate(widths)]
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
