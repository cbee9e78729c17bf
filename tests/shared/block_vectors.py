"""The inputs of `tests/golden/block_casts.npz` and `blocks_of_128.json`, and what references of others cast them to.

`tests/golden/record_block_casts.py` recorded them. Inputs are made again from seeds.
"""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from reference.numbers import philox

PATH = Path(__file__).parent.parent / "golden" / "block_casts.npz"
BLOCKS_OF_128 = PATH.with_name("blocks_of_128.json")
WHOLE, ODD = (256, 272), (150, 144)
"""Sizes with blocks of 128: whole ones along the rows, and a last one that is not full both ways."""


class Vector(NamedTuple):
    """One input: its dtype, what is special in it, and the factor of its numbers."""

    dtype: torch.dtype
    special: str = ""
    size: float = 1.0

    def __str__(self) -> str:
        return " ".join([str(self.dtype).removeprefix("torch."), self.special or "numbers", f"{self.size:g}"])


VECTORS = [
    *(Vector(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)),
    *(Vector(torch.bfloat16, special) for special in ("blocks of zeros", "zeros", "rows of all sizes")),
    *(Vector(torch.float32, special, 1e-30) for special in ("minus zero", "rows of all sizes")),
    Vector(torch.float32, "", 1e-41),
    Vector(torch.bfloat16, "", 1e37),
]
NOT_FINITE = [Vector(torch.bfloat16, "NaN"), Vector(torch.float32, "infinities")]
"""The reference of MXFP8 is not for these."""


def made(vector: Vector, seed: int = 0, shape: tuple[int, int] = (32, 64)) -> torch.Tensor:
    """The input."""
    rows, cols = shape
    x = philox.normal((rows, cols), seed=100 + seed)
    if vector.special == "rows of all sizes":
        x = x * torch.exp2(torch.arange(rows) % 40 - 20.0)[:, None]
    x = (x * vector.size).to(vector.dtype)
    if vector.special == "blocks of zeros":
        x[:32, :32] = 0
        x[20] = 0
    elif vector.special == "zeros":
        x.zero_()
    elif vector.special == "minus zero":
        x[:, ::3] = -0.0
    elif vector.special == "NaN":
        x[3, 5] = torch.nan
    elif vector.special == "infinities":
        x[3, 5], x[20, 2] = torch.inf, -torch.inf
    return x


def canonical(codes: torch.Tensor) -> torch.Tensor:
    """E4M3 codes as bytes, each NaN as 0x7F."""
    words = codes.view(torch.uint8)
    return words.masked_fill(words == 0xFF, 0x7F)


def recorded() -> dict[str, torch.Tensor]:
    """Every array of the file, by name."""
    with np.load(PATH) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files if name != "source"}


def kind_of(
    dialect: str, square: bool, dtype: torch.dtype, epsilon: float, shape: tuple[int, int], vector: Vector
) -> str:
    """The name of a cast to blocks of 128."""
    blocks = "squares" if square else "rows"
    return f"{dialect}, {blocks}, {str(dtype).removeprefix('torch.')}, epsilon {epsilon:g}, {shape}, {vector}"


def digests(codes: torch.Tensor, grid: torch.Tensor) -> list[str]:
    """128 bits of the SHA-256 of FP8 codes, and of the fp32 scales, a row of blocks in a line."""
    words = (one.contiguous().view(torch.uint8).numpy().tobytes() for one in (codes, grid.float()))
    return [hashlib.sha256(one).hexdigest()[:32] for one in words]


def recorded_blocks_of_128() -> dict[str, list[str]]:
    """`digests` by name."""
    found: dict[str, list[str]] = json.loads(BLOCKS_OF_128.read_text())["digests"]
    return found
