"""FP8: the values of codes, and the cast that makes every FP8 tensor.

Two formats of 8 bits, sign · exponent · mantissa ("FP8 Formats for Deep Learning", arXiv 2209.05433):

    E4M3 (`torch.float8_e4m3fn`)  1·4·3  bias  7  largest    448  no infinities,        NaN S.1111.111
    E5M2 (`torch.float8_e5m2`)    1·5·2  bias 15  largest 57,344  infinity S.11111.00,  NaN S.11111.{01,10,11}

`cast` is the instruction `cvt.rn.satfinite.{e4m3x2,e5m2x2}.f32` after one fp32 multiplication and an fma:

    v = fma(fp32(x), 0, fp32(x) · scale)     one rounding, to nearest even; fp32(x) is exact
    code = v rounded to nearest even         subnormals kept, signed zero kept
         = ±largest where |v| is beyond it   an infinite product too: the cast saturates what is finite
         = 0x7F where v is NaN               whatever the NaN's sign, in both formats

Of a finite x the fma adds ±0, which changes no word: v is the product. Of an infinite x it makes NaN, so that no
overflow ends as an ordinary number: a gradient scaler, an anomaly check or a clip sees it in what is computed from q.

The conversion exists twice. `encode_by_integers` is the definition, in readable shifts and additions. `cast` uses
torch's after a clamp, an order of magnitude faster, but only if on this machine it agrees with the definition at every
rounding boundary of the format.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch

from reference.numbers.denormals import check_denormals

# Elements converted at a time. They stay in the cache from multiplication to conversion. They are also too few for
# torch to use several threads, which would wait for each other: ten times as long when another process runs.
_CHUNK = 1 << 15

WIDE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Fields:
    """The parts of one code; `exponent` and `mantissa` are its fields.

    A normal value is ±(1 + mantissa / 2^mantissa_bits) · 2^(exponent - bias); a subnormal one, of exponent field 0, is
    ±(mantissa / 2^mantissa_bits) · 2^(1 - bias).
    """

    code: int
    sign: int
    exponent: int
    mantissa: int
    kind: str
    value: float

    def __str__(self) -> str:
        return f"0x{self.code:02X} = {self.kind}: {self.value:g}"


@dataclass(frozen=True)
class Format8:
    """An 8-bit floating-point format: its fields, and the constants that follow from them.

    `name` is Transformer Engine's, `dtype` torch's. A code is one sign bit, `exponent_bits`, `mantissa_bits`, from the
    top. With `has_infinities` the highest exponent is IEEE's (infinities and NaN); without, only the all-ones code is
    NaN and the rest of that exponent is finite.
    """

    name: str
    dtype: torch.dtype
    exponent_bits: int
    mantissa_bits: int
    bias: int
    has_infinities: bool

    def __post_init__(self) -> None:
        if self.exponent_bits + self.mantissa_bits != 7:
            raise ValueError(
                f"exponent_bits + mantissa_bits must be 7 beside the sign bit; "
                f"got {self.exponent_bits} + {self.mantissa_bits}."
            )

    @property
    def largest_code(self) -> int:
        """The code of the largest finite value: 0x7E (E4M3), 0x7B (E5M2)."""
        if self.has_infinities:
            return (((1 << self.exponent_bits) - 1) << self.mantissa_bits) - 1
        return 0x7E

    @property
    def largest(self) -> float:
        """The largest finite value: 448 (E4M3), 57,344 (E5M2)."""
        return self.value(self.largest_code)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive value with a leading one: 2^-6 (E4M3), 2^-14 (E5M2)."""
        return math.ldexp(1.0, 1 - self.bias)

    @property
    def infinity_codes(self) -> tuple[int, ...]:
        """The codes of +inf and -inf; none in E4M3."""
        return (self.largest_code + 1, 0x80 | (self.largest_code + 1)) if self.has_infinities else ()

    @property
    def nan_codes(self) -> tuple[int, ...]:
        """Every code that is NaN. The cast only ever makes 0x7F."""
        first = self.largest_code + (2 if self.has_infinities else 1)
        return tuple(sign | code for sign in (0x00, 0x80) for code in range(first, 0x80))

    def fields(self, code: int) -> Fields:
        """The parts of a code (0..255)."""
        if not 0 <= code <= 0xFF:
            raise ValueError(f"code must be an integer from 0 to 255; got {code}.")
        sign = code >> 7
        exponent = (code >> self.mantissa_bits) & ((1 << self.exponent_bits) - 1)
        mantissa = code & ((1 << self.mantissa_bits) - 1)
        if code in self.nan_codes:
            kind, value = "NaN", math.nan
        elif code in self.infinity_codes:
            kind, value = "infinity", math.inf
        elif exponent == 0:
            # Subnormal: no leading one, and the exponent of the smallest normal numbers.
            kind = "subnormal" if mantissa else "zero"
            value = math.ldexp(mantissa, 1 - self.bias - self.mantissa_bits)
        else:
            kind = "normal"
            significand = (1 << self.mantissa_bits) + mantissa
            value = math.ldexp(significand, exponent - self.bias - self.mantissa_bits)
        return Fields(code, sign, exponent, mantissa, kind, -value if sign else value)

    def value(self, code: int) -> float:
        """The value of a code (0..255), exactly."""
        return self.fields(code).value

    def values(self) -> list[float]:
        """Every finite value once, ascending: the ticks of the number line. 253 (E4M3), 247 (E5M2)."""
        positive = [self.value(code) for code in range(self.largest_code + 1)]
        return [-v for v in reversed(positive[1:])] + positive

    def spacing(self, value: float) -> float:
        """The distance between neighbouring representable values around `value` (the format's ulp there).

        Beyond the largest value it is the spacing of the last binade, although the cast saturates there.
        """
        if math.isnan(value):
            raise ValueError("value must be a number; got nan.")
        magnitude = min(abs(value), self.largest)
        exponent = math.frexp(max(magnitude, self.smallest_normal))[1] - 1
        return math.ldexp(1.0, exponent - self.mantissa_bits)


E4M3 = Format8("E4M3", torch.float8_e4m3fn, exponent_bits=4, mantissa_bits=3, bias=7, has_infinities=False)
E5M2 = Format8("E5M2", torch.float8_e5m2, exponent_bits=5, mantissa_bits=2, bias=15, has_infinities=True)
FORMATS = (E4M3, E5M2)


def format_of(dtype: torch.dtype) -> Format8:
    """The format of a torch dtype; ValueError if it is not one of the two FP8 dtypes."""
    for fmt in FORMATS:
        if fmt.dtype == dtype:
            return fmt
    raise ValueError(f"dtype must be torch.float8_e4m3fn or torch.float8_e5m2; got {dtype}.")


@cache
def decode_table(fmt: Format8) -> torch.Tensor:
    """The value of each of the 256 codes: fp32 [256]. NaN codes hold the quiet NaN with the code's sign."""
    words = [math.copysign(fmt.value(code), -1.0 if code >> 7 else 1.0) for code in range(256)]
    return torch.tensor(words, dtype=torch.float32, device="cpu")


def decode(codes: torch.Tensor, fmt: Format8 | None = None) -> torch.Tensor:
    """The fp32 values of FP8 codes, exactly; any shape.

    `codes` is a float8 tensor, or uint8 with `fmt` as the format of its bytes.
    """
    if codes.dtype == torch.uint8:
        if fmt is None:
            raise ValueError("codes of dtype torch.uint8 need fmt: formats.E4M3 or formats.E5M2.")
    else:
        own = format_of(codes.dtype)
        if fmt is not None and fmt is not own:
            raise ValueError(f"codes are {own.name} ({codes.dtype}), but fmt says {fmt.name}.")
        fmt, codes = own, codes.view(torch.uint8)
    table = decode_table(fmt).to(codes.device)
    return table.index_select(0, codes.reshape(-1).int()).reshape(codes.shape)


def encode_by_integers(values: torch.Tensor, fmt: Format8) -> torch.Tensor:
    """The codes (uint8) of fp32 `values` of any shape, by integer operations alone: the conversion's definition.

    The significand with its leading one is shifted down to the format's last place; the bits that are shifted out, and
    the parity of what stays, decide the rounding. A carry runs into the exponent by itself.
    """
    if values.dtype != torch.float32:
        raise ValueError(f"values must be torch.float32; got {values.dtype}.")
    word = values.contiguous().view(torch.int32)
    sign = (word >> 24) & 0x80
    magnitude = word & 0x7FFFFFFF
    exponent = (magnitude >> 23) - 127  # of the leading one; fp32 subnormals are far below every FP8 value
    significand = (magnitude & 0x7FFFFF) | 0x800000

    # Below the smallest normal exponent (subnormals) the last place does not move.
    below = (1 - fmt.bias - exponent).clamp(min=0)
    shift = (23 - fmt.mantissa_bits + below).clamp(max=25)  # a shift by 25 leaves 0, less than half a place
    kept = significand >> shift
    rest = significand & ((torch.ones_like(shift) << shift) - 1)
    half = torch.ones_like(shift) << (shift - 1)
    kept = kept + ((rest > half) | ((rest == half) & (kept & 1 == 1))).int()
    # The leading one of a normal `kept` adds one to the exponent field.
    field = ((exponent + fmt.bias).clamp(min=1) - 1) << fmt.mantissa_bits
    code = (field + kept).clamp(max=fmt.largest_code)
    return torch.where(magnitude > 0x7F800000, 0x7F, code | sign).to(torch.uint8)


def _encode_by_torch(values: torch.Tensor, fmt: Format8, out: torch.Tensor) -> None:
    """Write the codes of fp32 `values` (overwritten) to `out` (fmt.dtype): clamp, torch's conversion, NaN."""
    # clamp lets NaN through. Without it E5M2 would overflow to infinity and E4M3 to NaN.
    out.copy_(values.clamp_(-fmt.largest, fmt.largest))
    codes = out.view(torch.uint8)
    # 0xFF can only be a NaN with its sign, which the hardware drops.
    if codes.numel() and codes.max() == 0xFF:
        codes.masked_fill_(codes == 0xFF, 0x7F)


@cache
def _boundaries(fmt: Format8) -> torch.Tensor:
    """fp32 numbers at which a conversion to `fmt` can go wrong: [n, 2], each twice, side by side.

    They are every value, every midpoint between two values and the overflow threshold, each with both neighbours; and
    infinities, the fp32 extremes, NaN of both signs and several payloads. A monotone conversion that is right at these
    is right everywhere.
    """
    ladder = [fmt.value(code) for code in range(fmt.largest_code + 1)]
    ladder.append(fmt.largest + fmt.spacing(fmt.largest))
    points = ladder + [(a + b) / 2 for a, b in pairwise(ladder)]
    words = torch.tensor(points, dtype=torch.float32, device="cpu").view(torch.int32)
    words = torch.cat([words - 1, words, words + 1]).clamp(min=0)
    more = [0x00000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
    words = torch.cat([words, torch.tensor(more, dtype=torch.int32, device="cpu")])
    words = torch.cat([words, words | -0x80000000])
    return torch.stack([words, words], dim=1).view(torch.float32)


@cache
def torch_conversion_is_exact(fmt: Format8) -> bool:
    """Whether this machine's torch gives the defined code at every rounding boundary of `fmt`.

    It tries contiguous input (torch's vector loops and their tails) and strided input (its scalar loops).
    """
    pairs = _boundaries(fmt)
    for values in (pairs.reshape(-1), pairs[:, 0], pairs.reshape(-1)[:5]):
        out = torch.empty(values.shape, dtype=fmt.dtype, device="cpu")
        count, stride = values.numel(), values.stride(0)
        scratch = torch.empty(2 * count, dtype=torch.float32, device="cpu")[::stride][:count]
        scratch.copy_(values)
        _encode_by_torch(scratch, fmt, out)
        if not torch.equal(out.view(torch.uint8), encode_by_integers(values, fmt)):
            return False
    return True


def _pieces(x: torch.Tensor) -> Sequence[torch.Tensor]:
    """The elements of `x` in row-major order, without history, `_CHUNK` at a time."""
    return x.detach().reshape(-1).split(_CHUNK)


def widen(x: torch.Tensor) -> torch.Tensor:
    """`x` in fp32, exactly, like torch's `.float()`, but by one thread, as in `cast`."""
    if x.dtype == torch.float32:
        return x
    wide = torch.empty(x.shape, dtype=torch.float32, device="cpu")
    for piece, target in zip(_pieces(x), _pieces(wide), strict=True):
        target.copy_(piece)
    return wide


def cast(x: torch.Tensor, fmt: Format8, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
    """`x` times `scale`, as FP8 codes: a tensor of `fmt.dtype` and x's shape, row-major.

    An infinity becomes NaN. `x` is fp32, bf16 or fp16 of any shape; `scale` is one fp32 number (a tensor of one
    element, or a float that is rounded to fp32). RuntimeError where subnormal numbers are flushed to zero.
    """
    check_denormals()
    if x.dtype not in WIDE_DTYPES:
        raise ValueError(f"x must be torch.float32, torch.bfloat16 or torch.float16; got {x.dtype}.")
    factor = torch.as_tensor(scale, dtype=torch.float32, device="cpu").reshape(())
    out = torch.empty(x.shape, dtype=fmt.dtype, device="cpu")
    cast_into(out, x, factor)
    return out


def cast_into(out: torch.Tensor, x: torch.Tensor, factor: torch.Tensor) -> None:
    """`cast` without checks into `out`, row-major; `factor` is one fp32 number, or one for each of x."""
    fmt = format_of(out.dtype)
    exact = torch_conversion_is_exact(fmt)
    scratch = torch.empty(min(_CHUNK, x.numel()), dtype=torch.float32, device="cpu")
    pieces = _pieces(x)
    factors = [factor] * len(pieces) if factor.dim() == 0 else _pieces(factor)
    for piece, its_factor, target in zip(pieces, factors, _pieces(out), strict=True):
        wide = piece.float()
        values = torch.mul(wide, its_factor, out=scratch[: piece.numel()])
        # 0·x is exact, so whether this machine fuses the two does not matter: NaN where x is infinite.
        values.add_(wide, alpha=0)
        if exact:
            _encode_by_torch(values, fmt, target)
        else:
            target.view(torch.uint8).copy_(encode_by_integers(values, fmt))


def amax(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude in `x`, as an fp32 tensor of no dimensions: NaN is ignored, infinity counts.

    `x` is fp32, bf16 or fp16 of any shape. Without elements other than NaN the result is +0. RuntimeError where
    subnormal numbers are flushed to zero.
    """
    check_denormals()
    if x.dtype not in WIDE_DTYPES:
        raise ValueError(f"x must be torch.float32, torch.bfloat16 or torch.float16; got {x.dtype}.")
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    most = torch.stack([end for piece in _pieces(x) for end in torch.aminmax(piece)])
    most = most.abs().amax()
    if torch.isnan(most):
        return amax(torch.where(torch.isnan(x), 0, x))
    return most.float()
