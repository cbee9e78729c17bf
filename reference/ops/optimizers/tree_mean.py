"""`twin::tree_mean`: what the owner of a piece of the gradients does with the sums of all ranks.

The order is that of `reference.parallel.gradient_tree`, as a stack. Nodes are put on it one after the other; after
node i the two upper ones are replaced by their sum `additions[i]` times, the lower one being the left addend:

    stack = []
    for node, count in (nodes, additions):
        stack.append(fp32(node))                 exact
        count times:  b = pop, a = pop, push(a + b)     fp32, one rounding
    out = T( S · fp32(factor) )                  S: what is left; one rounding to fp32, and one to out's dtype T

Of four nodes of one width additions are [0, 1, 0, 2]: (n_0 + n_1) + (n_2 + n_3).

Source: the order is this project's.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from reference.numbers import formats
from reference.ops.checks import check_like, check_wide
from reference.ops.library import define

OP = "twin::tree_mean"


def outputs(nodes: Sequence[torch.Tensor], additions: Sequence[int], factor: float, out: torch.Tensor) -> None:
    """Refuse what `twin::tree_mean` does not accept."""
    check_wide(OP, "out", out.dtype)
    check_like(OP, "out", out, out.dtype, (nodes[0].numel(),), nodes[0].device)
    if nodes[0].dtype not in (out.dtype, torch.float32):
        raise ValueError(
            f"{OP}: nodes are {nodes[0].dtype} and out is {out.dtype}; nodes of its dtype or of torch.float32 are "
            f"accepted."
        )
    for i, node in enumerate(nodes):
        check_like(OP, f"nodes[{i}]", node, nodes[0].dtype, (nodes[0].numel(),), nodes[0].device)
    # How many are left after each node: one at least, and one at the end.
    left = [i + 1 - done for i, done in enumerate(accumulate(additions))]
    if len(left) != len(nodes) or min(left) < 1 or left[-1] != 1 or min(additions) < 0:
        raise ValueError(
            f"{OP}: additions={list(additions)} of {len(nodes)} nodes; a count for each is accepted, by which "
            f"one sum or more is left after each node, and one after the last."
        )


@define(outputs, mutates=("out",))
def tree_mean(nodes: list[torch.Tensor], additions: list[int], factor: float, out: torch.Tensor) -> None:
    """Write to `out` the sum of nodes in the order of `additions`, times `factor`.

    Args:
        nodes: contiguous `[n]` each, of out's dtype or of torch.float32, all of one dtype and on one device.
        additions: for each node how many additions follow it; as many as nodes but one, together.
        factor: rounded to fp32.
        out: contiguous `[n]` in fp32, bf16 or fp16; it may be one of the nodes.
    """
    outputs(nodes, additions, factor, out)
    stack: list[torch.Tensor] = []
    for node, count in zip(nodes, additions, strict=True):
        stack.append(formats.widen(node.detach()))
        for _ in range(count):
            upper = stack.pop()
            stack.append(stack.pop() + upper)
    out.copy_(stack[0] * float(np.float32(factor)))
