"""Drawings of what runs the kernels: compiling, tapes, recording, ranks, and a GPU that is simulated; see draw.py."""

from itertools import pairwise

from canvas import HOLLOW, Drawing

from reference.support.palette import GRAD, GREY, PALE, W, X, Y


def tapes() -> Drawing:
    """How the calls of one group settle, what a tape's arguments are, and where the memory lies."""
    d = Drawing(820, 690, "Tapes: the first call is measured, the second recorded, later ones are played anywhere")
    rows = (("first call of a group", "measured"), ("second call", "recorded"), ("other addresses", "moved"))
    for y, (bold, plain) in zip((50, 132, 214, 296), (*rows, ("known addresses", "played")), strict=True):
        d.text(20, y, bold, bold=True)
        d.text(20, y + 17, plain, 12.5)
    for y in (30, 112):
        d.box(170, y, 210, 52, "Python of the layer runs", PALE)
        d.arrow(380, y + 26, 407, y + 26)
        d.box(410, y, 180, 52, "launches, one by one")
        d.arrow(590, y + 26, 637, y + 26, dashed=True)
    for y, launches in ((194, "launches, one by one"), (276, "from the third time on\none CUDA graph")):
        d.box(170, y, 210, 52, "no Python of the layer", HOLLOW)
        d.box(410, y, 180, 52, launches)
        d.arrow(380, y + 26, 407, y + 26)
    d.box(640, 30, 160, 52, "sizes and lives\nof its tensors", HOLLOW, 12)
    d.box(640, 112, 160, 52, "the tape: launches\nwith their arguments", HOLLOW, 12)
    d.box(640, 194, 160, 52, "the tape copied,\naddresses replaced", HOLLOW, 12)
    d.arrow(720, 164, 720, 191, dashed=True)
    d.arrow(640, 220, 593, 220, dashed=True)
    d.arrow(720, 246, 720, 302, 594, 302, dashed=True)

    d.text(20, 374, "The arguments of a tape's launches: one buffer in the host's memory", bold=True)
    left = 20.0
    slots = (
        ("x + 0", X, 90),
        ("arena + 0", X, 100),
        ("4096", PALE, 70),
        ("0.5", PALE, 60),
        ("tensor map:\narena + 4096", W, 130),
        ("y + 0", Y, 90),
        ("scratch + 512", PALE, 120),
        ("scale + 4", GREY, 100),
    )
    for label, fill, width in slots:
        d.box(left, 388, width, 40, label, fill)
        left += width
    d.text(
        20, 450, "An address is a tensor of the call and an offset: elsewhere another number, and the rest stays.", 12
    )
    d.text(20, 467, "The driver gives a tensor map its other address.", 12)

    d.text(20, 520, "Where a call's tensors lie", bold=True)
    d.text(20, 551, "results", 12.5)
    d.box(110, 534, 110, 24, "y", Y)
    d.text(500, 551, "live as long as the caller keeps them", 12)
    d.text(20, 591, "arena", 12.5)
    d.box(110, 574, 170, 24, "codes of x, transposed", X, 12)
    d.box(280, 574, 130, 24, "codes of w", W, 12)
    d.box(410, 574, 70, 24, "mean, rstd", PALE, 11)
    d.text(500, 591, "what backward reads: freed after it", 12)
    d.text(20, 640, "scratch", 12.5)
    d.box(110, 614, 110, 24, "temporary 1", PALE, 12)
    d.box(220, 614, 110, 24, "temporary 2", PALE, 12)
    d.box(110, 640, 150, 24, "temporary 3, later", PALE, 12)
    d.text(500, 631, "temporaries: freed when the call returns;", 12)
    d.text(500, 647, "lives that do not overlap share room", 12)
    return d


def record() -> Drawing:
    """What a recorded step leaves in the file, and what a replay compares."""
    d = Drawing(830, 390, "Record and replay: a step leaves one file, and a CPU runs its ops again")
    boxes = ((124, 76), (228, 140), (396, 56), (480, 110), (618, 36), (686, 124))  # left edges and widths
    rows = (("on a GPU", "te.record", 24), ("one file", "safetensors", 144), ("on any CPU", "twin replay", 284))
    for bold, plain, y in rows:
        d.text(16, y + 20, bold, bold=True)
        d.text(16, y + 37, plain, 12.5)
    for y in (24, 284):
        labels = ("weights, x,\nscales", "twin::cast_transpose", "codes", "twin::gemm_fp8", "y", "a loss of torch's")
        fills = (W, GREY, X, GREY, Y, PALE if y == 24 else HOLLOW)
        for (x, w), label, fill in zip(boxes, labels, fills, strict=True):
            d.box(x, y, w, 44, label, fill)
        for (x, w), (following, _) in pairwise(boxes):
            d.arrow(x + w, y + 22, following - 3, y + 22)
    kept = (
        "whole",
        "name, arguments,\nmodule",
        "digests",
        "name, arguments,\nmodule",
        "digest",
        "gradient of y,\nwhole",
    )
    for (x, w), label, fill in zip(boxes, kept, (W, PALE, PALE, PALE, PALE, GRAD), strict=True):
        d.box(x, 144, w, 56, label, fill, 11)
    says = ("fed", "run again", "compared", "run again", "compared", "fed, not run")
    for (x, w), label in zip(boxes, says, strict=True):
        middle = x + w / 2
        d.arrow(middle, 68, middle, 141)
        d.arrow(middle, 200, middle, 281, both=label == "compared", dashed=label == "run again")
        d.text(middle + 6, 245, label, 12)
    d.text(124, 366, "An op that computed other bits is named, and so is memory that changed between two ops.", 12.5)
    return d


def two_runs() -> Drawing:
    """From two trails to a step, and from its two recordings to an op."""
    d = Drawing(830, 372, "Two runs: their trails name the step, and recordings of that step name the op")
    d.text(16, 22, "te.trail: a line of digests after each step", bold=True)
    steps = (("1", 90), ("2", 170), ("…", 250), ("36", 330), ("37", 410), ("38", 490), ("…", 570))
    for name, y in (("run a", 36), ("run b", 100)):
        d.text(16, y + 24, name)
        for label, x in steps:
            d.box(x, y, 62, 36, label, GRAD if label in ("37", "38") and name == "run b" else PALE)
    for label, x in steps:
        d.text(x + 31, 92, "≠" if label in ("37", "38") or x > 500 else "=", 14, "middle")
    d.text(654, 66, "twin diff a.trail b.trail:", 12.5)
    d.text(654, 84, "step 37, and the first", 12.5)
    d.text(654, 102, "tensor in it", 12.5)
    d.arrow(441, 136, 441, 186)
    d.text(452, 166, "the same step again, recorded in each run", 12)
    d.text(16, 206, "te.record(step=37): every op of it", bold=True)
    ops = (("cast", 90), ("gemm", 210), ("add", 330), ("mean", 450))
    for name, y in (("run a", 220), ("run b", 284)):
        d.text(16, y + 24, name)
        for label, x in ops:
            d.box(x, y, 92, 36, label, GRAD if label in ("add", "mean") and name == "run b" else GREY)
        for (_, x), (_, following) in pairwise(ops):
            d.arrow(x + 92, y + 18, following - 3, y + 18)
    for label, x in ops:
        d.text(x + 46, 276, "≠" if label in ("add", "mean") else "=", 14, "middle")
    d.text(566, 250, "twin diff a.safetensors b.safetensors:", 12.5)
    d.text(566, 268, "the op, the word, and what feeds it", 12.5)
    d.text(90, 348, "twin replay of each says which of the two is what the definition computes.", 12.5)
    return d


def compile_() -> Drawing:
    """From a step that needs kernels to their cubins, side by side."""
    d = Drawing(
        820, 390, "Compiling: a dry pass finds a step's kernels, NVRTC compiles them side by side, a cache keeps them"
    )
    d.text(20, 22, "Before a pair of functions runs on new shapes", bold=True)
    d.box(20, 46, 152, 62, "forward and backward\nrun dry: launches\nare collected", PALE, 12)
    d.box(200, 46, 136, 62, "kernels and macros\nof the step", PALE, 12)
    d.box(364, 46, 116, 62, "those that the\ncache lacks", PALE, 12)
    for x in (172, 336, 480):
        d.arrow(x, 77, x + 25, 77)
    bars = ((230, "GEMM + GELU"), (150, "GEMM + residual"), (110, "GEMM, fast"), (90, "the others"))
    for i, (width, label) in enumerate(bars):
        d.box(510, 40 + 24 * i, width, 20, label, size=11)
    d.arrow(510, 144, 770, 144)
    d.text(510, 162, "NVRTC, one thread each: the step", 12)
    d.text(510, 178, "waits for the slowest only", 12)
    d.text(20, 138, "No kernel runs, nothing is drawn; of PyTorch's\nops only shapes are computed.", 12)

    d.text(20, 212, "One configuration", bold=True)
    d.box(20, 230, 160, 66, "kernel.cu and headers,\ntheir include lines\nresolved", PALE, 12)
    d.box(20, 304, 160, 30, "macros: types, tile", PALE, 12)
    d.box(20, 342, 160, 30, "flags, NVRTC's build", PALE, 12)
    d.box(240, 292, 84, 40, "SHA-256")
    d.arrow(180, 263, 210, 263, 210, 304, 237, 304)
    d.arrow(180, 319, 200, 319, 200, 312, 237, 312)
    d.arrow(180, 357, 220, 357, 220, 320, 237, 320)
    d.arrow(324, 312, 371, 312)
    d.text(347, 304, "key", 12, "middle")
    d.box(374, 280, 130, 64, "cache entry:\ndigest, ptxas's\nlog, cubin", GREY, 12)
    d.arrow(504, 312, 531, 312)
    d.box(534, 290, 112, 44, "module, loaded\nonce a device", PALE, 12)
    d.arrow(646, 312, 673, 312)
    d.box(676, 290, 134, 44, "launch: arguments\nkept and refilled", PALE, 12)
    d.text(240, 372, "What is hashed is what is compiled: NVRTC opens no file.", 12)
    return d


def simulator() -> Drawing:
    """From a kernel's source to fibers, and what the simulated hardware does in its own time."""
    d = Drawing(820, 310, "The simulator: a kernel's source compiled for the CPU, and who runs it")
    d.text(20, 22, "The same source, two compilers", bold=True)
    d.box(20, 60, 150, 52, "kernels/attentions/attention.cu\nand its headers")
    d.box(20, 150, 150, 44, "kernels/ptx:\none file an instruction")
    d.box(20, 230, 150, 44, "simulator/ptx:\nthe same files in C++")
    d.box(230, 60, 130, 44, "NVRTC:\na cubin, for Hopper")
    d.box(230, 190, 130, 58, "g++:\na library, for\nany CPU")
    d.arrow(170, 80, 227, 80)
    d.arrow(170, 104, 227, 200)
    d.arrow(170, 160, 227, 96)
    d.arrow(170, 252, 227, 232)

    d.text(400, 22, "A launch on the CPU: one fiber runs at a time", bold=True)
    for i, top in enumerate((46, 122)):
        d.box(400, top, 230, 62, "", PALE)
        d.text(410, top + 16, f"block {i}: a thread of the CPU", 11)
        for warp in range(7):
            d.box(410 + 31 * warp, top + 26, 26, 26, "")
    d.text(400, 222, "A thread of the kernel is a fiber. Who waits lets the others go on;", 12)
    d.text(400, 240, "if nobody goes on, the launch fails and says who waits for what.", 12)

    d.text(660, 44, "What happens by itself", 12)
    d.box(660, 54, 150, 30, "copies (TMA)", GREY)
    d.box(660, 92, 150, 30, "products (wgmma)", GREY)
    d.box(660, 130, 150, 30, "bulk stores", GREY)
    d.text(660, 178, "at once, as late as", 12)
    d.text(660, 194, "allowed, or at random", 12)
    d.arrow(630, 110, 657, 110)

    d.box(
        400,
        252,
        410,
        40,
        "shared memory: NaN until somebody writes it; bounds, alignment\nand the count of arrivals are checked",
        HOLLOW,
        12,
    )
    return d


def parallel() -> Drawing:
    """The tree over a step's groups with who computes what, and a sum over K that passes through the ranks."""
    d = Drawing(820, 520, "Ranks: a tree over groups of microbatches, and a chain over K that passes through the ranks")
    d.text(20, 22, "A step's gradients: a sequence inside a group, a tree over groups", bold=True)
    lefts = [150 + 165 * group for group in range(4)]
    for y, label in ((58, "microbatches"), (114, "in .grad's dtype"), (170, "fp32"), (226, "the gradient")):
        d.text(20, y, label, 12.5)
    for group, left in enumerate(lefts):
        for half in range(2):
            d.box(left + 70 * half, 40, 70, 28, f"d{2 * group + half}", GRAD)
        d.arrow(left + 70, 68, left + 70, 93)
        d.box(left, 96, 140, 28, f"s{group} = d{2 * group} + d{2 * group + 1}", GRAD)
    for pair, left in enumerate((232, 562)):
        for side in (-1, 1):
            d.arrow(left + 70 + 82 * side, 124, left + 70 + 40 * side, 149)
        d.box(left, 152, 140, 28, f"s{2 * pair} + s{2 * pair + 1}", GRAD)
        d.arrow(left + 70, 180, 422 if pair == 0 else 512, 205)
    d.box(367, 208, 200, 28, "sum · 1/4, one rounding", GRAD)

    d.text(20, 270, "Who computes which groups", bold=True)
    for row, ranks in enumerate(((4,), (2, 2), (1, 1, 2), (1, 1, 1, 1))):
        y, first = 282 + 27 * row, 0
        d.text(20, y + 16, f"{len(ranks)} ranks" if row else "one process", 12.5)
        for rank, count in enumerate(ranks):
            left, last = lefts[first], lefts[first + count - 1] + 140
            d.box(left, y, last - left, 22, f"rank {rank}", PALE)
            first += count
    d.text(150, 410, "Only whole sums of the tree travel, so nobody can see who made them.", 12)

    d.text(20, 446, "A sum over K that ranks share: one chain", bold=True)
    steps = (
        (20, 190, "rank 0: its part of K,\nfrom +0", PALE),
        (270, 190, "rank 1: its part of K,\nfrom what it is given", PALE),
        (520, 130, "the last rank: scale,\nbias, one rounding", PALE),
        (710, 90, "y", Y),
    )
    for left, width, label, fill in steps:
        d.box(left, 460, width, 46, label, fill)
    for (left, width, _, _), (following, _, _, _) in pairwise(steps):
        d.arrow(left + width, 483, following - 3, 483)
    for x in (240, 490):
        d.text(x, 476, "fp32", 12, "middle")
    return d


def inference() -> Drawing:
    """Three sequences in pages of four tokens, and the tokens of a step that are packed into one forward."""
    d = Drawing(820, 330, "Pages of three sequences, two of which share one, and what one step computes")
    d.text(20, 22, "Sequences: what is in the cache, what is new", bold=True)
    rows = (("a: one token of it is new", 9, 1), ("b: admitted; begins as a does", 4, 3), ("c: a draft of two", 2, 3))
    for row, (label, cached, new) in enumerate(rows):
        top = 40 + 44 * row
        d.text(20, top + 19, label, 12.5)
        for i in range(cached + new):
            d.box(236 + 28 * i, top, 28, 28, f"{i}", X if i >= cached else GREY if row < 2 and i < 4 else PALE, 11)
    d.text(540, 59, "a page: 4 tokens of all layers", 12)
    d.text(540, 103, "grey: tokens that a and b share", 12)
    d.text(540, 147, "blue: new tokens, packed", 12)

    d.text(20, 196, "The cache: a page table says where a key lies", bold=True)
    names = ("a, b", "c", "a", "b", "free", "a", "c", "free", "free")
    for i, name in enumerate(names):
        d.box(20 + 84 * i, 210, 80, 28, name, HOLLOW if name == "free" else GREY if i == 0 else PALE)
        d.text(60 + 84 * i, 252, f"page {i}", 11, "middle")

    d.text(20, 292, "One forward", bold=True)
    for i, name in enumerate(("a9", "b4", "b5", "b6", "c2", "c3", "c4")):
        d.box(120 + 34 * i, 276, 34, 28, name, X, 11)
    d.arrow(362, 290, 412, 290)
    d.box(415, 270, 110, 40, "logits of\na9, b6, c2–c4", Y, 11)
    d.arrow(525, 290, 572, 290)
    d.box(575, 270, 224, 40, "a10, b7, c3, and c4, c5 where\nthe draft was right", PALE, 11)
    return d
