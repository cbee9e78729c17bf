"""`make_graphed_callables` for a pipeline's schedule: which module each captured pass runs.

    _order = [1, 2, -2, -1]     forward of chunk 1, of chunk 2, backward of chunk 2, of chunk 1; each once a microbatch

A model consists of chunks, and a chunk of layers. Samples, and the callables that come back, are sorted by chunk, then
by microbatch, then by layer.
"""

from collections.abc import Sequence
from typing import Any

from reference.arguments import is_real

__all__ = ["modules_of_passes"]


def modules_of_passes(order: Any, layers: Any, modules: int, samples: int) -> list[int]:
    """The number of each pass's module.

    Args:
        order: `_order`; entries of each chunk are as many as of every other, forward and backward.
        layers: `_num_layers_per_chunk`: None (all chunks are equal), one number, or one for each chunk.
        modules: how many there are.
        samples: how many `sample_args` there are, one for each pass.
    """
    chunks, microbatches = _chunks(order)
    if layers is None:
        layers = modules // chunks
    counts = [layers] * chunks if _is_count(layers) else layers
    if not (
        isinstance(counts, Sequence)
        and len(counts) == chunks
        and all(map(_is_count, counts))
        and sum(counts) == modules
    ):
        raise ValueError(
            f"make_graphed_callables: _num_layers_per_chunk={layers!r} for {chunks} chunks in _order and {modules} "
            f"modules; None, a number or a list with one for each chunk, {modules} in all, is accepted."
        )
    if samples != modules * microbatches:
        raise ValueError(
            f"make_graphed_callables: sample_args has {samples} entries for {modules} modules and {microbatches} "
            f"microbatches in _order; {modules * microbatches} are accepted."
        )
    found: list[int] = []
    first = 0
    for count in counts:
        found += list(range(first, first + count)) * microbatches
        first += count
    return found


def _is_count(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 1


def _chunks(order: Any) -> tuple[int, int]:
    """How many chunks and microbatches a schedule has."""
    if isinstance(order, Sequence) and any(is_real(x) and x < 0 and 2 * x % 2 == 1 for x in order):
        raise NotImplementedError(
            f"make_graphed_callables: _order={order!r} has half steps (weight gradients after delay_wgrad_compute=True)"
            f", which are not offered; whole numbers are accepted."
        )
    whole = isinstance(order, Sequence) and len(order) > 0 and all(isinstance(x, int) and x != 0 for x in order)
    if whole:
        chunks = max(map(abs, order))
        open_passes = [0] * (chunks + 1)
        for x in order:
            open_passes[abs(x)] += 1 if x > 0 else -1
            whole = whole and open_passes[abs(x)] >= 0
        microbatches = order.count(1)
        if whole and not any(open_passes) and all(order.count(x) == microbatches for x in range(1, chunks + 1)):
            return chunks, microbatches
    raise ValueError(
        f"make_graphed_callables: _order={order!r}; a list of chunks from 1 on, each as often as every other, and of "
        f"as many backwards (-1 for chunk 1) after them, is accepted."
    )
