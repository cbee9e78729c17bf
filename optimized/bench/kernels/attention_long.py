"""Attention over many keys: one chain along all of them, segments of 4,096, and PyTorch's with split keys
(docs/results/attention_long.json).

A step of one token has 32 heads of queries and 8 of keys, of 128 channels, in bf16, and pages of 128 keys in drawn
order. Its calls are a CUDA graph that goes round caches which L2 does not hold. "walk" is a block of threads for each
key head, "shared" the kernels that share its keys; "flash" is PyTorch's flash decoding over keys that lie one after the
other. Training has one text, causal, with 32 heads of 128 channels; cuDNN's is as PyTorch calls it.
"""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

import optimized  # noqa: F401  (registers the CUDA ops)
from optimized import measure
from optimized.bench import Payload, Progress, result, silent
from optimized.bench.layers.layer_models import cudnn, flash
from optimized.bench.table import Table, percent, table
from optimized.ops.attentions import attention_decode

twin = torch.ops.twin
NAME = "attention_long"
WHAT = "attention over many keys, two orders"
KERNELS = ("attention", "attention_backward", "attention_backward_ends", "attention_decode", "attention_gaps")
HEADS, GROUPS, D, PAGE = 32, 8, 128, 128
BATCHES, KEYS = (1, 8, 32), (2048, 8192, 32768)
TEXTS = (16384, 32768)
SEGMENT = 4096
LEAST_BYTES = 256 << 20  # of caches that a graph goes round
NEVER, ALWAYS = {"LEAST_KEYS": 1 << 30}, {"LEAST_KEYS": 1, "WAVES": 1 << 20}
WAYS: dict[str, tuple[dict[str, Any], int | None]] = {
    "one chain, walk": (NEVER, None),
    "one chain, shared": (ALWAYS, None),
    "segments, walk": (NEVER, SEGMENT),
    "segments, shared": (ALWAYS, SEGMENT),
}


def _calls(batch: int, keys: int) -> int:
    """Of a graph: each has a cache of its own."""
    return min(16, max(1, -(-LEAST_BYTES // (4 * batch * keys * GROUPS * D))))


def _step(batch: int, keys: int) -> dict[str, Callable[[], object]]:
    """Each way, as a graph."""
    calls, group = _calls(batch, keys), HEADS // GROUPS

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    pages = batch * keys // PAGE
    caches = [(drawn(pages, PAGE, GROUPS, D), drawn(pages, PAGE, GROUPS, D)) for _ in range(calls)]
    rows, order = drawn(batch * group, GROUPS, D), torch.randperm(pages, device="cuda").int().view(batch, -1)
    lengths = [torch.full((batch,), n, dtype=torch.int32, device="cuda") for n in (group, keys)]
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * group
    rest = (order, D**-0.5, "none", -1, -1, *lengths, starts, group, keys, None)

    def captured(choice: dict[str, Any], segment: int | None) -> Callable[[], object]:
        with mock.patch.multiple(attention_decode, **choice):
            return measure.graph(lambda i: twin.attention_paged(rows, *caches[i], *rest, segment), calls)

    def theirs(i: int) -> object:
        keys_of, values_of = (x.view(batch, keys, GROUPS, D).transpose(1, 2) for x in caches[i])
        return flash(rows.view(batch, group, GROUPS, D).transpose(1, 2), keys_of, values_of)

    graphs = {name: captured(*way) for name, way in WAYS.items()}
    return {**graphs, "flash": measure.graph(theirs, calls)}


def _training(tokens: int) -> dict[str, Callable[[], object]]:
    """Forward and backward of one text; the backward is one for both orders."""
    q, k, v, grad = (torch.randn(1, HEADS, tokens, D, device="cuda").bfloat16() for _ in range(4))
    rest = (D**-0.5, "causal", -1, -1, None, 0.0, None)
    in_segments = (*rest, *[None] * 9, SEGMENT)
    out, m, inv = twin.attention(q, k, v, *in_segments)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    theirs = functools.partial(cudnn, causal=True, p=0.0)
    found = theirs(*leaves)
    return {
        "forward": lambda: twin.attention(q, k, v, *rest),
        "forward, segments": lambda: twin.attention(q, k, v, *in_segments),
        "cuDNN forward": lambda: theirs(q, k, v),
        "backward": lambda: twin.attention_backward(grad, q, k, v, out, m, inv, *in_segments),
        "cuDNN backward": lambda: torch.autograd.grad(found, leaves, grad, retain_graph=True),
    }


def run(progress: Progress = silent, repeats: int = 15) -> Payload:
    steps, texts, done = [], [], 0
    for batch in BATCHES:
        for keys in KEYS:
            calls, times = _calls(batch, keys), measure.interleave(_step(batch, keys), repeats, 2)
            us = {name: measure.summary([one * 1e3 / calls for one in found]) for name, found in times.items()}
            steps.append({"batch": batch, "keys": keys, "us": us})
            torch.cuda.empty_cache()
            done += 1
            progress(done / (len(BATCHES) * len(KEYS) + len(TEXTS)))
    for tokens in TEXTS:
        times = measure.interleave(_training(tokens), 5, 1, ahead=True)
        texts.append({"tokens": tokens, "ms": {name: measure.summary(found) for name, found in times.items()}})
        torch.cuda.empty_cache()
        done += 1
        progress(done / (len(BATCHES) * len(KEYS) + len(TEXTS)))
    return result("attention over many keys, in one chain and in segments", KERNELS, steps=steps, texts=texts)


def tables(payload: Payload) -> list[Table]:
    """A step of one token, and training."""
    steps, texts = [], []
    for row in payload["steps"]:
        us = {name: one["median"] for name, one in row["us"].items()}
        chain = min(us["one chain, walk"], us["one chain, shared"])
        best = min(us["segments, walk"], us["segments, shared"])
        cells = [f"{us[name]:.0f}" for name in (*WAYS, "flash")]
        ratios = (f"{chain / us['flash']:.2f}×", f"{best / us['flash']:.2f}×")
        steps.append((f"batch {row['batch']}, {row['keys']:,} keys", *cells, *ratios))
    for row in payload["texts"]:
        ms = {name: one["median"] for name, one in row["ms"].items()}
        both = [ms[name] + ms["backward"] for name in ("forward", "forward, segments")]
        theirs = ms["cuDNN forward"] + ms["cuDNN backward"]
        cells = [f"{ms[name]:.1f}" for name in ("forward", "forward, segments", "backward")]
        texts.append((f"{row['tokens']:,} tokens", *cells, percent(both[1] / both[0] - 1), percent(theirs / both[1])))
    how = (
        "Microseconds of a step of one token, attention alone. The last columns divide the quicker way of each order "
        "by PyTorch's flash decoding, which splits keys as it likes."
    )
    of_texts = (
        "Milliseconds of one causal text. The backward is the same for both orders; what segments add is of forward "
        "and backward together, and so is the share of cuDNN's speed."
    )
    columns = ("", *WAYS, "flash", "chain / flash", "segments / flash")
    trained = ("", "forward", "in segments", "backward", "segments add", "of cuDNN's speed")
    return [
        table(payload, "One token after many", columns, steps, how),
        table(payload, "Long texts in training", trained, texts, of_texts),
    ]
