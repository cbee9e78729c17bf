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
from reference import philox

twin = torch.ops.twin
NAME = "attention"
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
    """Ops bound by memory: share of the bandwidth of a copy in the same run."""
    rows, hidden = 8192, 4096
    x, residual = (torch.randn(rows, hidden, device="cuda").bfloat16() for _ in range(2))
    bias = torch.randn(hidden, device="cuda").bfloat16()
    state = philox.new_state("cuda")
    scores = torch.randn(1, 16, 2048, 2048, device="cuda").bfloat16()
    y = twin.softmax(scores, 1.0, "none", None)
    heads = x.view(2048, 4, 32, 128)
    freqs = torch.randn(2048, 128, device="cuda")
    target = torch.empty_like(x)
    megabyte = x.numel() * 2e-6
    variants: dict[str, tuple[float, Callable[[], object]]] = {
        "copy": (2 * megabyte, lambda: target.copy_(x)),
        "bias_dropout_add": (3 * megabyte, lambda: twin.bias_dropout_add(x, bias, residual, 0.1, state)),
        "dropout_backward": (2 * megabyte, lambda: twin.dropout_backward(x, 0.1, state)),
        "rotary": (2 * megabyte, lambda: twin.rotary(heads, freqs, False, False)),
        "softmax": (2 * scores.numel() * 2e-6, lambda: twin.softmax(scores, 1.0, "none", None)),
        "softmax causal": (2 * scores.numel() * 2e-6, lambda: twin.softmax(scores, 1.0, "causal", None)),
        "softmax_backward": (3 * scores.numel() * 2e-6, lambda: twin.softmax_backward(scores, y, 1.0)),
    }
    times = measure.interleave({name: call for name, (_, call) in variants.items()}, repeats, flush=measure.Flush())
    found = {}
    for name, (size, _) in variants.items():
        summary = measure.summary(times[name])
        bandwidth = size / summary["median"] * 1e-3  # MB / ms = GB/s
        found[name] = {**summary, "TB/s": bandwidth}
        print(
            f"{name}: {summary['median']:.4f} ms, {bandwidth:.2f} TB/s, "
            f"{bandwidth / found['copy']['TB/s']:.2f} of a copy"
        )
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


if __name__ == "__main__":
    main()
