"""Output tiles of the GEMM kernels, and which of them a problem gets.

The choice changes no bit of any result (the order over K is fixed by contract), only the time. It is a pure
function of the problem and the number of multiprocessors, from a model of a persistent kernel:

    time = waves · (k-blocks · cycles of a k-block + cycles of a tile's ends)
    cycles of a k-block = max(tensor cores, operands from L2)

A k-block is 128 bytes of K: 128 FP8 or 64 16-bit values. Hopper's tensor cores take 1024 cycles for a k-block
of a 128 x 256 tile in either.
"""

import functools
from dataclasses import dataclass

K_BLOCK_BYTES = 128
# Bytes a multiprocessor gets from L2 in a cycle while all of them load. docs/gemm.md says how it was found.
L2_BYTES_PER_CYCLE = 48
# What a tile costs beside its k-blocks: filling the pipeline, scaling, packing, storing.
TILE_CYCLES = 1500


@dataclass(frozen=True)
class Tile:
    """An output tile: `warpgroups` consumers of 64 rows each, `block_n` columns, a ring of `stages` k-blocks."""

    warpgroups: int
    block_n: int
    stages: int

    def __post_init__(self) -> None:
        if self.warpgroups not in (1, 2) or self.block_n not in (64, 128, 256) or self.stages < 2:
            raise ValueError(f"{self}: a tile has 1 or 2 warpgroups, 64, 128 or 256 columns and at least 2 stages.")
        if self.shared_bytes > 232448:
            raise ValueError(f"{self} needs {self.shared_bytes} bytes of shared memory; a block has 232448.")

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}, {self.stages} stages"

    @property
    def block_m(self) -> int:
        """Rows."""
        return 64 * self.warpgroups

    @property
    def threads(self) -> int:
        """Threads of a block: one producer warpgroup and the consumers."""
        return 128 * (self.warpgroups + 1)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the stages of A and B, and two barriers a stage (kernels/gemm_tile.cuh)."""
        return self.stages * ((self.block_m + self.block_n) * K_BLOCK_BYTES + 16)

    def count(self, m: int, n: int) -> int:
        """Tiles that cover an output `[m, n]`."""
        return -(-m // self.block_m) * -(-n // self.block_n)

    @property
    def block_cycles(self) -> float:
        """Cycles of one k-block, at best."""
        tensor = self.block_m * self.block_n / 32
        l2 = (self.block_m + self.block_n) * K_BLOCK_BYTES / L2_BYTES_PER_CYCLE
        return max(tensor, l2)


TILES = (Tile(2, 256, 4), Tile(2, 128, 6), Tile(2, 64, 8), Tile(1, 128, 8), Tile(1, 64, 8))


@functools.lru_cache(maxsize=4096)
def select_tile(m: int, n: int, k_bytes: int, sms: int) -> Tile:
    """The tile with the least modelled time for `[m, k] · [n, k]ᵀ` on `sms` multiprocessors.

    Args:
        m: rows of the output.
        n: columns of the output.
        k_bytes: bytes of a row of an operand.
        sms: multiprocessors, each of which runs one persistent block.
    """

    def cycles(tile: Tile) -> float:
        waves = -(-tile.count(m, n) // sms)
        return waves * (-(-k_bytes // K_BLOCK_BYTES) * tile.block_cycles + TILE_CYCLES)

    return min(TILES, key=cycles)
