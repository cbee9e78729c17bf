"""Operands of FP8 GEMMs."""

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = (E4M3, E5M2)
OUTPUTS = (torch.float32, torch.bfloat16, torch.float16)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def draw(seed: int, rows: int, cols: int, dtype: torch.dtype, spread: float = 1.0) -> torch.Tensor:
    """Normal values times `spread`, in FP8, on the CPU."""
    return (normal(seed, rows, cols) * spread).clamp(-448, 448).to(dtype)


def random_codes(seed: int, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Every code, NaN and infinity too, with equal chance."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, cols), generator=generator, dtype=torch.uint8).view(dtype)


def one(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float32)


def on_gpu(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if t is None else t.cuda() for t in tensors]
