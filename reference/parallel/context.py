"""Context parallelism: attention of a sequence whose tokens ranks share, with the words of one process.

A sequence of S tokens is cut into 2t chunks. Rank r of t has chunks r and 2t - 1 - r, one after the other: under a
causal rule every rank then has as many pairs. (Transformer Engine and Megatron-LM cut so.) Keys and values of all ranks
are gathered.

    forward    out, m and 1 / l of a query have an order over keys alone: a chunk's queries are a call of their own
    dq         the same
    dk, dv     have an order over heads of a group, then over queries: ranks gather q, dL/dout, out, m and 1 / l, and a
               chunk's keys are a call of their own, with all queries that see them

    dropout    a pair's number in the whole sequence decides: a call is told where its first query and key are

A call is `twin::attention` or its backward, on part of the queries and keys. Blocks of 128 queries and keys are those
of the whole sequence, because a chunk is a multiple of 128. Under a causal rule keys after a chunk of queries, and
queries before a chunk of keys, are left out: those pairs are hidden.

Nothing is added over ranks. Backward computes the weights of a pair twice, once for dq and once for dk and dv.
"""

import functools

import torch
from torch.utils._python_dispatch import _disable_current_modes

from reference.ops.attentions.attention_options import Options
from reference.ops.library import twin
from reference.parallel.ordered_reduce import gathered_rows, ranks_of

Tensors = tuple[torch.Tensor, ...]
Heads = tuple[int, int, int]
"""How many heads a call has, how many there are, and the number of its first; ranks may share the heads, too."""


def chunks_of(group: str) -> tuple[int, int]:
    """The two chunks of this rank."""
    rank, count = ranks_of(group)
    return rank, 2 * count - 1 - rank


def gathered(group: str, x: torch.Tensor) -> torch.Tensor:
    """The tokens of all ranks `[S, ...]`, in order, from this rank's x `[S / t, ...]`."""
    count = ranks_of(group)[1]
    of_ranks = gathered_rows(group, x.contiguous()).unflatten(0, (2 * count, -1))
    order = [2 * min(chunk, 2 * count - 1 - chunk) + (chunk >= count) for chunk in range(2 * count)]
    return torch.cat([of_ranks[i] for i in order])


@functools.cache  # without a bound: a CUDA graph that was captured keeps their address
def _kept_numbers(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False), _disable_current_modes():  # so that no mode's stand-in is kept
        return torch.tensor(numbers, dtype=torch.int64, device=device)


def with_place(state: torch.Tensor, *place: int) -> torch.Tensor:
    """Seed and offset of a random state, and numbers after them. On a GPU these are kept: a copy would wait for it."""
    cuda = state.device.type == "cuda"
    after = _kept_numbers(place, state.device) if cuda else torch.tensor(place, dtype=torch.int64, device=state.device)
    return torch.cat([state[:2], after])


def at(state: torch.Tensor | None, heads: Heads, tokens: int, query: int, key: int) -> torch.Tensor | None:
    """The random state of a call whose first query and first key have these numbers in a sequence of so many tokens."""
    if state is None:
        return None
    return with_place(state, *heads, query, tokens, key, tokens)


def _heads(x: torch.Tensor) -> torch.Tensor:
    """`[b, h, s, ...]` of x `[s, b, h, ...]`."""
    return x.permute(1, 2, 0, *range(3, x.dim())).contiguous()


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """The inverse."""
    return x.permute(2, 0, 1, *range(3, x.dim()))


def attend(group: str, heads: Heads, options: Options, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    """out `[s, b, h, e]`, m and 1 / l `[s, b, h]` of this rank's q, k and v `[s, b, heads, d]`.

    `options`: of the whole sequence, without what depends on a place in it; its mask type is "causal" or "none".
    """
    k, v = gathered(group, k), gathered(group, v)
    n, causal, size, state = q.shape[0] // 2, options.mask_type == "causal", k.shape[0], options.rng_state
    options = options._replace(mask_type="causal_bottom_right" if causal else "none")
    found = []
    for half, chunk in enumerate(chunks_of(group)):
        stop = (chunk + 1) * n if causal else size
        options = options._replace(rng_state=at(state, heads, size, chunk * n, 0))
        found.append(twin.attention(_heads(q[half * n : (half + 1) * n]), _heads(k[:stop]), _heads(v[:stop]), *options))
    if state is not None:
        state[1] += 1
    first, second = ([_tokens(x) for x in results] for results in found)
    return tuple(torch.cat(pair) for pair in zip(first, second, strict=True))


def attend_backward(
    group: str,
    heads: Heads,
    options: Options,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    m: torch.Tensor,
    inv: torch.Tensor,
    grad: torch.Tensor,
) -> Tensors:
    """dq, dk, dv of this rank's tokens; arguments as `attend` has and returns them."""
    n, causal = q.shape[0] // 2, options.mask_type == "causal"
    of_queries = options._replace(mask_type="causal_bottom_right" if causal else "none")
    own, whole = (grad, q, out, m, inv), tuple(gathered(group, x) for x in (grad, q, out, m, inv))
    keys, values = gathered(group, k), gathered(group, v)
    size, state, gradients = keys.shape[0], options.rng_state, []
    for half, chunk in enumerate(chunks_of(group)):
        first, stop = chunk * n, (chunk + 1) * n
        last, begin = (stop, first) if causal else (size, 0)
        of_queries = of_queries._replace(rng_state=at(state, heads, size, first, 0))
        options = options._replace(rng_state=at(state, heads, size, begin, first))
        g, queries, *results = (_heads(x[half * n : (half + 1) * n]) for x in own)
        dq, _, _ = twin.attention_backward(
            g, queries, _heads(keys[:last]), _heads(values[:last]), *results, *of_queries
        )
        g, queries, *results = (_heads(x[begin:]) for x in whole)
        mine = (_heads(keys[first:stop]), _heads(values[first:stop]))
        _, dk, dv = twin.attention_backward(g, queries, *mine, *results, *options)
        gradients.append([_tokens(x) for x in (dq, dk, dv)])
    return tuple(torch.cat(pair) for pair in zip(*gradients, strict=True))
