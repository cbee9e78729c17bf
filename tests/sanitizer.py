"""One small launch of every kernel, for NVIDIA's compute-sanitizer:

    for tool in memcheck racecheck initcheck synccheck; do
        compute-sanitizer --tool $tool --error-exitcode 1 python tests/sanitizer.py; done

Inputs are filled by copies from the host, so that initcheck sees every byte that a kernel reads as written.
Shapes include whole tiles, ragged edges and a single row. What is computed is checked elsewhere.
"""

import itertools
import sys
from unittest import mock

import torch

import optimized  # noqa: F401  (registers the CUDA kernels)
from optimized.ops import gemm_fused
from optimized.ops.gemm import gemm_tiled
from optimized.ops.gemm_fp8 import gemm_fp8_tiled
from optimized.ops.gemm_fp8_split_k import gemm_fp8_split_k
from optimized.ops.gemm_tile import FP8_TILES, TILES
from reference.ops.activation import GATED, KINDS
from reference.ops.cast_transpose import cast_outputs

twin = torch.ops.twin
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
WIDE = (torch.float32, torch.bfloat16, torch.float16)


def casts() -> None:
    for (rows, cols), dtype, out in itertools.product(((1, 16), (130, 272), (128, 256)), WIDE, FP8):
        x = torch.randn(rows, cols).to(dtype).cuda()
        scale, history = torch.ones(3).cuda(), torch.zeros(5, 3).cuda()
        twin.amax(x, history, 0)
        twin.cast(x, scale, history, 0, out)
        twin.cast_transpose(x, scale, history, 1, out)
        twin.cast_transpose_dbias(x, scale, history, 2, out)
        twin.cat_cast_transpose_dbias([x, x, x], 1, scale, history, 2, out)
        twin.dbias(x)
        twin.dbias(x[:, :5].contiguous())
        for xs in ([x], [x] * 5):  # both capacities
            parts = [list(part) for part in zip(*(cast_outputs(one, one.shape[1], out) for one in xs), strict=True)]
            twin.multi_cast_transpose(xs, [scale] * len(xs), [history] * len(xs), [0] * len(xs), *parts)


def cast_stats() -> None:
    for (rows, cols), dtype, out in itertools.product(((1, 16), (130, 272), (4160, 272)), WIDE, FP8):
        x = torch.randn(rows, cols).to(dtype).cuda()
        twin.cast_stats(x, *twin.cast(x, torch.ones(1).cuda(), None, 0, out))
        twin.cast_stats(x, None, None)


def scale_update() -> None:
    for algorithm in ("max", "most_recent"):
        scales = [torch.ones(n).cuda() for n in (3, 2, 3)]
        histories = [torch.rand(length, n).cuda() for length, n in ((1, 3), (1030, 2), (16, 3))]
        twin.scale_update(scales, histories, 448.0, 0, algorithm)


def adam() -> None:
    for dtype, master, count in itertools.product(WIDE, (False, True), (2, 40)):  # both capacities
        grads = [torch.randn(size).to(dtype).cuda() for size in (2050, 8) * (count // 2)]
        params = [x.float() if master else x.clone() for x in grads]
        first, second = ([torch.zeros(x.shape).cuda() for x in grads] for _ in range(2))
        rounded = [torch.zeros(x.shape).to(dtype).cuda() for x in grads] if master else []
        twin.adam(grads, params, first, second, rounded, 1e-3, 0.9, 0.999, 1e-8, 0.1, 0.1, 0.001, not master)


def adam_states() -> None:
    moments = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
    for wide, one, count in itertools.product(WIDE, moments, (2, 40)):  # both capacities
        sizes = (2050, 8) * (count // 2)
        grads = [torch.randn(size).to(wide).cuda() for size in sizes]
        for param in (wide, torch.float32, torch.float16, torch.int16):
            params, first, second = ([torch.zeros(size).to(d).cuda() for size in sizes] for d in (param, one, one))
            copies = torch.bfloat16 if param == torch.int16 else wide
            rounded = [torch.zeros(size).to(copies).cuda() for size in sizes] if param != wide else []
            scales = [
                [torch.ones(1).cuda() for _ in sizes] if scaled else []
                for scaled in (param == torch.float16 != wide, *[one in moments[2:]] * 2)
            ]
            rest = (1e-3, 0.9, 0.999, 1e-8, 0.1, 0.1, 0.001, bool(rounded))
            twin.adam_states(grads, params, first, second, rounded, *scales, *rest)


def adam_capturable() -> None:
    for dtype, moment, master in itertools.product(WIDE, WIDE[:2], (False, True)):
        step, one = torch.zeros(1, dtype=torch.int32).cuda(), torch.ones(1).cuda()
        control = twin.adam_control(step, one, one, None, 0.9, 0.999, True)
        grads = [torch.randn(size).to(dtype).cuda() for size in (2050, 8)]
        params = [x.float() if master else x.clone() for x in grads]
        first, second = ([torch.zeros(x.shape).to(moment).cuda() for x in grads] for _ in range(2))
        rounded = [torch.zeros(x.shape).to(dtype).cuda() for x in grads] if master else []
        twin.adam_capturable(grads, params, first, second, rounded, control, 0.9, 0.999, 1e-8, 0.1, True, master)


def adafactor() -> None:
    for dtype, master, shape in itertools.product(WIDE, (False, True), ((130, 300), (2, 65, 40), (40000,))):
        grad = torch.randn(shape).to(dtype).cuda()
        param = grad.float() if master else grad.clone()
        matrix = len(shape) > 1
        row = torch.zeros((*shape[:-1], 1) if matrix else shape).cuda()
        col = torch.zeros((*shape[:-2], 1, shape[-1])).cuda() if matrix else None
        twin.adafactor(grad, param, row, col, 0.01, 0.5, 0.99, 1e-7, 1e-14, 1e-3, 1.0, master)


def clipping() -> None:
    for dtype, count in itertools.product(WIDE, (3, 66)):  # both capacities
        grads = [torch.randn(size).to(dtype).cuda() for size in (40000, 2050, 8) * (count // 3)]
        norm = twin.grad_norm(grads, "l2")
        twin.grad_norm(grads, "max")
        twin.clip_grads(grads, norm, 0.5)


def sgd() -> None:
    for dtype, master, count in itertools.product(WIDE, (False, True), (2, 40)):  # both capacities
        grads = [torch.randn(size).to(dtype).cuda() for size in (2050, 8) * (count // 2)]
        params = [x.float() if master else x.clone() for x in grads]
        buffers = [torch.zeros(x.shape).to(x.dtype).cuda() for x in params]
        for first_run in (True, False):
            twin.sgd(grads, params, buffers, 1e-3, 0.9, 0.0, 0.1, first_run, first_run, not first_run)
        twin.sgd(grads, params, [], 1e-3, 0.0, 0.0, 0.1, False, False, False)


def gemms() -> None:
    for m, n, k in ((1, 16, 16), (130, 272, 144), (256, 256, 256)):
        for bias, accumulate in itertools.product((None, torch.randn(n).bfloat16().cuda()), ("fast", "split")):
            a, b = (torch.randn(size, k).to(FP8[0]).cuda() for size in (m, n))
            one = torch.ones(1).cuda()
            twin.gemm_fp8(a, b, one, one, bias, torch.bfloat16, accumulate)
        a, b = (torch.randn(size, k).bfloat16().cuda() for size in (m, n))
        twin.gemm(a, b, None, torch.bfloat16)
        at = torch.randn(k, m).bfloat16().cuda().t()
        bt = torch.randn(k, n).bfloat16().cuda().t()
        twin.gemm(at, bt, None, torch.float32)


def gemm_tiles() -> None:
    """Every tile, on problems with more than one tile, ragged in each direction, then wide and narrow tiles in one."""
    one = torch.ones(1).cuda()
    for (m, n, k), tile in itertools.product(((330, 272, 592), (140, 736, 144)), FP8_TILES):
        a, b = (torch.randn(size, k).to(FP8[0]).cuda() for size in (m, n))
        for accumulate in ("fast", "split"):
            gemm_fp8_tiled(a, b, one, one, None, torch.bfloat16, accumulate, tile)
        if tile not in TILES:
            continue
        wide_a, wide_b = (torch.randn(size, k).bfloat16().cuda() for size in (m, n))
        gemm_tiled(wide_a, wide_b, None, torch.bfloat16, tile)


def gemm_split_k() -> None:
    """One part and several, one k-block in a part and several; edges in every direction; each output, with a bias."""
    one = torch.ones(1).cuda()
    for (m, n, k), out in itertools.product(((1, 16, 16), (70, 80, 1168), (130, 272, 16400)), WIDE):
        a, b = (torch.randn(size, k).to(FP8[0]).cuda() for size in (m, n))
        gemm_fp8_split_k(a, b, one, one, torch.randn(n).cuda(), out)


@mock.patch.object(gemm_fused, "multiprocessors", return_value=2)
def fused_gemms(_: mock.Mock) -> None:
    """Every tile, in each direction ragged; runs of eight and of four columns.

    On two multiprocessors, so that a block has several tiles and what one is given is written over for the next.
    """
    one, state = torch.ones(1).cuda(), (torch.ones(3).cuda(), torch.zeros(5, 3).cuda(), 1)
    bf16 = torch.bfloat16
    for tile, cols, kind in itertools.product(TILES, (272, 288), ("gelu", "swiglu")):
        n = 2 * cols if kind in GATED else cols
        a, b, w = (torch.randn(size, 592).to(FP8[0]).cuda() for size in (330, cols, n))
        x, bias = torch.randn(330, n).to(bf16).cuda(), torch.randn(n).to(bf16).cuda()
        gemm_fused.gemm_fp8_activation(a, w, one, one, bias, bf16, kind, *state, FP8[0], tile=tile)
        residual, rng_state = torch.randn(330, cols).to(bf16).cuda(), torch.tensor([1, 2]).cuda()
        rest = (bias[:cols].clone(), residual, bf16, 0.1, rng_state)
        gemm_fused.gemm_fp8_bias_dropout_add(a, b, one, one, *rest, tile=tile)
        for dtype in WIDE:
            out = torch.randn(330, cols).to(dtype).cuda()
            gemm_fp8_tiled(a, b, one, one, None, dtype, "split", tile, out, add=True)
            gemm_tiled(residual.t(), x.t(), None, dtype, tile, torch.randn(cols, n).to(dtype).cuda(), add=True)


def norms() -> None:
    """Every hidden takes another kernel or configuration; ragged rows, one row, none; many, for the taller tiles."""
    sizes = itertools.product((0, 1, 35), (7, 208, 1040, 2064, 4080, 5104, 6128, 8176, 12272, 16368, 16400))
    for (rows, hidden), kind in itertools.product([*sizes, (6150, 16)], ("layernorm", "rmsnorm")):
        for dtype in WIDE[:2]:
            x, grad = (torch.randn(rows, hidden).to(dtype).cuda() for _ in range(2))
            weight = torch.randn(hidden).cuda()
            bias = weight if kind == "layernorm" else None
            _, mean, rstd = twin.norm(x, weight, bias, 1e-5, False, kind, dtype)
            for residual in (None, grad):
                twin.norm_backward(grad, x, weight, mean, rstd, False, kind, residual)
            if hidden % 16 == 0:
                scale, history = torch.ones(3).cuda(), torch.zeros(5, 3).cuda()
                twin.norm_cast_transpose(x, weight, bias, 1e-5, True, kind, scale, history, 1, FP8[0])


def activations() -> None:
    for (rows, cols), kind, dtype in itertools.product(((1, 16), (130, 272), (128, 256)), KINDS, WIDE):
        grad = torch.randn(rows, cols).to(dtype).cuda()
        x = torch.randn(rows, 2 * cols if kind in GATED else cols).to(dtype).cuda()
        scale, history = torch.ones(3).cuda(), torch.zeros(5, 3).cuda()
        twin.activation(x, kind)
        twin.activation_backward(grad, x, kind)
        for out in FP8:
            twin.activation_cast_transpose(x, kind, scale, history, 0, out)
            twin.activation_backward_cast_transpose_dbias(grad, x, kind, scale, history, 1, out)
        odd = torch.randn(3, 10).to(dtype).cuda()
        twin.activation_backward(twin.activation(odd, kind), odd, kind)


def attentions() -> None:
    """Each head dimension's configuration; one row, ragged blocks, whole ones; masks, dropout, grouped heads."""
    for (sq, skv), d, dtype in itertools.product(((1, 1), (130, 200), (128, 256)), (24, 64, 128, 200), WIDE[1:]):
        q, grad = (torch.randn(1, 2, sq, d).to(dtype).cuda() for _ in range(2))
        k, v = (torch.randn(1, 1, skv, d).to(dtype).cuda() for _ in range(2))
        mask = (torch.rand(1, 1, 1, skv) < 0.5).cuda()
        for p, hidden, kind, window in (
            (0.0, None, "causal", (-1, -1)),
            (0.1, mask, "none", (-1, -1)),
            (0.0, None, "none", (100, 20)),
        ):
            state = torch.tensor([1, 2]).cuda()
            rest = (0.1, kind, *window, hidden, p)
            out, m, inv = twin.attention(q, k, v, *rest, state.clone())
            twin.attention_backward(grad, q, k, v, out, m, inv, *rest, state)
        for bias, slopes in (
            (torch.randn(1, 2, sq, skv).to(dtype).cuda(), None),
            (torch.randn(1, 1, sq, skv).cuda(), None),
            (None, torch.rand(2).cuda()),
        ):
            rest = (0.1, "causal", -1, -1, None, 0.1)
            before = torch.tensor([1, 2]).cuda()
            saved = twin.attention(q, k, v, *rest, before.clone(), bias, slopes)
            twin.attention_backward(grad, q, k, v, *saved, *rest, before, bias, slopes)
            if bias is not None:
                twin.attention_bias_backward(grad, q, k, v, *saved, *rest, before, bias, slopes)
        sinks, rest = torch.randn(2).cuda(), (0.1, "causal", -1, -1, None, 0.0, None)
        saved = twin.attention(q, k, v, *rest, None, None, sinks)
        twin.attention_sink_backward(grad, *saved, sinks)
        lengths = torch.tensor([max(1, sq // 2)]).int().cuda(), torch.tensor([max(1, skv // 3)]).int().cuda()
        rest = (0.1, "causal", -1, -1, None, 0.0, None)
        saved = twin.attention(q, k, v, *rest, None, None, None, *lengths)
        twin.attention_backward(grad, q, k, v, *saved, *rest, None, None, None, *lengths)
    # More tiles than multiprocessors, so that blocks take tickets; and turns of five key blocks.
    q, k, v, grad = (torch.randn(1, 40, 520, 64).bfloat16().cuda() for _ in range(4))
    for left in (-1, 150):
        rest = (0.1, "causal", left, -1, None, 0.0, None)
        twin.attention_backward(grad, q, k, v, *twin.attention(q, k, v, *rest), *rest)


def fp8_attentions() -> None:
    for (sq, skv), d, p in itertools.product(((1, 16), (130, 208), (520, 256)), (32, 64, 128, 208, 256), (0.0, 0.1)):
        q = torch.randn(1, 40, sq, d).to(FP8[0]).cuda()
        k, v = (torch.randn(1, 20, skv, d).to(FP8[0]).cuda() for _ in range(2))
        v_t = v.view(torch.uint8).transpose(2, 3).contiguous().view(FP8[0])
        grad, ones = torch.randn(1, 40, sq, d).bfloat16().cuda(), (torch.ones(1).cuda(),) * 3
        before = torch.tensor([1, 2]).cuda()
        rest = (0.1, "causal", -1, -1, None, p)
        saved = twin.attention_fp8(q, k, v_t, *ones, *rest, before.clone(), torch.bfloat16)
        twin.attention_fp8_backward(grad, q, k, v, *ones, *saved, *rest, before)


def normals() -> None:
    for count in (1, 7, 4096, 10001):
        twin.normal(torch.zeros(count).cuda(), 0.5, 2.0, 3)


def losses() -> None:
    """Whole tiles, ragged rows, rows that are not aligned; rows that are ignored."""
    for (rows, cols), dtype in itertools.product(((1, 1), (3, 250), (5, 2056), (4, 8193), (3, 16400)), WIDE):
        target = torch.randint(0, cols, (rows,))
        target[0] = -100
        target = target.cuda()
        whole = torch.randn(rows * cols + 1).to(dtype).cuda()
        for x in (whole[:-1].view(rows, cols), whole[1:].view(rows, cols)):  # the second off a multiple of 16 bytes
            for smoothing in (0.0, 0.1):
                loss, *stats = twin.cross_entropy(x, target, -100, smoothing)
                mean, divisor = twin.cross_entropy_mean(loss, target, -100, "mean")
                for grad in (mean, loss):
                    twin.cross_entropy_backward(grad, divisor, x, target, *stats, -100, smoothing)


def embeddings() -> None:
    for (rows, width), dtype, count in itertools.product(((1, 1), (7, 264), (500, 1040)), WIDE, (0, 1, 65, 300)):
        ids = torch.randint(0, rows, (count,))
        ids[: count // 2] = 0
        weight, grad = (torch.randn(n, width).to(dtype).cuda() for n in (rows, count))
        ids = ids.cuda()
        twin.embedding(weight, ids)
        for padding in (-1, 0):
            twin.embedding_backward(grad, ids, rows, padding)


def around_attention() -> None:
    for dtype, cols in itertools.product(WIDE, (7, 264, 1000, 2056)):
        x = torch.randn(1, 2, 5, cols).to(dtype).cuda()
        y = twin.softmax(x, 0.5, "causal", x[:1, :1, :1] < 0)
        y = twin.softmax(x, 0.5, "causal", None)
        twin.softmax_backward(x, y, 0.5)
        rows = torch.randn(3, cols).to(dtype).cuda()
        state = torch.tensor([1, 2]).cuda()
        twin.bias_dropout_add(rows, rows[0].clone(), rows, 0.1, state)
        twin.dropout_backward(rows, 0.1, state)
        for d, d2 in ((64, 64), (64, 32), (10, 6)):
            heads, freqs = torch.randn(5, 2, 3, d).to(dtype).cuda(), torch.randn(5, d2).cuda()
            for interleaved in (False, True):
                twin.rotary(heads, freqs, interleaved, False)


def main() -> None:
    parts = {
        "casts": casts,
        "cast_stats": cast_stats,
        "scale_update": scale_update,
        "adam": adam,
        "adam_states": adam_states,
        "adam_capturable": adam_capturable,
        "adafactor": adafactor,
        "clipping": clipping,
        "sgd": sgd,
        "gemms": gemms,
        "gemm_tiles": gemm_tiles,
        "gemm_split_k": gemm_split_k,
        "fused_gemms": fused_gemms,
        "norms": norms,
        "activations": activations,
        "attentions": attentions,
        "fp8_attentions": fp8_attentions,
        "around_attention": around_attention,
        "normals": normals,
        "losses": losses,
        "embeddings": embeddings,
    }
    with torch.no_grad():
        for name in sys.argv[1:] or parts:
            parts[name]()
            torch.cuda.synchronize()
            print(f"{name}: launched")


if __name__ == "__main__":
    main()
