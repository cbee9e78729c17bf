"""The first step and tensor in which trails differ: of two runs, or of the ranks of one."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from reference.inspect.parting import Comparison, listed
from reference.inspect.recorded_step.digest import number_of
from reference.inspect.trails.file import Named, Trail
from reference.inspect.trails.sums import changed_word

_SHOWN = 4  # tensors
State = dict[str, tuple[Named, tuple[int, ...]]]  # by name


def _label(trails: Sequence[Trail]) -> list[str]:
    """What each is called: by its rank, where ranks tell them apart, else by its path."""
    ranks = [trail.rank for trail in trails]
    if all(trail.ranks > 1 for trail in trails) and len(set(ranks)) == len(ranks):
        return [f"rank {rank}" for rank in ranks]
    return [str(trail.path) for trail in trails]


def _state(trail: Trail, step: int) -> State:
    named, digests = trail.steps[step]
    return {one.name: (one, tuple(row)) for one, row in zip(named, digests.tolist(), strict=True)}


def _same(states: Sequence[tuple[tuple[Named, ...], np.ndarray]]) -> bool:
    return all(one[0] == states[0][0] and np.array_equal(one[1], states[0][1]) for one in states[1:])


def compare(trails: Sequence[Trail]) -> Comparison:
    """Compare the steps that all of them have.

    Raises:
        ValueError: there is no such step.
    """
    labels = _label(trails)
    steps = [step for step in trails[0].steps if all(step in trail.steps for trail in trails[1:])]
    if not steps:
        raise ValueError(f"diff: {listed(labels)} have no step in common; trails of the same steps are accepted.")
    first = next((step for step in steps if not _same([trail.steps[step] for trail in trails])), None)
    notices = [trail.notice for trail in trails if trail.notice is not None]
    if first is None:
        said = f"The same bits: {len(steps)} steps, from {steps[0]} to {steps[-1]}, in {listed(labels)}."
        return Comparison(True, (said, *notices))
    return _parted(labels, [_state(trail, first) for trail in trails], steps, first, notices)


def _parted(labels: list[str], states: list[State], steps: list[int], step: int, notices: list[str]) -> Comparison:
    """What is said of the first step that differs."""
    names = dict.fromkeys(name for state in states for name in state)
    differs = [name for name in names if len({state.get(name) for state in states}) > 1]
    groups: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, state in enumerate(states):
        groups[tuple(state.get(name) for name in differs)].append(i)
    most = max(groups.values(), key=len)
    others = [i for i in range(len(states)) if i not in most]
    who = [labels[i] for i in others]
    verb = "have" if len(who) > 1 else "has"
    before = [one for one in steps if one < step]
    since = f"in step {step}" if not before or before[-1] == step - 1 else f"between steps {before[-1]} and {step}"
    counts = Counter(name.partition("/")[0] for name in differs)
    tensor, index, word = _first(differs, states[most[0]], states[others[0]])
    lines = [
        f"Different bits {since}: {listed(who)} {verb} other bits than {listed([labels[i] for i in most])}.",
        f"First: {tensor}; {word}.",
        f"{len(differs)} of {len(names)} tensors differ ({listed([f'{n} of {kind}' for kind, n in counts.items()])}): "
        + ", ".join(differs[:_SHOWN])
        + (", ..." if len(differs) > _SHOWN else "."),
        f"{len(before)} steps before are the same." if before else "It is the first step that all of them have.",
        f"To find the op, record step {step} of each (te.record), and compare the two files.",
    ]
    return Comparison(False, (*lines, *notices), step, None, tensor, index, tuple(who))


def _first(differs: list[str], one: State, other: State) -> tuple[str, tuple[int, ...] | None, str]:
    """The first tensor that differs, and its word, if digests say which."""
    for name in differs:
        if name in one and name in other and one[name][0] == other[name][0]:
            if one[name][1] == other[name][1]:
                continue
            named = one[name][0]
            found = changed_word(named.words, one[name][1], other[name][1])
            if found is None:
                return name, None, "more than one word differs"
            index, said = number_of(named.dtype, named.shape, *found)
            return name, index, f"1 word differs, at {list(index)}: {said}"
        return name, None, "one has it, or has it in another shape, and the other does not"
    return differs[0], None, "it differs in others of them"
