"""E2M1 and E8M0: the numbers of block scaling, beside FP8's (`reference.numbers.formats`).

    E2M1   4 bits, sign · 2 · 1, bias 1     0 0.5 1 1.5 2 3 4 6 and their negatives; no infinities, no NaN
    E8M0   8 bits of exponent, bias 127     2^-127 .. 2^127; 0xFF is NaN; no sign, no zero

("OCP Microscaling Formats (MX) Specification", version 1.0.) Of E2M1 two codes are one byte, the first one in its low
half, along the last dimension.

A conversion to E2M1 saturates at ±6. NaN becomes code 0, since E2M1 has none: what a NaN belongs to must say so by its
scale.

    nearest      to even: |x| up to 0.25 becomes 0, from 0.75 to 1.25 1, from 1.75 to 2.5 2, from 3.5 to 5 4
    stochastic   with u = byte / 256 of a random byte and step(a) = 0.5 below 2, 1 below 4, 2 from there on:
                     t = fp32(|x| + u · step(|x|)),  |code| = min(floor(t / step(t)) · step(t), 6)
                 so x goes up in proportion to its distance from the number below, in steps of 1/256

In both, the sign is that of x where x < 0; so −0 becomes code 0, and a negative x that is rounded to zero code 8.
The first is `cvt.rn.satfinite.e2m1x2.f32` of everything but −0 and NaN; the second what Transformer Engine computes
for `cvt.rs.satfinite.e2m1x4.f32`, which takes eight random bits a number, too (its `stochastic_round_fp4_e2m1`).

`e8m0_above(x)` is the smallest power of two that is not below x ≥ 0, as `cvt.rp.satfinite.ue8m0x2.f32`: 2^-127 where x
is smaller, 2^127 where it is larger or infinite, NaN where x is NaN.
"""

from functools import cache

import torch

CPU_ONLY = "MXFP8 and NVFP4 need Blackwell's tensor cores, and the kernels here are for Hopper; the CPU computes both"
"""Why no op of these formats has a CUDA side."""
E2M1_LARGEST = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of the codes 0 to 7; those of 8 to 15 are their negatives."""

E8M0_NAN = 0xFF
_MANTISSA = 0x7FFFFF


def blocks(size: int, block: int) -> int:
    """How many blocks hold `size` numbers; the last one may not be full."""
    return -(-size // block)


def whole(x: torch.Tensor, block: int, square: bool = False) -> torch.Tensor:
    """x `[rows, cols]` with zeros up to whole blocks of columns, and of rows where blocks are square; or x itself."""
    rows, cols = x.shape
    more, below = blocks(cols, block) * block - cols, blocks(rows, block) * block - rows if square else 0
    return torch.nn.functional.pad(x, (0, more, 0, below)) if more or below else x


def block_amax(x: torch.Tensor, block: int, square: bool) -> torch.Tensor:
    """The largest |x| of each block of a row, fp32 `[rows, blocks]`; a NaN in a block is its amax.

    x is `[rows, cols]`; a block is `block` columns of one row, or where `square` of `block` rows, which share its amax.
    """
    rows = x.shape[0]
    x = whole(x, block, square).abs()
    found = x.reshape(x.shape[0], -1, block).amax(dim=2) if x.numel() else x.new_zeros(rows, blocks(x.shape[1], block))
    if square and x.numel():
        found = found.reshape(-1, block, found.shape[1]).amax(dim=1).repeat_interleave(block, dim=0)[:rows]
    return found.float()


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """The codes, uint8 from 0 to 15, of fp32 numbers of any shape, rounded to nearest."""
    size = x.abs()
    code = (size > 0.25).to(torch.uint8)
    for edge, even_above in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += size >= edge if even_above else size > edge
    return code | (x < 0).to(torch.uint8) << 3


def _step(size: torch.Tensor) -> torch.Tensor:
    """The distance of E2M1's numbers from `size` on."""
    return 0.5 * (1 + (size >= 2).float() + 2 * (size >= 4).float())


def encode_e2m1_stochastic(x: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """The codes, uint8 from 0 to 15, of fp32 numbers, rounded by `random`, a byte (uint8) for each of them."""
    size = x.abs()
    jittered = size + random.float() / 256 * _step(size)  # the product is exact
    step = _step(jittered)
    rounded = ((jittered / step).floor() * step).clamp(max=E2M1_LARGEST)
    # Every E2M1 number is a value of the other conversion, too; NaN is its code 0.
    return encode_e2m1(rounded) | (x < 0).to(torch.uint8) << 3


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte: uint8 `[..., n]`, n even, → uint8 `[..., n / 2]`."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The codes in bytes: uint8 `[..., n / 2]` → uint8 `[..., n]`."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


@cache
def _pairs() -> torch.Tensor:
    """The two numbers of each byte: fp32 `[256, 2]`."""
    values = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], dtype=torch.float32, device="cpu")
    return values[unpack(torch.arange(256, dtype=torch.uint8, device="cpu")[:, None]).int()]


def decode_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """The fp32 numbers in bytes of two codes: uint8 `[..., n / 2]` → `[..., n]`."""
    return _pairs()[packed.int()].flatten(-2)


def e8m0_above(x: torch.Tensor) -> torch.Tensor:
    """The E8M0 codes (uint8) of the smallest powers of two that are not below x ≥ 0, fp32 of any shape."""
    word = x.contiguous().view(torch.int32)
    exponent = word >> 23
    mantissa = word & _MANTISSA
    # A subnormal x of up to half the smallest normal number is covered by 2^-127.
    up = (mantissa > 0) & ~((exponent == 0) & (mantissa <= 0x400000))
    found = (exponent + up.int()).clamp(max=0xFE)
    return torch.where(x.isnan(), E8M0_NAN, found).to(torch.uint8)


def decode_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """2^(code − 127) in fp32, exactly; NaN of 0xFF."""
    words = codes.int() << 23
    words = torch.where(codes == 0, 0x400000, words)  # 2^-127 is a subnormal number
    return torch.where(codes == E8M0_NAN, 0x7FC00000, words).view(torch.float32)
