"""Output tiles of the GEMM kernels, and which of them a problem gets.

The choice changes the time but no bit of any result: the contract fixes the order over K. It is a pure function of the
problem and the number of multiprocessors:

    time = sum over waves of (cycles of a tile's ends + max(k-blocks · cycles of a k-block, cycles of its copies))

The cycles are fitted to a sweep on an H200 (tests/golden/gemm_sweep.json). A cluster takes more, since it starts later.
The copies of a wave take as long as a multiprocessor's copy engine needs for its rows, or as L2 needs for the lines of
the whole wave, so a wave that is not full may be faster. The last wave is rarely full: therefore tiles of 256 columns
are mixed with as many of 224 as fill it (`Tile.cut`).

A k-block is 128 bytes of K: 128 FP8 or 64 16-bit values. Hopper's tensor cores take 1024 cycles for a k-block of a
128 x 256 tile in either. Smaller tiles are bound by the way of their operands from L2 through shared memory.

The copy engine fetches a row of a k-block in at most 2.4 cycles if it starts at a multiple of 128 bytes; the costs of
k-blocks contain this. Where K is no such multiple, most rows straddle two lines, and the last k-block reaches past the
end of every row. Then the copies may take longer than the wgmma, and clusters win, because they copy fewer rows. Rows
that do not exist are not copied.
"""

import functools
from dataclasses import dataclass

from optimized.cuda import launch

K_BLOCK_BYTES = 128


def stage_bytes(block_m: int, block_n: int) -> int:
    """Shared memory of a stage: its part of A and B, two barriers, and which tile begins with it."""
    return (block_m + block_n) * K_BLOCK_BYTES + 16 + 16


@dataclass(frozen=True)
class Tile:
    """An output tile: `warpgroups` consumers of 64 rows each, `block_n` columns, a ring of `stages` k-blocks.

    The `cluster` blocks compute tiles one below the other and share the copies of B, or, with `across`, tiles side by
    side and share the copies of A. Tiles of 256 columns are mixed with tiles of `mixed`.
    """

    warpgroups: int
    block_n: int
    stages: int
    cluster: int = 1
    across: bool = False
    mixed: int = 224

    def __post_init__(self) -> None:
        if (
            self.warpgroups not in (1, 2, 3)
            or self.block_n not in (16, 32, 64, 96, 128, 160, 192, 224, 256)
            or self.stages < 2
            or self.cluster not in (1, 2)
            or (self.across and (self.cluster == 1 or self.narrow < self.block_n))
        ):
            raise ValueError(
                f"{self}: a tile has 1 to 3 warpgroups, 16 columns or 32 to 256 in steps of 32, at least 2 stages and "
                f"clusters of 1 or 2, of which 2 with fewer than 256 columns may lie side by side."
            )
        if self.shared_bytes > 232448:
            raise ValueError(f"{self} needs {self.shared_bytes} bytes of shared memory; a block has 232448.")

    def __str__(self) -> str:
        together = "" if self.cluster == 1 else f", {self.cluster} blocks share {'A' if self.across else 'B'}"
        return f"{self.block_m}x{self.block_n}, {self.stages} stages{together}"

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
        """Dynamic shared memory (kernels/gemms/gemm_tile.cuh)."""
        return self.stages * stage_bytes(self.block_m, self.block_n)

    def macros(self, *names: str) -> dict[str, int | str]:
        """The kernel's macros of these names, in this order."""
        every = {
            "WARPGROUPS": self.warpgroups,
            "BLOCK_N": self.block_n,
            "STAGES": self.stages,
            "CLUSTER": self.cluster,
            "ACROSS": int(self.across),
            "NARROW": self.narrow,
        }
        return {name: every[name] for name in names}

    @property
    def narrow(self) -> int:
        """Columns of the narrow tiles that are mixed with those of `block_n`; `block_n` where there are none."""
        return self.mixed if self.block_n == 256 else self.block_n

    @property
    def sharing_a(self) -> int:
        """How many blocks of a cluster share the copies of A: those side by side."""
        return self.cluster if self.across else 1

    @property
    def sharing_b(self) -> int:
        """How many blocks of a cluster share the copies of B: those one below the other."""
        return self.cluster // self.sharing_a

    @property
    def columns(self) -> int:
        """Columns of a cluster's tile."""
        return self.block_n * self.sharing_a

    def rows(self, m: int) -> int:
        """How many clusters, one below the other, cover `m` rows."""
        return -(-m // (self.block_m * self.sharing_b))

    def count(self, m: int, n: int) -> int:
        """How many clusters' tiles cover an output `[m, n]` if all have `block_n` columns."""
        return self.rows(m) * -(-n // self.columns)

    def cut(self, m: int, n: int, sms: int) -> int:
        """How many clusters' tiles an output `[m, n]` is cut into: whole waves, if narrow tiles can fill the last one.

        The kernel spreads them over the rows (kernels/gemms/gemm_tile.cuh, `Schedule`). The busiest cluster has as many
        tiles as it would have without narrow ones, and each cluster has some that are narrow.
        """
        wide, clusters = self.count(m, n), sms // self.cluster
        if wide <= clusters or self.narrow == self.block_n:
            return wide
        return max(wide, min(-(-wide // clusters) * clusters, self.rows(m) * (n // self.narrow)))

    def blocks(self, tiles: int, sms: int) -> int:
        """How many blocks of the persistent kernel `tiles` clusters' tiles take: at most one for a multiprocessor."""
        return min(tiles, sms // self.cluster) * self.cluster


@dataclass(frozen=True)
class Cost:
    """Cycles that a tile takes for one k-block, and for its ends: filling the pipeline, scaling, packing, storing."""

    block: int
    ends: int


# For each tile: with one chain over K (fast accumulation, 16-bit operands), and with chains of K = 128 (split
# accumulation).
COSTS = {
    Tile(2, 256, 4): (Cost(1245, 4000), Cost(1210, 5500)),
    Tile(2, 256, 4, 2): (Cost(1235, 4000), Cost(1245, 5900)),
    Tile(2, 128, 7): (Cost(630, 1650), Cost(615, 2100)),
    Tile(2, 64, 9): (Cost(445, 750), Cost(430, 1010)),
    Tile(1, 128, 9): (Cost(385, 1140), Cost(395, 1450)),
    Tile(1, 64, 13): (Cost(280, 660), Cost(295, 860)),
    Tile(2, 192, 5): (Cost(940, 2360), Cost(895, 5360)),
    Tile(2, 192, 5, 2): (Cost(930, 2880), Cost(940, 5260)),
    Tile(2, 160, 6): (Cost(780, 1910), Cost(800, 4830)),
    Tile(2, 96, 8): (Cost(490, 1730), Cost(500, 1640)),
    Tile(1, 192, 7): (Cost(450, 2110), Cost(705, 3810)),
    Tile(1, 128, 9, 2): (Cost(410, 1100), Cost(525, 1330)),
    Tile(1, 32, 18): (Cost(235, 680), Cost(235, 650)),
    Tile(1, 16, 22): (Cost(260, 580), Cost(200, 470)),
    Tile(1, 64, 13, 2): (Cost(250, 650), Cost(365, 1710)),
    Tile(1, 16, 22, 2, across=True): (Cost(210, 950), Cost(175, 800)),
    Tile(1, 32, 18, 2, across=True): (Cost(210, 900), Cost(215, 1870)),
}
TILES = tuple(COSTS)[:6]  # every kernel has them
FP8_TILES = tuple(COSTS)  # the FP8 GEMM without a fused epilogue has them

# Cycles of the copy engine for a row of a k-block that starts at a multiple of 32 bytes, or of 16, or that reaches past
# the end of the operand's row.
ROW_32, ROW_16, ROW_END = 2.5, 3.3, 8.5
# Lines that L2 delivers to all multiprocessors in a cycle, and lines that a row at a multiple of 32, or of 16, takes.
L2_LINES, LINES_32, LINES_16 = 64, 1.5, 2.7
CLUSTER_START = 1500  # cycles
# A GEMM of more cycles runs at the power limit, where copies cost power, too; a time this near to the best will do.
LONG, NEARLY = 300_000, 1.01


def modelled_cycles(tile: Tile, m: int, n: int, k_bytes: int, split: bool, sms: int) -> float:
    """The time in cycles that `select_tile` compares; arguments as there."""
    return cycles_of(tile, COSTS[tile][split], m, n, k_bytes, sms)


def cycles_of(tile: Tile, cost: Cost, m: int, n: int, k_bytes: int, sms: int) -> float:
    """The time in cycles that `cheapest_tile` compares; arguments as there."""
    if m == 0 or n == 0:
        return 0.0
    blocks, rest = divmod(k_bytes, K_BLOCK_BYTES)
    k_blocks = blocks + (rest > 0)
    rows = min(tile.block_m, m) / tile.sharing_a + min(tile.block_n, n) / tile.sharing_b  # that a block copies
    row, lines = (0.0, 1.0) if not rest else (ROW_16, LINES_16) if k_bytes % 32 else (ROW_32, LINES_32)
    tiles = tile.cut(m, n, sms)
    width = 1.0 if tiles == tile.count(m, n) else tile.rows(m) * n / (tiles * tile.block_n)
    alone = max(k_blocks * cost.block * width, rows * (blocks * row + ROW_END) if rest else 0.0)

    together = k_blocks * (m * tiles / tile.rows(m) + n * tile.rows(m)) * lines / L2_LINES  # all tiles' copies

    def wave(clusters: int) -> float:
        """Cycles for so many clusters' tiles at once."""
        return cost.ends + max(alone, together * clusters / tiles)

    clusters = sms // tile.cluster
    full, last = divmod(tiles, clusters)
    cycles = full * wave(clusters) + (wave(last) if last else 0.0)
    return cycles + (CLUSTER_START if tile.cluster > 1 else 0)


def select_tile(m: int, n: int, k_bytes: int, split: bool, sms: int, tiles: tuple[Tile, ...] = TILES) -> Tile:
    """`cheapest_tile` of `tiles`, those of a kernel, with the costs of one chain over K or of `split` accumulation."""
    return cheapest_tile(m, n, k_bytes, sms, _costs(tiles, split))


@functools.cache
def _costs(tiles: tuple[Tile, ...], split: bool) -> tuple[tuple[Tile, Cost], ...]:
    return tuple((tile, COSTS[tile][split]) for tile in tiles)


@functools.lru_cache(maxsize=4096)
def cheapest_tile(m: int, n: int, k_bytes: int, sms: int, costs: tuple[tuple[Tile, Cost], ...]) -> Tile:
    """The tile with the least modelled time for `[m, k] · [n, k]ᵀ` on `sms` multiprocessors.

    For a long GEMM it is the largest tile within 1 % of that time: it copies operands least often.

    Args:
        m, n: rows and columns of the output.
        k_bytes: bytes of a row of an operand.
        sms: multiprocessors, each of which runs one persistent block.
        costs: the tiles that the kernel has, each with what it costs.
    """
    # Without a second row of tiles, or a second column, a cluster's second block has nothing to do.
    tried = (
        one for one in costs if one[0].cluster == 1 or (n > one[0].block_n if one[0].across else m > one[0].block_m)
    )
    cycles = {tile: cycles_of(tile, cost, m, n, k_bytes, sms) for tile, cost in tried}
    least = min(cycles.values())
    near = [tile for tile in cycles if cycles[tile] <= least * (NEARLY if least > LONG else 1)]
    return max(near, key=lambda tile: (tile.block_m * tile.block_n, -cycles[tile]))


@functools.cache
def multiprocessors(index: int) -> int:
    """Multiprocessors of CUDA device `index`: blocks of a persistent kernel."""
    return launch.processors(index)
