"""`twin::gemm_fp8_activation_scale` is the two ops that it names, and its amax follows from the largest h."""

import pytest
import torch
from shared.bits import assert_same_bits
from shared.gemm_codes import E4M3, E5M2, draw, normal, one

import reference  # noqa: F401  (declares the ops)
from optimized.ops.gemms.gemm_activation_scale import KNOWN_FROM
from reference.ops.activations.activation import GATED, KINDS, functions

twin = torch.ops.twin
M, K, COLS = 37, 48, 32
SIXTEEN = (torch.bfloat16, torch.float16)


def product(kind: str) -> tuple[torch.Tensor, ...]:
    n = COLS * (2 if kind in GATED else 1)
    return draw(1, M, K, E4M3), draw(2, n, K, E4M3), one(0.3), one(1.7)


@pytest.mark.parametrize("dtype", [*SIXTEEN, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_two_ops(kind: str, dtype: torch.dtype) -> None:
    operands = product(kind)
    for bias, how in ((None, (E4M3, False, 0.0)), (normal(6, len(operands[1])).to(dtype), (E5M2, True, 1e-3))):
        found = twin.gemm_fp8_activation_scale(*operands, bias, dtype, kind, *how)
        h = twin.gemm_fp8(*operands, bias, dtype, "fast")
        for a, b in zip(found, (h, *twin.activation_scale_cast_transpose(h, kind, *how)), strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("kind", KNOWN_FROM)
def test_the_amax_is_that_of_the_largest_h_from_a_number_on(kind: str, dtype: torch.dtype) -> None:
    """For each word h of 16 bits from `KNOWN_FROM` on, infinity included, no |act| of a word up to h is larger."""
    words = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    nan = words.isnan()
    act = functions(kind).act(words[:, None]).view(-1)
    assert bool(act[nan].isnan().all()), "NaN is passed over on both sides"
    h, order = words[~nan].float().sort(stable=True)
    magnitudes = act[~nan][order].abs()
    assert not bool(magnitudes[h >= 0].isnan().any())
    largest = magnitudes.nan_to_num(0.0, torch.inf).cummax(0).values  # of -inf, act may be NaN
    known = h >= KNOWN_FROM[kind]
    assert_same_bits(largest[known], magnitudes[known])
    if not KNOWN_FROM[kind]:  # what is never larger than +0 has the amax of +0
        assert float(largest[h <= 0].max()) == 0.0


def test_every_kind_that_is_not_gated_has_such_a_number() -> None:
    assert set(KNOWN_FROM) == {kind for kind in KINDS if kind not in GATED}


def test_it_says_what_it_accepts() -> None:
    operands, how = product("gelu"), (E4M3, False, 0.0)
    op = twin.gemm_fp8_activation_scale
    with pytest.raises(ValueError, match=r"^twin::gemm_fp8_activation_scale: kind must be one of .*; got 'elu'\."):
        op(*operands, None, torch.bfloat16, "elu", *how)
    with pytest.raises(
        ValueError, match=r"^twin::gemm_fp8_activation_scale: the columns of the activation must be a multiple of 16"
    ):
        op(*operands[:1], draw(2, 48, K, E4M3), *operands[2:], None, torch.bfloat16, "geglu", *how)
    with pytest.raises(ValueError, match=r"^twin::gemm_fp8_activation_scale: epsilon=-1.0; "):
        op(*operands, None, torch.bfloat16, "gelu", E4M3, False, -1.0)
