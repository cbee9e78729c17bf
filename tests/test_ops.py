"""What holds of every op, of each call in its list (optimized/recordings/cases): on a CPU."""

import copy
import re

import pytest
import torch
from conftest import assert_same_bits
from torch.utils._pytree import tree_map_only

from optimized.recordings import cases
from optimized.recordings.calls import Call, Inputs, tensors_in
from reference.ops import library

LISTS = sorted(cases.having("calls"))
NOTHING = ((0, 16), (16, 0), (1, 0), (0, 0))


def drawn(name: str, device: str = "cpu", seed: int = 0) -> list[Call]:
    """The calls of a file."""
    return list(cases.MODULES[name].calls(Inputs(device, seed)))


def changed(call: Call) -> list[int]:
    """Which of its arguments an op may change."""
    arguments = getattr(torch.ops.twin, call.name).default._schema.arguments
    return [i for i, one in enumerate(arguments) if one.alias_info is not None and one.alias_info.is_write]


def without_numbers(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


@pytest.mark.parametrize("name", LISTS)
def test_a_call_gives_the_same_twice_and_changes_what_it_says(name: str) -> None:
    """Its results have the shapes and dtypes that a compiler was told; other memory does not enter them."""
    for call in drawn(name):
        before, again = copy.deepcopy(call.args), copy.deepcopy(call.args)
        results = call.run()
        torch.full((1 << 16,), torch.nan)
        others = call._replace(args=again).run()
        for a, b in zip(tensors_in([results, call.args]), tensors_in([others, again]), strict=True):
            assert_same_bits(a, b, call.name)
        may_change = changed(call)
        for i, (now, then) in enumerate(zip(call.args, before, strict=True)):
            if i not in may_change:
                for a, b in zip(tensors_in(now), tensors_in(then), strict=True):
                    assert_same_bits(a, b, f"{call.name} changed argument {i}")
        told = call._replace(args=tree_map_only(torch.Tensor, without_numbers, call.args)).run()
        for a, b in zip(tensors_in(told), tensors_in(results), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), call.name


def check_nothing(name: str, device: str) -> None:
    """An op of nothing gives no NaN, or answers in a sentence."""
    for rows, cols in NOTHING:
        for call in cases.MODULES[name].sized(Inputs(device), rows, cols):
            try:
                results = call.run()
            except (TypeError, ValueError, NotImplementedError) as error:
                refused = str(error)
                assert re.match(r"twin::\w+: .*(1 to \d+ c|1 to \d+ columns;)", refused), refused
                continue
            for x in tensors_in([results, call.args]):
                wide = x.float() if x.is_floating_point() else x
                assert not bool(wide.isnan().any()), f"{call.name} of {rows}, {cols}: {x}"


@pytest.mark.parametrize("name", sorted(cases.having("sized")))
def test_nothing_gives_no_nan(name: str) -> None:
    check_nothing(name, "cpu")


def test_every_op_has_its_cases() -> None:
    """In a file of its own name, or of the op that it belongs to."""
    ops = set(library._IMPLEMENTATIONS["CPU"])
    for function, made in (
        ("calls", {one.name for name in LISTS for one in cases.MODULES[name].calls(Inputs("cpu", filled=False))}),
        ("sized", {x.name for m in cases.having("sized").values() for x in m.sized(Inputs("cpu"), 1, 16)}),
    ):
        assert not ops - made, f"no {function} for {ops - made}"
    assert not {case.op.split()[0] for case in cases.cases()} & set() - ops
