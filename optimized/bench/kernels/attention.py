"""Attention against cuDNN's through PyTorch, and the ops around it against a copy (docs/results/attention.json).

python -m optimized.bench.kernels.attention_plot draws docs/attention.png from it; it needs no GPU.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

import optimized  # noqa: F401  (registers the CUDA ops)
from optimized import measure
from optimized.bench import Payload, Progress, each, silent
from optimized.bench.layers.layer_models import cudnn
from optimized.bench.memory_bound import Copies, in_turn
from optimized.bench.table import Table, percent, table
from reference.numbers import philox

twin = torch.ops.twin
NAME = "attention"
WHAT = "exact attention, against cuDNN's"
KERNELS = (
    "attention",
    "attention_backward",
    "attention_backward_ends",
    "attention_backward_wide",
    "attention_fp8",
    "attention_wide",
    "dropout",
    "rotary",
    "softmax",
)
CASES = (  # batch, heads, heads of keys and values, sequence, channels, mask, dropout
    *((4, 32, 32, s, 128, mask, 0.0) for s in (512, 2048, 8192, 16384) for mask in ("causal", "none")),
    (1, 32, 32, 32768, 128, "causal", 0.0),
    *((4, 32, 32, 2048, 128, mask, 0.1) for mask in ("causal", "none")),
    *((4, 32, 8, 2048, 128, mask, 0.0) for mask in ("causal", "none")),
    *((2, 32, hkv, 4096, 128, "causal", 0.0) for hkv in (32, 8)),
    *((4, 32, 32, s, 64, mask, 0.0) for s in (2048, 8192) for mask in ("causal", "none")),
    (4, 32, 32, 2048, 96, "causal", 0.0),
    *((4, 16, 16, 2048, 256, mask, 0.0) for mask in ("causal", "none")),
)

FP8_CASES = (  # batch, heads, sequence, channels, mask
    *((4, 32, s, 128, mask) for s in (2048, 8192) for mask in ("causal", "none")),
    (4, 32, 8192, 64, "none"),
    (4, 16, 8192, 256, "none"),
)


def _pair(b: int, h: int, hkv: int, s: int, d: int, mask_type: str, dropout: float) -> dict[str, Callable[[], object]]:
    """Ours and cuDNN's, forward and backward."""
    q, k, v, grad = (torch.randn(s, b, n, d, device="cuda").bfloat16().permute(1, 2, 0, 3) for n in (h, hkv, hkv, h))
    rest = (d**-0.5, mask_type, -1, -1, None, dropout, philox.new_state("cuda") if dropout else None)
    out, m, inv = twin.attention(q, k, v, *rest)
    theirs = functools.partial(cudnn, causal=mask_type == "causal", p=dropout)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    result = theirs(*leaves)
    return {
        "forward": lambda: twin.attention(q, k, v, *rest),
        "cuDNN forward": lambda: theirs(q, k, v),
        "backward": lambda: twin.attention_backward(grad, q, k, v, out, m, inv, *rest),
        "cuDNN backward": lambda: torch.autograd.grad(result, leaves, grad, retain_graph=True),
    }


def _in_fp8(b: int, h: int, s: int, d: int, mask_type: str) -> dict[str, Callable[[], object]]:
    """The forward of FP8 codes, and of bf16 numbers."""
    q, k, v = (torch.randn(s, b, h, d, device="cuda").bfloat16().permute(1, 2, 0, 3) for _ in range(3))
    codes = [x.to(torch.float8_e4m3fn) for x in (q, k, v.transpose(2, 3).contiguous())]
    ones, rest = [torch.ones(1, device="cuda")] * 3, (d**-0.5, mask_type, -1, -1, None, 0.0, None)
    return {
        "bf16": lambda: twin.attention(q, k, v, *rest),
        "FP8": lambda: twin.attention_fp8(*codes, *ones, *rest, torch.bfloat16),
    }


def _elementwise(repeats: int) -> dict[str, Any]:
    """Ops bound by memory, as in `copies`. Scores that the causal mask hides need not be read, only written."""
    xs = [torch.randn(8192, 4096, device="cuda").bfloat16() for _ in range(4)]
    scores = [torch.randn(1, 16, 2048, 2048, device="cuda").bfloat16() for _ in range(3)]
    bias, freqs = xs[0][0].clone(), torch.randn(2048, 128, device="cuda")
    state = philox.new_state("cuda")
    one, all_scores = 2 * xs[0].numel(), 2 * scores[0].numel()

    x, s = in_turn(xs), in_turn(scores)

    def rotary(interleaved: bool) -> Callable[[int], object]:
        return lambda i: twin.rotary(x(i).view(2048, 4, 32, 128), freqs, interleaved, False)

    ops: dict[str, tuple[int, Callable[[int], object]]] = {
        "bias_dropout_add": (3 * one, lambda i: twin.bias_dropout_add(x(i), bias, x(i + 1), 0.1, state)),
        "dropout_backward": (2 * one, lambda i: twin.dropout_backward(x(i), 0.1, state)),
        "rotary": (2 * one, rotary(False)),
        "rotary interleaved": (2 * one, rotary(True)),
        "softmax": (2 * all_scores, lambda i: twin.softmax(s(i), 1.0, "none", None)),
        "softmax causal": (3 * all_scores // 2, lambda i: twin.softmax(s(i), 1.0, "causal", None)),
        "softmax_backward": (3 * all_scores, lambda i: twin.softmax_backward(s(i), s(i + 1), 1.0)),
    }
    moved, calls = ({name: pair[place] for name, pair in ops.items()} for place in (0, 1))
    found = Copies(4, repeats).beside(calls, moved)  # type: ignore[arg-type]
    copy = {"TB/s": next(iter(found.values()))["copy_terabytes_per_second"]}
    return {"copy": copy, **{op: {**row["ms"], "TB/s": row["terabytes_per_second"]} for op, row in found.items()}}


def run(progress: Progress = silent, repeats: int = 20) -> Payload:
    found: dict[str, Any] = {"attention": {}, "FP8": {}}
    for case in each(CASES, lambda done: progress(0.8 * done)):
        # Launches are queued ahead: a short case is not the host's time. A long one needs fewer samples.
        samples = measure.interleave(_pair(*case), max(5, repeats * 2048 // max(2048, case[3])), ahead=True)
        name = "b={} h={} hkv={} s={} d={} {} dropout={}".format(*case)
        found["attention"][name] = {key: measure.summary(values) for key, values in samples.items()}
    for b, h, s, d, mask in FP8_CASES:
        samples = measure.interleave(_in_fp8(b, h, s, d, mask), max(5, repeats * 2048 // s), ahead=True)
        name = f"b={b} h={h} hkv={h} s={s} d={d} {mask} dropout=0.0"
        found["FP8"][name] = {key: measure.summary(values) for key, values in samples.items()}
    found["elementwise"] = _elementwise(repeats)
    progress(1.0)
    return {"ms": found, "provenance": measure.provenance(KERNELS)}


def sizes(name: str) -> dict[str, int]:
    """b, h, hkv, s and d of a case of the payload."""
    return {key: int(value) for key, _, value in (word.partition("=") for word in name.split()[:5])}


def flops(name: str, way: str) -> float:
    """Those of a case of the payload."""
    of = sizes(name)
    pairs = of["b"] * of["h"] * of["s"] ** 2 * (0.5 if " causal" in name else 1.0)
    return pairs * of["d"] * 2 * (2 if way == "forward" else 5)


def tables(payload: Payload) -> list[Table]:
    """Attention against cuDNN's, and the ops around it against a device copy."""
    rows = []
    for name, times in payload["ms"]["attention"].items():
        cells = [name.replace(" none", "").replace(" dropout=0.0", "")]
        for way in ("forward", "backward"):
            ours, theirs = times[way]["median"], times[f"cuDNN {way}"]["median"]
            cells += [f"{ours:.3g}", f"{flops(name, way) / ours / 1e9:.0f}", percent(theirs / ours)]
        rows.append(cells)
    case = "b batch, h heads (hkv of keys), s sequence, d channels"
    columns = (case, "forward ms", "TFLOP/s", "of cuDNN", "backward ms", "TFLOP/s", "of cuDNN")
    how = (
        "100 % is the speed of cuDNN's attention as torch calls it, in the same run. A CPU reproduces the bits of "
        "our attention, but not those of cuDNN. FLOP are counted as usual: two products forward, five backward, half "
        "of them where causal."
    )
    in_fp8 = []
    for name, times in payload["ms"]["FP8"].items():
        fp8, bf16 = times["FP8"]["median"], times["bf16"]["median"]
        speed = f"{flops(name, 'forward') / fp8 / 1e9:.0f}"
        in_fp8.append((name.replace(" none", "").replace(" dropout=0.0", ""), f"{fp8:.3g}", speed, f"{bf16 / fp8:.2f}"))
    of_codes = "The forward of E4M3 codes, without their cast, beside the exact forward in bf16, in the same run."
    around = payload["ms"]["elementwise"]
    others = [
        (name.replace("_", " "), f"{value['TB/s']:.2f}", percent(value["TB/s"] / around["copy"]["TB/s"]))
        for name, value in around.items()
    ]
    copied = "Bandwidth, and its share of what `Tensor.copy_` of 512 MiB reaches in the same run."
    return [
        table(payload, "Exact attention, bf16", columns, rows, how),
        table(payload, "Attention in FP8", ("case", "ms", "TFLOP/s", "bf16's time / FP8's"), in_fp8, of_codes),
        table(payload, "The ops around attention, bf16", ("kernel", "TB/s", "of a copy"), others, copied),
    ]
