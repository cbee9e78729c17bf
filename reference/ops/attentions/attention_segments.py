"""The second order of attention: keys in segments, which can be computed side by side.

In `reference.ops.attentions.attention` O is one chain along all keys. With `key_segment` = 4096 that chain, like m and
l, begins anew at the keys 0, 4096, 8192, .. of a sequence: a segment has m_s, l_s (of four lanes) and O_s by those
formulas, from m = -2^100, l = 0 and O = 0, over the key blocks of this segment that the query block visits. They are
added in order of segments. With G = 384,

    m' = max(m, m_s)
    a = 2^(((m - m') + G) - G)            b = 2^(((m_s - m') + G) - G)
    O = fma(O, a, O_s · b) + 0            l = fma(l, a, l_s · b)            of each lane
    m = m'

in fp32: O_s · b and l_s · b are rounded, then each fma once. Adding +0 makes +0 of a -0, so that O is never -0, as it
never is in a chain. m, l and O of the first segment that the query block visits
are taken as they are. Then follow the sum of l's lanes, a sink, and out, as there.

So a text of up to 4,096 keys, or a window within one segment, has the words of the one chain. A segment that is hidden
altogether from a query, visited or not, changes no bit, as long as v is finite: its l_s and O_s are +0, and where it
comes first, a is 0 and b is 1 for the next one. A query's words depend on the keys that it sees alone, again.

m is that of the one chain. 1 / l and out may differ in their last bits. The backward reads m and 1 / l as ever.

A position decides to which segment a key belongs, not the number of keys or of processors: the same words come from
training, from a prompt in pieces and from one token after the other.
"""

import numpy as np
import torch

from reference.numbers import elementary
from reference.numbers.elementary import ZERO, exp2_grid_scalar
from reference.ops.attentions import attention_options
from reference.support.numba_jit import fma, jit

Found = tuple[torch.Tensor, np.ndarray, np.ndarray]
"""O fp32 `[heads, rows, e]`, m `[heads · rows]` and l `[heads · rows, 4]`."""


def check_key_segment(op: str, key_segment: int | None) -> None:
    """Refuse segments of another size."""
    if key_segment is not None and key_segment not in attention_options.KEY_SEGMENTS:
        accepted = ", ".join(map(str, attention_options.KEY_SEGMENTS))
        raise ValueError(f"{op}: key_segment={key_segment}; None and {accepted} are accepted.")


def segments(seen: list[slice], key_segment: int | None) -> list[slice]:
    """Which of the key blocks `seen` belong to each segment, in order; without segments, all to one."""
    if not seen:
        return []
    if key_segment is None:
        return [slice(len(seen))]
    numbers = [keys.start // key_segment for keys in seen]
    firsts = [n for n, number in enumerate(numbers) if not n or number != numbers[n - 1]]
    return [slice(first, end) for first, end in zip(firsts, [*firsts[1:], len(seen)], strict=True)]


@jit
def _join(
    m: np.ndarray,
    l: np.ndarray,  # noqa: E741  (its name everywhere)
    o: np.ndarray,
    own_m: np.ndarray,
    own_l: np.ndarray,
    own_o: np.ndarray,
    powers: np.ndarray,
) -> None:
    for row in range(m.shape[0]):
        new = max(m[row], own_m[row])
        a = exp2_grid_scalar(m[row] - new, powers)
        b = exp2_grid_scalar(own_m[row] - new, powers)
        m[row] = new
        for lane in range(4):
            l[row, lane] = fma(l[row, lane], a, own_l[row, lane] * b)
        for n in range(o.shape[1]):
            o[row, n] = fma(o[row, n], a, own_o[row, n] * b) + ZERO


def join(found: Found, own: Found) -> Found:
    """The sum of the segments so far and of the next one; `found` is changed."""
    (o, m, l), (own_o, own_m, own_l) = found, own  # noqa: E741
    of_rows = (x.contiguous().view(-1, x.shape[2]).numpy() for x in (o, own_o))
    total, added = of_rows
    _join(m, l, total, own_m, own_l, added, elementary.powers_of_two())
    return torch.from_numpy(total).view(o.shape), m, l
