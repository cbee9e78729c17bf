"""What a layer does with its cache in a step of inference: rotate, copy and attend by the tensors of that step.

`reference.nn.attentions.kv_cache.InferenceParams.step_of` makes them.
"""

from typing import Any, NamedTuple

import torch

from reference.arguments import MASK_TYPES
from reference.nn.attentions.exact_attention import Equation
from reference.nn.attentions.fp8_keys_values import codes_of
from reference.ops.library import twin


class Cached(NamedTuple):
    """Everything but tensors that a step's launches depend on.

    Attributes:
        layout: "one" new token of every sequence; "equal": as many of each, after as many; or "mixed". "paged" where
            the cache has pages.
        start: with "equal" the tokens of each sequence before the step, otherwise 0.
        keys: rows of the cache that attention reads; with "paged" no sequence is longer.
        longest: with "paged" the most new tokens that a sequence has, otherwise 0.
        at_once: whether `attended_at_once` takes the step.
    """

    layout: str
    start: int
    keys: int
    longest: int = 0
    at_once: bool = False


class StepTensors(NamedTuple):
    """What a layer reads in a step, and the cache, which it changes.

    Attributes:
        keys, values: the layer's cache [max_batch_size, max_sequence_length, heads, channels], or in pages.
        positions: int32, of the tokens in the order [s, b]; None with "equal".
        rows: int64, where new tokens go in the cache as [tokens, heads, channels]; None with "equal".
        source: int64, which of the tokens in the order [b, s] those are; with "mixed", and with "paged" where there are
            others.
        hidden: bool [b, 1, s, keys], True where a query does not see a key; None with "equal" and "paged".
        key_scales, value_scales: scale_inv of FP8 keys and values, fp32 [pages, page_size, heads].
        page_table, q_lengths, kv_lengths, q_starts: as `twin::attention_paged` takes them.
        rows_lengths, rows_starts: q_lengths and q_starts where queries that share a head of keys are its rows; None
            where each layer has to compute them.
    """

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    source: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    q_lengths: torch.Tensor | None = None
    kv_lengths: torch.Tensor | None = None
    q_starts: torch.Tensor | None = None
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    rows_lengths: torch.Tensor | None = None
    rows_starts: torch.Tensor | None = None


def mixed_tensors(
    starts: list[int],
    steps: list[int],
    capacity: int,
    longest: int,
    causal: bool,
    window: tuple[int, int],
    device: torch.device,
) -> tuple[torch.Tensor, ...]:
    """positions, rows, source and hidden of `StepTensors` with "mixed".

    `starts`, `steps`: the tokens of each sequence before the step, and its new ones. `capacity`: tokens of a row of the
    cache. `longest`: of the sequences, the new tokens included.
    """
    before, added = (torch.tensor(one, dtype=torch.int64, device="cpu")[:, None] for one in (starts, steps))
    new, columns = torch.arange(max(steps), device="cpu"), torch.arange(longest, device="cpu")
    at = before + new  # [b, s]
    exists = new < added
    rows = (at + torch.arange(len(starts), device="cpu")[:, None] * capacity)[exists]
    lower = at - window[0] if window[0] >= 0 else torch.zeros_like(at)
    ends = before + added
    upper = at if causal else at + window[1] if window[1] >= 0 else ends.expand_as(at)
    upper = torch.minimum(upper, ends - 1)
    hidden = ~exists[..., None] | (columns < lower[..., None]) | (columns > upper[..., None])
    positions = torch.minimum(at, ends - 1).t().flatten().int()
    found = (positions, rows, exists.flatten().nonzero()[:, 0], hidden[:, None])
    return tuple(t.to(device) for t in found)


def turned(cached: Cached, step: StepTensors, x: torch.Tensor, angles: torch.Tensor, pairs: bool) -> torch.Tensor:
    """x [s, b, h, d] rotated by its positions' rows of angles [positions, d2]; `pairs`: neighbours are paired."""
    if step.positions is None:
        return twin.rotary(x, angles[cached.start : cached.start + x.shape[0]], pairs, False)
    rows = x.reshape(-1, 1, *x.shape[2:])
    return twin.rotary(rows, angles.index_select(0, step.positions), pairs, False).view(x.shape)


def entered(
    cached: Cached, step: StepTensors, equation: Equation, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[Equation, torch.Tensor | None, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Copy k and v to the cache; how to attend now, the mask, and the q, k and v that attention reads.

    All are [b, heads, s, d]. With one token of each sequence, the queries that share a head of keys become the rows of
    one head, [b, heads of keys, queries, d], so that keys are read once.
    """
    for cache, new in ((step.keys, k), (step.values, v)):
        new = new.transpose(1, 2)
        if step.rows is None:
            cache[: new.shape[0], cached.start : cached.keys].copy_(new)
            continue
        tokens = new.reshape(-1, *new.shape[2:])
        tokens = tokens if step.source is None else tokens.index_select(0, step.source)
        cache.view(-1, *cache.shape[2:]).index_copy_(0, step.rows, tokens)
    keys, values = (cache[: q.shape[0], : cached.keys].transpose(1, 2) for cache in (step.keys, step.values))
    if cached.layout == "equal":
        causal = MASK_TYPES[equation.mask_type][0] != "none"
        return equation._replace(mask_type="causal_bottom_right" if causal else "no_mask"), None, (q, keys, values)
    if cached.layout == "one" and equation.softmax == "vanilla":  # a sink belongs to one head of queries
        q = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
    return equation._replace(mask_type="no_mask", window=(-1, -1)), step.hidden, (q, keys, values)


def attended_in_pages(
    cached: Cached,
    step: StepTensors,
    equation: Equation,
    sinks: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copy k and v to their pages, and attend: out [b, heads, s, e], m and inv of `twin::attention_paged`.

    q, k and v are [b, heads, s, d], or packed, [tokens, heads, d], and so is out. With one token of each sequence, the
    queries that share a head of keys become the rows of one head, as in `entered`.
    """
    heads, groups, causal = q.shape[1], k.shape[1], MASK_TYPES[equation.mask_type][0] != "none"
    where: Any = (step.q_lengths, step.kv_lengths, step.q_starts)
    at: Any = step.rows

    def tokens(x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 3:
            return x
        x = x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])
        return x if step.source is None else x.index_select(0, step.source)

    def enter(cache: torch.Tensor, new: torch.Tensor) -> None:
        cache.view(-1, *cache.shape[2:]).index_copy_(0, at, new)

    table: Any = step.page_table
    keys, values = step.keys, step.values
    if step.key_scales is None or step.value_scales is None:
        for cache, new in ((keys, k), (values, v)):
            enter(cache, tokens(new))
    else:
        for codes, scales, new in ((keys, step.key_scales, k), (values, step.value_scales, v)):
            new_codes, new_scales = codes_of(tokens(new))
            enter(codes.view(torch.uint8), new_codes.view(torch.uint8))
            enter(scales, new_scales)
    rows, longest = tokens(q), cached.longest
    rule, (left, right) = "causal_bottom_right" if causal else "none", equation.window
    together = heads // groups if longest == 1 and equation.softmax == "vanilla" and left == -1 else 1
    if together > 1:
        rows = rows.view(-1, groups, together, rows.shape[2]).transpose(1, 2).reshape(-1, groups, rows.shape[2])
        where, rule, right = _where_together(step, together), "none", -1
    given = (equation.scale, rule, left, right, *where, longest * together, cached.keys, sinks, equation.key_segment)
    if step.key_scales is None or step.value_scales is None:
        out, m, inv = twin.attention_paged(rows, keys, values, table, *given)
    else:
        in_codes = (keys, values, step.key_scales, step.value_scales)
        out, m, inv = twin.attention_paged_codes(rows, *in_codes, table, *given)
    if together > 1:
        out = _by_heads(out, together)
        m, inv = (x.reshape(-1, heads, 1) for x in (m, inv))
    if q.dim() == 3:
        return out, m, inv
    b, _, s, _ = q.shape
    if step.source is not None:
        out = out.new_zeros(b * s, *out.shape[1:]).index_copy_(0, step.source, out)
    return out.view(b, s, heads, -1).transpose(1, 2), m, inv


def _where_together(step: StepTensors, together: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q_lengths, kv_lengths and q_starts where so many queries are rows of the head of keys that they share."""
    of_keys, lengths, starts = step.kv_lengths, step.rows_lengths, step.rows_starts
    assert step.q_lengths is not None
    assert of_keys is not None
    assert step.q_starts is not None
    if lengths is None or starts is None:
        lengths, starts = step.q_lengths * together, step.q_starts * together
    return lengths, of_keys, starts


def _by_heads(out: torch.Tensor, together: int) -> torch.Tensor:
    """[t · together, groups, e] as [t, heads, e]."""
    _, groups, e = out.shape
    return out.view(-1, together, groups, e).transpose(1, 2).reshape(-1, groups * together, e)


def takes_at_once(cached: Cached, step: StepTensors, equation: Equation) -> bool:
    """Whether a step is one of `attended_at_once`: one token of each sequence, in pages of 16 bits.

    A sink belongs to one head of queries, and so does a window's left side, counted from each query.
    """
    one = cached.layout == "paged" and cached.longest == 1 and step.source is None
    plain = step.key_scales is None and not equation.fp8_kv
    return one and plain and equation.softmax == "vanilla" and equation.window[0] == -1


def attended_at_once(
    cached: Cached,
    step: StepTensors,
    equation: Equation,
    angles: torch.Tensor,
    pairs: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> torch.Tensor:
    """out [t, heads, e] of q [t, groups, together, d] and k and v [t, groups, d or e], which are not rotated yet.

    The words of `turned` and `attended_in_pages`, in two launches in place of nine. `angles` [positions, d2] are those
    of all positions; `pairs`: neighbours are paired.
    """
    together = q.shape[2]
    rows = twin.rotary_append(q, k, v, angles, step.positions, step.rows, step.keys, step.values, pairs)
    where = (*_where_together(step, together), together, cached.keys, None, equation.key_segment)
    given = (step.keys, step.values, step.page_table, equation.scale, "none", -1, -1, *where)
    out, _, _ = twin.attention_paged(rows.flatten(0, 1), *given)
    return _by_heads(out, together)


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise RuntimeError(
            "inference_params: a backward has reached a forward with a cache, which keeps nothing for gradients; a "
            "backward of forwards without inference_params is accepted."
        )


def ended(module: torch.nn.Module, *arguments: Any, **more: Any) -> Any:
    """The results of `module.forward` without gradients; a backward that reaches them raises a sentence."""
    with torch.no_grad():
        results = module.forward(*arguments, **more)
    tensors = [x for x in (*arguments, *module.parameters()) if isinstance(x, torch.Tensor)]
    if not any(x.requires_grad for x in tensors):
        return results
    anchor = torch.empty(0, requires_grad=True, dtype=torch.float32, device="cpu")
    if not isinstance(results, tuple):
        return _End.apply(results, anchor)
    return tuple(_End.apply(x, anchor) if isinstance(x, torch.Tensor) else x for x in results)
