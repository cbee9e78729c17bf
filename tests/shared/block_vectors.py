"""The inputs of `tests/golden/block_casts.npz`, and its words: what Transformer Engine's references cast them to.

`tests/golden/record_block_casts.py` recorded it. Inputs are made again from seeds.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from reference.numbers import philox

PATH = Path(__file__).parent.parent / "golden" / "block_casts.npz"


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


def made(vector: Vector, seed: int = 0) -> torch.Tensor:
    """The input `[32, 64]`."""
    rows, cols = 32, 64
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
