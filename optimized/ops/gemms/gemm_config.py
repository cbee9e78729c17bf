"""A configuration of a GEMM kernel: its macros, its threads and its shared memory."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from optimized.cuda import launch
from optimized.ops.gemms.gemm_tile import Tile, multiprocessors

TYPES = {  # a kernel's names of the dtypes of operands and outputs
    torch.float8_e4m3fn: "E4M3",
    torch.float8_e5m2: "E5M2",
    torch.bfloat16: "BF16",
    torch.float16: "FP16",
    torch.float32: "FP32",
}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
HALVES = (torch.bfloat16, torch.float16)
OUTPUTS = (*HALVES, torch.float32)


@dataclass(frozen=True)
class GemmConfig:
    """One configuration of `kernels/<kernel>.cu`.

    Args:
        kernel: the file, and its function.
        tile: the output tile.
        macros: names and values.
        epilogue_bytes: shared memory that the epilogue has after the stages.
    """

    kernel: str
    tile: Tile
    macros: tuple[tuple[str, int | str], ...]
    epilogue_bytes: int = 0

    @functools.cached_property
    def ahead(self) -> "GemmConfig":
        """The form that copies b before it waits for the kernel before it, if it is launched early."""
        return replace(self, macros=(*self.macros, ("EARLY", 1)))

    @property
    def defines(self) -> dict[str, int | str]:
        """The macros, as the compiler takes them."""
        return dict(self.macros)

    @property
    def listed(self) -> tuple[str, dict[str, int | str]]:
        """The entry of a module's CONFIGURATIONS."""
        return self.kernel, self.defines

    @functools.cached_property
    def function(self) -> launch.Kernel:
        """The kernel's function of its own name."""
        return launch.function(self.kernel, self.kernel, self.defines, self.tile.shared_bytes + self.epilogue_bytes)

    def launch(self, index: int, tiles: int, args: Sequence[Any], early: bool = False) -> None:
        """Launch persistent blocks for `tiles` clusters' tiles on CUDA device `index`."""
        blocks, shared = self.tile.blocks(tiles, multiprocessors(index)), self.function.max_dynamic_smem
        launch.launch(self.function, (blocks,), (self.tile.threads,), args, shared, device=index, early=early)


def fp8_config(
    kernel: str,
    types: tuple[torch.dtype, ...],
    tile: Tile,
    of_tile: str,
    others: Mapping[str, int | str] | None = None,
    epilogue_bytes: int = 0,
) -> GemmConfig:
    """A configuration of a kernel that multiplies FP8: its macros are the `types` of a, b and, if it has a choice, the
    output, those that it reads `of_tile`, and `others`.
    """
    formats = dict(zip(("A_FORMAT", "B_FORMAT", "OUT")[: len(types)], (TYPES[one] for one in types), strict=True))
    macros = formats | tile.macros(*of_tile.split()) | dict(others or {})
    return GemmConfig(kernel, tile, tuple(macros.items()), epilogue_bytes)
