"""Cases of launches: the matrix products, and which tile each gets. See `launch_cases`."""

import itertools
from typing import Any

import torch
from launch_notes import BF16, E4M3, E5M2, FP8, FP16, FP32, HALVES, WIDE, Notes, empty, inverses, state, twin

from optimized.ops import gemm, gemm_fp8, gemm_fp8_split_k, gemm_fused, gemm_tile
from optimized.ops.gemm_tile import FP8_TILES, TILES, Tile
from reference.ops.activation import GATED, RECORDED

LAYOUTS = list(itertools.product((False, True), (False, True)))


def operand(rows: int, k: int, dtype: torch.dtype, transposed: bool = False) -> torch.Tensor:
    return empty(k, rows, dtype=dtype).t() if transposed else empty(rows, k, dtype=dtype)


def gemms(note: Notes) -> None:
    for tile, (a, b) in itertools.product(TILES, LAYOUTS):
        note(gemm.gemm_tiled, operand(264, 136, BF16, a), operand(520, 136, BF16, b), None, BF16, tile)
    for half, out, bias in itertools.product(HALVES, WIDE, (None, *WIDE)):
        vector = None if bias is None else empty(40, dtype=bias)
        note(twin.gemm, operand(33, 72, half), operand(40, 72, half), vector, out)
    # Padded copies: rows off 16 bytes, a slice that starts off them, and strides of rows that are longer.
    for a in (empty(33, 70), empty(33, 256)[:, 3:67], empty(33, 256)[:, 64:128], empty(70, 33).t(), empty(1, 8)):
        note(twin.gemm, a, empty(24, a.shape[1]), empty(24, start=1), BF16)
        note(twin.gemm, empty(24, a.shape[1]), a, None, FP32)
    for m, n, k in ((0, 8, 8), (8, 0, 8), (8, 8, 0), (8, 16, 1 << 16), (9000, 1800, 64), (4096, 4096, 4096)):
        note(twin.gemm, empty(m, k), empty(n, k), empty(n), BF16)
        note(twin.gemm_accumulate, empty(m, k), empty(n, k), empty(m, n, dtype=FP32))
    for out in (empty(8, 16, start=1), empty(8, 32)[:, :16], empty(8, 16, dtype=FP32)):
        note(twin.gemm_accumulate, empty(64, 8).t(), empty(64, 16).t(), out)
    note(gemm.gemm_tiled, empty(300, 64), empty(1800, 64), None, BF16, TILES[0], empty(300, 1800), cut=22)


def fp8_operands(
    m: int, n: int, k: int, a: torch.dtype = E4M3, b: torch.dtype = E4M3
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (empty(m, k, dtype=a), empty(n, k, dtype=b), *inverses())


def fp8_gemms(note: Notes) -> None:
    for tile, accumulate in itertools.product(FP8_TILES, ("fast", "split")):
        for n in (528, 544)[: 1 + (accumulate == "fast")]:
            note(gemm_fp8.gemm_fp8_tiled, *fp8_operands(264, n, 272), None, BF16, accumulate, tile)
    biased = itertools.product([E4M3], [E4M3], WIDE, WIDE)
    for a, b, out, bias in (*itertools.product(FP8, FP8, WIDE, [None]), *biased):
        vector = None if bias is None else empty(48, dtype=bias)
        note(twin.gemm_fp8, *fp8_operands(40, 48, 272, a, b), vector, out, "split")
    for k, accumulate in itertools.product((16, 128, 144, 160), ("fast", "split")):
        note(twin.gemm_fp8, *fp8_operands(40, 64, k), empty(64, start=1), FP16, accumulate)
    for (m, n, k), accumulate in itertools.product(
        ((0, 16, 16), (8, 0, 16), (8, 16, 0), (9000, 1808, 64), (4096, 12288, 4096), (300, 528, 4096)),
        ("fast", "split"),
    ):
        note(twin.gemm_fp8, *fp8_operands(m, n, k), None, BF16, accumulate)
    note(twin.gemm_fp8, *fp8_operands(8, 16, 0), empty(16), BF16, "fast")
    for shape, out in itertools.product(((70, 96, 272), (3000, 3008, 64), (8, 16, 0), (0, 16, 16)), WIDE):
        m, n, _ = shape
        note(twin.gemm_fp8_accumulate, *fp8_operands(*shape, E5M2), empty(m, n, dtype=out))
    for out in (empty(8, 16, start=1), empty(8, 32)[:, :16]):
        note(twin.gemm_fp8_accumulate, *fp8_operands(8, 16, 272, E5M2), out)
    out = empty(300, 1808)
    note(gemm_fp8.gemm_fp8_tiled, *fp8_operands(300, 1808, 64), None, BF16, "fast", TILES[0], out, cut=22)


def split_k(note: Notes) -> None:
    for a, b, out in itertools.product(FP8, FP8, WIDE):
        note(twin.gemm_fp8, *fp8_operands(64, 64, 65536, a, b), None, out, "split")
    for m, n, k in ((1, 16, 32768), (40, 48, 100 * 128 + 16), (300, 272, 16384), (130, 528, 30000 * 16)):
        note(gemm_fp8_split_k.gemm_fp8_split_k, *fp8_operands(m, n, k), empty(n, start=1), BF16)
    ks = (128, 256, 2048, 8192, 16384, 65536, 65552, 1 << 20)
    note.table(
        "m n k processors: tiles, parts, k-blocks of a part, is_faster",
        (
            (m, n, k, sms, *gemm_fp8_split_k.partition(m, n, k, sms), gemm_fp8_split_k.is_faster(m, n, k, sms))
            for m, n, k, sms in itertools.product((1, 65, 256), (16, 128, 1024), ks, (132, 114))
        ),
    )


def fused_gemms(note: Notes) -> None:
    def forward(
        m: int,
        cols: int,
        k: int,
        kind: str,
        half: torch.dtype,
        q: torch.dtype = E4M3,
        tile: Tile | None = None,
        **o: Any,
    ) -> None:
        n = cols * (2 if kind in GATED else 1)
        bias = empty(n, dtype=o.get("bias", half), start=o.get("start", 0))
        rest = (bias, half, kind, *state(), 1, q)
        call = twin.gemm_fp8_activation if tile is None else gemm_fused.gemm_fp8_activation
        note(call, *fp8_operands(m, n, k), *rest, *([] if tile is None else [tile]))

    def backward(
        m: int,
        cols: int,
        k: int,
        kind: str,
        half: torch.dtype,
        q: torch.dtype = E5M2,
        start: int = 0,
    ) -> None:
        x = empty(m, cols * (2 if kind in GATED else 1), dtype=half, start=start)
        note(twin.gemm_fp8_activation_backward, *fp8_operands(m, cols, k, E5M2), x, kind, *state(), 1, q)

    def residual(
        m: int,
        n: int,
        k: int,
        p: float,
        half: torch.dtype = BF16,
        parts: str = "br",
        tile: Tile | None = None,
        **o: Any,
    ) -> None:
        start = o.get("start", 0)
        bias, added = empty(n, dtype=half, start=start), empty(m, n, dtype=half, start=start)
        rest = (bias if "b" in parts else None, added if "r" in parts else None, half, p)
        rng = empty(2, dtype=torch.int64) if p else None
        call = twin.gemm_fp8_bias_dropout_add if tile is None else gemm_fused.gemm_fp8_bias_dropout_add
        note(call, *fp8_operands(m, n, k), *rest, rng, *([] if tile is None else [tile]))

    for half, kind in (*((BF16, kind) for kind in (*RECORDED, "glu")), (FP16, "gelu"), (FP16, "swiglu")):
        forward(70, 96, 272, kind, half)
        backward(70, 96, 272, kind, half)
    for tile in TILES:
        forward(300, 272, 4096, "swiglu", BF16, tile=tile)
        for p in (0.0, 0.1):
            residual(300, 544, 4096, p, tile=tile)
    for k in (128, 1024, 2048, 4096):
        forward(70, 512, k, "gelu", BF16, E5M2, bias=FP32)
        residual(70, 512, k, 0.1, FP16)
    for m, n, k in ((0, 16, 16), (8, 16, 0), (2048, 256, 2032), (2048, 256, 2048), (2047, 256, 2032)):
        forward(m, n, k, "geglu", BF16)
        backward(m, n, k, "geglu", BF16)
        for p in (0.0, 0.1):
            residual(m, n, k, p)
    backward(70, 64, 272, "swiglu", BF16, start=1)
    for parts in ("b", "r", ""):
        residual(70, 64, 2048, 0.1, parts=parts, start=1)
    forward(8, 16, 16, "gelu", FP32)
    backward(8, 16, 16, "gelu", FP32)
    residual(1 << 19, 1 << 16, 4096, 0.1)
    residual(1 << 19, (1 << 16) - 16, 4096, 0.1)
    rows = []
    for epilogue, tile in itertools.product((gemm_fused.ACTIVATION, gemm_fused.DROPOUT), TILES):
        chosen = gemm_fused.fused_tile(epilogue, tile)
        steps = [gemm_fused.select_steps(epilogue, chosen, k, "swiglu") for k in (16, 129, 512, 1024, 2048, 4096)]
        shared = chosen.shared_bytes + gemm_fused.epilogue_bytes(epilogue, chosen)
        rows.append((epilogue, f"{tile}: {chosen}", chosen.threads, shared, *steps))
    note.table("epilogue, tile: as fused, threads, bytes, steps for K = 16 129 512 1024 2048 4096", rows)


def tiles(note: Notes) -> None:
    """Which tile a product gets, and the model of its time."""
    rows = []
    for m, n in itertools.product((1, 64, 129, 520, 2048, 8192), (16, 128, 272, 4096, 12288)):
        for k, split in itertools.product((64, 144, 4112, 16384), (False, True)):
            every = (TILES, FP8_TILES, gemm_fp8.ADDING_TILES)
            names = [FP8_TILES.index(gemm_tile.select_tile(m, n, k, split, 132, one)) for one in every]
            rows.append((m, n, k, int(split), *names))
    note.table("m n k split: number of the tile among TILES, FP8_TILES, ADDING_TILES", rows)
    shapes = ((1, 16, 64), (300, 528, 4096), (4096, 4096, 4112), (8192, 12288, 4128), (0, 16, 16), (16, 0, 16))
    rows = [
        (str(tile), m, n, k, int(split), sms, f"{gemm_tile.modelled_cycles(tile, m, n, k, split, sms):.3f}")
        for tile, (m, n, k), (split, sms) in itertools.product(FP8_TILES, shapes, ((False, 132), (True, 114)))
    ]
    note.table("tile, m n k split processors: modelled cycles", rows)
    rows = []
    for tile in FP8_TILES:
        about = (
            tile.block_m,
            tile.threads,
            tile.shared_bytes,
            tile.narrow,
            tile.sharing_a,
            tile.sharing_b,
            tile.columns,
        )
        cuts = [tile.cut(m, n, sms) for m, n, sms in ((300, 1808, 132), (4096, 4096, 132), (9000, 1808, 114))]
        rows.append((f"{tile}:", *about, "|", *cuts, "|", *(tile.blocks(cut, 132) for cut in (*cuts, 1, 3))))
    note.table("tile: rows, threads, bytes, narrow, sharing a and b, columns | cuts | blocks", rows)
