"""Which bit of some bytes has flipped, from their CRC-32 before and after.

A CRC is linear: the sums of two texts that differ in one bit differ by x^m · P modulo P's polynomial, where m bits come
after the flipped one. The powers of x are all different up to m = 2^32 - 2, so m is a discrete logarithm, found in
2^16 small steps and as many large ones (Shanks).
"""

from functools import cache

POLYNOMIAL = 0xEDB88320  # IEEE 802.3's, its lowest power in the highest bit, as in zlib
_SMALL = 1 << 16


def _times_x(c: int) -> int:
    return (c >> 1) ^ (POLYNOMIAL if c & 1 else 0)


def _over_x(c: int) -> int:
    return ((c ^ POLYNOMIAL) << 1 | 1) if c >> 31 else c << 1


@cache
def _powers() -> dict[int, int]:
    """The sum that a flipped bit with m bits after it changes the CRC by → m, for small m."""
    found, c = {}, POLYNOMIAL
    for m in range(_SMALL):
        found[c] = m
        c = _times_x(c)
    return found


@cache
def _back() -> tuple[int, ...]:
    """What each bit of a sum becomes when it is divided by x^(2^16)."""
    images = []
    for bit in range(32):
        c = 1 << bit
        for _ in range(_SMALL):
            c = _over_x(c)
        images.append(c)
    return tuple(images)


def flipped_bit(size: int, written: int, found: int) -> tuple[int, int] | None:
    """The byte, and the bit in it, whose flip makes the CRC-32 `written` of `size` bytes to `found`; None if none does.

    Where more than one bit differs a bit may be named all the same: of n bits, with a probability of n / 2^32.
    """
    change, before = written ^ found, 0
    while change and before < 8 * size:
        if change in _powers():
            at = 8 * size - 1 - before - _powers()[change]
            return divmod(at, 8) if at >= 0 else None
        images, c, change = _back(), change, 0
        for bit in range(32):
            if c >> bit & 1:
                change ^= images[bit]
        before += _SMALL
    return None
