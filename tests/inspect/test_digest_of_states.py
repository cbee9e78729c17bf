"""`te.digest` of what optimizers keep in dicts, lists and tuples: each tensor and number in it counts."""

import copy
import enum
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference as te


class Pair(NamedTuple):
    first: Any
    second: Any


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float8_e4m3fn)


def tensor(numbers: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32).to(dtype)


TENSORS = st.builds(tensor, st.lists(st.integers(0, 3), max_size=3), st.sampled_from(DTYPES))
NUMBERS = st.one_of(st.integers(-2, 2), st.booleans(), st.sampled_from([0.0, -0.0, 1.0, 0.1, float("inf")]))
OTHERS = st.sampled_from([None, "1", "a.b", b"1", torch.float32, np.float32(1), np.arange(3), Colour.RED, 1j])
LEAVES = st.one_of(TENSORS, NUMBERS, OTHERS)
KEYS = st.sampled_from(["a", "b", "a.b", "[0]", "", 0, 1, "0"])


def inside(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(values, max_size=3)
    return st.one_of(
        some,
        some.map(tuple),
        some.map(deque),
        st.dictionaries(KEYS, values, max_size=3),
        st.builds(Pair, values, values),
    )


STATES = st.dictionaries(st.sampled_from(["a", "b", "exp_avg"]), st.recursive(LEAVES, inside, max_leaves=8), max_size=3)


def words(x: Any) -> Any:
    """A state in tuples that are equal exactly if states are."""
    if isinstance(x, torch.Tensor):
        return ("tensor", str(x.dtype), tuple(x.shape), x.view(torch.uint8).tolist())
    if isinstance(x, np.ndarray):
        return ("array", x.dtype.str, x.shape, x.tobytes())
    if isinstance(x, dict):
        return (type(x), {repr(key): words(value) for key, value in x.items()})
    if isinstance(x, (list, tuple, deque)):
        return (type(x), [words(one) for one in x])
    return (type(x), repr(x))


def digest(state: Any) -> Any:
    """Of an optimizer that keeps it for its one parameter."""
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight] = state
    return te.digest(model, optimizer)


@settings(max_examples=200, deadline=None)
@given(STATES, STATES)
def test_digests_are_equal_exactly_if_states_are(one: Any, other: Any) -> None:
    assert digest(one) == digest(copy.deepcopy(one))
    if words(one) != words(other):
        assert str(digest(one)) != str(digest(other))


def leaves(x: Any) -> Iterator[tuple[Any, Any]]:
    """The dict or list, and the key, of each value that can be replaced."""
    pairs = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, (list, tuple, deque)) else ()
    for key, value in pairs:
        if not isinstance(x, tuple):
            yield x, key
        yield from leaves(value)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_one_value_that_changes_anywhere_changes_the_digest(data: st.DataObject) -> None:
    """At any depth, where all else stays as it is."""
    state = data.draw(STATES.filter(lambda found: any(True for _ in leaves(found))))
    before, text = digest(state), words(state)
    where, key = data.draw(st.sampled_from(list(leaves(state))))
    where[key] = data.draw(LEAVES)
    after = digest(state)
    assert (before == after) is (text == words(state))


def test_of_one_tensor_under_several_names_each_counts() -> None:
    one, two = torch.ones(3), torch.ones(3)
    assert digest({"a": [one, two, one]}) == digest({"a": [one.clone(), two.clone(), one.clone()]})
    two[0] = 2
    assert digest({"a": [one, two, one]}) != digest({"a": [one, two, two]})


def test_the_lists_of_lbfgs_and_the_settings_of_groups() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    x, y = torch.randn(8, 4), torch.randn(8, 3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    before = te.digest(model, optimizer)
    directions = optimizer.state[model.weight]["old_dirs"]
    assert directions
    directions[-1].view(torch.int32)[2] ^= 1
    after = te.digest(model, optimizer)
    assert [name for name in before if before[name] != after[name]] == [
        f"optimizer/weight.old_dirs[{len(directions) - 1}]"
    ]
    adam = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), betas=(0.9, 0.99), fused=False)
    before = te.digest(model, adam)
    adam.param_groups[0]["betas"] = (0.9, 0.98)
    after = te.digest(model, adam)
    assert [name for name in before if before[name] != after[name]] == ["optimizer/group 0.betas[1]"]
    adam.param_groups[0]["lr"].fill_(0.2)
    assert te.digest(model, adam)["optimizer/group 0.lr"] != after["optimizer/group 0.lr"]


def test_parameters_that_the_model_does_not_have_are_told_apart() -> None:
    model, others = torch.nn.Linear(2, 1, bias=False), [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD([*model.parameters(), *others], lr=0.1)
    for i, p in enumerate(others):
        optimizer.state[p]["step"] = i
    optimizer.state["all"] = {"calls": [1]}  # as some optimizers keep what is of no parameter
    found = te.digest(model, optimizer)
    assert {"optimizer/parameter 1.step", "optimizer/parameter 2.step", "optimizer/state 'all'.calls[0]"} <= set(found)
    optimizer.state[others[0]]["step"] = 5
    assert str(te.digest(model, optimizer)) != str(found)


def circle() -> list[Any]:
    found: list[Any] = [1]
    found.append([found])
    return found


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (
            [1, {"a": print}],
            r"^digest: optimizer/weight\.x\[1\]\.a is <built-in function print>; tensors, numbers, texts,",
        ),
        ({1, 2}, r"^digest: optimizer/weight\.x is \{1, 2\}; tensors, numbers"),
        (
            {(1, 2): 3},
            r"^digest: optimizer/weight\.x is \{\(1, 2\): 3\}; tensors, numbers, .* dicts by numbers or texts",
        ),
        (np.array([None]), r"^digest: optimizer/weight\.x is array\(\[None\], dtype=object\); "),
        ((torch.zeros(2, device="meta"),), r"^digest: optimizer/weight\.x\[0\] is on the meta device; dense"),
        (circle(), r"^weight\.x\[1\]\[0\] is a list that contains itself; one that ends is accepted"),
        (
            OrderedDict(a=[torch.ones(2).to_sparse()]),
            r"^digest: optimizer/weight\.x\.a\[0\] is torch\.sparse_coo; dense",
        ),
    ],
)
def test_what_has_no_words_is_refused_by_its_name(value: Any, sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        digest({"x": value})
