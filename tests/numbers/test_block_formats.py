"""E2M1 and E8M0: every code, every 16-bit word, and rounding by random bytes."""

import ml_dtypes
import numpy as np
import torch

from reference.numbers import block_formats as formats

CODES = torch.arange(16, dtype=torch.uint8)


def every_bf16() -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).float()


def values() -> torch.Tensor:
    """What the codes 0 to 15 stand for, as ml_dtypes has them."""
    return torch.from_numpy(np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32))


def test_a_code_is_its_value() -> None:
    decoded = formats.decode_e2m1(formats.pack(CODES))
    assert torch.equal(decoded.view(torch.int32), values().view(torch.int32)), "the sign of zero, too"
    assert formats.encode_e2m1(values()).tolist() == [*range(8), 0, *range(9, 16)], "minus zero is code 0"


def test_bytes_hold_two_codes() -> None:
    packed = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(formats.pack(formats.unpack(packed)), packed)
    assert formats.unpack(packed[0x2B:0x2C]).tolist() == [0xB, 0x2], "the first in the low half"


def test_rounding_to_nearest_is_ml_dtypes() -> None:
    x = every_bf16()
    x = torch.cat([x, x[x.abs() < 8] * (1 + 2**-20), x[x.abs() < 8] * (1 - 2**-20)])
    x = x[~x.isnan()]
    found = formats.encode_e2m1(x)
    with np.errstate(all="ignore"):
        oracle = x.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert torch.equal(values()[found.int()], torch.from_numpy(oracle))
    assert torch.equal(found >> 3 == 1, x < 0), "the sign is that of a negative number, rounded to zero or not"
    assert formats.encode_e2m1(torch.tensor([torch.nan, -torch.nan])).tolist() == [0, 0]


def test_random_rounding_is_in_proportion() -> None:
    """Of all 256 bytes, as many round up as the distance from the number below says."""
    every = torch.arange(256, dtype=torch.uint8)
    ladder = torch.tensor(formats.E2M1_VALUES)
    for x in (0.0, 0.125, 0.3, 0.5, 1.75, 1.9, 2.25, 3.999, 4.5, 5.75, 6.0, 1e-9):
        below = ladder[ladder <= x].max()
        above = ladder[ladder > below].min() if x < 6 else below
        for sign in (1, -1):
            codes = formats.encode_e2m1_stochastic(torch.full((256,), sign * x), every)
            found = values()[codes.int()] * sign
            assert set(found.tolist()) <= {float(below), float(above)}
            ups = int((found == above).sum()) if above != below else 0
            share = (x - float(below)) / float(above - below) if above != below else 0
            assert abs(ups - 256 * share) <= 1, f"{x}: {ups} of 256"


def test_random_rounding_saturates_and_keeps_codes() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    for code in CODES[CODES != 8]:
        assert set(formats.encode_e2m1_stochastic(values()[code.int()].expand(256), every).tolist()) == {int(code)}
    for x, code in ((7.0, 7), (1e30, 7), (torch.inf, 7), (-torch.inf, 15), (torch.nan, 0)):
        assert set(formats.encode_e2m1_stochastic(torch.full((256,), x), every).tolist()) == {code}


def test_powers_are_not_below() -> None:
    """The smallest one, for every positive bf16 number and its neighbours in fp32."""
    words = torch.arange(0, 1 << 15, dtype=torch.int32) << 16
    words = torch.cat([words, words + 1, words[1:] - 1])
    x = words[words <= 0x7F800000].view(torch.float32)
    codes = formats.e8m0_above(x)
    powers = formats.decode_e8m0(codes).double()
    assert torch.equal(powers, torch.exp2(codes.double() - 127))
    largest = codes == 0xFE
    assert bool((powers >= x.double())[~largest].all())
    assert bool((powers / 2 < x.double())[codes > 0].all())
    assert formats.e8m0_above(torch.tensor([0.0, 2**-127, torch.inf, torch.nan])).tolist() == [0, 0, 0xFE, 0xFF]
    assert bool(formats.decode_e8m0(torch.tensor([0xFF], dtype=torch.uint8)).isnan())
