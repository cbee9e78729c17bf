"""Cases of `attention`, whose backward belongs to them; `drawn` is what the calls of its relatives begin with."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from optimized.recordings.calls import BF16, FP16, FP32, Call, Calls, Inputs
from optimized.recordings.case import HALVES, Case, Outputs, named, random_state, short
from reference.numbers import philox
from reference.ops.attentions.attention_options import Options

twin = torch.ops.twin


def hidden_of(kind: str, b: int, h: int, sq: int, skv: int) -> torch.Tensor | None:
    """A padding mask [b, 1, 1, skv] whose last sequence is all padding, or a random mask [b, h, sq, skv]."""
    if kind == "padding":
        lengths = torch.tensor([skv * (n + 1) // b for n in range(b)][::-1])
        lengths[-1] = 0
        return (torch.arange(skv) >= lengths[:, None]).view(b, 1, 1, skv)
    if kind == "arbitrary":
        return philox.uniform((b, h, sq, skv), seed=131) < 0.4
    return None


def _attention(
    sizes: tuple[int, int, int, int, int, int],
    dtype: torch.dtype,
    mask_type: str,
    mask: str,
    dropout: float,
    device: torch.device,
) -> Outputs:
    b, h, hkv, sq, skv, d = sizes

    def heads(n: int, s: int, seed: int) -> torch.Tensor:
        return philox.normal((s, b, n, d), seed=seed).to(dtype).to(device).permute(1, 2, 0, 3)

    q, k, v, grad = heads(h, sq, 132), heads(hkv, skv, 133), heads(hkv, skv, 134), heads(h, sq, 135)
    hidden = hidden_of(mask, b, h, sq, skv)
    rest = (d**-0.5, mask_type, -1, -1, None if hidden is None else hidden.to(device), dropout)
    drawn = random_state(device) if dropout else None
    before = None if drawn is None else drawn.clone()
    out, m, inv = twin.attention(q, k, v, *rest, drawn)
    gradients = twin.attention_backward(grad, q, k, v, out, m, inv, *rest, before)
    found = named("out m inv dq dk dv", (out, m, inv, *gradients))
    return found if drawn is None else {**found, "rng_state": drawn}


def in_segments(sizes: tuple[int, int, int, int, int, int], dropout: float, device: torch.device) -> Outputs:
    """Keys in segments, of which one, two or all three hold keys that a query sees."""
    b, h, hkv, sq, skv, d = sizes

    def heads(n: int, s: int, seed: int) -> torch.Tensor:
        return philox.normal((b, n, s, d), seed=seed).to(BF16).to(device)

    q, k, v, grad = heads(h, sq, 242), heads(hkv, skv, 243), heads(hkv, skv, 244), heads(h, sq, 245)
    drawn = random_state(device) if dropout else None
    before = None if drawn is None else drawn.clone()
    options = Options(d**-0.5, "causal_bottom_right", 5000, 0, None, dropout, drawn, key_segment=4096)
    results = twin.attention(q, k, v, *options)
    gradients = twin.attention_backward(grad, q, k, v, *results, *options._replace(rng_state=before))
    return named("out m inv dq dk dv", (*results, *gradients))


def cases() -> Iterator[Case]:
    """Attention, forward and backward."""
    for dtype in HALVES:
        for label, sizes, mask_type, mask, dropout in (
            ("no mask", (1, 2, 2, 70, 150, 64), "none", "", 0.0),
            ("one query", (2, 1, 1, 1, 129, 8), "none", "", 0.0),
            ("five blocks of keys", (1, 2, 1, 130, 600, 72), "none", "", 0.0),
            ("causal", (1, 2, 2, 150, 150, 32), "causal", "", 0.0),
            ("causal, GQA", (2, 4, 2, 65, 65, 80), "causal", "", 0.0),
            ("bottom right", (1, 2, 1, 40, 140, 128), "causal_bottom_right", "", 0.0),
            ("padding", (3, 2, 2, 50, 66, 32), "none", "padding", 0.0),
            ("causal, padding, dropout", (2, 2, 2, 70, 70, 64), "causal", "padding", 0.1),
            ("arbitrary mask, dropout", (1, 2, 2, 33, 130, 16), "none", "arbitrary", 0.5),
            ("wide heads", (1, 1, 1, 40, 40, 256), "causal", "", 0.0),
            ("2048 tokens", (2, 4, 4, 2048, 2048, 128), "causal", "", 0.1),
        ):
            run = partial(_attention, sizes, dtype, mask_type, mask, dropout)
            yield Case("attention", f"{short(dtype)}, {label}", run, live=max(sizes) > 500)
    for label, sizes, dropout in (
        ("one query", (2, 4, 2, 1, 9000, 128), 0.0),
        ("a prompt's end", (1, 2, 1, 150, 9000, 64), 0.1),
        ("wide heads", (1, 1, 1, 100, 5000, 192), 0.0),
    ):
        yield Case("attention", f"bf16, in segments, {label}", partial(in_segments, sizes, dropout))


class Drawn(NamedTuple):
    """Arguments of attention, and a gradient of what comes back."""

    grad: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: Options

    def saved(self) -> tuple[torch.Tensor, ...]:
        """The gradient and what the backward is given: q, k, v, and the results of the forward."""
        state = self.options.rng_state
        options = self.options._replace(rng_state=None if state is None else state.clone())
        return (self.grad, self.q, self.k, self.v, *twin.attention(self.q, self.k, self.v, *options))


def _draw(
    c: Inputs,
    sizes: tuple[int, int, int, int, int, int],
    dtype: torch.dtype = BF16,
    start: int = 0,
    contiguous: bool = False,
    e: int = 0,
    mask_type: str = "none",
    window: tuple[int, int] = (-1, -1),
    dropout: float = 0.0,
    **options: Any,
) -> Drawn:
    """`[s, b, h, d]` seen as `[b, h, s, d]`, as in the layers, if not contiguous; `e`: the size of v's heads."""
    b, h, heads, sq, skv, d = sizes

    def of(n: int, s: int, d: int) -> torch.Tensor:
        if contiguous:
            return c.normal(b, n, s, d, dtype=dtype, start=start)
        return c.normal(s, b, n, d, dtype=dtype, start=start).permute(1, 2, 0, 3)

    q, k, v, grad = of(h, sq, d), of(heads, skv, d), of(heads, skv, e or d), of(h, sq, e or d)
    state = c.random_state() if dropout else None
    return Drawn(grad, q, k, v, Options(0.125, mask_type, *window, dropout=dropout, rng_state=state, **options))


def plain(c: Inputs) -> Iterator[Drawn]:
    """Each head dimension's kernels; one row, ragged blocks, whole ones; masks, windows, dropout, grouped heads."""
    for d, dropout in ((24, 0.0), (64, 0.1), (128, 0.0), (128, 0.1), (200, 0.1), (256, 0.0)):
        yield _draw(c, (1, 4, 2, 130, 150, d), dropout=dropout)
    for d in (64, 200):
        yield _draw(c, (1, 4, 2, 130, 150, d), FP16)
        yield _draw(c, (1, 2, 1, 128, 256, d), mask_type="causal")
        yield _draw(c, (1, 2, 1, 1, 1, d), mask_type="causal")
    for d in (8, 72, 136):
        yield _draw(c, (1, 2, 2, 128, 129, d), contiguous=True)
    for mask_type in ("causal", "causal_bottom_right"):
        yield _draw(c, (2, 2, 1, 40, 140, 32), mask_type=mask_type)
    for mask_type, window in (("none", (300, 0)), ("none", (100, 20)), ("causal", (200, 5))):
        yield _draw(c, (1, 2, 1, 300, 260, 32), mask_type=mask_type, window=window)
    yield _draw(c, (1, 2, 1, 140, 300, 200), mask_type="causal_bottom_right", window=(2**31 - 1, 0))
    yield _draw(c, (2, 2, 1, 40, 70, 32), mask=c.mask(2, 1, 1, 70), dropout=0.5)
    yield _draw(c, (2, 2, 1, 40, 70, 32), mask=c.mask(2, 2, 40, 70))
    yield _draw(c, (2, 2, 2, 40, 70, 32), start=1)
    yield _draw(c, (1, 2, 2, 40, 70, 8))
    for sizes in ((2, 2, 2, 0, 70, 32), (2, 2, 2, 40, 0, 32), (0, 2, 2, 40, 70, 32), (1, 1, 1, 1, 1, 8)):
        yield _draw(c, sizes, dropout=0.1)
    yield _draw(c, (7, 20, 10, 33, 40, 16), mask_type="causal")  # more tiles than a GPU has multiprocessors
    yield _draw(c, (4, 48, 24, 130, 300, 64))  # so many that the last works of backward are taken in parts
    yield _draw(c, (1, 2, 1, 140, 600, 16), mask_type="causal_bottom_right", window=(150, -1))  # turns of five blocks
    # Heads of two sizes: with the kernels of the larger one.
    yield _draw(c, (1, 2, 2, 130, 150, 40), e=128)
    yield _draw(c, (1, 1, 1, 1, 1, 16), e=8)  # where strides say nothing
    # k and v of other strides, and repeated heads.
    first = _draw(c, (2, 2, 1, 40, 70, 32), contiguous=True)
    v = c.normal(70, 2, 1, 32).permute(1, 2, 0, 3)
    yield first._replace(v=v)
    yield first._replace(k=first.k.expand(2, 2, 70, 32), v=v.expand(2, 2, 70, 32))


def with_bias(c: Inputs) -> Iterator[Drawn]:
    """A bias of every shape, with all that it may stand beside."""
    for d, dropout in ((24, 0.0), (64, 0.0), (128, 0.1), (200, 0.1)):
        yield _draw(c, (1, 4, 2, 130, 150, d), dropout=dropout, bias=c.normal(1, 4, 130, 150))
    bias = c.normal(2, 1, 130, 150, dtype=FP32)
    yield _draw(c, (2, 4, 2, 130, 150, 64), FP16, mask_type="causal", bias=bias)
    yield _draw(c, (2, 2, 1, 40, 70, 32), bias=c.normal(1, 40, 70, 2).permute(0, 3, 1, 2))  # read as a copy
    yield _draw(c, (2, 2, 1, 0, 70, 32), bias=c.normal(2, 2, 0, 70))
    yield _draw(c, (1, 2, 1, 1, 1, 64), bias=c.normal(1, 1, 1, 1, dtype=FP32), mask_type="causal", dropout=0.1)
    yield _draw(
        c, (2, 4, 2, 130, 150, 128), bias=c.normal(1, 4, 130, 150), q_lengths=lengths(c, 130), window=(40, 5),
        kv_lengths=lengths(c, 150),
    )  # fmt: skip
    yield _draw(c, (1, 4, 2, 130, 150, 192), bias=c.normal(1, 4, 130, 150), e=128)


def lengths(c: Inputs, most: int) -> torch.Tensor:
    """Of two sequences: one to `most`."""
    return c.integers(2, below=most, dtype=torch.int32) + 1


def with_more(c: Inputs) -> Iterator[Drawn]:
    """Sinks, ALiBi, and lengths of the batch's entries."""
    for d, dropout in ((64, 0.1), (128, 0.0), (256, 0.0)):
        yield _draw(c, (1, 4, 2, 130, 150, d), dropout=dropout, sinks=c.normal(4, dtype=FP32))
    for d in (64, 256):
        given: dict[str, Any] = {"q_lengths": lengths(c, 130), "kv_lengths": lengths(c, 150)}
        yield _draw(c, (2, 4, 2, 130, 150, d), mask_type="causal", dropout=0.1, contiguous=True, **given)
    for d, slopes in (
        (32, c.positive(2)),
        (64, c.positive(2, 2)),
        (128, c.positive(2)),
        (200, c.positive(1, 2)[0]),
    ):
        yield _draw(c, (2, 2, 1, 40, 70, d), mask_type="causal_bottom_right", slopes=slopes, dropout=0.1)


def packed(c: Inputs) -> Iterator[Drawn]:
    """Sequences one after the other, with rows between them and with none; every option beside them."""
    bias = c.normal(1, 4, 130, 140)
    for d, e, more in (
        (64, 64, {}),
        (128, 128, {"dropout": 0.1}),
        (72, 128, {"slopes": c.positive(4), "dropout": 0.1}),
        (40, 40, {"sinks": c.normal(4, dtype=FP32), "window": (50, 3)}),
        (64, 64, {"bias": bias}),
        (256, 256, {}),
    ):
        rows, keys = int32(c, 0, 130, 131, 136), int32(c, 2, 22, 100, 245)
        given: dict[str, Any] = {"q_lengths": int32(c, 130, 0, 5), "kv_lengths": int32(c, 20, 70, 140)}
        given |= {"q_starts": rows, "kv_starts": keys, "longest_q": 130, "longest_kv": 140, **more}
        q, k, v, grad = (c.normal(n, h, x) for n, h, x in ((137, 4, d), (250, 2, d), (250, 2, e), (137, 4, e)))
        state = c.random_state() if given.get("dropout") else None
        left, right = given.pop("window", (-1, -1))
        yield Drawn(grad, q, k, v, Options(0.125, "causal_bottom_right", left, right, rng_state=state, **given))


def many_keys(c: Inputs) -> Iterator[Drawn]:
    """Few queries of more keys than `attention_decode` asks for."""
    for d, dtype, sq in ((64, BF16, 1), (128, FP16, 6), (200, BF16, 12)):
        yield _draw(c, (1, 4, 2, sq, 1100, d), dtype, mask_type="causal_bottom_right", sinks=c.normal(4, dtype=FP32))
    given: dict[str, Any] = {"q_lengths": int32(c, 1, 0), "kv_lengths": int32(c, 1030, 5)}
    yield _draw(c, (2, 2, 1, 2, 1030, 32), mask_type="causal_bottom_right", window=(300, 0), **given)
    yield _draw(c, (1, 4, 1, 1, 1030, 64), mask=c.mask(1, 1, 1, 1030), contiguous=True)


def segmented(c: Inputs) -> Iterator[Drawn]:
    """More keys than a segment has: each kernel, by itself and with what it may stand beside."""
    given: dict[str, Any] = {"mask_type": "causal_bottom_right", "key_segment": 4096}
    for d, sq, more in (
        (64, 1, {}),
        (128, 9, {"sinks": c.normal(2, dtype=FP32)}),
        (200, 12, {"window": (300, 0)}),
        (64, 40, {"dropout": 0.1}),
        (128, 40, {"sinks": c.normal(2, dtype=FP32)}),
        (40, 2, {"bias": c.normal(1, 1, 2, 4200, dtype=FP32)}),
        (200, 40, {"dropout": 0.1}),
        (136, 2, {"slopes": c.positive(2), "dropout": 0.5}),
    ):
        yield _draw(c, (1, 2, 1, sq, 4200, d), FP16 if d == 40 else BF16, **given, **more)
    yield _draw(c, (1, 1, 1, 260, 4200, 136), key_segment=4096)  # in clusters
    yield _draw(c, (2, 2, 1, 33, 4200, 64), q_lengths=int32(c, 33, 5), kv_lengths=int32(c, 4190, 70), **given)
    yield _draw(c, (2, 2, 1, 33, 4200, 200), q_lengths=int32(c, 33, 5), kv_lengths=int32(c, 4190, 70), **given)
    for d in (64, 200):  # few keys, where one chain's kernels have the words
        yield _draw(c, (1, 2, 1, 130, 150, d), **given)
    for d in (64, 136):
        for place in ((2, 6, 4), (2, 6, 4, 128, 512, 0, 4608)):
            drawn = _draw(c, (2, 2, 1, 17, 4200, d), dropout=0.4, **given)
            numbers = torch.tensor(place, device=c.device)
            state = torch.cat([drawn.options.rng_state, numbers])  # type: ignore[list-item]
            yield drawn._replace(options=drawn.options._replace(rng_state=state))
    for d in (64, 256):
        where: dict[str, Any] = {"q_starts": int32(c, 0, 40, 45), "kv_starts": int32(c, 0, 4200, 4270)}
        where |= {"q_lengths": int32(c, 40, 5), "kv_lengths": int32(c, 4200, 70), "longest_q": 40, "longest_kv": 4200}
        q, k, v, grad = (c.normal(n, h, d) for n, h in ((45, 2), (4270, 1), (4270, 1), (45, 2)))
        yield Drawn(grad, q, k, v, Options(0.125, "causal_bottom_right", -1, -1, **where, key_segment=4096))


def placed(c: Inputs) -> Iterator[Drawn]:
    """Dropout that draws in a larger tensor: of six heads the last two, and of 512 tokens those from 128 on, too."""
    for d in (64, 128, 200):
        for place in ((2, 6, 4), (2, 6, 4, 128, 512, 0, 512)):
            drawn = _draw(c, (2, 2, 1, 40, 150, d), dropout=0.4)
            numbers = torch.tensor(place, device=c.device)
            state = torch.cat([drawn.options.rng_state, numbers])  # type: ignore[list-item]
            yield drawn._replace(options=drawn.options._replace(rng_state=state))


def placed_with_bias(c: Inputs) -> Iterator[Drawn]:
    """`placed`, with a bias of the part."""
    for drawn in placed(c):
        (b, h, sq, _), skv = drawn.q.shape, drawn.k.shape[2]
        yield drawn._replace(options=drawn.options._replace(bias=c.normal(b, h, sq, skv, dtype=drawn.q.dtype)))


def int32(c: Inputs, *numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=c.device)


def forward(drawn: Drawn) -> Call:
    return Call(twin.attention, (drawn.q, drawn.k, drawn.v, *drawn.options))


def calls(c: Inputs) -> Calls:
    more = (*many_keys(c), *placed(c), *placed_with_bias(c), *segmented(c))
    for drawn in (*plain(c), *with_bias(c), *with_more(c), *packed(c), *more):
        yield forward(drawn)


def larger(c: Inputs) -> Iterator[Drawn]:
    yield _draw(c, (1, 48, 24, 400, 300, 128))  # more tiles than a GPU has multiprocessors
    yield _draw(c, (1, 2, 1, 700, 5000, 64), mask_type="causal", window=(200, 5))
    yield _draw(c, (1, 40, 40, 520, 520, 256), mask_type="causal", dropout=0.1)


def large(c: Inputs) -> Calls:
    for drawn in larger(c):
        yield forward(drawn)


def of_sizes(c: Inputs, rows: int, cols: int, dtype: torch.dtype = BF16) -> Iterator[Drawn]:
    """Queries and keys of any number: plain, with a bias, and with sinks."""
    bias, sinks = c.normal(1, 2, rows, cols, dtype=dtype), c.normal(2, dtype=FP32)
    every: tuple[dict[str, Any], ...] = ({}, {"bias": bias}, {"sinks": sinks})
    for more in every:
        yield _draw(c, (1, 2, 2, rows, cols, 16), dtype, **more)


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for dtype in HALVES:
        for drawn in of_sizes(c, rows, cols, dtype):
            yield forward(drawn)
