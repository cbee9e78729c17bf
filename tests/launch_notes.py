"""What the cases of launches (`launch_cases` and its neighbour) are written with: tensors, and notes of calls."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from dry_gpu import DryGpu

twin = torch.ops.twin
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WIDE, HALVES, FP8 = (FP32, BF16, FP16), (BF16, FP16), (E4M3, E5M2)


def empty(*shape: int, dtype: torch.dtype = BF16, start: int = 0) -> torch.Tensor:
    """A matrix on the pretended GPU, `start` elements after a multiple of 16 bytes."""
    size = torch.Size(shape).numel()
    return torch.empty(size + start, dtype=dtype, device="cuda")[start:].view(shape)


def state(columns: int = 3, step: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """A scale and an amax history whose entries are `step` apart."""
    return empty(columns * step, dtype=FP32)[::step], empty(4, columns * step, dtype=FP32)[:, ::step]


def inverses() -> tuple[torch.Tensor, torch.Tensor]:
    return empty(1, dtype=FP32), empty(1, dtype=FP32)


class Notes:
    """Calls on a pretended GPU, as text."""

    def __init__(self, gpu: DryGpu) -> None:
        self.gpu = gpu
        self.cases: list[str] = []

    def __call__(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call, and note what was launched; what the call returns."""
        self.gpu.lines.clear()
        written = [self.gpu.shown(one) for one in args] + [f"{name}={value}" for name, value in options.items()]
        result = call(*args, **options)
        first = f"{call.__name__}({', '.join(written)})"
        lines = self.gpu.taken(first if result is None else f"{first} -> {self.gpu.shown(result)}")
        self.cases.append("\n  ".join(lines))
        return result

    def table(self, title: str, rows: Iterable[Sequence[Any]]) -> None:
        """Numbers that a function of the host code gives, a line of them for each of its arguments."""
        self.cases.append("\n  ".join([title, *(" ".join(map(str, row)) for row in rows)]))


def macros(defines: dict[str, Any]) -> str:
    """Macros of a configuration, as text."""
    return " ".join(f"{name}={value}" for name, value in defines.items())
