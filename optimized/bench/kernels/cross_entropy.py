"""Softmax cross-entropy of a language model's logits, as `copies` explains (docs/results/cross_entropy.json).

Forward must read the logits; backward must read them and write their gradient. PyTorch's loss is that of the logits in
fp32, eager and compiled, forward and backward together, as ours is once more through autograd.
"""

from collections.abc import Callable
from typing import Any

import torch

import optimized as te
from optimized.bench import Payload, Progress, each, silent
from optimized.bench.memory_bound import DTYPES, Copies, of_copy
from optimized.bench.table import Table

NAME = "cross_entropy"
WHAT = "cross-entropy, against PyTorch and a copy"
KERNELS = ("cross_entropy",)
TOKENS = 8192
# Dtype and classes: GPT-2's vocabulary, padded and as it is, whose rows are not aligned; Llama 3's.
CASES = (("bf16", 50304), ("bf16", 50257), ("bf16", 128256), ("fp32", 50304))
BYTES = {"forward": 1, "backward": 2}  # of an element, in units of its size; all others do both

twin = torch.ops.twin


def _theirs(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.float(), target)


def variants(logits: torch.Tensor, target: torch.Tensor) -> dict[str, Callable[[int], object]]:
    """The ops by themselves, and losses with their gradients."""
    torch._dynamo.reset()  # so that nothing is compiled for more than one shape
    options = (-100, 0.0)
    loss, *stats = twin.cross_entropy(logits, target, *options)
    _, divisor = twin.cross_entropy_mean(loss, target, -100, "mean")
    one = torch.ones((), device="cuda")
    losses = {
        "forward + backward": te.cross_entropy,
        "PyTorch, eager": _theirs,
        "PyTorch, compiled": torch.compile(_theirs),
    }
    leaf = logits.detach().requires_grad_()

    def both(function: Callable[..., torch.Tensor]) -> Callable[[int], object]:
        def call(_: int) -> object:
            with torch.enable_grad():
                return torch.autograd.grad(function(leaf, target), leaf)

        return call

    return {
        "forward": lambda _: twin.cross_entropy(logits, target, *options),
        "backward": lambda _: twin.cross_entropy_backward(one, divisor, logits, target, *stats, *options),
        **{name: both(function) for name, function in losses.items()},
    }


@torch.no_grad()
def run(progress: Progress = silent, repeats: int = 11) -> Payload:
    copies = Copies(2, repeats)
    rows: list[dict[str, Any]] = []
    for name, classes in each(CASES, progress):
        dtype = DTYPES[name]
        logits = torch.empty(TOKENS, classes, dtype=dtype, device="cuda").normal_(std=3)
        target = torch.randint(0, classes, (TOKENS,), device="cuda")
        ops = variants(logits, target)
        size = TOKENS * classes * dtype.itemsize
        moved = {op: size * BYTES.get(op, sum(BYTES.values())) for op in ops}
        rows += copies.rows({"case": f"{name}, {classes:,}", "tokens": TOKENS, "classes": classes}, ops, moved)
    return copies.result(rows, KERNELS)


def tables(payload: Payload) -> list[Table]:
    """Losses against the device copy."""
    return [of_copy(payload, "Cross-entropy of 8192 tokens, by dtype and classes", "case", str)]
