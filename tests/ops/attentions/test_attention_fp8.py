"""`twin::attention_fp8`: the written order, float64, special codes, masks, dropout, refusals.

On an H200 it equals its definition on the CPU in every bit: results, statistics and all gradients.
"""

import re

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared.attention_cases import DRAWN, LAYOUTS, MASKS, Case, hidden_pairs, inputs, to_cuda
from shared.attention_fp8_cases import CASES, FP8, arguments, in_the_written_order, transposed
from shared.bits import assert_same_bits
from shared.training_pairs import train_both
from torch._subclasses.fake_tensor import FakeTensorMode

import optimized  # noqa: F401  (registers the CUDA ops)
import reference as te
from reference.numbers import formats, tensor_core
from reference.ops.attentions import attention, attention_fp8
from reference.ops.attentions.attention import MASK_TYPES

twin = torch.ops.twin
DTYPES = (torch.bfloat16, torch.float16)
NAN = 0x7F


def check(case: Case, headroom: float = 1.0) -> None:
    given = arguments(case, headroom)
    expected = in_the_written_order(case, given)
    for name, a, b in zip(("out", "m", "inv"), expected, twin.attention_fp8(*given), strict=True):
        assert_same_bits(a, b, f"{name} of {case}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("skv", [1, 7, 33, 128, 130, 300])
def test_the_order_is_the_written_one(dtype: torch.dtype, skv: int) -> None:
    check(Case(sq=3, skv=skv, d=48, dtype=dtype, mask_type="causal_bottom_right" if skv > 3 else "causal", scale=0.7))


@pytest.mark.sample(5)
@pytest.mark.parametrize("mask_type", attention.MASK_TYPES)
@pytest.mark.parametrize("mask", MASKS)
def test_masks_have_the_written_order(mask_type: str, mask: str) -> None:
    check(Case(2, 1, 2, 9, 140, 16, torch.bfloat16, mask_type, mask, dropout=0.3))


@settings(max_examples=12, deadline=None)
@given(
    case=st.builds(
        Case,
        d=st.integers(1, 16).map(lambda n: 16 * n),
        **DRAWN
        | {
            "group": st.integers(1, 2),
            "sq": st.integers(1, 12),
            "skv": st.integers(1, 280),
            "scale": st.sampled_from((None, 1.0, 1e-3, 30.0)),
        },
    ),
    headroom=st.sampled_from((1.0, 1.0, 2.0**-12, 30.0)),
)
def test_any_shape_has_the_written_order(case: Case, headroom: float) -> None:
    check(case, headroom)


def test_against_float64() -> None:
    """Scores are exact here, so only P's rounding and 13 bits of each step are lost."""
    generator = np.random.default_rng(0)
    b, h, s, d = 2, 2, 200, 32
    q, k = (torch.from_numpy(generator.integers(-3, 4, (b, h, s, d)).astype(np.float32)).to(FP8) for _ in range(2))
    v = torch.from_numpy(generator.integers(-8, 9, (b, h, s, d)).astype(np.float32)).to(FP8)
    ones = [torch.ones(1)] * 3
    out, _, _ = twin.attention_fp8(q, k, transposed(v), *ones, 0.125, "causal", -1, -1, None, 0.0, None, torch.float16)
    wide = [x.double() for x in (q, k, v)]
    scores = (wide[0] @ wide[1].transpose(2, 3)) * 0.125
    weights = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    # A weight: 2^-4 of itself, or 2^-18 of a row's largest at most; 4 steps of 33 terms lose 2^-13 of the
    # largest partial sum each, which is at most 2 Σ weight |v|; the grid of exponents and out's rounding are less.
    # l has the same errors of weights and steps, whose terms have one sign: Σ weight = 1. And with |x - X| <= e,
    # |l - 1| <= f, |x / l - X| <= (e + f |X|) / (1 - f).
    exact = weights @ wide[2]
    of_weights = (2.0**-4 * weights + 2.0**-18) @ wide[2].abs()
    of_steps = 8 * 33 * 2.0**-13 * (weights @ wide[2].abs())
    of_sum = 2.0**-4 + s * 2.0**-18 + 4 * 33 * 2.0**-13
    error = (out.double() - exact).abs()
    bound = (of_weights + of_steps + of_sum * exact.abs()) / (1 - of_sum)
    assert bool((error <= bound + 2.0**-10).all())
    assert bool((error > 0.05 * of_weights).any())  # the bound is not idle


def test_inside_a_step_the_order_of_keys_does_not_matter() -> None:
    """Which is why a kernel may multiply the keys of 32 in the order in which its registers hold the weights."""
    generator = np.random.default_rng(1)
    codes = [torch.from_numpy(generator.integers(0, 256, (20, 128)).astype(np.uint8)) for _ in range(2)]
    codes = [torch.where(x & 0x7F == NAN, torch.zeros_like(x), x) for x in codes]
    order = torch.cat([32 * n + torch.from_numpy(generator.permutation(32)) for n in range(4)])
    plain = tensor_core.gemm(*(x.view(FP8) for x in codes))
    assert_same_bits(plain, tensor_core.gemm(*(x[:, order].contiguous().view(FP8) for x in codes)))
    other = torch.from_numpy(generator.permutation(128))
    assert not torch.equal(plain, tensor_core.gemm(*(x[:, other].contiguous().view(FP8) for x in codes)))


def test_a_row_depends_on_the_keys_that_it_sees_alone() -> None:
    case = Case(b=1, hkv=2, sq=270, skv=270, d=32, mask_type="causal")
    q, k, v_t, *rest = arguments(case)
    whole = twin.attention_fp8(q, k, v_t, *rest)
    for length in (1, 130, 256):
        short = (q[:, :, :length], k[:, :, :length], v_t[..., :length])
        for a, b in zip(whole, twin.attention_fp8(*short, *rest), strict=True):
            assert_same_bits(a[:, :, :length], b)


def test_nan_codes() -> None:
    case = Case(sq=4, skv=200, d=16, mask_type="causal_bottom_right")
    given = arguments(case)
    for operand, place, rows in ((0, (0, 0, 2, 5), [2]), (1, (0, 0, 198, 5), [2, 3])):
        changed = [x.clone() if isinstance(x, torch.Tensor) else x for x in given]
        changed[operand].view(torch.uint8)[place] = NAN
        out, _, inv = twin.attention_fp8(*changed)
        assert out.isnan().any(-1)[0, 0].nonzero().flatten().tolist() == rows
        assert inv.isnan()[0, 0].nonzero().flatten().tolist() == rows
        for a, b in zip(in_the_written_order(case, tuple(changed)), twin.attention_fp8(*changed), strict=True):
            assert_same_bits(a, b)
    v_t = given[2].clone()
    v_t.view(torch.uint8)[0, 0, 7, 10] = NAN
    out, *_ = twin.attention_fp8(*given[:2], v_t, *given[3:])
    assert out.isnan().flatten(0, 2).any(0).nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize("invs", [(1e-30, 1e-30, 1.0), (1e-44, 1.0, 1e-44), (1e30, 1e30, 1.0), (1.0, 1.0, 1e38)])
def test_scales_at_the_ends_of_fp32(invs: tuple[float, ...]) -> None:
    case = Case(sq=3, skv=140, d=16)
    given = arguments(case)
    given = (*given[:3], *(torch.tensor([x]) for x in invs), *given[6:])
    for a, b in zip(in_the_written_order(case, given), twin.attention_fp8(*given), strict=True):
        assert_same_bits(a, b)


def test_rows_that_see_nothing() -> None:
    out, m, inv = twin.attention_fp8(*arguments(Case(b=2, hkv=2, sq=140, skv=200, mask="everything")))
    assert_same_bits(out, torch.zeros_like(out))
    assert_same_bits(inv, torch.zeros_like(inv))
    assert bool((m == -(2.0**100)).all())


@pytest.mark.parametrize(("sq", "skv"), [(0, 5), (5, 0), (0, 0)])
def test_nothing(sq: int, skv: int) -> None:
    codes = [torch.zeros(1, 1, *shape).to(FP8) for shape in ((sq, 16), (skv, 16), (16, skv))]
    options = (0.25, "none", -1, -1, None, 0.0, None, torch.bfloat16)
    out, _, inv = twin.attention_fp8(*codes, *[torch.ones(1)] * 3, *options)
    assert out.shape == (1, 1, sq, 16)
    assert not out.any()
    assert not inv.any()


def test_no_weight_saturates() -> None:
    """A row's largest p is 256, as m is 8 below its exponent; 1 / l is at most 1 / 256."""
    assert formats.E4M3.largest >= 2**attention_fp8.HEADROOM
    found = attention_fp8.rounded_weights(torch.tensor([[256.0, 2.0**-6, 2.0**-10, 2.0**-9]]))
    assert found.float().tolist() == [[256.0, 2.0**-6, 0.0, 2.0**-9]]
    given = arguments(Case(sq=100, skv=300, scale=2.0, d=64))
    _, m, inv = twin.attention_fp8(*given)
    assert bool((m.abs() < 128).all())
    assert bool((inv <= 1 / 256).all())  # a chain of terms that are not negative loses nothing of its largest one


def test_dropout() -> None:
    case = Case(b=2, hkv=2, sq=60, skv=150, d=16, dropout=0.25)
    given = arguments(case)
    state = given[12].clone()
    out, _, inv = twin.attention_fp8(*given)
    assert torch.equal(given[12], state + torch.tensor([0, 1]))
    whole, _, same = twin.attention_fp8(*given[:11], 0.0, None, case.dtype)
    assert_same_bits(inv, same, "1 / l counts dropped weights")
    assert not torch.equal(out, whole)
    nothing, *_ = twin.attention_fp8(*given[:11], 1.0, state, case.dtype)
    assert not nothing.any()


def test_fake_tensors_have_the_results_shapes_and_strides() -> None:
    given = arguments(Case(b=2, hkv=2, group=2, sq=20, skv=30, layout="sbhd"))
    real = twin.attention_fp8(*given)
    with FakeTensorMode() as mode:
        fake = twin.attention_fp8(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in given))
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    assert real[0].permute(2, 0, 1, 3).is_contiguous()


def test_hidden_blocks_change_no_bit() -> None:
    """A window leaves blocks out; a mask that hides the same pairs leaves none out."""
    case = Case(sq=300, skv=300, d=16, mask_type="causal", window=(40, -1))
    given = arguments(case)
    masked = (*given[:7], "none", -1, -1, hidden_pairs(case, None), *given[11:])
    for a, b in zip(twin.attention_fp8(*given), twin.attention_fp8(*masked), strict=True):
        assert_same_bits(a, b)


GOOD = arguments(Case(b=2, hkv=2, group=2, sq=20, skv=30, d=32))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({0: GOOD[0][0]}, "q must be 4-D; got [4, 20, 32]"),
        ({1: GOOD[1].bfloat16()}, "k is torch.bfloat16; q, k and v_t must be torch.float8_e4m3fn"),
        ({2: GOOD[2].view(torch.float8_e5m2)}, "v_t is torch.float8_e5m2; q, k and v_t must be"),
        ({0: GOOD[0].transpose(2, 3)}, "q must be contiguous in its last dimension"),
        ({0: GOOD[0][..., :24]}, "head_dim must be a multiple of 16 from 16 to 256; got 24"),
        ({1: GOOD[1][:1]}, "k must be [batch, key heads, keys, head_dim] with q's batch 2 and head_dim 32"),
        ({2: GOOD[2][..., :29]}, "v_t must be [2, 2, 32, 30], for k of [2, 2, 30, 32]; got [2, 2, 32, 29]"),
        ({0: GOOD[0][:, :3]}, "q's 3 heads must be a multiple of k's heads; k has 2"),
        ({4: torch.ones(2)}, "k_scale_inv must be torch.float32 [1] on cpu; got torch.float32 [2]"),
        ({5: torch.ones(1).double()}, "v_scale_inv must be torch.float32 [1]"),
        ({6: 0.0}, "scale must be a positive number"),
        ({7: "padding"}, "mask_type must be one of none, causal, causal_bottom_right; got 'padding'"),
        ({8: -2}, "left and right must each be -1 (no limit) or a number of keys; got -2 and -1"),
        ({10: torch.ones(2, 4, 20, 30)}, "mask must be torch.bool"),
        ({11: 0.1}, "needs rng_state"),
        ({13: torch.float32}, "out_dtype must be torch.bfloat16 or torch.float16; got torch.float32"),
    ],
)
def test_refusals(change: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^twin::attention_fp8: .*{re.escape(sentence)}"):
        twin.attention_fp8(*[change.get(n, x) for n, x in enumerate(GOOD)])


def test_layouts_change_no_bit() -> None:
    case = Case(b=2, hkv=2, group=2, sq=70, skv=150, d=32, dropout=0.1)
    given = arguments(case)
    expected = twin.attention_fp8(*(x.clone() if isinstance(x, torch.Tensor) else x for x in given))
    wide = torch.zeros(2, 2, 32, 176, dtype=torch.uint8).view(FP8)
    wide[..., :150] = given[2]
    q = given[0].view(torch.uint8).permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3).view(FP8)
    for a, b in zip(expected, twin.attention_fp8(q, given[1], wide[..., :150], *given[3:]), strict=True):
        assert_same_bits(a, b)


def run(given: tuple, v: torch.Tensor, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    """Forward and backward: every result, by name."""
    before = None if given[12] is None else given[12].clone()
    out, m, inv = twin.attention_fp8(*given)
    codes = (*given[:2], v, *given[3:6])
    dq, dk, dv = twin.attention_fp8_backward(grad, *codes, out, m, inv, *given[6:12], before)
    return {"out": out, "m": m, "inv": inv, "dq": dq, "dk": dk, "dv": dv}


def compare(case: Case, headroom: float = 1.0) -> None:
    cpu = arguments(case, headroom)
    more = (transposed(cpu[2]), inputs(case)["grad"])
    cuda = [to_cuda(x) if isinstance(x, torch.Tensor) else x for x in (*cpu, *more)]
    expected = run(cpu, *more)
    for name, value in run(tuple(cuda[:-2]), *cuda[-2:]).items():
        assert_same_bits(expected[name], value, f"{name} of {case}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("mask_type", MASK_TYPES)
def test_every_configuration(dtype: torch.dtype, d: int, dropout: float, mask_type: str) -> None:
    compare(Case(b=2, hkv=2, group=2, sq=197, skv=261, d=d, dtype=dtype, mask_type=mask_type, dropout=dropout))


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_masks_and_layouts(mask: str, layout: str) -> None:
    compare(Case(b=2, hkv=1, group=2, sq=300, skv=150, mask=mask, mask_type="causal", layout=layout))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [(0, 0), (100, -1), (-1, 100), (127, 1), (300, 257)])
def test_windows(window: tuple[int, int]) -> None:
    compare(Case(hkv=2, group=2, sq=600, skv=700, d=80, window=window, dropout=0.1))


@pytest.mark.gpu
@pytest.mark.parametrize(("sq", "skv"), [(1, 1), (1, 129), (128, 128), (129, 1), (64, 65), (512, 17), (257, 640)])
def test_ragged(sq: int, skv: int) -> None:
    compare(Case(hkv=2, group=1, sq=sq, skv=skv, d=32, mask_type="causal", dropout=0.25))


@pytest.mark.gpu
def test_more_tiles_than_multiprocessors() -> None:
    compare(Case(b=2, hkv=8, group=2, sq=2100, skv=2100, d=128, mask_type="causal"))


@pytest.mark.gpu
@pytest.mark.parametrize("headroom", [2.0**-12, 30.0])
def test_scales_that_do_not_fit(headroom: float) -> None:
    compare(Case(hkv=2, sq=200, skv=300, d=64, mask_type="causal"), headroom)


@pytest.mark.gpu
def test_nan_codes_on_both_sides() -> None:
    case = Case(sq=100, skv=200, d=64, mask_type="causal_bottom_right")
    for operand in range(3):
        cpu = list(arguments(case))
        cpu[operand] = cpu[operand].clone()
        cpu[operand].view(torch.uint8)[0, 0, 50, 30] = 0x7F
        cuda = [to_cuda(x) if isinstance(x, torch.Tensor) else x for x in cpu]
        for a, b in zip(twin.attention_fp8(*cpu), twin.attention_fp8(*cuda), strict=True):
            assert_same_bits(a, b)


@pytest.mark.gpu
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=CASES)
def test_any_shape(case: Case) -> None:
    compare(case)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_layer(layout: str, recomputes: bool, same_bits) -> None:  # type: ignore[no-untyped-def]
    layer = te.TransformerLayer(64, 96, 4, params_dtype=torch.bfloat16, attn_input_format=layout)
    recipe = te.DelayedScaling(amax_history_len=4, fp8_dpa=True)
    train_both(layer, (70, 2, 64), torch.bfloat16, recipe, same_bits, checkpoint_core_attention=recomputes)


@pytest.mark.gpu
def test_codes_that_the_copy_engine_cannot_read_are_copied() -> None:
    case = Case(b=2, hkv=2, sq=70, skv=75, d=32)
    q, k, v_t, *rest = arguments(case)
    assert v_t.stride(2) % 16
    wide = torch.zeros(2, 2, 70, 40, dtype=torch.uint8).view(FP8)[..., 1:33]
    wide.copy_(q)
    expected = twin.attention_fp8(q, k, v_t, *rest)
    operands = (to_cuda(x) for x in (wide, k, v_t))
    found = twin.attention_fp8(*operands, *(to_cuda(x) if isinstance(x, torch.Tensor) else x for x in rest))
    for a, b in zip(expected, found, strict=True):
        assert_same_bits(a, b)
