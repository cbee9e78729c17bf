"""The drawings of docs/, as SVG written by hand: `python docs/drawings/draw.py` writes them beside this file.

One tensor has one colour in every drawing, from the palette of Okabe and Ito, which colour-blind readers can tell apart
(https://jfly.uni-koeln.de/color/): x and what is computed like it blue, w orange, y green, gradients purple. Grey is
whatever is no tensor. The background is transparent. Text outside of boxes has a middle grey that is legible on white
and on black; text in boxes is nearly black on a fill of its own.

`tests/pages/test_docs.py` compares the files with what this script draws.
"""

from pathlib import Path

import machinery
from canvas import HOLLOW, Drawing

from reference.support.palette import GRAD, GREY, PALE, W, X, Y

FOLDER = Path(__file__).parent


def gemm() -> Drawing:
    """Which block computes what, the roles in a block, and what overlaps."""
    d = Drawing(820, 500, "The FP8 GEMM: tiles of the output, the roles of a block's warps, and what overlaps in time")
    d.text(20, 22, "The output is cut into tiles", bold=True)
    d.box(100, 40, 250, 44, "B [N, K]", W)
    d.box(30, 96, 58, 200, "A\n[M, K]", X)
    left = 100.0
    for width in (66, 66, 60, 58):
        for row in range(5):
            d.box(left, 96 + 40 * row, width, 40, fill=Y if (left, row) == (166, 2) else PALE)
        left += width
    d.inner(199, 200, "D tile")
    d.arrow(88, 196, 164, 196)
    d.arrow(199, 84, 199, 174)
    d.text(100, 316, "128 × 256", 12)
    d.text(350, 316, "128 × 224", 12, "end")
    d.text(225, 334, "narrower tiles fill the last wave", 12, "middle")

    d.text(400, 22, "One block: a producer, a ring, two consumers", bold=True)
    d.box(400, 130, 100, 84, "producer:\none thread\nstarts every\ncopy (TMA)")
    for i in range(4):
        top = 48 + 64 * i
        d.box(560, top, 36, 50, "A", X)
        d.box(596, top, 64, 50, "B", W)
    d.text(610, 316, "4 stages of shared memory", 12, "middle")
    d.arrow(500, 160, 557, 112)
    d.arrow(557, 190, 503, 184, dashed=True)
    d.text(500, 122, "copies", 12)
    d.text(508, 206, "empty", 12)
    d.box(712, 60, 98, 96, "warpgroup 0:\nwgmma for\nrows 0–63\nof the tile", Y)
    d.box(712, 184, 98, 96, "warpgroup 1:\nwgmma for\nrows 64–127\nof the tile", Y)
    d.arrow(660, 110, 709, 110)
    d.arrow(660, 232, 709, 232)
    d.text(684, 102, "full", 12, "middle")
    d.text(684, 224, "full", 12, "middle")

    d.text(20, 374, "In time: nothing waits for a tile's end", bold=True)
    for label, y in (("copies", 404), ("tensor cores", 434), ("stores", 464)):
        d.text(110, y + 4, label, 12, "end")
    for i in range(20):
        later, ahead = i >= 8, i >= 5
        d.box(124 + 33 * i, 391, 33, 20, f"{i - 5 if ahead else i + 3}", GREY if ahead else PALE, 11)
        d.box(124 + 33 * i, 421, 33, 20, f"{i - 8 if later else i}", GREY if later else PALE, 11)
    for i in range(8):
        d.box(421 + 33 * i, 451, 33, 20, fill=Y)
    d.text(124, 492, "k-blocks of tile t", 12)
    d.text(388, 492, "tile t + 1: its first k-blocks hide the stores of tile t", 12)
    return d


def attention() -> Drawing:
    """Which blocks are visited, and what happens to one."""
    d = Drawing(820, 440, "Exact attention: the visited blocks of scores, and the steps for one of them")
    d.text(20, 22, "Scores, in blocks of 128 queries × 128 keys", bold=True)
    d.box(86, 40, 264, 32, "k, v", W)
    d.box(40, 80, 36, 264, "q", X)
    for row in range(6):
        for column in range(6):
            label = "mask" if row == column != 4 else ""
            fill = HOLLOW if column > row else Y if row == 4 else PALE
            d.box(86 + 44 * column, 80 + 44 * row, 44, 44, label, fill, 11)
    d.arrow(94, 278, 300, 278)
    lines = "A block of threads takes one row of blocks,\nfrom left to right. Blocks that the causal rule"
    d.text(86, 366, lines + "\nhides altogether are not visited.", 12)

    d.text(380, 22, "For each visited block", bold=True)
    steps = (
        ("S = q kᵀ", "tensor cores, one chain over d", PALE),
        ("m' = max(m, max S · c)", "the largest weight is exactly 1", PALE),
        ("O ← O · 2^(m − m')", "if m has grown", Y),
        ("p = 2^(S · c − m')", "on a grid of 2⁻¹⁵: every word is known", PALE),
        ("O ← O + p v", "p in 16 bits; the same chain goes on", Y),
    )
    for i, (formula, why, fill) in enumerate(steps):
        y = 40 + 54 * i
        d.box(380, y, 178, 36, formula, fill, 13)
        d.text(570, y + 23, why, 11.5)
        if i:
            d.arrow(469, y - 18, 469, y - 2)
    d.text(380, 330, "After the last block: out = O · (1 / l), where l is the sum of weights.", 12)
    d.text(380, 362, "Backward", bold=True)
    d.box(380, 376, 112, 44, "k, v stay,\nq, grad pass by", PALE, 12)
    for y, what, where in ((370, "dk, dv", "in registers"), (402, "dq", "in memory, last key block first")):
        d.arrow(492, y + 13, 519, y + 13)
        d.box(522, y, 64, 26, what, GRAD)
        d.text(598, y + 17, where, 11.5)
    return d


def norm() -> Drawing:
    """The tree of a row's sum, and how a cluster shares a tile of rows."""
    d = Drawing(820, 430, "Norms: the written tree of a row's sum, and a cluster that casts and transposes rows")
    d.text(20, 22, "A row's sum is a tree over neighbours", bold=True)
    for i in range(16):
        d.box(20 + 22 * i, 42, 20, 20, fill=X)
    level, y = [20 + 22 * i + 10.0 for i in range(16)], 62.0
    while len(level) > 1:
        pairs = list(zip(level[::2], level[1::2], strict=True))
        for left, right in pairs:
            d.line(left, y, (left + right) / 2, y + 24)
            d.line(right, y, (left + right) / 2, y + 24)
        level, y = [(left + right) / 2 for left, right in pairs], y + 24
    d.text(level[0], y + 14, "sum", 12, "middle")
    lines = "Whoever holds an aligned power of two of\nneighbours adds a subtree: 8 in a lane, 256 in"
    d.text(20, 200, lines + "\na warp, 1024 in four warps. All of them add in\none order, and so does the CPU.", 12)
    d.text(20, 280, "A column's sum (dγ, dβ)", bold=True)
    for i in range(6):
        d.box(20 + 58 * i, 294, 52, 36, "rows", GRAD, 11)
        d.line(46 + 58 * i, 330, 46 + 58 * i, 348)
    d.arrow(46, 348, 366, 348)
    lines = "Blocks of rows, each summed in order; then the\nblocks, in runs of 16. Their number does not depend"
    d.text(20, 372, lines + "\non the number of multiprocessors.", 12)

    d.text(420, 22, "Norm + cast + transpose: x is read once", bold=True)
    d.box(420, 44, 390, 56, fill=X)
    d.line(615, 38, 615, 106)
    for left, which in ((420, "block 0: left half"), (615, "block 1: right half")):
        middle = left + 97
        d.inner(middle, 68, which)
        d.inner(middle, 86, "of the same 64 rows of x")
        d.arrow(middle, 100, middle, 131)
        d.box(middle - 67, 134, 134, 46, "rows in registers,\npart of each sum", PALE, 12)
        d.arrow(middle, 180, middle, 205)
        d.box(middle - 67, 208, 134, 46, "y in fp32, times\nscale, to FP8", Y, 12)
        for x, label, codes in ((middle - 40, "", "q"), (middle + 40, "transposed", "qᵀ")):
            d.arrow(x, 254, x, 295)
            d.text(x - 8, 280, label, 11, "end")
            d.box(x - 33, 298, 66, 38, codes, Y)
    d.arrow(588, 157, 641, 157, both=True)
    d.text(615, 148, "sums", 11, "middle")
    lines = "A cluster of 1, 2, 4 or 8 blocks shares the columns\nof a tile, by the row's length: the codes stay in"
    d.text(420, 366, lines + "\nshared memory, only sums travel between blocks.", 12)
    return d


def layer() -> Drawing:
    """The launches of a layer's forward and backward in FP8."""
    d = Drawing(820, 570, "A transformer layer in FP8: the launches of forward and backward")
    d.text(20, 22, "Forward", bold=True)
    d.text(20, 44, "attention half", 12)
    d.text(20, 154, "MLP\nhalf", 12)
    for y, weight in ((48, "w of qkv"), (158, "w of fc1")):
        d.box(196, y - 25, 74, 20, weight, W, 11)
        d.box(570, y - 25, 74, 20, "w of proj" if y == 48 else "w of fc2", W, 11)
        d.box(106, y, 66, 44, "norm\n+ cast", PALE)
        d.arrow(172, y + 22, 185, y + 22)
        d.box(506, y, 222, 44, ("proj" if y == 48 else "fc2") + " GEMM + bias\n+ dropout + residual")
        d.arrow(728, y + 22, 761, y + 22)
    d.box(188, 48, 90, 44, "qkv GEMM")
    d.box(302, 48, 84, 44, "attention")
    d.box(410, 48, 72, 44, "cast", PALE)
    for a, b in ((278, 299), (386, 407), (482, 503)):
        d.arrow(a, 70, b, 70)
    d.box(188, 158, 208, 44, "fc1 GEMM + bias + GELU\n+ cast")
    d.arrow(396, 180, 503, 180)
    d.text(450, 172, "FP8", 11, "middle")
    d.box(40, 58, 30, 24, "x", X)
    d.arrow(70, 70, 103, 70)
    d.box(764, 58, 36, 24, "h", X)
    d.box(764, 168, 36, 24, "y", Y)
    d.arrow(782, 82, 782, 116, 70, 116, 70, 180, 103, 180)

    d.text(20, 250, "Backward", bold=True)
    rows = (
        (272, "fc2", "fc1", "GELU backward\n+ cast + sums", "dy", "MLP\nhalf"),
        (412, "proj", "qkv", "cast dq, dk, dv\n+ sums", "dh", "attention\nhalf"),
    )
    for y, last, first, middle, name, half in rows:
        d.text(20, y + 18, half, 12)
        d.box(764, y + 10, 36, 24, name, GRAD)
        d.box(636, y, 100, 44, "cast\n+ sums", PALE)
        d.box(528, y, 90, 44, f"{last} dgrad")
        d.box(300, y, 112, 44, middle, PALE, 12)
        d.box(200, y, 82, 44, f"{first} dgrad")
        d.box(90, y, 92, 44, "norm back-\nward + add", PALE, 12)
        for x in (761, 633, 297, 197):
            d.arrow(x, y + 22, x - 22 if x == 761 else x - 12, y + 22)
        for x, gemm_name in ((636, last), (306, first)):
            d.arrow(x + 50, y + 44, x + 50, y + 59)
            d.box(x, y + 62, 100, 30, f"{gemm_name} wgrad")
            d.arrow(x + 100, y + 77, x + 116, y + 77)
            d.box(x + 119, y + 67, 30, 20, "dw", GRAD, 11)
    d.arrow(525, 294, 415, 294)
    d.box(430, 412, 80, 44, "attention\nbackward")
    d.arrow(525, 434, 513, 434)
    d.arrow(427, 434, 415, 434)
    d.arrow(136, 316, 136, 386, 782, 386, 782, 419)
    d.text(150, 380, "gradient of h, in 16 bits", 11)
    d.arrow(136, 456, 136, 484, 95, 484)
    d.box(62, 472, 30, 24, "dx", GRAD)
    lines = "Dark boxes are GEMMs and attention, light ones are bound by memory. Every cast writes FP8 codes and,"
    lines += "\nfor wgrad and dgrad, their transposed copy. Each half casts its weights before its first GEMM."
    d.text(20, 534, lines, 12)
    return d


def cast() -> Drawing:
    """A thread's rows, the transposition, and the order of the column sums."""
    d = Drawing(820, 410, "Cast and transpose: a thread's 16 rows, both copies of the codes, the order of column sums")
    d.text(20, 22, "A block reads 128 rows × 256 bytes of x", bold=True)
    for i in range(8):
        for half in (0, 1):
            d.box(20 + 104 * half, 44 + 26 * i, 104, 26, fill=X if i < 4 and not half else PALE)
    d.box(20, 44, 26, 26)
    d.arrow(238, 57, 50, 57)
    d.text(242, 62, "a thread: 16 rows × 16 bytes", 12)
    d.arrow(238, 109, 118, 109)
    d.text(242, 113, "a warp: 64 rows × 128 bytes,\n4 runs of 16 rows × 8 groups", 12)
    d.text(242, 190, "a block: four warps, two by two", 12)

    d.text(480, 22, "A thread makes both copies of its codes", bold=True)
    for r in range(16):
        for c in range(8):
            d.box(480 + 15 * c, 44 + 11 * r, 15, 11, fill=X if c == 2 else GREY if r == 10 else PALE)
    d.text(480, 238, "16 rows × 8 columns of codes, in registers", 12)
    d.arrow(602, 72, 647, 72)
    d.box(650, 59, 160, 26, "16 bytes of a row of qᵀ", X, 12)
    d.text(650, 102, "leave through shared memory\nin lines of 128 bytes", 11)
    d.arrow(602, 160, 647, 160)
    d.box(650, 147, 160, 26, "8 bytes of a row of q", GREY, 12)
    d.text(650, 190, "leave from the registers", 11)

    d.text(20, 290, "The order of a column's sum (dbias): every kernel keeps it", bold=True)
    d.box(20, 310, 140, 42, "16 rows: a halving\ntree, in a thread", GRAD, 12)
    d.box(190, 310, 140, 42, "4 such runs: a\nhalving tree, 64 rows", GRAD, 12)
    d.box(360, 310, 170, 42, "blocks of 64 rows in\norder, by a second kernel", GRAD, 12)
    d.box(560, 310, 140, 42, "one rounding to the\ngradient's type", GRAD, 12)
    for x in (160, 330, 530):
        d.arrow(x, 331, x + 27, 331)
    lines = "A warp's part of a wgmma accumulator has 16 rows too, so a GEMM's epilogue can keep the same order."
    d.text(20, 384, lines, 12)
    return d


def recipes() -> Drawing:
    """Blocks of a row, square blocks, and how a chain joins the sum."""
    d = Drawing(820, 372, "Block scaling: 128 numbers of a row or 128 by 128 of a weight share a scale")
    d.text(20, 22, "x and gradients: 128 of a row", bold=True)
    for r in range(8):
        for c in range(4):
            d.box(20 + 50 * c, 40 + 16 * r, 50, 16, fill=X if (r, c) == (2, 1) else PALE)
    d.text(232, 62, "one token's features;\nfor the weight's\ngradient once more,\n128 tokens of a\nfeature", 12)
    d.text(20, 188, "K, which the product sums over", 12)
    d.arrow(20, 196, 220, 196)

    d.text(430, 22, "weights: 128 × 128", bold=True)
    for r in range(2):
        for c in range(4):
            d.box(430 + 50 * c, 40 + 64 * r, 50, 64, fill=W if (r, c) == (0, 1) else PALE)
    d.text(642, 62, "one cast serves\nboth ways: a transpose\nhas the same blocks", 12)
    d.text(430, 188, "K", 12)
    d.arrow(430, 196, 630, 196)

    d.text(20, 236, "A stage of the product's ring, and what follows from it", bold=True)
    d.box(20, 252, 120, 34, "128 × 128 of x", X)
    d.box(20, 290, 120, 34, "256 × 128 of w", W)
    d.box(20, 328, 120, 28, "their scales s, t", GREY)
    d.arrow(140, 288, 208, 288)
    d.box(210, 266, 150, 44, "p: a chain of 128\nfrom zero", Y)
    d.arrow(360, 288, 428, 288)
    d.box(430, 266, 180, 44, "acc = fma(p, s · t, acc)\nfp32, rounded once", Y)
    d.arrow(140, 342, 520, 342, 520, 313)
    d.text(280, 358, "read while the chain before runs", 12)
    d.arrow(610, 288, 668, 288)
    d.box(670, 266, 130, 44, "+ bias, one\nrounding", GREY)
    return d


DRAWINGS = {
    "attention": attention,
    "cast": cast,
    "compile": machinery.compile_,
    "gemm": gemm,
    "inference": machinery.inference,
    "layer": layer,
    "norm": norm,
    "parallel": machinery.parallel,
    "recipes": recipes,
    "record": machinery.record,
    "simulator": machinery.simulator,
    "tapes": machinery.tapes,
    "two_runs": machinery.two_runs,
}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
