"""The activations: against float64, their written products, what the casts and sums are made of.

On an H200 the kernels equal their CPU definitions in every bit: values, codes, amax, sums.
"""

import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import cast_values
from shared.activation_values import INF, NAN, every_word, numbers
from shared.bits import assert_same_bits
from shared.cast_values import poison
from shared.determinism import assert_same_again

import optimized  # noqa: F401  (registers the CUDA kernels)
from reference.inspect.recorded_step import float64
from reference.numbers import elementary, formats
from reference.ops.activations import activation
from reference.ops.activations.activation import width

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TIGHT = activation.Clamp(1.5, 0.5, -0.25).kind  # "clamped_swiglu" that limits half of the numbers
KINDS, GATED = (*activation.KINDS, TIGHT), (*activation.GATED, TIGHT)
SIXTEEN = (torch.bfloat16, torch.float16)
BANDWIDTH_OPS = (
    "activation",
    "activation_backward",
    "activation_cast_transpose",
    "activation_backward_cast_transpose_dbias",
)
twin = torch.ops.twin
WIDE = formats.WIDE_DTYPES
FP8 = (E4M3, E5M2)
ROWS = (0, 1, 7, 16, 65, 130)
COLS = (16, 48, 272, 1040)  # of y


def clamped(x: torch.Tensor, limit: float, alpha: float, offset: float) -> torch.Tensor:
    x1, x2 = x.chunk(2, -1)
    x1, x2 = x1.clamp(max=limit), x2.clamp(-limit, limit) + offset
    return x1 * torch.sigmoid(alpha * x1) * x2


TRUTH = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "srelu": lambda x: F.relu(x) ** 2,
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "geglu": lambda x: F.gelu(x.chunk(2, -1)[0], approximate="tanh") * x.chunk(2, -1)[1],
    "swiglu": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "reglu": lambda x: F.relu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "sreglu": lambda x: F.relu(x.chunk(2, -1)[0]) ** 2 * x.chunk(2, -1)[1],
    "qgeglu": lambda x: TRUTH["qgelu"](x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "glu": lambda x: torch.sigmoid(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "clamped_swiglu": lambda x: clamped(x, 7.0, 1.702, 1.0),
    TIGHT: lambda x: clamped(x, 1.5, 0.5, -0.25),
}
EXACT = ("relu", "srelu")  # before the last rounding, of 16-bit words
# docs/elementary.md: gelu and silu have a relative error of at most 14 · 2^-23 (absolute below 2^-14), their
# derivatives an absolute one of 20 · 2^-23. relu has none.
RELATIVE, FLOOR, ABSOLUTE = 14 * 2.0**-23, 2.0**-14, 20 * 2.0**-23


def half_ulp(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half the distance between neighbours of `dtype` around float64 `value`."""
    info = torch.finfo(dtype)
    magnitude = value.abs().clamp(min=info.smallest_normal)
    return torch.exp2(torch.floor(torch.log2(magnitude))) * info.eps / 2


def gradients(grad: torch.Tensor, x: torch.Tensor, kind: str) -> torch.Tensor:
    """dx in float64, by torch's derivatives."""
    wide = x.double().requires_grad_()
    with torch.enable_grad():
        (dx,) = torch.autograd.grad(TRUTH[kind](wide), wide, grad.double())
    return dx


def parts(x: torch.Tensor, kind: str) -> list[torch.Tensor]:
    """act and act' of x1, what act is multiplied by, and what the gradient is for dx2: whole fp32 tensors."""
    x1, x2 = (half.contiguous() for half in x.chunk(2, 1))
    clamp = activation.clamp_of(kind)
    if clamp is None:
        act, slope = (f(x1) for f in activation.FUNCTIONS[kind])
        return [act, slope, x2.float(), act]
    limit, alpha, offset = clamp
    x1, x2 = x1.float(), x2.float()
    act = elementary.swish(torch.minimum(x1, torch.tensor(limit)), alpha)
    slope = elementary.dswish(x1, alpha).masked_fill(x1 > limit, 0.0)
    inside = torch.maximum(torch.minimum(x2, torch.tensor(limit)), torch.tensor(-limit))
    return [act, slope, inside + torch.tensor(offset), act.masked_fill(x2.abs() > limit, 0.0)]


def fp32_forward(x: torch.Tensor, kind: str) -> torch.Tensor:
    """y before its rounding, whole tensors at a time."""
    if kind not in GATED:
        return activation.FUNCTIONS[kind][0](x)
    act, _, gate, _ = parts(x, kind)
    return act * gate


def fp32_backward(grad: torch.Tensor, x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind not in GATED:
        return grad.float() * activation.FUNCTIONS[kind][1](x)
    _, slope, gate, through = parts(x, kind)
    return torch.cat([(grad.float() * gate) * slope, grad.float() * through], 1)


class TestAgainstFloat64:
    @pytest.mark.parametrize("dtype", SIXTEEN)
    @pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in GATED])
    def test_every_16_bit_word(self, kind: str, dtype: torch.dtype) -> None:
        x = every_word(dtype)
        y, truth = twin.activation(x, kind), TRUTH[kind](x.double())
        finite = x.isfinite() & (truth.abs() <= torch.finfo(dtype).max)
        error = 0.0 if kind in EXACT else RELATIVE * truth.abs().clamp(min=FLOOR)
        assert ((y.double() - truth).abs() <= half_ulp(truth, dtype) + error)[finite].all()
        grad = torch.ones_like(x)
        dx, truth = twin.activation_backward(grad, x, kind), gradients(grad, x, kind)
        error = 0.0 if kind in EXACT else ABSOLUTE
        assert ((dx.double() - truth).abs() <= half_ulp(truth, dtype) + error)[finite].all()

    @pytest.mark.parametrize("dtype", SIXTEEN)
    @pytest.mark.parametrize("kind", GATED)
    def test_every_16_bit_word_through_the_gate(self, kind: str, dtype: torch.dtype) -> None:
        x = every_word(dtype)
        x = x[x.isfinite() & (x.abs() < 64)].view(-1, 16)
        gate, grad = numbers(len(x), 16, dtype, 0), numbers(len(x), 16, dtype, 1)
        self.compare(grad, torch.cat([x, gate], 1), kind)

    @pytest.mark.parametrize("dtype", formats.WIDE_DTYPES)
    @pytest.mark.parametrize("kind", KINDS)
    def test_random_numbers(self, kind: str, dtype: torch.dtype) -> None:
        x = numbers(50, 64, dtype, 0)
        self.compare(numbers(50, activation.width(kind, 64), dtype, 1), x, kind)

    def compare(self, grad: torch.Tensor, x: torch.Tensor, kind: str) -> None:
        dtype, truth = x.dtype, TRUTH[kind](x.double())
        gate = parts(x, kind)[2].double() if kind in GATED else torch.ones(1, dtype=torch.float64)
        # The activation's error times the gate; each multiplication adds 2^-24 of its result; then the last rounding.
        error = RELATIVE * ((truth / gate).abs().clamp(min=FLOOR) * gate.abs()).nan_to_num(0)
        bound = half_ulp(truth, dtype) * 1.001 + error + 2.0**-23 * truth.abs()
        assert ((twin.activation(x, kind).double() - truth).abs() <= bound).all()
        truth = gradients(grad, x, kind)
        dx = twin.activation_backward(grad, x, kind).double()
        weight = (grad.double() * gate).abs()
        if kind in GATED:
            # Of dx2 = grad · act(x1), |act| <= 16 here.
            weight = torch.cat([weight, grad.double().abs() * 16], 1)
        bound = half_ulp(truth, dtype) * 1.001 + ABSOLUTE * weight + 2.0**-22 * truth.abs()
        x1 = x.double() if kind not in GATED else torch.cat([x.chunk(2, 1)[0]] * 2, 1).double()
        assert ((dx - truth).abs() <= bound)[x1.abs() <= 16].all()

    def test_the_first_half_is_activated_and_the_second_multiplies(self) -> None:
        x = torch.tensor([[2.0, -1.0, 3.0, 5.0]])
        expected = torch.tensor([[2 * 3 / (1 + math.exp(-2)), -5 / (1 + math.e)]])
        torch.testing.assert_close(twin.activation(x, "swiglu"), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_recorded_step_compares_with(kind: str) -> None:
    x = numbers(5, 32, torch.float32, 0, 4.0)
    torch.testing.assert_close(float64.evaluated("activation", [x, kind])[0], TRUTH[kind](x.double()))


class TestDefinition:
    @pytest.mark.sample(20)
    @pytest.mark.parametrize("dtype", formats.WIDE_DTYPES)
    @pytest.mark.parametrize("kind", KINDS)
    @settings(max_examples=12, deadline=None)
    @given(rows=st.integers(0, 40), cols=st.integers(0, 40).map(lambda n: 2 * n), seed=st.integers(0, 1000))
    def test_one_rounding_of_the_fp32_values(self, kind, dtype, rows, cols, seed) -> None:  # type: ignore[no-untyped-def]
        x, grad = numbers(rows, cols, dtype, seed), numbers(rows, activation.width(kind, cols), dtype, seed + 1)
        assert_same_bits(twin.activation(x, kind), fp32_forward(x, kind).to(dtype), "y")
        assert_same_bits(twin.activation_backward(grad, x, kind), fp32_backward(grad, x, kind).to(dtype), "dx")

    @pytest.mark.parametrize("kind", GATED)
    def test_the_order_of_the_products(self, kind: str) -> None:
        x, grad = numbers(30, 32, torch.float32, 0), numbers(30, 16, torch.float32, 1)
        _, derivative, gates, through = (part.numpy() for part in parts(x, kind))
        found = twin.activation_backward(grad, x, kind)
        other = 0
        for r, c in np.ndindex(30, 16):
            g, gate = grad[r, c].numpy(), gates[r, c]
            first = np.float32(np.float32(g * gate) * derivative[r, c])
            assert found[r, c].numpy() == first
            assert found[r, 16 + c].numpy() == np.float32(g * through[r, c])
            other += first != np.float32(g * np.float32(gate * derivative[r, c]))
        assert other > 50 or kind == "reglu", "numbers that tell the orders apart; a slope of 0 or 1 does not"

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_pieces_do_not_show(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        x, grad = numbers(37, 32, torch.bfloat16, 0), numbers(37, activation.width(kind, 32), torch.bfloat16, 1)
        y, dx = twin.activation(x, kind), twin.activation_backward(grad, x, kind)
        for chunk in (1, 32, 100):
            monkeypatch.setattr(activation, "_CHUNK", chunk)
            assert_same_bits(twin.activation(x, kind), y)
            assert_same_bits(twin.activation_backward(grad, x, kind), dx)

    def test_relu_keeps_nan_and_makes_every_zero_positive(self) -> None:
        x = torch.tensor([[NAN, -NAN, 0.0, -0.0, 1e-45, -1e-45, INF, -INF]])
        for dtype in formats.WIDE_DTYPES:
            here = x.to(dtype)
            tiny = float(here[0, 4])  # 0 in fp16 and bf16
            expected = torch.tensor([[NAN, NAN, 0.0, 0.0, tiny, 0.0, INF, 0.0]], dtype=dtype)
            assert_same_bits(twin.activation(here, "relu"), expected)
            slope = torch.tensor([[NAN, NAN, 0.0, 0.0, float(tiny > 0), 0.0, 1.0, 0.0]], dtype=dtype)
            assert_same_bits(twin.activation_backward(torch.ones_like(here), here, "relu"), slope)

    def test_srelu_and_its_slope_at_special_values(self) -> None:
        x = torch.tensor([[NAN, 0.0, -0.0, -3.0, 3.0, INF, -INF, 2.0**80, 2.0**-80]])
        expected = torch.tensor([[NAN, 0.0, 0.0, 0.0, 9.0, INF, 0.0, INF, 0.0]])
        assert_same_bits(twin.activation(x, "srelu"), expected)
        slope = torch.tensor([[NAN, 0.0, 0.0, 0.0, 6.0, INF, 0.0, 2.0**81, 2.0**-79]])
        assert_same_bits(twin.activation_backward(torch.ones_like(x), x, "srelu"), slope)

    def test_a_gradient_times_a_slope_of_zero_is_a_product(self) -> None:
        x = torch.full((1, 4), -1.0)
        grad = torch.tensor([[1.0, -1.0, INF, NAN]])
        assert_same_bits(twin.activation_backward(grad, x, "relu"), torch.tensor([[0.0, -0.0, NAN, NAN]]))

    def test_special_values_of_the_gate(self) -> None:
        x = torch.tensor([[0.0, 1.0, INF, NAN, INF, INF, 0.0, 1.0]])
        y = twin.activation(x, "swiglu")
        assert y[0, :3].isnan().tolist() == [True, False, True]
        assert y[0, 1] == INF
        assert y[0, 3].isnan()


class TestCasts:
    @pytest.mark.sample(13)
    @pytest.mark.parametrize("out", [E4M3, E5M2])
    @pytest.mark.parametrize("dtype", formats.WIDE_DTYPES)
    @pytest.mark.parametrize("kind", KINDS)
    @settings(max_examples=6, deadline=None)
    @given(rows=st.integers(0, 150), groups=st.integers(0, 6), column=st.integers(0, 1), seed=st.integers(0, 1000))
    def test_the_parts_are_those_of_the_fp32_values(self, kind, dtype, out, rows, groups, column, seed) -> None:  # type: ignore[no-untyped-def]
        n = 16 * groups * (2 if kind in GATED else 1)
        x, grad = numbers(rows, n, dtype, seed), numbers(rows, activation.width(kind, n), dtype, seed + 1)
        scale = torch.tensor([0.7, 91.0])
        histories = [torch.full((3, 2), 0.25) for _ in range(4)]
        expected = twin.cast_transpose(fp32_forward(x, kind), scale, histories[0], column, out)
        found = twin.activation_cast_transpose(x, kind, scale, histories[1], column, out)
        for name, a, b in zip(("q", "q_t", "scale_inv"), found, expected, strict=True):
            assert_same_bits(a, b, name)
        assert_same_bits(histories[1], histories[0], "amax")
        dx = fp32_backward(grad, x, kind)
        expected = twin.cast_transpose_dbias(dx, scale, histories[2], column, out)
        found = twin.activation_backward_cast_transpose_dbias(grad, x, kind, scale, histories[3], column, out)
        for name, a, b in zip(("q", "q_t", "scale_inv"), found, expected, strict=False):
            assert_same_bits(a, b, name)
        assert_same_bits(found[3], expected[3].to(dtype), "dbias")
        assert_same_bits(histories[3], histories[2], "amax")

    @pytest.mark.parametrize("dtype", SIXTEEN)
    @pytest.mark.parametrize("kind", ["gelu", "silu", "qgelu"])
    def test_codes_do_not_pass_through_16_bits(self, kind: str, dtype: torch.dtype) -> None:
        x = every_word(dtype)
        one = torch.ones(1)
        q = twin.activation_cast_transpose(x, kind, one, None, 0, E4M3)[0].view(torch.uint8)
        assert_same_bits(q, formats.cast(getattr(elementary, kind)(x), formats.E4M3).view(torch.uint8))
        through = twin.cast(twin.activation(x, kind), one, None, 0, E4M3)[0].view(torch.uint8)
        assert (q != through).any()

    def test_dbias_is_of_the_unrounded_gradient_in_the_written_order(self) -> None:
        rows = 130
        x, grad = numbers(rows, 16, torch.bfloat16, 0), numbers(rows, 16, torch.bfloat16, 1)
        *_, dbias = twin.activation_backward_cast_transpose_dbias(grad, x, "gelu", torch.ones(1), None, 0, E5M2)
        dx = fp32_backward(grad, x, "gelu").numpy()
        for c in range(16):
            total = None
            for block in range(0, rows, 64):
                runs = []
                for run in range(block, block + 64, 16):
                    v = [dx[r, c] if r < rows else np.float32(0) for r in range(run, run + 16)]
                    for h in (8, 4, 2, 1):
                        v = [v[i] + v[i + h] for i in range(h)]
                    runs.append(v[0])
                block_sum = (runs[0] + runs[2]) + (runs[1] + runs[3])
                total = block_sum if total is None else total + block_sum
            assert dbias[c] == torch.tensor(total).to(torch.bfloat16)
        assert (dbias != twin.dbias(twin.activation_backward(grad, x, "gelu"))).any()

    def test_the_amax_ignores_nan_and_counts_infinity(self) -> None:
        x = torch.zeros(2, 16)
        x[0, 0], x[0, 1], x[1, 2] = NAN, 3.0, -INF
        history = torch.zeros(2, 1)
        twin.activation_cast_transpose(x, "relu", torch.full((1,), 8.0), history, 0, E4M3)
        assert history.tolist() == [[3.0], [0.0]]
        x[1, 2] = INF
        twin.activation_cast_transpose(x, "relu", torch.ones(1), history, 0, E4M3)
        assert history.tolist() == [[INF], [0.0]]


@pytest.mark.parametrize("dtype", formats.WIDE_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_scale_is_that_of_the_numbers_before_they_are_rounded(kind: str, dtype: torch.dtype) -> None:
    for rows, how in ((37, (E4M3, False, 0.0)), (5, (E4M3, True, 1e-3)), (0, (E4M3, False, 2.0))):
        x = numbers(rows, 48, dtype, rows, 4.0)
        y, scale = twin.activation_scale(x, kind, *how)
        assert_same_bits(y, twin.activation(x, kind))
        assert_same_bits(scale, twin.current_scale(fp32_forward(x, kind), *how))


def compare_with_two_ops(x: torch.Tensor, kind: str, device: str | torch.device = "cpu") -> None:
    """`activation_scale_cast_transpose` on a device is `activation_scale` and `cast_transpose` on a CPU."""
    for how in ((E4M3, False, 0.0), (E5M2, True, 1e-3)):
        y, scale = twin.activation_scale(x, kind, *how)
        expected = twin.cast_transpose(y, scale, None, 0, how[0])
        found = twin.activation_scale_cast_transpose(x.to(device), kind, *how)
        for name, a, b in zip(("q", "q_t", "scale_inv"), found, expected, strict=True):
            assert_same_bits(a, b, f"{name} of {kind}, {x.dtype} {list(x.shape)}")


@pytest.mark.parametrize("dtype", formats.WIDE_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_cast_with_its_own_scale_is_that_of_the_rounded_numbers(kind: str, dtype: torch.dtype) -> None:
    for rows, cols in ((0, 16), (1, 16), (37, 48)):
        x = case(rows, cols, kind, dtype, rows)[1]
        compare_with_two_ops(x, kind)
        compare_with_two_ops(torch.where(x.isfinite(), x, 0.0), kind)
        compare_with_two_ops(torch.zeros_like(x), kind)


@pytest.mark.parametrize("dtype", formats.WIDE_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_scale_of_a_gradient_is_that_of_the_rounded_numbers(kind: str, dtype: torch.dtype) -> None:
    """Or that of the fp32 numbers: `GRADIENT_IS_ROUNDED` says which."""
    for rows, how in ((37, (E5M2, False, 0.0)), (5, (E4M3, True, 1e-3)), (0, (E4M3, False, 2.0))):
        x, grad = numbers(rows, 48, dtype, rows, 4.0), numbers(rows, activation.width(kind, 48), dtype, rows + 1)
        dx, scale = twin.activation_backward_scale(grad, x, kind, *how)
        expected = twin.activation_backward(grad, x, kind)
        assert_same_bits(dx, expected)
        wide = expected if activation.GRADIENT_IS_ROUNDED else fp32_backward(grad, x, kind)
        assert_same_bits(scale, twin.current_scale(wide, *how))


class TestRefusals:
    def refused(self, op: str, arguments: tuple[object, ...], sentence: str) -> None:
        with pytest.raises(ValueError, match=re.escape(f"twin::{op}: {sentence}")):
            getattr(twin, op)(*arguments)

    @pytest.mark.parametrize(
        ("op", "more"),
        [
            ("activation", ()),
            ("activation_scale_cast_transpose", (E5M2, False, 0.0)),
            ("activation_cast_transpose", (torch.ones(3), None, 1, E4M3)),
        ],
    )
    def test_forward(self, op: str, more: tuple[object, ...]) -> None:
        for x, kind, sentence in (
            (torch.zeros(4, 32), "tanh", f"kind must be one of {', '.join(map(repr, activation.KINDS))}; got 'tanh'."),
            (torch.zeros(4), "gelu", "x must be 2-D, [rows, cols]; got shape (4,)."),
            (torch.zeros(4, 32, dtype=torch.float64), "relu", "x must be torch.float32, torch.bfloat16 or"),
            (torch.zeros(4, 64)[:, ::2], "silu", "x must be contiguous (row-major); got strides (64, 2)"),
            (torch.zeros(4, 33), "geglu", "x must have an even number of columns for kind 'geglu', whose first half"),
        ):
            self.refused(op, (x, kind, *more), sentence)

    @pytest.mark.parametrize(
        ("op", "more"),
        [
            ("activation_backward", ()),
            ("activation_backward_scale", (E5M2, False, 0.0)),
            ("activation_backward_cast_transpose_dbias", (torch.ones(3), None, 1, E4M3)),
        ],
    )
    def test_backward(self, op: str, more: tuple[object, ...]) -> None:
        x = torch.zeros(4, 32)
        for grad, kind, sentence in (
            (torch.zeros(4, 32), "mish", "kind must be one of"),
            (torch.zeros(4, 32), "swiglu", "grad must be contiguous torch.float32 [4, 16] on cpu; got"),
            (torch.zeros(4, 16), "gelu", "grad must be contiguous torch.float32 [4, 32] on cpu; got"),
            (torch.zeros(4, 32).bfloat16(), "gelu", "grad must be contiguous torch.float32 [4, 32] on cpu; got"),
            (torch.zeros(32, 4).t(), "gelu", "grad must be contiguous"),
            (torch.zeros(128), "gelu", "grad must be contiguous"),
        ):
            self.refused(op, (grad, x, kind, *more), sentence)
        self.refused(op, (torch.zeros(4, 16), torch.zeros(4, 33), "geglu", *more), "x must have an even number")

    def test_casts(self) -> None:
        x, good = torch.zeros(4, 32), [torch.ones(3), torch.zeros(5, 3), 1, E4M3]
        for position, wrong, sentence in (
            (0, torch.ones(3, 1), "scale must be 1-D, [columns]; got shape (3, 1)."),
            (1, torch.zeros(3), "amax_history must be [length >= 1, columns]"),
            (2, 5, "column must be from 0 to 2, the columns of scale; got 5."),
            (3, torch.float32, "dtype must be torch.float8_e4m3fn or torch.float8_e5m2; got torch.float32."),
        ):
            state = [*good[:position], wrong, *good[position + 1 :]]
            self.refused("activation_cast_transpose", (x, "gelu", *state), sentence)
            self.refused("activation_backward_cast_transpose_dbias", (x, x, "gelu", *state), sentence)
        columns = "the columns of the activation must be a multiple of 16, which FP8 tensor cores need; got 24 (kind"
        self.refused("activation_cast_transpose", (torch.zeros(4, 48), "swiglu", *good), columns)
        how = (E4M3, False, 0.0)
        self.refused("activation_scale_cast_transpose", (torch.zeros(4, 48), "swiglu", *how), columns)
        self.refused("activation_scale_cast_transpose", (x, "gelu", E4M3, False, -1.0), "epsilon=-1.0; a finite number")
        self.refused(
            "activation_backward_cast_transpose_dbias",
            (torch.zeros(4, 12), torch.zeros(4, 24), "swiglu", *good),
            "the columns of x must be a multiple of 16, which FP8 tensor cores need; got 24",
        )

    @pytest.mark.parametrize("op", ["activation", "activation_cast_transpose"])
    def test_there_is_no_derivative(self, op: str) -> None:
        more = (torch.ones(1), None, 0, E4M3) if op.endswith("transpose") else ()
        with pytest.raises(RuntimeError, match=rf"twin::{op} has no derivative of its own"):
            getattr(twin, op)(torch.zeros(4, 32, requires_grad=True), "gelu", *more)


class TestTheRecordedBandwidths:
    @pytest.mark.parametrize("op", BANDWIDTH_OPS)
    def test_large_matrices_reach_three_quarters_of_a_copy(self, op: str) -> None:
        path = Path(__file__).parents[3] / "docs" / "results" / "activation.json"
        large = {
            row["kind"]: row["of_copy"]
            for row in json.loads(path.read_text("utf-8"))["rows"]
            if (row["op"], row["dtype"]) == (op, "bf16")
            and row["x_columns"] == (32768 if row["kind"] in GATED else 16384)
        }
        assert set(large) == {"gelu", "geglu", "relu", "silu", "swiglu"}
        assert min(large.values()) >= 0.75


def compare_plain(grad: torch.Tensor, x: torch.Tensor, kind: str) -> None:
    """y and dx on both sides."""
    where = f"of {kind}, {x.dtype} {list(x.shape)}"
    expected = twin.activation(x, kind), twin.activation_backward(grad, x, kind)
    poison(x.numel() * x.element_size())
    assert_same_bits(twin.activation(x.cuda(), kind), expected[0], f"y {where}")
    poison(x.numel() * x.element_size())
    assert_same_bits(twin.activation_backward(grad.cuda(), x.cuda(), kind), expected[1], f"dx {where}")
    compare_scales(grad, x, kind)


def compare_scales(grad: torch.Tensor, x: torch.Tensor, kind: str) -> None:
    """y and dx with their scales on both sides; also of numbers without infinities, whose scale is not 1."""
    for pair in ((grad, x), [torch.where(one.isfinite(), one, 0.0) for one in (grad, x)]):
        there = [one.cuda() for one in pair]
        for how in ((FP8[0], False, 0.0), (FP8[1], True, 1e-3)):
            poison(x.numel() * x.element_size())
            found = twin.activation_scale(there[1], kind, *how), twin.activation_backward_scale(*there, kind, *how)
            expected = (
                twin.activation_scale(pair[1], kind, *how),
                twin.activation_backward_scale(*pair, kind, *how),
            )
            for name, a, b in zip(
                ("y", "y's scale", "dx", "dx's scale"), sum(found, ()), sum(expected, ()), strict=True
            ):
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
    return cast_values.numbers(rows, cols, dtype, seed), cast_values.numbers(rows, n, dtype, seed + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("kind", KINDS)
def test_every_shape(kind: str, dtype: torch.dtype) -> None:
    for seed, (rows, cols) in enumerate(itertools.product(ROWS, COLS)):
        grad, x = case(rows, cols, kind, dtype, seed)
        compare_plain(grad, x, kind)
        for out in FP8:
            compare_casts(grad, x, kind, out)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_columns(kind: str, dtype: torch.dtype) -> None:
    for seed, (rows, cols) in enumerate(itertools.product((1, 5), (0, 1, 3, 4, 8, 20, 129, 513))):
        compare_plain(*case(rows, cols, kind, dtype, seed), kind)


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("kind", ["gelu", "swiglu", TIGHT])
def test_the_scale_of_any_shape(kind: str, dtype: torch.dtype) -> None:
    for seed, (rows, cols) in enumerate(itertools.product((0, 1, 5), (0, 3, 16, 513))):
        compare_scales(*case(rows, cols, kind, dtype, seed), kind)


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("kind", ["gelu", "relu", "srelu", "swiglu", TIGHT])
def test_the_cast_with_its_own_scale(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    """Edges of a tile; numbers off the 16-byte boundary; every 16-bit word."""
    for seed, (rows, cols) in enumerate([(1, 16), (65, 144), (0, 16)]):
        x = case(rows, cols, kind, dtype, seed)[1]
        for one in (x, torch.where(x.isfinite(), x, 0.0)):
            compare_with_two_ops(one, kind, device)
    how = (E4M3, False, 0.0)
    shifted = torch.cat([one.new_zeros(1), one.flatten()]).to(device)[1:].view(one.shape)
    for a, b in zip(
        twin.activation_scale_cast_transpose(shifted, kind, *how),
        twin.activation_scale_cast_transpose(one, kind, *how),
        strict=True,
    ):
        assert_same_bits(a, b)
    if dtype in SIXTEEN and kind not in GATED:
        x = every_word(dtype)
        compare_with_two_ops(torch.where(x.isfinite() & (x.abs() < 300), x, 0.0), kind, device)


@pytest.mark.gpu
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


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [float("inf"), float("nan"), 2.0**-149, 3.4028234663852886e38])
def test_a_scale_that_is_hardly_one(scale: float) -> None:
    # The padding of q_t stays zero even where 0 * scale is NaN.
    for kind, dtype, out in itertools.product(KINDS, WIDE, FP8):
        compare_casts(*case(17, 48, kind, dtype, 0), kind, out, scale)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("kind", KINDS)
def test_every_16_bit_word(kind: str, dtype: torch.dtype) -> None:
    words = every_word(dtype)
    other, ones = cast_values.numbers(256, 256, dtype), torch.ones(256, 256, dtype=dtype)
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


@pytest.mark.gpu
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


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_the_sums_of_many_blocks(kind: str) -> None:
    for rows in (8192 + 65, 20000):
        compare_casts(*case(rows, 32, kind, torch.bfloat16, 3), kind, FP8[1])
    compare_casts(*case(16, 20000, kind, torch.bfloat16, 4), kind, FP8[0])


@pytest.mark.gpu
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


@pytest.mark.gpu
def test_two_runs_two_streams_and_a_graph_give_the_same_bits() -> None:
    grad, x = (t.cuda() for t in case(1000, 1024, "geglu", torch.bfloat16, 0))
    scale, history = torch.full((1,), 2.0, device="cuda"), torch.zeros(2, 1, device="cuda")

    def run() -> list[torch.Tensor]:
        state = (scale, history, 0, FP8[1])
        return [
            twin.activation(x, "geglu"),
            *twin.activation_scale(x, "geglu", FP8[0], False, 0.0),
            twin.activation_backward(grad, x, "geglu"),
            *twin.activation_backward_scale(grad, x, "geglu", FP8[1], False, 0.0),
            *twin.activation_scale_cast_transpose(x, "geglu", FP8[0], False, 0.0),
            *twin.activation_scale_cast_transpose(x, "gelu", FP8[0], False, 0.0),
            *twin.activation_cast_transpose(x, "geglu", *state),
            *twin.activation_backward_cast_transpose_dbias(grad, x, "geglu", *state),
        ]

    assert_same_again(run)


@pytest.mark.gpu
def test_refusals_are_those_of_the_cpu() -> None:
    x = torch.zeros(4, 32, device="cuda")
    with pytest.raises(ValueError, match=r"twin::activation: kind must be one of 'gelu', 'geglu'.*; got 'elu'\."):
        twin.activation(x, "elu")
    with pytest.raises(ValueError, match=r"twin::activation_backward: grad must be .* \[4, 16\] on cuda:0; got"):
        twin.activation_backward(x, x, "swiglu")
    with pytest.raises(ValueError, match=r"twin::activation_backward: grad must be .* on cuda:0; got .* on cpu"):
        twin.activation_backward(x.cpu(), x, "gelu")
