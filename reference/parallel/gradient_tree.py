"""The order in which a step's gradients are added: a sequence inside a group of microbatches, a tree over groups.

A step has M microbatches in G groups, M/G neighbours each. G belongs to the run, as its learning rate does, and not to
the machine.

    s_g  = ((d_1 + d_2) + d_3) + ...       d_i: what backward gives for microbatch i of group g; in `.grad`'s dtype,
                                           rounded to it after each addition, as PyTorch adds
    S    = tree(s_0, ..., s_(G-1))         fp32, one rounding an addition; s_g is widened exactly
    grad = round(S · fp32(1/G))            a product in fp32, then one rounding to `.grad`'s dtype

The tree adds neighbours, then neighbouring sums, and so on; an odd one at the end passes unchanged:

    G = 5:   ((s_0 + s_1) + (s_2 + s_3)) + s_4

The left addend is that of the lower numbers. So a sum of neighbouring groups that is a node of the tree may be made
anywhere: a rank that has groups a to b sends the fewest nodes that cover them (`nodes`), and whoever has all nodes of a
piece ends the sum. With G = 1 nothing is added or multiplied, and the words are those of PyTorch.

A gradient that is missing in all microbatches of a group (None) is not added: it counts as -0, since x + -0 is x. One
that is missing in all groups stays None.

What travels between ranks: where each rank has one group, s_g in `.grad`'s dtype; otherwise nodes in fp32.
"""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
Nodes = list[tuple[range, T]]
"""Sums of neighbouring groups, each with the groups that it is of."""


def owned(groups: int, ranks: int, rank: int) -> range:
    """The groups that a rank computes: neighbours, and as many as others have, or one more."""
    return range(rank * groups // ranks, (rank + 1) * groups // ranks)


def is_node(left: range, right: range, groups: int) -> bool:
    """Whether the tree over `groups` adds the sums of `left` and of `right`, its neighbour."""
    width = len(left)  # a power of two: only a sum that has the last group may have another width
    return left.start % (2 * width) == 0 and right.stop == min(left.start + 2 * width, groups)


def push(nodes: Nodes[T], which: range, value: T, groups: int, add: Callable[[T, T], T]) -> None:
    """Append the sum of the groups `which`, the next after those in `nodes`, and make what additions there are."""
    nodes.append((which, value))
    while len(nodes) > 1 and is_node(nodes[-2][0], nodes[-1][0], groups):
        (left, a), (right, b) = nodes[-2:]
        nodes[-2:] = [(range(left.start, right.stop), add(a, b))]


def nodes(groups: int, which: range) -> list[range]:
    """The fewest nodes of the tree over `groups` that cover the groups `which`, in order."""
    found: Nodes[None] = []
    for group in which:
        push(found, range(group, group + 1), None, groups, lambda a, b: None)
    return [one for one, _ in found]


def additions(groups: int, ranks: int) -> list[int]:
    """For each node of all ranks, in their order, how many additions follow it: of `twin::tree_mean`."""
    found: Nodes[None] = []
    counts = []
    for rank in range(ranks):
        for which in nodes(groups, owned(groups, ranks, rank)):
            before = len(found) + 1
            push(found, which, None, groups, lambda a, b: None)
            counts.append(before - len(found))
    return counts
