"""What the cases of `twin parity` share: their class, and inputs that Philox draws alike on every machine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import reference as te
from reference.numbers import philox

Outputs = dict[str, torch.Tensor]
HALVES = (torch.bfloat16, torch.float16)
WIDE = (*HALVES, torch.float32)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Case:
    """`run(device)` gives the outputs of `op` on that device; a `live` case is too large to be recorded."""

    op: str
    name: str
    run: Callable[[torch.device], Outputs]
    live: bool = False

    def key(self, output: str) -> str:
        """The name of an output in a recording."""
        return f"{self.op}/{self.name}/{output}"


def short(dtype: torch.dtype) -> str:
    """The short name of a dtype: bf16, fp16, fp32, e4m3, e5m2."""
    names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
    return names[str(dtype).removeprefix("torch.")]


def every_word(dtype: torch.dtype) -> torch.Tensor:
    """[256, 256]: all words of a 16-bit dtype, or 65,536 random words of fp32 with NaN and infinities among them."""
    if dtype == torch.float32:
        words = philox.element_words(11, 0, 1 << 16)[0].astype("uint32").view("int32")
        words[:8] = [0x7F800000, -0x800000, 0x7FC00000, -0x400000, 0, -0x80000000, 1, 0x7F7FFFFF]
        return torch.from_numpy(words).view(torch.float32).view(256, 256)
    return torch.arange(1 << 16).to(torch.int16).view(dtype).view(256, 256)


def numbers(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Normal numbers whose rows differ in magnitude, from 2⁻⁸ to 2⁷."""
    x = philox.normal(shape, seed=seed)
    powers = torch.arange(shape[0]) % 16 - 8
    return (x * torch.exp2(powers.float())[:, None]).to(dtype)


def codes(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """FP8 numbers from a bell curve that fills most of the format."""
    return te.formats.cast(philox.normal(shape, seed=seed), te.formats.format_of(dtype), 24.0)


def named(names: str, results: Any) -> Outputs:
    """An op's results by name."""
    return dict(zip(names.split(), results, strict=True))


def state(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and amax history of three columns; the cases use column 1."""
    return torch.tensor([1.0, 3.0, 1.0], device=device), torch.zeros(4, 3, device=device)


def random_state(device: torch.device) -> torch.Tensor:
    """Seed and offset of dropout."""
    return torch.tensor([0x1234567890ABCDEF, 5], dtype=torch.int64, device=device)


def inverses(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """scale_inv of both operands of a GEMM."""
    return torch.tensor([0.037], device=device), torch.tensor([1.3], device=device)
