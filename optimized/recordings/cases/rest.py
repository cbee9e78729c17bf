"""Cases of `twin parity`: norms, activations, attention, softmax, rotary embedding, dropout, losses, embedding."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from optimized.recordings.case import (
    FP8,
    HALVES,
    WIDE,
    Case,
    Outputs,
    every_word,
    named,
    numbers,
    random_state,
    short,
    state,
)
from reference import philox
from reference.ops.activation import GATED
from reference.ops.activation import RECORDED as ACTIVATIONS
from reference.ops.adam import correction
from reference.ops.norm import KINDS as NORMS

twin = torch.ops.twin
EPSILON = 1e-5


def _norm(shape: tuple[int, int], dtype: torch.dtype, kind: str, device: torch.device) -> Outputs:
    """Forward, backward with and without the residual's gradient, and the FP8 cast where the width allows it."""
    x, grad, residual = (numbers(shape, dtype, 101 + n).to(device) for n in range(3))
    zero_centered = shape[0] % 2 == 0
    weight, bias = (philox.normal((shape[1],), 1.0 - n, 0.3, seed=104 + n).to(dtype).to(device) for n in range(2))
    beta = bias if kind == "layernorm" else None
    y, mean, rstd = twin.norm(x, weight, beta, EPSILON, zero_centered, kind, dtype)
    found = named("y mean rstd", (y, mean, rstd))
    for name, extra in (("", None), (" + residual", residual)):
        results = twin.norm_backward(grad, x, weight, mean, rstd, zero_centered, kind, extra)
        found |= named(f"dx{name} dweight{name} dbias{name}".replace(" + ", "+"), results)
    if shape[1] % 16 == 0:
        for target in FP8:
            scales, history = state(device)
            cast = twin.norm_cast_transpose(x, weight, beta, EPSILON, zero_centered, kind, scales, history, 1, target)
            found |= named(" ".join(f"{n}.{short(target)}" for n in ("q", "q_t", "scale_inv", "m", "r")), cast)
            found[f"amax.{short(target)}"] = history
    return found


def norms() -> Iterator[Case]:
    """Norms: forward, backward, and forward to FP8."""
    for kind, dtype in product(NORMS, WIDE):
        for shape in ((1, 16), (7, 80), (34, 201), (66, 1040), (5, 4096), (1000, 2048)):
            size = "x".join(map(str, shape))
            yield Case(kind, f"{short(dtype)} {size}", partial(_norm, shape, dtype, kind), live=shape[0] > 500)


def _words_through(dtype: torch.dtype, kind: str, device: torch.device) -> Outputs:
    """An activation and its derivative, of all words of a 16-bit dtype."""
    x = every_word(dtype).to(device)
    if kind in GATED:  # the half that is activated has every word
        x = torch.cat([x, numbers((256, 256), dtype, 111).to(device)], 1)
    grad = numbers((256, 256), dtype, 112).to(device)
    return {"y": twin.activation(x, kind), "dx": twin.activation_backward(grad, x, kind)}


def _activation_cast(shape: tuple[int, int], dtype: torch.dtype, kind: str, device: torch.device) -> Outputs:
    rows, width = shape
    x = numbers((rows, 2 * width if kind in GATED else width), dtype, 121).to(device)
    grad = numbers(shape, dtype, 122).to(device)
    found: Outputs = {}
    for target in FP8:
        scales, history = state(device)
        label = short(target)
        forward = twin.activation_cast_transpose(x, kind, scales, history, 1, target)
        backward = twin.activation_backward_cast_transpose_dbias(grad, x, kind, scales, history, 1, target)
        found |= named(f"q.{label} q_t.{label} scale_inv.{label}", forward)
        found |= named(f"dq.{label} dq_t.{label} dscale_inv.{label} dbias.{label}", backward)
        found[f"amax.{label}"] = history
    return found


def activations() -> Iterator[Case]:
    """Activations of every word, and activations with the FP8 cast; forward and backward."""
    for kind, dtype in product(ACTIVATIONS, WIDE):
        yield Case(f"{kind}", f"{short(dtype)}, 65,536 words", partial(_words_through, dtype, kind))
        for shape in ((1, 16), (37, 80), (130, 144), (1000, 2048)):
            size = "x".join(map(str, shape))
            run = partial(_activation_cast, shape, dtype, kind)
            yield Case(f"{kind} to FP8", f"{short(dtype)} {size}", run, live=shape[0] > 500)


def _mask(kind: str, b: int, h: int, sq: int, skv: int) -> torch.Tensor | None:
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
    hidden = _mask(mask, b, h, sq, skv)
    rest = (d**-0.5, mask_type, -1, -1, None if hidden is None else hidden.to(device), dropout)
    drawn = random_state(device) if dropout else None
    before = None if drawn is None else drawn.clone()
    out, m, inv = twin.attention(q, k, v, *rest, drawn)
    gradients = twin.attention_backward(grad, q, k, v, out, m, inv, *rest, before)
    found = named("out m inv dq dk dv", (out, m, inv, *gradients))
    return found if drawn is None else {**found, "rng_state": drawn}


def attentions() -> Iterator[Case]:
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


def _attention_fp8(
    sizes: tuple[int, ...], dtype: torch.dtype, mask_type: str, dropout: float, device: torch.device
) -> Outputs:
    b, h, hkv, s, d = sizes

    def codes(n: int, seed: int) -> torch.Tensor:
        return philox.normal((b, n, s, d), std=100.0, seed=seed).to(device).to(torch.float8_e4m3fn)

    q, k, v, factors = codes(h, 241), codes(hkv, 242), codes(hkv, 243), philox.uniform((3, 1), seed=244) / 100
    grad = philox.normal((b, h, s, d), seed=245).to(dtype).to(device)
    v_t = v.view(torch.uint8).transpose(2, 3).contiguous().view(torch.float8_e4m3fn)
    scale_invs, rest = list(factors.to(device)), (d**-0.5, mask_type, -1, -1, None, dropout)
    drawn = random_state(device) if dropout else None
    before = None if drawn is None else drawn.clone()
    out, m, inv = twin.attention_fp8(q, k, v_t, *scale_invs, *rest, drawn, dtype)
    gradients = twin.attention_fp8_backward(grad, q, k, v, *scale_invs, out, m, inv, *rest, before)
    return named("out m inv dq dk dv", (out, m, inv, *gradients))


def attentions_fp8() -> Iterator[Case]:
    """Attention in FP8, forward, and its backward."""
    for dtype in HALVES:
        for label, sizes, mask_type, dropout in (
            ("causal", (1, 2, 2, 150, 64), "causal", 0.0),
            ("GQA, dropout", (2, 4, 2, 130, 128), "none", 0.1),
            ("wide heads", (1, 1, 1, 140, 256), "causal", 0.0),
        ):
            run = partial(_attention_fp8, sizes, dtype, mask_type, dropout)
            yield Case("attention_fp8", f"{short(dtype)}, {label}", run, live=True)  # not recorded yet


def _attention_options(kind: str, dtype: torch.dtype, device: torch.device) -> Outputs:
    """A bias with its gradient, ALiBi, or sinks with theirs; grouped heads, causal, with dropout."""
    b, h, hkv, s, d = 2, 4, 2, 150, 64

    def heads(n: int, seed: int) -> torch.Tensor:
        return philox.normal((b, n, s, d), seed=seed).to(dtype).to(device)

    q, k, v, grad = heads(h, 232), heads(hkv, 233), heads(hkv, 234), heads(h, 235)
    bias = philox.normal((1, h, s, s), seed=236).to(dtype).to(device) if kind == "bias" else None
    slopes = (2.0 ** -torch.arange(1, h + 1, device=device)).float() if kind == "ALiBi" else None
    sinks = philox.normal((h,), seed=237).to(device) if kind == "sinks" else None
    drawn, options = random_state(device), (bias, slopes, sinks)
    before, rest = drawn.clone(), (d**-0.5, "causal", -1, -1, None, 0.1)
    out, m, inv = twin.attention(q, k, v, *rest, drawn, *options)
    given = (grad, q, k, v, out, m, inv, *rest, before, *options)
    found = named("out m inv dq dk dv", (out, m, inv, *twin.attention_backward(*given)))
    if kind == "bias":
        found["dbias"] = twin.attention_bias_backward(*given)
    if kind == "sinks":
        found["dsinks"] = twin.attention_sink_backward(grad, out, m, inv, sinks)
    return found


def attention_options() -> Iterator[Case]:
    """Attention whose scores have a bias, or whose rows have a sink."""
    ops = {"bias": "attention_bias_backward", "ALiBi": "attention", "sinks": "attention_sink_backward"}
    for dtype, (kind, op) in product(HALVES, ops.items()):
        run = partial(_attention_options, kind, dtype)
        yield Case(op, f"{short(dtype)}, {kind}", run, live=True)  # not recorded yet


def _softmax(dtype: torch.dtype, mask_type: str, mask: str, device: torch.device) -> Outputs:
    shape = (2, 3, 40, 150)
    x, grad = (philox.normal(shape, std=4.0 - 3 * n, seed=141 + n).to(dtype).to(device) for n in range(2))
    hidden = _mask(mask, *shape)
    y = twin.softmax(x, 0.3, mask_type, None if hidden is None else hidden.to(device))
    return {"y": y, "dx": twin.softmax_backward(grad, y, 0.3)}


def _rotary(dtype: torch.dtype, interleaved: bool, device: torch.device) -> Outputs:
    x, grad = (philox.normal((33, 2, 3, 48), seed=151 + n).to(dtype).to(device) for n in range(2))
    positions = torch.arange(40.0)[:, None]
    freqs = (positions * philox.uniform((1, 32), seed=153) * 7).to(device)
    return {"y": twin.rotary(x, freqs, interleaved, False), "dx": twin.rotary(grad, freqs, interleaved, True)}


def _normal(mean: float, std: float, device: torch.device) -> Outputs:
    values = torch.full((1 << 20,), torch.nan, device=device)
    twin.normal(values, mean, std, 161)
    return {"values": values}


def _dropout(dtype: torch.dtype, p: float, parts: str, device: torch.device) -> Outputs:
    x, residual = (numbers((45, 100), dtype, 161 + n).to(device) for n in range(2))
    bias = philox.normal((100,), seed=163).to(dtype).to(device)
    drawn = random_state(device) if p else None
    before = None if drawn is None else drawn.clone()
    out = twin.bias_dropout_add(x, bias if "b" in parts else None, residual if "r" in parts else None, p, drawn)
    found = {"out": out, "dx": twin.dropout_backward(x, p, before)}
    return found if drawn is None else {**found, "rng_state": drawn}


def _adam(dtype: torch.dtype, master: bool, decoupled: bool, device: torch.device) -> Outputs:
    """Three steps of two tensors."""
    sizes, param = ((3, 7), (33, 100)), torch.float32 if master else dtype
    grads = [numbers(shape, dtype, 171 + i).to(device) for i, shape in enumerate(sizes)]
    params = [numbers(shape, param, 173 + i).to(device) for i, shape in enumerate(sizes)]
    first, second = ([torch.zeros(shape, device=device) for shape in sizes] for _ in range(2))
    rounded = [torch.zeros_like(grad) for grad in grads] if master else []
    for step in (1, 2, 3):
        divisors = correction(0.9, step), correction(0.999, step)
        twin.adam(grads, params, first, second, rounded, 1e-2, 0.9, 0.999, 1e-8, 0.1, *divisors, decoupled)
    lists = {"param": params, "exp_avg": first, "exp_avg_sq": second, "rounded": rounded}
    return {f"{name}.{i}": x for name, found in lists.items() for i, x in enumerate(found)}


def elementwise() -> Iterator[Case]:
    """Adam, normal numbers, softmax, rotary embedding, and bias + dropout + residual, forward and backward."""
    for dtype, master, decoupled in product(WIDE, (False, True), (False, True)):
        if not (master and dtype == torch.float32):
            label = f"{short(dtype)}{', masters' * master}{', decoupled decay' * decoupled}"
            yield Case("adam", label, partial(_adam, dtype, master, decoupled))
    for dtype, (mask_type, mask) in product(
        HALVES, (("none", ""), ("causal", ""), ("causal_bottom_right", "padding"), ("none", "arbitrary"))
    ):
        yield Case("softmax", f"{short(dtype)} {mask_type} {mask}".strip(), partial(_softmax, dtype, mask_type, mask))
    for dtype, interleaved in product(WIDE, (False, True)):
        label = f"{short(dtype)}{', interleaved' * interleaved}"
        yield Case("rotary", label, partial(_rotary, dtype, interleaved))
    for mean, std in ((0.0, 1.0), (0.5, 0.023)):
        yield Case("normal", f"mean {mean}, std {std}", partial(_normal, mean, std), live=True)  # not recorded yet
    for dtype, p, parts in product(WIDE, (0.0, 0.1), ("br", "b", "r", "-")):
        yield Case("bias_dropout_add", f"{short(dtype)} p={p} {parts}", partial(_dropout, dtype, p, parts))


def _cross_entropy(dtype: torch.dtype, classes: int, smoothing: float, device: torch.device) -> Outputs:
    """Forward, mean and backward; every seventh row is ignored."""
    logits = numbers((60, classes), dtype, 181).to(device)
    target = (philox.uniform((60,), seed=182) * classes).long()
    target[::7] = -100
    target = target.to(device)
    loss, *stats = twin.cross_entropy(logits, target, -100, smoothing)
    mean, divisor = twin.cross_entropy_mean(loss, target, -100, "mean")
    dx = twin.cross_entropy_backward(mean, divisor, logits, target, *stats, -100, smoothing)
    return {"loss": loss, "mean": mean, "dx": dx, **named("m inv", stats)}


def _embedding(dtype: torch.dtype, width: int, padding: int, device: torch.device) -> Outputs:
    """Rows of a table of 300; half of the numbers are among the first ten."""
    weight, grad = numbers((300, width), dtype, 191).to(device), numbers((2000, width), dtype, 192).to(device)
    ids = (philox.uniform((2000,), seed=193) * 300).long()
    ids = torch.where(ids % 2 == 0, ids % 10, ids).to(device)
    return {"out": twin.embedding(weight, ids), "dweight": twin.embedding_backward(grad, ids, 300, padding)}


def losses() -> Iterator[Case]:
    """Cross-entropy and embedding, forward and backward. They have not been recorded yet."""
    for dtype, classes, smoothing in product(WIDE, (1000, 8195, 50304), (0.0, 0.1)):
        label = f"{short(dtype)} {classes} classes{', smoothed' * bool(smoothing)}"
        yield Case("cross_entropy", label, partial(_cross_entropy, dtype, classes, smoothing), live=True)
    for dtype, (width, padding) in product(WIDE, ((64, -1), (1100, 3))):
        yield Case("embedding", f"{short(dtype)} [300, {width}]", partial(_embedding, dtype, width, padding), live=True)


def cases() -> Iterator[Case]:
    yield from norms()
    yield from activations()
    yield from attentions()
    yield from attention_options()
    yield from attentions_fp8()
    yield from elementwise()
    yield from losses()
