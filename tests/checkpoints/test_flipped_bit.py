"""The bit that flipped is found from two CRC-32 alone."""

import os
import random
import zlib

import pytest

from reference.checkpoints.flipped_bit import flipped_bit


@pytest.mark.parametrize("size", [1, 7, 8192, 8193, 1 << 20])
def test_a_flipped_bit_is_found(size: int) -> None:
    draw, data = random.Random(size), bytearray(os.urandom(size))
    before = zlib.crc32(data)
    for at in {0, size - 1, *(draw.randrange(size) for _ in range(20))}:
        bit = draw.randrange(8)
        data[at] ^= 1 << bit
        assert flipped_bit(size, before, zlib.crc32(data)) == (at, bit)
        data[at] ^= 1 << bit
    assert flipped_bit(size, before, before) is None


def test_every_bit_of_a_short_text() -> None:
    data = bytearray(b"what was written")
    before = zlib.crc32(data)
    for at in range(8 * len(data)):
        data[at // 8] ^= 1 << at % 8
        assert flipped_bit(len(data), before, zlib.crc32(data)) == divmod(at, 8)
        data[at // 8] ^= 1 << at % 8
    data[2:5] = b"at?"
    assert flipped_bit(len(data), before, zlib.crc32(data)) is None
