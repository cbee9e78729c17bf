"""`twin::norm_scale_cast_transpose` is `twin::norm_scale` and the cast of its y."""

import itertools

import pytest
import torch
from shared.bits import assert_same_bits

import reference  # noqa: F401  (declares the ops)
from reference.numbers import formats
from reference.ops.norms.norm import KINDS

twin = torch.ops.twin
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize("dtype", formats.WIDE_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_two_ops(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    for rows, how in itertools.product((0, 1, 37), ((E4M3, False, 0.0), (E5M2, True, 1e-3))):
        x, weight, bias = ((3 * torch.randn(*size)).to(dtype) for size in ((rows, 48), (48,), (48,)))
        if rows > 1:
            x[1, 2], x[2, 3] = torch.inf, torch.nan
        given = (x, weight, bias if kind == "layernorm" else None, 1e-5, True, kind)
        y, mean, rstd, scale = twin.norm_scale(*given, dtype, *how)
        expected = (*twin.cast_transpose(y, scale, None, 0, how[0]), mean, rstd)
        for a, b in zip(twin.norm_scale_cast_transpose(*given, *how), expected, strict=True):
            assert_same_bits(a, b)


def test_it_says_what_it_accepts() -> None:
    x, weight = torch.zeros(4, 24), torch.ones(24)
    op = twin.norm_scale_cast_transpose
    start = "^twin::norm_scale_cast_transpose: "
    with pytest.raises(ValueError, match=f"{start}the columns of x must be a multiple of 16"):
        op(x, weight, None, 1e-5, False, "rmsnorm", E4M3, False, 0.0)
    x, weight = torch.zeros(4, 32), torch.ones(32)
    with pytest.raises(ValueError, match=f"{start}kind must be 'layernorm' or 'rmsnorm'; got 'batchnorm'"):
        op(x, weight, None, 1e-5, False, "batchnorm", E4M3, False, 0.0)
    with pytest.raises(ValueError, match=f"{start}dtype must be "):
        op(x, weight, None, 1e-5, False, "rmsnorm", torch.bfloat16, False, 0.0)
    with pytest.raises(ValueError, match=f"{start}epsilon=-1.0; "):
        op(x, weight, None, 1e-5, False, "rmsnorm", E4M3, False, -1.0)
