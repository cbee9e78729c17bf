"""What every op launches on a GPU, seen without one: as it was when the GPU suite last judged it, and within limits."""

import difflib
from typing import Any

import pytest
import torch
from dry_gpu import DryGpu, renumbered
from launch_cases import FILES, noted
from record_launches import FOLDER

from optimized import launch
from optimized.ops import MODULES
from optimized.ops.gemm_tile import FP8_TILES, TILES

LINES = 24  # of a difference
SHARED_BYTES = 232448  # that a block of Hopper's can have
# A product has more configurations than CI compiles: each macro must have a value that CI compiles somewhere.
SAMPLED = {"adam_states", "gemm", "gemm_fp8", "gemm_fp8_fused"}


@pytest.fixture(scope="module", params=FILES)
def seen(request: pytest.FixtureRequest) -> tuple[str, str, DryGpu]:
    """Name, text and GPU of a file of cases."""
    return request.param, *noted(request.param)


def test_launches_are_those_that_were_recorded(seen: tuple[str, str, DryGpu]) -> None:
    name, text, _ = seen
    recorded = (FOLDER / f"{name}.txt").read_text("utf-8")
    if text != recorded:
        difference = difflib.unified_diff(recorded.splitlines(), text.splitlines(), "recorded", "now", "", "", 1, "")
        lines = [line if len(line) < 600 else f"{line[:600]} ..." for line in difference]
        shown = "\n".join(lines[:LINES])
        pytest.fail(
            f"tests/golden/launches/{name}.txt differs ({len(lines)} lines of difference, the first of them here):\n"
            f"{shown}\n"
            f"If this launch was changed on purpose and the GPU suite passes with it, record it:\n"
            f"    PYTHONPATH=. python tests/record_launches.py {name}",
            pytrace=False,
        )


def test_what_is_recorded_is_tested_and_small() -> None:
    paths = sorted(FOLDER.iterdir())
    assert [path.name for path in paths] == sorted(f"{name}.txt" for name in FILES)
    assert sum(path.stat().st_size for path in paths) < 600_000


def test_launches_are_within_the_limits_of_the_gpu(seen: tuple[str, str, DryGpu]) -> None:
    for kernel, grid, block, args, smem in seen[2].launches:
        what = f"{kernel.kernel}.{kernel.name} {kernel.defines} {grid} {block} {smem}"
        assert 0 < grid[0] < 2**31, what
        assert all(0 < extent <= 65535 for extent in grid[1:]), what
        assert len(block) == 1, what
        assert block[0] == 1 or block[0] % 32 == 0, what
        assert 0 < block[0] <= 1024, what
        # Without being asked, the driver allows 48 KB.
        assert 0 <= smem <= max(kernel.max_dynamic_smem, 48 * 1024), what
        assert kernel.max_dynamic_smem <= SHARED_BYTES, what
        assert sum(8 if not hasattr(arg, "storage") else arg.storage.nbytes for arg in args) <= 32764, what


def test_every_configuration_launched_is_one_that_is_compiled(seen: tuple[str, str, DryGpu]) -> None:
    compiled: dict[str, list[dict[str, Any]]] = {}
    for module in MODULES:
        for kernel, defines in module.CONFIGURATIONS:
            compiled.setdefault(kernel, []).append(defines)
    for launched in seen[2].launches:
        kernel, defines = launched.kernel.kernel, launched.kernel.defines
        if kernel in SAMPLED:
            values = {name: {one.get(name) for one in compiled[kernel]} for name in defines}
            missing = [name for name, value in defines.items() if value not in values[name]]
            assert not missing, (kernel, missing, defines)
        else:
            assert defines in compiled[kernel], (kernel, defines)


# By kernel: rows of a tile, bytes of a row of it. The last two arguments are the matrix's extents.
CASTS = {"cast_transpose": (128, 256), "cat_cast_transpose": (128, 256), "activation_cast_transpose": (64, 256)}
BYTES = (4, 2, 2)  # of an element, by the macro WIDE


def test_blocks_cover_matrices_and_no_more(seen: tuple[str, str, DryGpu]) -> None:
    for kernel, grid, block, args, _ in seen[2].launches:
        size = BYTES[int(kernel.defines.get("WIDE", 0))]
        if kernel.kernel in CASTS:
            tile_rows, row_bytes = CASTS[kernel.kernel]
            rows, cols = map(int, args[-2:])
            assert grid[0] == max(1, -(-cols * size // row_bytes)), (kernel.kernel, grid, rows, cols)
            tiles = max(1, -(-rows // tile_rows))
            assert tiles <= grid[1] * grid[2] < tiles + grid[1], (kernel.kernel, grid, rows, cols)
        elif kernel.kernel.startswith("attention") and kernel.name in ("attention", "attention_backward"):
            shape = args[3 if kernel.name == "attention" else 4].storage[()]
            b, h, group, sq, skv, d = (int(shape[name]) for name in ("batches", "heads", "group", "sq", "skv", "d"))
            wide = kernel.kernel.endswith("_wide")
            # Those of v may be fewer than those of q and k, which took the kernel.
            assert d <= 256 if wide else d <= int(kernel.defines["N_OUT"]) == 64 * int(kernel.defines["D_CHUNKS"])
            cluster = int(kernel.defines.get("CLUSTER", 2 if wide else 1))
            if kernel.name == "attention":
                works = -(-sq // (128 * cluster if wide else 192)) * b * h
            else:
                works = -(-skv // 128) * b * h // group
            assert grid == (
                cluster * min(works, {1: 132, 2: 64}[cluster]),
            )  # the dry GPU's blocks, or clusters, at once
        elif kernel.kernel == "cast":
            assert grid == (max(1, -(-int(args[-1]) * size // (32 * block[0]))),)
        elif kernel.kernel == "dropout" and kernel.name != "advance":
            assert (grid[0] - 1) * 8 * block[0] < int(args[4]) <= grid[0] * 8 * block[0]
        elif kernel.kernel == "softmax":
            rows = int(args[2 if kernel.name == "softmax" else 3])
            assert (grid[0] - 1) * (block[0] // 32) < rows <= grid[0] * (block[0] // 32)
            groups, cols = int(kernel.defines["GROUPS"]), int(args[3 if kernel.name == "softmax" else 4])
            assert groups == 0 or cols <= 256 * groups


def test_every_kernel_of_the_ops_is_launched_by_some_case() -> None:
    texts = "".join((FOLDER / f"{name}.txt").read_text("utf-8") for name in FILES)
    for module in MODULES:
        for kernel in {kernel for kernel, _ in module.CONFIGURATIONS}:
            assert f"  {kernel}." in texts, kernel


@pytest.mark.parametrize("tile", sorted({*TILES, *FP8_TILES}, key=str), ids=str)
def test_tiles_cover_an_output_once(tile: Any) -> None:
    """As kernels/gemm_tile.cuh spreads them: rows of clusters' tiles, some of a row's narrow where the cut is finer."""
    for m, n in ((1, 16), (300, 1808), (4096, 4096), (9000, 1808), (129, 12288)):
        rows, wide = tile.rows(m), tile.count(m, n)
        height = tile.block_m * tile.sharing_b
        assert (rows - 1) * height < m <= rows * height
        assert (wide // rows - 1) * tile.columns < n <= wide // rows * tile.columns
        for sms in (2, 114, 132):
            cut = tile.cut(m, n, sms)
            blocks = tile.blocks(cut, sms)
            assert 0 < blocks <= sms
            assert blocks % tile.cluster == 0
            clusters = sms // tile.cluster
            assert -(-cut // clusters) == -(-wide // clusters), "narrow tiles must not make another wave"
            # No row may have more tiles than narrow ones fit beside each other.
            assert cut == wide or -(-cut // rows) * tile.narrow <= n + tile.narrow


def test_storages_are_numbered_in_the_order_of_a_text() -> None:
    assert renumbered("&7+4 &3 &7 &12") == "&0+4 &1 &0 &2"


def test_a_dry_gpu_leaves_nothing_behind() -> None:
    before = launch.launch
    with DryGpu() as gpu:
        assert launch.launch is not before
        x = torch.empty(3, 16, device="cuda")
        assert x.device == torch.device("cuda", 0)
        assert x.is_cuda
        torch.ops.twin.dbias(x)
        assert len(gpu.launches) == 1
        (line,) = gpu.taken()
        assert line.startswith("dbias.dbias [VECTOR=1 WIDE=0] (8,) (128,) (&0, &1, 3, 16)")
        assert gpu.taken() == []
    assert launch.launch is before
    assert torch.empty(1).device.type == "cpu"
