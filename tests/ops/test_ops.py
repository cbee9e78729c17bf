"""What holds of every op, of each call in its list (optimized/recordings/cases), on a CPU and where kernels run."""

import copy
import random
import re

import pytest
import torch
from shared.bits import assert_same_bits
from shared.op_calls import LISTS, SIZED, drawn, listed, sized
from torch.utils._pytree import tree_map_only

import optimized  # noqa: F401  (registers the CUDA kernels)
from optimized import measure
from optimized.recordings import cases
from optimized.recordings.calls import Call
from optimized.recordings.case import FP8
from reference.inspect.recorded_step.ops import tensors_of
from reference.ops import library

NOTHING = ((0, 16), (16, 0), (1, 0), (0, 0))
SMALL = 1 << 13  # numbers in a call's arguments, for the simulator


def without_numbers(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LISTS)
def test_a_call_gives_the_same_twice_and_changes_what_it_says(name: str, every: int) -> None:
    """Its results have the shapes and dtypes that a compiler was told; other memory does not enter them.

    Small calls, the first of each op and every fourth large one; all are a slow test.
    """
    seen: set[str] = set()
    for i, call in enumerate(drawn(name)):
        if sum(x.numel() for x in tensors_of(call.args)) > SMALL and call.name in seen and i % every:
            continue
        seen.add(call.name)
        before, again = copy.deepcopy(call.args), copy.deepcopy(call.args)
        told = call._replace(args=tree_map_only(torch.Tensor, without_numbers, call.args)).run()
        results = call.run()
        torch.full((1 << 16,), torch.nan)
        others = call._replace(args=again).run()
        for a, b in zip(tensors_of([results, call.args]), tensors_of([others, again]), strict=True):
            assert_same_bits(a, b, call.name)
        may_change = call.changed()
        for i, (now, then) in enumerate(zip(call.args, before, strict=True)):
            if i not in may_change:
                for a, b in zip(tensors_of(now), tensors_of(then), strict=True):
                    assert_same_bits(a, b, f"{call.name} changed argument {i}")
        for a, b in zip(tensors_of(told), tensors_of(results), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), call.name


@pytest.mark.parametrize("name", LISTS)
def test_a_compiler_may_trace_it(name: str) -> None:
    """PyTorch's own checks of an op, one small call of each: its schema and its fake."""
    check_traced(name, ["test_autograd_registration", "test_faketensor", "test_schema"])


@pytest.mark.sample(14)
@pytest.mark.parametrize("name", LISTS)
def test_a_compiler_may_trace_it_for_any_size(name: str) -> None:
    """The same with sizes that are symbols."""
    check_traced(name, ["test_aot_dispatch_dynamic"])


def check_traced(name: str, tests: list[str]) -> None:
    small: dict[str, Call] = {}
    for call in sorted(drawn(name), key=lambda call: sum(x.numel() for x in tensors_of(call.args))):
        if all(x.numel() for x in tensors_of(call.args)):
            small.setdefault(call.name, call)
    for op, call in small.items():
        given = list(tensors_of(call.args))
        for x in given:  # NaN is not close to NaN
            if x.dtype in (torch.bfloat16, torch.float16, torch.float32):
                x.nan_to_num_(1.0, 2.0, -2.0)
        codes = any(x.dtype in FP8 for x in given)  # such a number cannot be multiplied, as that test does
        of_this = [one for one in tests if one != "test_schema" or not codes]
        torch.library.opcheck(getattr(torch.ops.twin, op).default, call.args, test_utils=of_this)


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("name", LISTS)
def test_cuda_gives_the_words_of_the_cpu(name: str, device: torch.device, is_simulated: bool) -> None:
    """Results, and arguments after them, of numbers that are fresh in each session."""
    seed = 0 if is_simulated else int(torch.randint(1 << 20, ()))
    calls = list(enumerate(drawn(name, seed)))
    if is_simulated:
        small = [one for one in calls if 0 < sum(x.numel() for x in tensors_of(one[1].args)) <= SMALL]
        random.Random(name).shuffle(small)
        small.sort(key=lambda one: all(x.numel() for x in tensors_of(one[1].args)))  # with numbers in all, if there is
        calls = list({call.name: (i, call) for i, call in small}.values())  # the last one of each op
    for i, here in calls:
        there = here.moved(device)
        torch.full((1 << 20,), torch.nan, device=device)  # what the allocator hands out next
        found, expected = there.run(), here.run()
        for a, b in zip(tensors_of([found, there.args]), tensors_of([expected, here.args]), strict=True):
            assert_same_bits(a, b, f"{name}, call {i}: {here.name}, seed {seed}")


def check_nothing(name: str, device: torch.device | str) -> None:
    """An op of nothing gives no NaN, or answers in a sentence."""
    for rows, cols in NOTHING:
        for call in sized(name, device, rows, cols):
            try:
                results = call.run()
            except (TypeError, ValueError, NotImplementedError) as error:
                refused = str(error)
                assert re.match(r"twin::\w+: .*(1 to \d+ c|1 to \d+ columns;)", refused), refused
                continue
            for x in tensors_of([results, call.args]):
                wide = x.float() if x.is_floating_point() else x
                assert not bool(wide.isnan().any()), f"{call.name} of {rows}, {cols}: {x}"


@pytest.mark.parametrize("name", SIZED)
def test_nothing_gives_no_nan(name: str) -> None:
    check_nothing(name, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", SIZED)
def test_nothing_gives_no_nan_on_a_gpu(name: str, device: torch.device) -> None:
    check_nothing(name, device)


def test_every_op_has_its_cases() -> None:
    """In a file of its own name, or of the op that it belongs to; one that only the CPU has needs none."""
    ops = set(library._IMPLEMENTATIONS["CPU"]) - set(library.CPU_ONLY)
    assert not set(library.CPU_ONLY) & set(library._IMPLEMENTATIONS["CUDA"])
    assert {call.name for name in LISTS for call in listed(name)} == ops
    assert {call.name for name in SIZED for call in sized(name, "cpu", 1, 16)} == ops
    files = {name for name, module in cases.MODULES.items() if name != "layers"}
    assert files == set(LISTS), "without calls"


def test_every_file_of_ops_is_in_the_contract() -> None:
    """One of its ops is named in docs/numerics.md, whose section says what the others do."""
    contract = (measure.ROOT / "docs" / "numerics.md").read_text("utf-8")
    files: dict[str, list[str]] = {}
    for op, definition in library._IMPLEMENTATIONS["CPU"].items():
        files.setdefault(definition.__module__, []).append(op)
    missing = {file: ops for file, ops in files.items() if not any(f"`twin::{op}`" in contract for op in ops)}
    assert not missing
