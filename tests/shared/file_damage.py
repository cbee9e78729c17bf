"""Damage to files: cut, filled, flipped, lengthened."""

import random
from pathlib import Path


def flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 1, 1, 8)) if content else 0):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def cut(path: Path, draw: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content) + 1)])


def lengthen(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randrange(1, 100)))


def fill(path: Path, draw: random.Random) -> None:
    path.write_bytes(draw.randbytes(len(path.read_bytes())))
