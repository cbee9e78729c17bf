"""Output tiles of the GEMM kernels: which there are, how they cover an output, and which a problem gets."""

import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimized import measure
from optimized.bench.kernels import gemm as gemm_bench
from optimized.bench.kernels import gemm_shapes
from optimized.ops.gemms.gemm_tile import FP8_TILES, TILES, Tile, modelled_cycles, select_tile


def fits(tile: Tile) -> bool:
    return tile.shared_bytes <= 232448 and tile.threads in (256, 384)


def test_tiles_fit_a_multiprocessor() -> None:
    assert all(fits(tile) for tile in FP8_TILES)
    assert len(set(FP8_TILES)) == len(FP8_TILES)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Tile(4, 128, 4), "a tile has 1 to 3 warpgroups"),
        (lambda: Tile(2, 144, 4), "16 columns or 32 to 256 in steps of 32"),
        (lambda: Tile(2, 256, 4, 3), "clusters of 1 or 2"),
        (lambda: Tile(2, 256, 4, 2, across=True), "2 with fewer than 256 columns may lie side by side"),
        (lambda: Tile(2, 256, 5), "bytes of shared memory; a block has 232448"),
    ],
)
def test_tiles_that_do_not_fit_are_refused(make: Callable[[], Tile], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


def test_select_tile_is_a_sensible_function_of_the_problem() -> None:
    layer = [(8192, 12288, 4096), (8192, 4096, 16384), (4096, 4096, 8192), (16384, 4096, 8192)]
    for m, n, k in layer:
        fast, split = (select_tile(m, n, k, split, 132) for split in (False, True))
        assert (fast.block_m, fast.block_n, fast.cluster) == (128, 256, 2), "large problems get the large tile, shared"
        assert (split.block_m, split.cluster) == (128, 1), "sharing B hurts split accumulation"
    assert select_tile(128, 8192, 4096, False, 132).cluster == 1, "a cluster needs two rows of tiles"
    assert select_tile(1, 4096, 4096, False, 132).block_m == 64, "one row wastes least in 64"
    for m, n in ((0, 64), (64, 0), (0, 0)):
        assert select_tile(m, n, 64, True, 132, FP8_TILES) in FP8_TILES, "of nothing, any"
    small = select_tile(256, 1024, 1024, True, 132)
    assert small.count(256, 1024) > TILES[0].count(256, 1024), "a small problem is spread over more blocks"
    for m, n, k in itertools.product((1, 100, 4000), (16, 256, 4096), (16, 4096)):
        assert select_tile(m, n, k, True, 132) in TILES
    assert select_tile(38, 1296, 16384, True, 132, FP8_TILES).block_n == 16, "few tiles and a long K: narrow ones"
    assert select_tile(1222, 736, 20368, True, 132, FP8_TILES).cluster == 2, "rows that straddle lines: fewest copies"


def tiles_of_clusters(tile: Tile, m: int, n: int, cut: int, sms: int) -> list[list[tuple[int, int, int]]]:
    """What Schedule of kernels/gemms/gemm_tile.cuh gives a cluster: rows of tiles, first columns, the columns after
    them."""
    high, rows, less = 8 // (1 if tile.across else tile.cluster), tile.rows(m), tile.block_n - tile.narrow
    clusters = tile.blocks(cut, sms) // tile.cluster

    def start(i: int, count: int) -> int:
        narrow = min(count, (count * tile.block_n - n) // less) if less else 0
        return i * tile.columns - (i * narrow + count - 1) // count * less

    order = []
    upper = rows * (cut // rows + 1) - cut
    for first, end, count in ((0, upper, cut // rows), (upper, rows, cut // rows + 1)):
        for top in range(first, end, high):
            band = range(top, min(top + high, end))
            order += [(row, start(i, count), min(start(i + 1, count), n)) for i in range(count) for row in band]
    assert len(order) == cut
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(clusters)]
    for index, place in enumerate(order):
        wave, position = divmod(index, clusters)
        # From wave to wave a cluster moves back by half a band of the raster where there are narrow tiles.
        found[(position + wave * min(high // 2, clusters) * (less > 0)) % clusters].append(place)
    return found


@settings(max_examples=150, deadline=None)
@given(
    m=st.integers(1, 8000),
    n=st.integers(1, 500).map(lambda i: 16 * i),
    tile=st.sampled_from(FP8_TILES),
    part=st.floats(0, 1),
)
def test_cut_tiles_cover_every_output_once(m: int, n: int, tile: Tile, part: float) -> None:
    """Whatever the cut: and no cluster gets more columns than it would of wide tiles."""
    whole = tile.count(m, n)
    most = tile.rows(m) * (n // tile.narrow) if tile.narrow < tile.block_n else whole
    chosen = tile.cut(m, n, 132)
    assert whole <= chosen <= max(whole, most)
    for cut in (chosen, round(whole + part * max(0, most - whole))):
        found = tiles_of_clusters(tile, m, n, cut, 132)
        rows: dict[int, list[tuple[int, int]]] = {}
        for row, first, end in itertools.chain(*found):
            assert 0 < end - first <= tile.columns
            assert end - first in (tile.narrow, tile.columns) or end == n
            rows.setdefault(row, []).append((first, end))
        assert sorted(rows) == list(range(tile.rows(m)))
        for pieces in rows.values():
            pieces.sort()
            assert [first for first, _ in pieces] == [0, *(end for _, end in pieces[:-1])], "neighbours touch"
            assert pieces[-1][1] == n
    load = max(sum(end - first for _, first, end in places) for places in tiles_of_clusters(tile, m, n, chosen, 132))
    assert load <= -(-whole // (132 // tile.cluster)) * tile.columns


@pytest.mark.parametrize("tile", TILES[:2], ids=str)
def test_cut_tiles_fill_the_waves_of_the_layers_shapes(tile: Tile) -> None:
    """The busiest cluster has at most 1.6 % more columns than the mean; with wide tiles alone it has 3.1 % more."""
    for name, (m, n, _) in gemm_bench.shapes().items():
        if name == "proj.wgrad":  # 3.9 waves: 32 columns less of 1024 would be less than the mean
            continue
        found = tiles_of_clusters(tile, m, n, tile.cut(m, n, 132), 132)
        loads = [sum(end - first for _, first, end in places) for places in found]
        assert max(loads) < 1.016 * statistics.mean(loads), name


def test_rows_that_straddle_lines_are_copied_by_clusters() -> None:
    """Where copies take longer than products, the tile that copies least wins, for split accumulation too."""
    for m, n, k in ((23592, 256, 14448), (9263, 1136, 3984), (8192, 7680, 12912), (32240, 2048, 16)):
        for split in (False, True):
            assert select_tile(m, n, k, split, 132).cluster == 2, (m, n, k, split)
            rounded = -(-k // 128) * 128
            copied, whole = (modelled_cycles(TILES[0], m, n, depth, split, 132) for depth in (k, rounded))
            assert copied > whole, "a K that is a multiple of 128 bytes is copied faster"


def recorded(name: str) -> dict[str, Any]:
    return json.loads((measure.RESULTS / f"{name}.json").read_text("utf-8"))


def test_recorded_sweep_agrees_with_the_choice_of_tiles() -> None:
    """The costs are fitted to it: on average within 2 % of the best of twelve times, each of which has its noise."""
    result = json.loads((Path(__file__).parents[2] / "golden" / "gemm_sweep.json").read_text("utf-8"))
    losses = []
    for kind, m, n, k, times in result["rows"]:
        found = {tile: time for tile, time in zip(result["tiles"], times, strict=True) if time is not None}
        if kind == "bf16":
            chosen = str(select_tile(m, n, 2 * k, False, result["processors"]))
        else:
            tiles = tuple(tile for tile in FP8_TILES if str(tile) in found)
            chosen = gemm_shapes.chosen(kind, m, n, k, result["processors"], tiles)
        losses.append(found[chosen] / min(found.values()))
    assert len(losses) == 792
    assert statistics.geometric_mean(losses) < 1.02
    assert max(losses) < 1.4


def test_the_list_of_shapes_is_what_it_says() -> None:
    listed = gemm_shapes.problems()
    assert len(set(listed)) == len(listed) >= 200
    assert listed == gemm_shapes.problems()
    for m, n, k in listed:
        assert 1 <= m <= 32768
        assert all(16 <= extent <= 32768 and extent % 16 == 0 for extent in (n, k))
    for extents in zip(*listed, strict=True):
        powers = [extent for extent in extents if extent & (extent - 1) == 0]
        assert 0.4 < len(powers) / len(listed) < 0.8
    assert sum(gemm_shapes.kinds(m, n) == ("fast", "split") for m, n, _ in listed) >= 50


def test_recorded_equality_explains_every_difference() -> None:
    result = recorded("gemm_equality")
    names = {row["name"] for row in result["rows"]}
    assert names >= set(gemm_bench.shapes())
    assert len(names) >= 20
    for row in result["rows"]:
        if row["differing_words"]:
            assert row["why"].startswith("cuBLASLt splits K"), row
            assert row["sampled_against_the_cpu"]["differing_words"] == 0, row
