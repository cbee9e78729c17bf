"""`twin::attention_fp8_backward` on the CPU: the 16-bit backward of the codes, and why of them; refusals."""

import re

import pytest
import torch
from shared.attention_cases import Case, inputs
from shared.attention_fp8_cases import FP8, arguments, transposed
from shared.bits import assert_same_bits

from reference.ops.attentions.attention_fp8_backward import dequantized

twin = torch.ops.twin


def both(case: Case, headroom: float = 1.0) -> tuple[tuple, tuple]:
    """Arguments of the forward, and of the backward."""
    given, grad = arguments(case, headroom), inputs(case)["grad"]
    state = None if given[12] is None else given[12].clone()
    results = twin.attention_fp8(*given)
    v = transposed(given[2])
    return given, (grad, *given[:2], v, *given[3:6], *results, *given[6:12], state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask_type", ["none", "causal"])
def test_it_is_the_backward_of_the_numbers_that_the_codes_are(dtype: torch.dtype, mask_type: str) -> None:
    case = Case(2, 2, 2, 140, 150, 32, dtype, mask_type, "padding", dropout=0.1, layout="sbhd")
    _, given = both(case)
    grad, *codes = given[:4]
    wide = [(x.float() * scale_inv).to(dtype) for x, scale_inv in zip(codes, given[4:7], strict=True)]
    expected = twin.attention_backward(grad, *wide, *given[7:])
    for name, a, b in zip(("dq", "dk", "dv"), expected, twin.attention_fp8_backward(*given), strict=True):
        assert_same_bits(a, b, name)
        assert b.dtype == dtype


def test_every_code_is_dequantized_with_one_rounding_after_the_product() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    scale_inv = torch.tensor([0.0123])
    for dtype in (torch.bfloat16, torch.float16):
        found = dequantized(codes, scale_inv, dtype)
        assert_same_bits(found, (codes.to(torch.float32) * scale_inv).to(dtype))
        assert found.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]


def test_saturated_codes_leave_gradients_of_their_size() -> None:
    """By scores of the numbers before the cast, whose largest are 30 times what the codes hold, weights explode."""
    case = Case(sq=64, skv=64, d=64, dtype=torch.bfloat16, scale=1.0)
    _, backward = both(case, headroom=30.0)
    grads = twin.attention_fp8_backward(*backward)
    wild = twin.attention_backward(backward[0], *(inputs(case)[name] for name in "qkv"), *backward[7:])
    for one, other in zip(grads, wild, strict=True):
        assert one.abs().max() < 100
        assert not other.abs().max() < 1e6


_, GOOD = both(Case(b=2, hkv=2, group=2, sq=20, skv=30, d=32))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({0: GOOD[0].float()}, "grad is torch.float32; torch.bfloat16 and torch.float16 are accepted"),
        (
            {0: GOOD[0].half()},
            "out must be torch.float16 [2, 4, 20, 32] on cpu, as the forward's out was",
        ),
        ({1: GOOD[1].bfloat16()}, "q is torch.bfloat16; q, k and v must be torch.float8_e4m3fn"),
        ({3: transposed(GOOD[3])}, "v must be [2, 2, 30, 32], for k of [2, 2, 30, 32]; got [2, 2, 32, 30]"),
        ({6: torch.ones(3)}, "v_scale_inv must be torch.float32 [1]"),
        ({8: GOOD[8].double()}, "m must be contiguous torch.float32 [2, 4, 20]"),
        ({11: "padding"}, "mask_type must be one of"),
    ],
)
def test_refusals(change: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^twin::attention_fp8_backward: .*{re.escape(sentence)}"):
        twin.attention_fp8_backward(*[change.get(n, x) for n, x in enumerate(GOOD)])
