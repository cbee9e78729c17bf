"""`twin::token_weights`: how likely each token is to be drawn, as integers.

Of a row x of V logits, in fp32, each operation rounded once, with the row's temperature T:

    m   = max x                              NaN is ignored
    w_i = floor(2^30 · exp((x_i - m) / T))   `reference.numbers.elementary.exp`; 0 where that is NaN

A weight is an int32 from 0 to 2^30, and the largest is 2^30. With T = 0 the first token whose logit is m has 2^30 and
all others 0; so has token 0 where no logit is above -inf. Sums of weights are exact in any order, so whatever draws by
them (`reference.generation.sampling`) has no order to write down. A token of less than 2^-30 of the likeliest one's
probability has no weight.
"""

import numpy as np
import torch

from reference.numbers import elementary, formats
from reference.ops.checks import check_input, check_like
from reference.ops.library import define

OP = "twin::token_weights"
ONE = 1 << 30
MOST_TOKENS = 1 << 23  # whose weights add up to a number that float64 has


def outputs(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    check_input(OP, "logits", logits)
    if not 0 < logits.shape[1] <= MOST_TOKENS:
        raise ValueError(f"{OP}: logits has shape {list(logits.shape)}; 1 to {MOST_TOKENS} columns are accepted.")
    check_like(OP, "temperature", temperature, torch.float32, logits.shape[:1], logits.device)
    return logits.new_empty(logits.shape, dtype=torch.int32)


@define(outputs)
def token_weights(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """w, int32 `[rows, V]`.

    Args:
        logits: `[rows, V]`, contiguous; fp32, bf16 or fp16.
        temperature: fp32 `[rows]`; what is not above 0 counts as 0.
    """
    weights = outputs(logits, temperature)
    if not len(logits):
        return weights
    x = formats.widen(logits).numpy()
    x = np.where(np.isnan(x), np.float32(-np.inf), x)
    t = temperature.numpy()
    m = x.max(1, keepdims=True)
    with np.errstate(invalid="ignore", over="ignore"):
        y = (x - m) / np.where(t > 0, t, np.float32(1))[:, None]
    e = elementary.exp(torch.from_numpy(np.where(x == m, np.float32(0), y))).numpy()
    w = np.where(np.isnan(e), np.float32(0), e * np.float32(ONE)).astype(np.int32)
    first = x.argmax(1)
    greedy = ~(t > 0) | (m[:, 0] == -np.inf)
    w[greedy] = 0
    w[greedy, first[greedy]] = ONE
    return weights.copy_(torch.from_numpy(w))
