"""The tree over groups: whichever ranks have which groups, the additions are the same."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from reference.parallel.gradient_tree import Nodes, additions, nodes, owned, push


def add(left: str, right: str) -> str:
    return f"({left} + {right})"


def tree(leaves: list[str]) -> str:
    """Neighbours, then neighbouring sums, and so on; an odd one passes."""
    while len(leaves) > 1:
        odd = leaves[len(leaves) & ~1 :]
        leaves = [add(a, b) for a, b in zip(leaves[::2], leaves[1::2], strict=False)] + odd
    return leaves[0]


def sums(groups: int, which: range) -> Nodes[str]:
    found: Nodes[str] = []
    for group in which:
        push(found, range(group, group + 1), str(group), groups, add)
    return found


@given(st.integers(1, 300), st.data())
def test_any_split_of_groups_over_ranks_makes_the_additions_of_the_tree(groups: int, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, groups - 1))) if groups > 1 else [])
    together: Nodes[str] = []
    for start, stop in itertools.pairwise([0, *cuts, groups]):
        of_rank = sums(groups, range(start, stop))
        assert [which for which, _ in of_rank] == nodes(groups, range(start, stop))
        for which, value in of_rank:
            push(together, which, value, groups, add)
    assert together == [(range(groups), tree([str(group) for group in range(groups)]))]


@given(st.integers(1, 300), st.data())
def test_ranks_own_all_groups_in_order_and_about_equally_many(groups: int, data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, groups))
    shares = [owned(groups, ranks, rank) for rank in range(ranks)]
    assert list(itertools.chain(*shares)) == list(range(groups))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert min(map(len, shares)) >= 1


def test_a_rank_sends_one_sum_where_a_power_of_two_is_divided_by_another() -> None:
    for groups, ranks in ((8, 1), (8, 2), (8, 4), (8, 8), (16, 2)):
        assert all(len(nodes(groups, owned(groups, ranks, rank))) == 1 for rank in range(ranks))


@given(st.integers(1, 300), st.data())
def test_the_additions_of_all_ranks_nodes_as_a_stack(groups: int, data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, groups))
    of_ranks = [value for rank in range(ranks) for _, value in sums(groups, owned(groups, ranks, rank))]
    stack: list[str] = []
    for value, count in zip(of_ranks, additions(groups, ranks), strict=True):
        stack.append(value)
        for _ in range(count):
            right = stack.pop()
            stack.append(add(stack.pop(), right))
    assert stack == [tree([str(group) for group in range(groups)])]


def test_the_tree_of_five() -> None:
    assert sums(5, range(5)) == [(range(5), "(((0 + 1) + (2 + 3)) + 4)")]
