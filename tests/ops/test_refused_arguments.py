"""What ops refuse: the calls in their lists (optimized/recordings/cases), each with one argument changed.

A refusal is a sentence that names an argument, and comes before anything is launched. No list here says what is
refused: tensors are of one device; a dtype or a number of dimensions that no call has is refused; a size that another
argument's size determines in all calls is refused when it is another; and where numbers begin to be refused, the
sentence names the last that is accepted.
"""

import collections
import copy
import math
import re
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from shared.dry_gpu import DryGpu
from shared.op_calls import LISTS
from torch.utils._pytree import tree_map_only

import optimized  # noqa: F401  (registers the CUDA kernels)
from optimized.recordings import cases
from optimized.recordings.calls import Call, Inputs
from reference.inspect.recorded_step.ops import tensors_of

REFUSALS = (TypeError, ValueError, IndexError, NotImplementedError, RuntimeError)
SMALL = 1 << 12  # numbers in a call that the CPU runs
PATTERNS, OF_ONE = 6, 3  # how many kinds of calls of an op, and calls of one kind, are changed
# Lists of numbers, whatever their places, and of words.
ANY_RANK = {"clip_grads.grads", "grad_norm.grads", "normal.values", "word_sums.tensors"}
OF_SIZES = {"cat_cast_transpose_dbias.groups", "cat_cast_blocks_transpose_dbias.groups"}  # which columns decide
ANY_DTYPE = {"word_sums.tensors"}


class Place(NamedTuple):
    """A tensor among a call's arguments: its argument, and its place in that argument's list."""

    argument: int
    entry: int | None

    def of(self, args: tuple[Any, ...]) -> torch.Tensor:
        found = args[self.argument] if self.entry is None else args[self.argument][self.entry]
        assert isinstance(found, torch.Tensor)
        return found

    def replaced(self, call: Call, other: Any) -> Call:
        args = list(call.args)
        if self.entry is not None:
            other = [other if i == self.entry else x for i, x in enumerate(args[self.argument])]
        args[self.argument] = other
        return Call(call.op, tuple(args))


def names(call: Call) -> list[str]:
    """Of the op's arguments."""
    return [one.name for one in getattr(torch.ops.twin, call.name).default._schema.arguments]


def places(call: Call) -> Iterator[Place]:
    """All tensors of a call; of a list the first and the last."""
    for i, x in enumerate(call.args):
        if isinstance(x, torch.Tensor):
            yield Place(i, None)
        elif isinstance(x, (list, tuple)):
            yield from (Place(i, n) for n in {0, len(x) - 1} if x and isinstance(x[n], torch.Tensor))


def kind(x: Any) -> Any:
    """Of what kind an argument is."""
    if isinstance(x, torch.Tensor):
        return x.dim(), x.dtype
    if isinstance(x, (list, tuple)):
        return tuple({kind(one) for one in x})
    return x if isinstance(x, (str, bool, torch.dtype)) else type(x)


def kinds(calls: list[Call]) -> dict[tuple[Any, ...], list[Call]]:
    """Calls by the op, and by how many dimensions its tensors have and which of them are there."""
    found: dict[tuple[Any, ...], list[Call]] = collections.defaultdict(list)
    for call in calls:
        ranks = tuple(x.dim() if isinstance(x, torch.Tensor) else None for x in call.args)
        found[call.name, *ranks].append(call)
    return found


def few(calls: list[Call]) -> list[Call]:
    """Of each op some calls that differ in kind, small ones."""
    found: dict[str, dict[Any, Call]] = collections.defaultdict(dict)
    for call in sorted(calls, key=lambda call: sum(x.numel() for x in tensors_of(call.args))):
        if all(x.numel() for x in tensors_of(call.args)):
            found[call.name].setdefault(tuple(map(kind, call.args)), call)
    return [call for of in found.values() for call in list(of.values())[:PATTERNS]]


def refused(call: Call) -> str | None:
    """The sentence that refuses a call; None if it is taken."""
    try:
        call.run()
    except REFUSALS as error:
        text = str(error)
        assert text.startswith("twin::") or any(text.startswith(name) for name in names(call)), (call.name, text)
        assert text.endswith("."), (call.name, text)
        return text
    return None


def is_true(text: str | None, call: Call) -> None:
    """Refuse a sentence that gives a tensor another dtype than it has."""
    for name, entry, dtype in re.findall(r"\b(\w+)(?:\[(\d+)\])?(?: is)? (torch\.\w+)", text or ""):
        if name in names(call):
            found = call.args[names(call).index(name)]
            found = found[int(entry)] if entry else found
            assert not isinstance(found, torch.Tensor) or str(found.dtype) == dtype, (call.name, text)


def made(name: str) -> list[Call]:
    """The calls of a file: shapes and dtypes, without numbers."""
    return list(cases.MODULES[name].calls(Inputs("meta", filled=False)))


@pytest.mark.parametrize("name", LISTS)
def test_tensors_of_two_devices_are_refused(name: str) -> None:
    taken = []
    with DryGpu(written=False) as gpu:
        calls = few(list(cases.MODULES[name].calls(Inputs("cuda", filled=False))))
        for call in calls:
            if sum(1 for _ in tensors_of(call.args)) == 1:
                continue
            for place in places(call):
                x = place.of(call.args)
                here = torch.ones(x.shape, dtype=torch.float32).to(x.dtype)
                before = len(gpu.launches)
                if refused(place.replaced(call, here)) is None:
                    taken.append(f"{call.name}.{names(call)[place.argument]}")
                else:
                    assert len(gpu.launches) == before, (call.name, place)
    assert not taken


@pytest.mark.parametrize("name", LISTS)
def test_dtypes_and_ranks_that_no_call_has_are_refused(name: str) -> None:
    taken = set()
    calls = made(name)
    ranks: dict[str, set[int]] = collections.defaultdict(set)
    for call in calls:
        for place in places(call):
            ranks[f"{call.name}.{names(call)[place.argument]}"].add(place.of(call.args).dim())
    for call in few(calls):
        for place in places(call):
            x, of = place.of(call.args), f"{call.name}.{names(call)[place.argument]}"
            for dtype in (torch.float64, torch.complex64):
                other = place.replaced(call, x.to(dtype))
                text = refused(other)
                is_true(text, other)
                if of not in ANY_DTYPE and text is None:
                    taken.add((of, dtype))
            for dtype in (torch.float32, torch.bfloat16, torch.float16):  # which some argument may have
                other = place.replaced(call, x.to(dtype))
                is_true(refused(other), other)
            if of in ANY_RANK or x.numel() == 1:
                continue
            for other in (x.unsqueeze(0), x.flatten(0, 1) if x.dim() > 1 else x[0]):
                if other.dim() not in ranks[of] and refused(place.replaced(call, other)) is None:
                    taken.add((of, other.dim()))
    assert not taken


# How one size follows from another.
SIZES: list[Callable[[int], int]] = [lambda n: n, lambda n: 2 * n]
SIZES += [lambda n, k=k: -(-n // k) for k in (8, 16, 32, 128)]  # type: ignore[misc]


def determined(calls: list[Call]) -> Iterator[tuple[int, int]]:
    """Arguments, and dimensions of them, whose size another argument's determines in all of several calls."""
    dims = [(i, d) for i, x in enumerate(calls[0].args) if isinstance(x, torch.Tensor) for d in range(x.dim())]
    sizes = {(i, d): [call.args[i].shape[d] for call in calls] for i, d in dims}
    for (i, d), those in sizes.items():
        others = [found for (j, _), found in sizes.items() if j != i]
        if len(set(those)) >= 3 and any(list(map(follows, found)) == those for found in others for follows in SIZES):
            yield i, d


@pytest.mark.parametrize("name", LISTS)
def test_a_size_that_another_determines_is_refused_when_it_is_another(name: str) -> None:
    taken = set()
    for calls in kinds(made(name)).values():
        for i, d in determined(calls):
            for call in list({call.args[i].shape[d]: call for call in calls}.values())[:OF_ONE]:
                for size in {max(0, call.args[i].shape[d] - 1), call.args[i].shape[d] + 1} - {call.args[i].shape[d]}:
                    shape = list(call.args[i].shape)
                    shape[d] = size
                    if refused(Place(i, None).replaced(call, call.args[i].new_empty(shape))) is None:
                        taken.add((call.name, names(call)[i], d))
    assert not taken


def numbers(text: str | None) -> set[float]:
    """Those that a sentence states."""
    found = re.findall(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", (text or "").replace("negative", "0"))
    return set(map(float, found))


def words(text: str | None) -> str:
    """A sentence without its numbers."""
    return re.sub(r"-?(\d+(\.\d+)?(e[+-]?\d+)?|inf|nan)", "", text or "")


def ordered(x: float) -> int:
    """The floats in their order, as integers."""
    (word,) = struct.unpack("<q", struct.pack("<d", x))
    return word if word >= 0 else -(word & (2**63 - 1))


def unordered(n: int) -> float:
    found: float = struct.unpack("<d", struct.pack("<Q", n if n >= 0 else -n | 1 << 63))[0]
    return found


def edge(accepts: Callable[[Any], bool], good: Any, bad: Any) -> tuple[Any, Any]:
    """Two neighbours on the way from an accepted number to a refused one: the first is accepted, the second is not."""
    there, back = (ordered, unordered) if isinstance(good, float) else (int, int)
    inside, outside = there(good), there(bad)
    while abs(outside - inside) > 1:
        middle = (inside + outside) // 2
        inside, outside = (middle, outside) if accepts(back(middle)) else (inside, middle)
    return back(inside), back(outside)


def in_words(text: str, inside: float, outside: float) -> bool:
    """Whether a sentence says that a number must be finite, or positive in fp32, and these are where that ends."""
    with np.errstate(over="ignore"):
        here, there = np.float32(inside), np.float32(outside)
    finite = np.isfinite(here) and (np.isinf(there) or abs(inside) == float(np.finfo(np.float32).max))
    positive = abs(inside) < 1 and here > 0 >= there
    return bool(("finite" in text and (finite or math.isinf(outside))) or ("positive" in text and positive))


@pytest.mark.parametrize("name", LISTS)
def test_a_sentence_states_where_numbers_begin_to_be_refused(name: str) -> None:
    """The last that is accepted or the first that is not, if sizes do not decide; and NaN is never between numbers."""
    for call in few(made(name)):
        for i, value in enumerate(call.args):
            if type(value) not in (int, float):
                continue
            what = f"{call.name}.{names(call)[i]}"
            for end in (-(2**40), 2**40) if type(value) is int else (-math.inf, math.inf):
                tell = lambda x, call=call, i=i: refused(Place(i, None).replaced(call, x))  # noqa: E731
                text = tell(end)
                if text is None:
                    continue
                inside, outside = edge(lambda x: words(tell(x)) != words(text), value, end)  # noqa: B023
                at_edge = tell(outside)
                if isinstance(value, float):
                    assert tell(math.nan) is not None, what
                stated = numbers(text) - {end}
                if stated <= numbers(at_edge) and what not in OF_SIZES:  # else they follow from the number itself
                    assert {inside, outside} & stated or in_words(text, inside, outside), (what, inside, outside, text)


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_one_tensor_are_lists(name: str) -> None:
    """A small call of each op with lists of tensors, cut to their first entries, runs or is refused in a sentence."""
    if not any(isinstance(x, (list, tuple)) for call in made(name) for x in call.args):
        return
    for call in few(list(cases.MODULES[name].calls(Inputs("cpu"))))[:2]:
        lists = [len(x) for x in call.args if isinstance(x, (list, tuple)) and len(x) > 1]
        if lists:
            args = (x[:1] if isinstance(x, (list, tuple)) and len(x) == lists[0] else x for x in call.args)
            refused(Call(call.op, tuple(args)))


@pytest.mark.parametrize("name", LISTS)
def test_what_the_definition_refuses_a_compiler_and_a_gpu_refuse(name: str) -> None:
    """`outputs` does, which they call: not the arithmetic behind it, which is the CPU's alone."""
    for there in few(made(name)):
        numbers = [i for i, x in enumerate(there.args) if type(x) in (int, float)]
        if not numbers or sum(x.numel() for x in tensors_of(there.args)) > SMALL:
            continue
        here = tree_map_only(torch.Tensor, lambda x: torch.zeros(x.shape, dtype=x.dtype), there.args)
        if refused(Call(there.op, copy.deepcopy(here))) is not None:
            continue  # zeros are no such values
        for i in numbers:
            for value in (-1, -(2**31)) if type(there.args[i]) is int else (-1.0, math.nan, -math.inf):
                place = Place(i, None)
                said = refused(place.replaced(Call(there.op, copy.deepcopy(here)), value))
                assert said is None or refused(place.replaced(there, value)) is not None, (there.name, said)
