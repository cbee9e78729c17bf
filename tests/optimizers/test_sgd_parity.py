"""On an H200 `twin::sgd` equals its CPU definition in every bit."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.adam_parameters import awkward
from shared.bits import assert_same_bits

import optimized  # noqa: F401  (registers the CUDA kernels)
from optimized.ops.optimizers.sgd import CAPACITIES

pytestmark = [pytest.mark.gpu, pytest.mark.simulated]

twin = torch.ops.twin
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KINDS = {"fp32": (FP32, FP32), "bf16": (BF16, BF16), "fp16": (FP16, FP16), "bf16, fp32 parameters": (BF16, FP32)}


def compare(
    sizes: list[int],
    kind: str,
    momentum: float = 0.9,
    flags: tuple[bool, bool] = (False, False),
    decay: float = 0.1,
    offset: int = 0,
    special: bool = False,
    seed: int = 0,
) -> None:
    """Three steps of tensors that begin `offset` elements after a multiple of 16 bytes; `flags`: Nesterov's, last."""
    wide, dtype = KINDS[kind]
    sides = []
    for device in ("cpu", "cuda"):
        lists: list[list[torch.Tensor]] = [[], [], []]
        for (i, size), (j, one) in itertools.product(enumerate(sizes), enumerate((wide, dtype, dtype))):
            x = awkward(seed + 3 * i + j, size, one, special)
            lists[j].append(torch.zeros(size + offset, dtype=one, device=device)[offset:].copy_(x))
        for step in range(3):
            buffers = lists[2] if momentum else []
            twin.sgd(lists[0], lists[1], buffers, 1e-2, momentum, 0.3, decay, flags[0], step == 0, flags[1])
        sides.append([x for part in lists for x in part])
    for i, (a, b) in enumerate(zip(*sides, strict=True)):
        assert_same_bits(b, a, f"{kind}, tensor {i % len(sizes)} of list {i // len(sizes)}")


@pytest.mark.sample(6)
@pytest.mark.parametrize("flags", list(itertools.product((False, True), repeat=2)), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind: str, flags: tuple[bool, bool]) -> None:
    compare([1, 7, 8, 9, 2047, 2048, 2049, 0, 70001], kind, flags=flags)
    compare([2049, 3], kind, flags=flags, special=True)
    compare([2049, 3], kind, 0.0, flags, 0.0, special=True)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=9),
    kind=st.sampled_from(list(KINDS)),
    momentum=st.sampled_from((0.0, 0.9)),
    offset=st.integers(0, 9),
    seed=st.integers(0, 2**20),
)
def test_any_list_at_any_address(sizes: list[int], kind: str, momentum: float, offset: int, seed: int) -> None:
    compare(sizes, kind, momentum, offset=offset, special=True, seed=seed)


@pytest.mark.sample(1)
@pytest.mark.parametrize("count", [CAPACITIES[0], CAPACITIES[0] + 1, CAPACITIES[1] + 1])
def test_around_the_capacity_of_a_launch(count: int) -> None:
    compare([5 + i % 7 for i in range(count)], "bf16")
