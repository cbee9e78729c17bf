"""`twin::cast_transpose` and `twin::cast_transpose_dbias` on the CPU: the cast, its transpose, the bias gradient."""

import itertools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.bits import assert_same_bits

import reference.ops.casts.cast_transpose
from reference.numbers import formats

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
twin = torch.ops.twin


def test_ceil16():
    ceil16 = reference.ops.casts.cast_transpose.ceil16
    assert [ceil16(rows) for rows in (0, 1, 15, 16, 17, 4096)] == [0, 16, 16, 16, 32, 4096]


@pytest.mark.parametrize("dtype", formats.WIDE_DTYPES)
@pytest.mark.parametrize("out", [E4M3, E5M2])
@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(0, 150),
    cols=st.integers(0, 9).map(lambda n: 16 * n),
    column=st.integers(0, 1),
    seed=st.integers(0, 1000),
)
def test_the_parts_are_those_of_the_plain_ops(dtype, out, rows, cols, column, seed):
    x = (torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * 30).to(dtype)
    scale = torch.tensor([0.7, 91.0])
    histories = [torch.full((3, 2), 0.25) for _ in range(3)]
    q, scale_inv = twin.cast(x, scale, histories[0], column, out)
    pair = twin.cast_transpose(x, scale, histories[1], column, out)
    triple = twin.cast_transpose_dbias(x, scale, histories[2], column, out)
    padded = (rows + 15) // 16 * 16
    for q_there, q_t, scale_inv_there in (pair, triple[:3]):
        assert_same_bits(q_there, q, "q")
        assert_same_bits(scale_inv_there, scale_inv, "scale_inv")
        assert (q_t.shape, q_t.dtype) == ((cols, padded), out)
        assert q_t.is_contiguous()
        codes = q_t.view(torch.uint8)
        assert torch.equal(codes[:, :rows], q.view(torch.uint8).t())
        assert not codes[:, rows:].any()
    assert_same_bits(triple[3], twin.dbias(x), "dbias")
    assert_same_bits(histories[1], histories[0])
    assert_same_bits(histories[2], histories[0])


def test_padding_is_positive_zero_even_where_a_stale_allocation_was():
    # Fill memory of the size that the output will take with other bytes first.
    for _ in range(8):
        torch.full((64, 48), 0xFF, dtype=torch.uint8)
        _, q_t, _ = twin.cast_transpose(torch.ones(33, 64), torch.ones(1), None, 0, E4M3)
        assert (q_t.view(torch.uint8)[:, 33:] == 0).all()


def test_negative_zeros_and_nan_are_transposed_as_codes():
    x = torch.zeros(3, 16)
    x[1, 2], x[2, 5] = -0.0, -float("nan")
    for out in (E4M3, E5M2):
        _, q_t, _ = twin.cast_transpose(x, torch.ones(1), None, 0, out)
        codes = q_t.view(torch.uint8)
        assert codes[2, 1] == 0x80
        assert codes[5, 2] == 0x7F
        assert codes.count_nonzero() == 2


def test_dbias_is_of_x_itself_neither_scaled_nor_cast():
    x = torch.full((2, 16), 1.0 + 2.0**-20)
    *_, dbias = twin.cast_transpose_dbias(x, torch.tensor([1000.0]), None, 0, E4M3)
    assert (dbias == 2.0 + 2.0**-19).all()


def test_the_outputs_share_no_memory():
    x = torch.ones(16, 16)
    outputs = twin.cast_transpose_dbias(x, torch.ones(1), None, 0, E4M3)
    pointers = [x.data_ptr(), *(t.untyped_storage().data_ptr() for t in outputs)]
    assert len(set(pointers)) == 5


@pytest.mark.parametrize("op", ["cast_transpose", "cast_transpose_dbias"])
def test_refusals(op):
    call = getattr(twin, op)
    good = [torch.zeros(4, 32), torch.ones(3), torch.zeros(5, 3), 1, E4M3]
    for position, wrong, sentence in (
        (0, torch.zeros(2, 4, 32), "x must be 2-D, [rows, cols]; got shape (2, 4, 32)."),
        (0, torch.zeros(4, 40), "the columns of x must be a multiple of 16"),
        (0, torch.zeros(4, 64)[:, ::2], "x must be contiguous (row-major); got strides (64, 2)"),
        (1, torch.ones(3, 1), "scale must be 1-D, [columns]; got shape (3, 1)."),
        (2, torch.zeros(3), "amax_history must be [length >= 1, columns]"),
        (3, 5, "column must be from 0 to 2, the columns of scale; got 5."),
        (4, torch.float32, "dtype must be torch.float8_e4m3fn or torch.float8_e5m2; got torch.float32."),
    ):
        arguments = [*good[:position], wrong, *good[position + 1 :]]
        with pytest.raises(ValueError, match=re.escape(f"twin::{op}: {sentence}")):
            call(*arguments)
    with pytest.raises(RuntimeError, match=rf"twin::{op} has no derivative of its own"):
        call(torch.zeros(4, 32, requires_grad=True), *good[1:])


def all_outputs(xs, out=E4M3):
    made = [reference.ops.casts.cast_transpose.cast_outputs(x, x.shape[1], out) for x in xs]
    return list(map(list, zip(*made, strict=True)))


@pytest.mark.parametrize("dtype", formats.WIDE_DTYPES)
@pytest.mark.parametrize("out", [E4M3, E5M2])
def test_several_at_once_are_each_as_alone(dtype, out):
    xs = [torch.randn(rows, cols).to(dtype) * 30 for rows, cols in ((0, 16), (5, 0), (17, 32), (64, 48))]
    scale = torch.tensor([0.7, 91.0, 3.0, 5.0])
    histories = [torch.full((3, 4), 0.25) for _ in range(2)]
    made = all_outputs(xs, out)
    twin.multi_cast_transpose(xs, [scale] * 4, [histories[0]] * 4, [3, 2, 1, 0], *made)
    for i, x in enumerate(xs):
        alone = twin.cast_transpose(x, scale, histories[1], 3 - i, out)
        for name, a, b in zip(("q", "q_t", "scale_inv"), (part[i] for part in made), alone, strict=True):
            assert_same_bits(a, b, f"{name} of {list(x.shape)}")
    assert_same_bits(*histories)
    twin.multi_cast_transpose(xs, [scale] * 4, [], [0] * 4, *made)  # no amax is noted
    assert_same_bits(*histories)


def test_several_at_once_in_a_compiled_function():
    """The same history twice in a list: both columns arrive."""
    xs, scale = [torch.randn(20, 32), torch.randn(5, 16)], torch.tensor([1.0, 2.0])

    def step(xs, scale, history):
        made = all_outputs(xs)
        twin.multi_cast_transpose(xs, [scale] * 2, [history] * 2, [0, 1], *made)
        return made

    histories = [torch.zeros(4, 2) for _ in range(2)]
    with torch.no_grad():
        eager = step(xs, scale, histories[0])
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(xs, scale, histories[1])
    for a, b in zip(itertools.chain(*eager, histories[:1]), itertools.chain(*compiled, histories[1:]), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"scales": 1}, r"scales must have 2 entries, one for each of xs; got 1\."),
        ({"amax_histories": 1}, r"amax_histories must have 2 entries, one for each of xs; got 1\."),
        ({"columns": [0, 7]}, r"column"),
        ({"q": "dtype"}, r"xs\[1\] is torch.float32 on cpu, to torch.float8_e5m2, and xs\[0\] torch.float32"),
        ({"q_t": "shape"}, r"q_t\[1\] must be contiguous torch.float8_e4m3fn \[16, 16\] on cpu; got .*\[16, 5\]"),
        ({"scale_inv": "shape"}, r"scale_inv\[1\] must be contiguous torch.float32 \[1\] on cpu; got .*\[2\]"),
    ],
)
def test_several_at_once_refuses(change, sentence):
    xs = [torch.randn(20, 32), torch.randn(5, 16)]
    q, q_t, scale_inv = all_outputs(xs)
    arguments = {
        "scales": [torch.ones(2)] * 2,
        "amax_histories": [torch.zeros(1, 2)] * 2,
        "columns": [0, 1],
        "q": q,
        "q_t": q_t,
        "scale_inv": scale_inv,
    }
    for name, how in change.items():
        there = arguments[name]
        if how == "dtype":
            arguments[name] = [there[0], there[1].to(torch.float32).to(E5M2)]
        elif how == "shape":
            arguments[name] = [there[0], torch.empty(2) if name == "scale_inv" else torch.empty(16, 5).to(E4M3)]
        else:
            arguments[name] = there[:how] if isinstance(how, int) else how
    with pytest.raises(ValueError, match=sentence):
        twin.multi_cast_transpose(xs, *arguments.values())


def parts_of(seed, rows, groups, widths, dtype, device="cpu"):
    drawn = torch.Generator().manual_seed(seed)
    return [(torch.randn(rows, groups * w, generator=drawn) * 30).to(dtype).to(device) for w in widths]


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", formats.WIDE_DTYPES)
@pytest.mark.parametrize(
    ("groups", "widths"), [(1, (16,)), (3, (16, 8, 8)), (1, (64, 8, 24)), (2, (24, 8)), (4, (8, 8, 8))]
)
@pytest.mark.parametrize("rows", [0, 5, 130])
def test_parts_side_by_side_are_cast_as_the_matrix_they_make(dtype, groups, widths, rows):
    xs, scale = parts_of(1, rows, groups, widths, dtype), torch.tensor([0.7, 91.0])
    whole = torch.cat([x.view(rows, groups, w) for x, w in zip(xs, widths, strict=True)], dim=2)
    histories = [torch.full((3, 2), 0.25) for _ in range(2)]
    found = twin.cat_cast_transpose_dbias(xs, groups, scale, histories[0], 1, E5M2)
    expected = twin.cast_transpose_dbias(whole.flatten(1), scale, histories[1], 1, E5M2)
    for name, a, b in zip(("q", "q_t", "scale_inv", "dbias"), found, expected, strict=True):
        assert_same_bits(a, b, name)
    assert_same_bits(*histories)


def test_parts_that_are_refused():
    x, state = torch.zeros(4, 48), (torch.ones(2), None, 0, E4M3)
    for xs, groups, sentence in (
        ([], 1, "xs must be 1 to 3 matrices; got 0."),
        ([x] * 4, 1, "xs must be 1 to 3 matrices; got 4."),
        ([x, x[:2]], 1, r"xs[1] must have 4 rows, as xs[0], and columns that are a multiple of 8 · groups"),
        ([x, x[:, :32].contiguous()], 3, "groups=3 >= 1; got [4, 32]."),
        ([x], 0, "groups=0 >= 1; got [4, 48]."),
        ([x, x.bfloat16()], 1, "xs[1] is torch.bfloat16 on cpu, xs[0] torch.float32 on cpu."),
        ([x, x.t()], 1, "xs[1] must be contiguous"),
        ([x[:, :24].contiguous()], 1, "the columns of xs together must be a multiple of 16; got 24."),
    ):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            twin.cat_cast_transpose_dbias(xs, groups, *state)
