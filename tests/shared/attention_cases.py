"""Inputs of attention for the tests on either device: shapes, masks, and tensors in the layouts that layers use.

And what float64 makes of them, with a bound for each number.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import strategies as st

from reference.ops.attentions import attention
from reference.ops.attentions.attention import MASK_TYPES
from reference.ops.random.dropout import keep_scale, threshold

LAYOUTS = ("bhsd", "bshd", "sbhd", "interleaved")
MASKS = ("none", "padding", "all queries", "arbitrary", "everything")
BIASES = ("none", "bhss", "1hss", "b1ss", "11ss", "h slopes", "bh slopes")  # which dimensions a bias has
LENGTHS = ("none", "queries", "keys", "both")  # what entries of a batch have lengths of


@dataclass(frozen=True)
class Case:
    """One call: q [b, h, sq, d], k [b, hkv, skv, d] and v [b, hkv, skv, e]; an e of 0 is d."""

    b: int = 1
    hkv: int = 1
    group: int = 1
    sq: int = 64
    skv: int = 64
    d: int = 64
    dtype: torch.dtype = torch.bfloat16
    mask_type: str = "none"
    mask: str = "none"
    window: tuple[int, int] = (-1, -1)
    dropout: float = 0.0
    layout: str = "bhsd"
    scale: float | None = None
    seed: int = 0
    bias: str = "none"
    bias_is_fp32: bool = False
    sinks: bool = False
    e: int = 0
    lengths: str = "none"
    key_segment: int | None = None

    @property
    def h(self) -> int:
        return self.hkv * self.group

    @property
    def softmax_scale(self) -> float:
        return self.d**-0.5 if self.scale is None else self.scale


def _numbers(generator: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(generator.normal(size=shape).astype(np.float32)).to(dtype)


def _view(generator: np.random.Generator, b: int, h: int, s: int, d: int, case: Case) -> torch.Tensor:
    """`[b, h, s, d]` as a view of memory in the case's layout."""
    if case.layout == "bhsd":
        return _numbers(generator, (b, h, s, d), case.dtype)
    if case.layout == "bshd":
        return _numbers(generator, (b, s, h, d), case.dtype).permute(0, 2, 1, 3)
    if case.layout == "sbhd":
        return _numbers(generator, (s, b, h, d), case.dtype).permute(1, 2, 0, 3)
    return _numbers(generator, (s, b, h, 3, d), case.dtype)[:, :, :, 1].permute(1, 2, 0, 3)


def _mask(generator: np.random.Generator, case: Case) -> torch.Tensor | None:
    if case.mask == "none":
        return None
    if case.mask == "padding":
        lengths = generator.integers(0, case.skv + 1, size=(case.b, 1, 1, 1))
        return torch.from_numpy(np.arange(case.skv)[None, None, None, :] >= lengths)
    shape = (1, 1, case.sq, case.skv) if case.mask == "all queries" else (case.b, case.h, case.sq, case.skv)
    density = 1.0 if case.mask == "everything" else 0.5
    return torch.from_numpy(generator.random(shape) < density)


def _bias(case: Case) -> dict[str, torch.Tensor | None]:
    """bias and slopes of a case, drawn apart, so that the other inputs of a case do not change."""
    generator, sizes = np.random.default_rng(case.seed + 1), {"b": case.b, "h": case.h, "1": 1}
    if case.bias.endswith("slopes"):
        shape = [sizes[letter] for letter in case.bias.split()[0]]
        return {"bias": None, "slopes": torch.from_numpy(generator.random(shape).astype(np.float32))}
    if case.bias == "none":
        return {"bias": None, "slopes": None}
    shape = (sizes[case.bias[0]], sizes[case.bias[1]], case.sq, case.skv)
    return {"bias": _numbers(generator, shape, torch.float32 if case.bias_is_fp32 else case.dtype), "slopes": None}


def _lengths(case: Case) -> dict[str, torch.Tensor | None]:
    """q_lengths and kv_lengths of a case, drawn apart; some are nothing, or everything."""
    generator, found = np.random.default_rng(case.seed + 3), {}
    for name, of, most in (("q_lengths", "queries", case.sq), ("kv_lengths", "keys", case.skv)):
        drawn = np.clip(generator.integers(-most // 4, most + most // 4 + 2, size=case.b), 0, most)
        found[name] = torch.from_numpy(drawn.astype(np.int32)) if case.lengths in (of, "both") else None
    return found


def inputs(case: Case) -> dict[str, torch.Tensor | None]:
    """q, k, v, grad, mask, rng_state, bias, slopes, sinks and lengths of a case, on the CPU."""
    generator = np.random.default_rng(case.seed)
    sinks = torch.from_numpy(np.random.default_rng(case.seed + 2).normal(size=case.h).astype(np.float32))
    more = _bias(case) | _lengths(case)
    return more | {
        "sinks": 2 * sinks if case.sinks else None,
        "q": _view(generator, case.b, case.h, case.sq, case.d, case),
        "k": _view(generator, case.b, case.hkv, case.skv, case.d, case),
        "v": _view(generator, case.b, case.hkv, case.skv, case.e or case.d, case),
        "grad": _view(generator, case.b, case.h, case.sq, case.e or case.d, case),
        "mask": _mask(generator, case),
        "rng_state": torch.from_numpy(generator.integers(0, 2**62, size=2)) if case.dropout else None,
    }


def to_cuda(x: torch.Tensor | None) -> torch.Tensor | None:
    """A copy on the GPU with the strides of `x`, holes included."""
    if x is None or x._base is None:
        return None if x is None else x.to("cuda")
    return x._base.to("cuda").as_strided(x.shape, x.stride(), x.storage_offset())


def run(case: Case, given: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Forward and backward: every result, by name."""
    twin = torch.ops.twin
    q, k, v, grad, mask, state = (given[name] for name in ("q", "k", "v", "grad", "mask", "rng_state"))
    before = None if state is None else state.clone()
    rest = (case.softmax_scale, case.mask_type, *case.window, mask, case.dropout)
    bias = [given.get(name) for name in ("bias", "slopes", "sinks", "q_lengths", "kv_lengths")]
    bias += [None] * 4 + [case.key_segment]  # nothing is packed
    while bias and bias[-1] is None:
        bias.pop()
    out, m, inv = twin.attention(q, k, v, *rest, state, *bias)
    dq, dk, dv = twin.attention_backward(grad, q, k, v, out, m, inv, *rest, before, *bias)
    found = {"out": out, "m": m, "inv": inv, "dq": dq, "dk": dk, "dv": dv}
    if given.get("sinks") is not None:
        found["dsinks"] = twin.attention_sink_backward(grad, out, m, inv, given["sinks"])
    if given.get("bias") is not None:
        found["dbias"] = twin.attention_bias_backward(grad, q, k, v, out, m, inv, *rest, before, *bias)
    return found if state is None else {**found, "rng_state": state}


def hidden_pairs(case: Case, mask: torch.Tensor | None) -> torch.Tensor:
    """bool [b, h, sq, skv], from the definitions of the masks."""
    i, j = torch.arange(case.sq)[:, None], torch.arange(case.skv)[None, :]
    queries, keys = _sizes(case)
    shift, (left, right) = _shift(case), case.window
    right = right if case.mask_type == "none" else 0
    hidden = (i >= queries) | (j >= keys)
    if left >= 0:
        hidden = hidden | (j < i + shift - left)
    if right >= 0:
        hidden = hidden | (j > i + shift + right)
    hidden = hidden.expand(case.b, case.h, -1, -1)
    return hidden if mask is None else hidden | mask


def _sizes(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """How many queries and keys each entry has, int64 [b, 1, 1, 1]."""
    lengths = (x if x is None else x.long() for x in _lengths(case).values())
    sizes = zip(lengths, (case.sq, case.skv), strict=True)
    queries, keys = (torch.full((case.b,), most) if x is None else x for x, most in sizes)
    return queries.view(-1, 1, 1, 1), keys.view(-1, 1, 1, 1)


def _shift(case: Case) -> torch.Tensor:
    """Of each entry's diagonal, int64 [b, 1, 1, 1]."""
    queries, keys = _sizes(case)
    return (keys - queries) * (case.mask_type != "causal")


def without_lengths(case: Case) -> tuple[Case, dict[str, torch.Tensor | None]]:
    """The same call with a mask in place of lengths, mask type and window, and with a tensor in place of slopes."""
    given = inputs(case)
    given |= {"mask": hidden_pairs(case, given["mask"]), "q_lengths": None, "kv_lengths": None}
    if given["slopes"] is not None:
        distance = (torch.arange(case.sq)[:, None] + _shift(case) - torch.arange(case.skv)).abs()
        given |= {"bias": given["slopes"].view(-1, case.h, 1, 1) * (-distance).float(), "slopes": None}
        given["bias"] = given["bias"].expand(case.b, -1, -1, -1)
    return replace(case, lengths="none", mask_type="none", window=(-1, -1)), given


def kept_pairs(case: Case, state: torch.Tensor | None) -> torch.Tensor:
    """float64 [b, h, sq, skv]: 1 where dropout keeps a weight."""
    if not threshold(case.dropout):
        return torch.ones(case.b, case.h, case.sq, case.skv, dtype=torch.float64)
    heads = [attention.keep_pairs(n, 1, case.sq, case.skv, case.dropout, state) for n in range(case.b * case.h)]
    return torch.cat(heads).view(case.b, case.h, case.sq, case.skv).double()


def _bias_values(case: Case, given: dict) -> torch.Tensor:
    """float64, broadcastable to [b, h, sq, skv]."""
    if given["slopes"] is None:
        return torch.zeros(1, 1, 1, 1).double() if given["bias"] is None else given["bias"].detach().double()
    apart = (torch.arange(case.sq)[:, None] + _shift(case) - torch.arange(case.skv)).abs()
    return -given["slopes"].double().view(-1, case.h, 1, 1) * apart


def exact(case: Case, given: dict) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Results of float64 autograd, and how far the op may be from each.

    With u the unit of rounding of the 16-bit type, t its smallest subnormal, f = max(t, 2^-125) the weight below which
    one may count as 0 (2^n does below n = -126, and 1/2 <= l), e = 2^-22 a generous unit of one
    tensor-core step (which truncates at 2^-25 of its largest term, 17 terms) and n the number of steps:
      scores   |dS| <= n e Σ|q||k|; a weight is off by a factor 1 + w, w = 1.1e-5 (grid) + 2 max(scale |dS|) + sum
               (with a bias max(.. + 2^-23 (|scale S| + 2 |b|)): t and b log2 e are rounded)
      out      u |out| + Σ weight |v| (u + 2 w + n e) + f Σ|v|              (P is rounded; l >= 1/2)
      ds       weight (Σ|grad| B_out + n e Σ|grad||v|) + (u + 2 w + f / weight)(weight |dP - D|) + t
      dq, dk   scale Σ (B_ds + n e |ds|) |k or q| + u |dq or dk|
      dv       Σ weight |grad| (u + 2 w + n e) + u |dv| + f Σ|grad|
    """
    hidden, keep, kept = (
        hidden_pairs(case, given["mask"]),
        kept_pairs(case, given["rng_state"]),
        keep_scale(case.dropout),
    )
    q, k, v = (given[name].double().requires_grad_() for name in ("q", "k", "v"))
    grad, scale = given["grad"].double(), case.softmax_scale
    keys, values = (x.repeat_interleave(case.group, 1) for x in (k, v))
    bias = _bias_values(case, given).requires_grad_()
    plain = (q @ keys.transpose(2, 3)) * scale
    scores = plain + bias
    scores = scores.masked_fill(hidden, -math.inf)
    if given["sinks"] is not None:
        sinks = given["sinks"].double().requires_grad_()
        column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = torch.softmax(scores, -1)[..., : case.skv]
    weights = torch.where(hidden, 0.0, weights)  # rows hidden altogether are NaN
    out = (weights * keep * kept) @ values
    out.backward(grad)
    truth = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    if given["bias"] is not None:
        truth["dbias"] = bias.grad
    if given["sinks"] is not None:
        truth["dsinks"] = sinks.grad

    unit, tiny = (2.0**-8, 2.0**-133) if case.dtype == torch.bfloat16 else (2.0**-11, 2.0**-24)
    step, least = 2.0**-22, max(tiny, 2.0**-125)
    counts = (case.d, case.e or case.d, case.skv, case.sq * case.group)
    along_d, along_e, along_keys, along_queries = (math.ceil(n / 16) + 1 for n in counts)
    qa, ka, va, ga = (x.detach().abs() for x in (q, keys, values, grad))
    a = weights.detach()
    score_error = scale * along_d * step * (qa @ ka.transpose(2, 3))
    if case.bias != "none":
        score_error = score_error + 2.0**-23 * (plain.detach().abs() + 2 * bias.detach().abs())
    factor = 1.1e-5 + 2 * score_error.amax(-1, keepdim=True) + (case.skv + 8) * 2.0**-23
    loose = unit + 2 * factor
    bound = {"out": unit * truth["out"].abs()}
    bound["out"] += kept * ((a * (loose + along_keys * step)) @ va + least * va.sum(2, keepdim=True))
    dp = (grad @ values.detach().transpose(2, 3)) * keep * kept
    dots = (grad * truth["out"]).sum(-1, keepdim=True)
    error = (ga * (bound["out"] + along_e * step * truth["out"].abs())).sum(-1, keepdim=True)
    error = error + kept * along_e * step * (ga @ va.transpose(2, 3))
    ds = a * (dp - dots)
    ds_bound = a * error + loose * ds.abs() + least * (dp - dots).abs() + tiny
    ds_bound = torch.where(hidden, 0.0, ds_bound)
    bound["dq"] = scale * (ds_bound + along_keys * step * ds.abs()) @ ka + unit * truth["dq"].abs()
    if given["sinks"] is not None:
        # a is off by w, D as above; b sq terms of fp32 are added.
        share = 1 - torch.where(hidden.all(-1), 1.0, a.sum(-1))
        of_dots = (ga * (bound["out"] + along_e * step * truth["out"].abs())).sum(-1)
        terms = share * (dots.abs() * (factor + case.b * case.sq * 2.0**-23)).squeeze(-1)
        bound["dsinks"] = (terms + share * of_dots).sum((0, 2))
    if given["bias"] is not None:
        # ds without its rounding, so without u and t in its bound; added b h times, and rounded to the bias's type.
        shared = [n for n in range(2) if given["bias"].shape[n] == 1]
        each = ds_bound - tiny * (~hidden) + (case.b * case.h + 1) * 2.0**-23 * ds.abs()
        each = each.sum(shared, keepdim=True) if shared else each
        bound["dbias"] = each + (0.0 if given["bias"].dtype == torch.float32 else unit) * truth["dbias"].abs()
    groups = (case.b, case.hkv, case.group)
    dk = (scale * (ds_bound + along_queries * step * ds.abs()).transpose(2, 3) @ qa).unflatten(1, groups[1:]).sum(2)
    dv = (kept * ((a * (loose + along_queries * step) + least).transpose(2, 3) @ ga)).unflatten(1, groups[1:]).sum(2)
    bound["dk"], bound["dv"] = dk + unit * truth["dk"].abs(), dv + unit * truth["dv"].abs()
    # Results below the smallest subnormal round to a multiple of it.
    return truth, {name: b + tiny for name, b in bound.items()}


def check_against_float64(case: Case) -> None:
    given = inputs(case)
    truth, bound = exact(case, given)
    found = run(case, given)
    for name, expected in truth.items():
        error = (found[name].double() - expected).abs()
        assert bool((error <= bound[name]).all()), f"{name} of {case}: {(error / bound[name]).max().item():.2f} bounds"


SIDES = st.sampled_from((-1, -1, -1, 0, 1, 5, 64, 127, 128, 200))  # keys that a window has on one side

# What the cases of every kind of attention are drawn from.
DRAWN = {
    "b": st.integers(1, 2),
    "hkv": st.integers(1, 2),
    "group": st.integers(1, 3),
    "sq": st.integers(1, 300),
    "skv": st.integers(1, 300),
    "dtype": st.sampled_from((torch.bfloat16, torch.float16)),
    "mask_type": st.sampled_from(MASK_TYPES),
    "mask": st.sampled_from(MASKS),
    "window": st.tuples(SIDES, SIDES),
    "dropout": st.sampled_from((0.0, 0.0, 0.1, 0.5, 1.0)),
    "layout": st.sampled_from(LAYOUTS),
    "scale": st.sampled_from((None, None, 1.0, 1e-3, 3.0)),
    "seed": st.integers(0, 2**31),
}
CASES = st.builds(
    Case,
    d=st.integers(2, 32).map(lambda eighths: 8 * eighths),
    bias=st.sampled_from(("none", *BIASES)),
    bias_is_fp32=st.booleans(),
    e=st.one_of(st.just(0), st.integers(1, 32).map(lambda eighths: 8 * eighths)),
    lengths=st.sampled_from(("none", *LENGTHS)),
    **DRAWN,
)
