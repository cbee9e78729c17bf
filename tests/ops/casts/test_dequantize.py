"""`twin::dequantize`: every code by every dtype, the scale of an element's block, and refusals."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from shared.bits import assert_same_bits

from reference.numbers import formats
from reference.ops.casts.cast_blocks import scale_shape

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
twin = torch.ops.twin


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("wide", formats.WIDE_DTYPES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_code_on_a_gpu(dtype: torch.dtype, wide: torch.dtype, device: torch.device) -> None:
    q = torch.arange(256, dtype=torch.uint8).view(dtype).view(16, 16)
    for scale in (1.0, 0.37, 2.0**-120, 2.0**118):
        scale_inv = torch.full((1,), scale)
        found = twin.dequantize(q.to(device), scale_inv.to(device), False, wide)
        assert_same_bits(found.cpu(), twin.dequantize(q, scale_inv, False, wide))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_product_rounded_twice(dtype: torch.dtype) -> None:
    q = torch.arange(256, dtype=torch.uint8).view(dtype).view(16, 16)
    for scale, wide in itertools.product((1.0, 0.37, 2.0**-140), formats.WIDE_DTYPES):
        with np.errstate(invalid="ignore"):
            product = q.float().numpy() * np.float32(scale)
        assert_same_bits(twin.dequantize(q, torch.full((1,), scale), True, wide), torch.from_numpy(product).to(wide))


@pytest.mark.parametrize("square", [False, True])
def test_the_scale_of_an_elements_block(square: bool) -> None:
    x = torch.randn(300, 272, generator=torch.Generator().manual_seed(1))
    q, scale_inv = twin.cast_blocks(x, E4M3, square, "fp32", 0.0)
    found = twin.dequantize(q, scale_inv, square, torch.float32)
    for r, c in itertools.product((0, 127, 128, 299), (0, 127, 128, 271)):
        scale = scale_inv[r // 128, c // 128] if square else scale_inv[c // 128, r]
        assert found[r, c] == q[r, c].float() * scale


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("rows", [1, 37, 300])
def test_the_scale_of_an_elements_row(rows: int, device: torch.device) -> None:
    x = torch.randn(rows, 272, generator=torch.Generator().manual_seed(1))
    q, scale_inv = twin.cast_rowwise(x, E4M3, False, 0.0)
    wanted = q.float() * scale_inv[:, None]
    assert_same_bits(twin.dequantize(q, scale_inv, False, torch.float32), wanted)
    assert_same_bits(twin.dequantize(q.to(device), scale_inv.to(device), True, torch.float32).cpu(), wanted)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"q": torch.zeros(4, 16)}, "q must be torch.float8_e4m3fn or torch.float8_e5m2; got torch.float32"),
        ({"q": torch.zeros(4, 8, dtype=torch.uint8).view(E4M3)}, r"cols a multiple of 16; got \[4, 8\]"),
        ({"dtype": torch.float64}, "dtype must be torch.float32, torch.bfloat16 or torch.float16; got torch.float64"),
        ({"scale_inv": torch.ones(2)}, r"scale_inv must be contiguous torch.float32 \[1\] or \[4\]"),
        ({"scale_inv": torch.ones(1, 1)}, r"scale_inv must be contiguous torch.float32 \[1, 4\]"),
    ],
)
def test_refusals(arguments: dict[str, Any], sentence: str) -> None:
    assert scale_shape(4, 16, False) == (1, 4)
    given = {
        "q": torch.zeros(4, 16, dtype=torch.uint8).view(E4M3),
        "scale_inv": torch.ones(1),
        "square": False,
        "dtype": torch.bfloat16,
    }
    with pytest.raises(ValueError, match=f"^twin::dequantize: .*{sentence}"):
        twin.dequantize(*(given | arguments).values())
