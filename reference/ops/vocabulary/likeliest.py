"""`twin::likeliest`: the likeliest token of each row of logits, and its loss, with each logit read once.

    t    = the first largest logit's place     NaN is ignored; 0 where no logit is above -inf
    loss = log S - (x[t] - m)                  the word of `twin::cross_entropy` for the target t

A text whose tokens are the likeliest ones needs no more of its logits (`reference.generation`).
"""

import numpy as np
import torch

from reference.numbers import formats
from reference.ops.checks import check_input
from reference.ops.library import define
from reference.ops.vocabulary.cross_entropy import cross_entropy
from reference.ops.vocabulary.token_weights import MOST_TOKENS

OP = "twin::likeliest"


def outputs(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    check_input(OP, "logits", logits)
    if not 0 < logits.shape[1] <= MOST_TOKENS:
        raise ValueError(f"{OP}: logits has shape {list(logits.shape)}; 1 to {MOST_TOKENS} columns are accepted.")
    rows = logits.shape[:1]
    return logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows, dtype=torch.float32)


@define(outputs)
def likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """t, int64 `[rows]`, and loss, fp32 `[rows]`.

    Args:
        logits: `[rows, V]`, contiguous; fp32, bf16 or fp16.
    """
    tokens, losses = outputs(logits)
    if len(logits):
        x = formats.widen(logits.detach()).numpy()
        tokens.copy_(torch.from_numpy(np.where(np.isnan(x), np.float32(-np.inf), x).argmax(1)))
        losses.copy_(cross_entropy(logits, tokens, -1, 0.0)[0])
    return tokens, losses
