"""Time attention against cuDNN's through PyTorch, and the ops around it against a copy, in one run on an H200.

python -m optimized.bench.attention [--write]
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import optimized  # noqa: F401  (registers the CUDA ops)
from optimized import measure
from optimized.bench.table import Table, origin, percent
from reference import philox

twin = torch.ops.twin
NAME = "attention"
WHAT = "attention against cuDNN's; softmax, rotary embedding and dropout against a copy"
_CALLS = 4
KERNELS = ("attention", "attention_backward", "dropout", "rotary", "softmax")


def _pair(
    b: int, h: int, hkv: int, s: int, d: int, mask_type: str, dropout: float
) -> tuple[dict[str, Callable[[], object]], float]:
    """Ours and cuDNN's, forward and backward, and the forward's TFLOP."""
    q, k, v, grad = (torch.randn(s, b, n, d, device="cuda").bfloat16().permute(1, 2, 0, 3) for n in (h, hkv, hkv, h))
    state = philox.new_state("cuda") if dropout else None
    rest = (d**-0.5, mask_type, None, dropout, state)
    out, m, inv = twin.attention(q, k, v, *rest)
    causal = mask_type == "causal"

    def theirs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal, enable_gqa=h != hkv)

    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    result = theirs(*leaves)
    work = 4e-12 * b * h * s * s * d * (0.5 if causal else 1.0)
    return {
        "forward": lambda: twin.attention(q, k, v, *rest),
        "cuDNN forward": lambda: theirs(q, k, v),
        "backward": lambda: twin.attention_backward(grad, q, k, v, out, m, inv, *rest),
        "cuDNN backward": lambda: torch.autograd.grad(result, leaves, grad, retain_graph=True),
    }, work


def _attention(repeats: int) -> dict[str, Any]:
    found = {}
    for case in (
        (4, 32, 32, 2048, 128, "causal", 0.0),
        (4, 32, 32, 2048, 128, "none", 0.0),
        (4, 32, 32, 2048, 128, "none", 0.1),
        (4, 32, 8, 2048, 128, "causal", 0.0),
        (4, 16, 16, 2048, 64, "causal", 0.0),
        (2, 16, 16, 2048, 256, "causal", 0.0),
    ):
        variants, work = _pair(*case)
        name = "b={} h={} hkv={} s={} d={} {} dropout={}".format(*case)
        times = {key: measure.summary(value) for key, value in measure.interleave(variants, repeats).items()}
        median = {key: value["median"] for key, value in times.items()}
        print(
            f"{name}: forward {median['forward']:.3f} ms ({work / median['forward'] * 1e3:.0f} TFLOP/s), "
            f"cuDNN {median['cuDNN forward']:.3f}; backward {median['backward']:.3f}, "
            f"cuDNN {median['cuDNN backward']:.3f}"
        )
        found[name] = times
    return found


def _elementwise(repeats: int) -> dict[str, Any]:
    """Ops bound by memory: share of the bandwidth of a copy of 512 MiB in the same run.

    The bytes are those that must move: each input once, each output once; of scores that the causal rule hides, only
    the output. Calls take their inputs in turn from a set that exceeds L2.
    """
    rows, hidden = 8192, 4096
    source = torch.randn(1 << 28, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    xs = [torch.randn(rows, hidden, device="cuda").bfloat16() for _ in range(4)]
    scores = [torch.randn(1, 16, 2048, 2048, device="cuda").bfloat16() for _ in range(3)]
    bias, freqs = xs[0][0].clone(), torch.randn(2048, 128, device="cuda")
    state = philox.new_state("cuda")
    one, all_scores = xs[0].numel() * 2e-6, scores[0].numel() * 2e-6  # MB

    def x(i: int) -> torch.Tensor:
        return xs[i % len(xs)]

    def s(i: int) -> torch.Tensor:
        return scores[i % len(scores)]

    def rotary(interleaved: bool) -> Callable[[int], object]:
        return lambda i: twin.rotary(x(i).view(2048, 4, 32, 128), freqs, interleaved, False)

    variants: dict[str, tuple[float, Callable[[int], object]]] = {
        "bias_dropout_add": (3 * one, lambda i: twin.bias_dropout_add(x(i), bias, x(i + 1), 0.1, state)),
        "dropout_backward": (2 * one, lambda i: twin.dropout_backward(x(i), 0.1, state)),
        "rotary": (2 * one, rotary(False)),
        "rotary interleaved": (2 * one, rotary(True)),
        "softmax": (2 * all_scores, lambda i: twin.softmax(s(i), 1.0, "none", None)),
        "softmax causal": (1.5 * all_scores, lambda i: twin.softmax(s(i), 1.0, "causal", None)),
        "softmax_backward": (3 * all_scores, lambda i: twin.softmax_backward(s(i), s(i + 1), 1.0)),
    }
    calls: dict[str, Callable[[], object]] = {name: measure.graph(call, _CALLS) for name, (_, call) in variants.items()}
    calls["copy"] = lambda: target.copy_(source)
    times = measure.interleave(calls, repeats, warmup=2, flush=measure.Flush())
    found = {}
    for name in ("copy", *variants):
        size, count = (2 * source.numel() * 2e-6, 1) if name == "copy" else (variants[name][0], _CALLS)
        summary = {key: value / count for key, value in measure.summary(times[name]).items()}
        bandwidth = size / summary["median"] * 1e-3  # MB / ms = GB/s
        found[name] = {**summary, "TB/s": bandwidth}
        share = bandwidth / found["copy"]["TB/s"]
        print(f"{name}: {summary['median']:.4f} ms, {bandwidth:.2f} TB/s, {share:.2f} of a copy")
    return found


def run(progress: Callable[[float], None] | None = None, repeats: int = 20) -> dict[str, Any]:
    """Measure; `progress` is told the fraction done."""
    found = {"attention": _attention(repeats)}
    if progress is not None:
        progress(0.8)
    found["elementwise"] = _elementwise(repeats)
    if progress is not None:
        progress(1.0)
    return {"ms": found, "provenance": measure.provenance(KERNELS)}


def main() -> None:
    """Print the times, and write docs/results/attention.json if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/results/attention.json")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    payload = run(repeats=options.repeats)
    if options.write:
        measure.write_result(NAME, payload)


def tables(payload: dict[str, Any]) -> list[Table]:
    """Attention against cuDNN's, and the ops around it against the device copy."""
    rows = []
    for name, times in payload["ms"]["attention"].items():
        cells = [name.replace(" none", "").replace(" dropout=0.0", "")]
        for way in ("forward", "backward"):
            ours, theirs = times[way]["median"], times[f"cuDNN {way}"]["median"]
            cells += [f"{ours:.2f}", percent(theirs / ours)]
        rows.append(tuple(cells))
    columns = ("attention, bf16", "forward ms", "of cuDNN", "backward ms", "of cuDNN")
    note = (
        "100 % is the speed of cuDNN's attention as torch calls it, interleaved in the same run. cuDNN's bits are its "
        f"own; these are reproducible on a CPU. {origin(payload)}"
    )
    around = payload["ms"]["elementwise"]
    others = tuple(
        (name.replace("_", " "), f"{value['TB/s']:.2f}", percent(value["TB/s"] / around["copy"]["TB/s"]))
        for name, value in around.items()
    )
    return [
        Table("Attention", columns, tuple(rows), note),
        Table("Around attention, bf16", ("kernel", "TB/s", "of copy"), others, origin(payload)),
    ]


if __name__ == "__main__":
    main()
