"""The bulk scale update on an H200 equals its CPU definition in every bit, for any list of modules at once."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.bits import assert_same_bits

import optimized  # noqa: F401  (registers the CUDA kernels)
from optimized.ops.casts.scale_update import CAPACITIES

pytestmark = [pytest.mark.gpu, pytest.mark.simulated]

twin = torch.ops.twin
SPECIAL = np.array([0.0, -0.0, np.nan, np.inf, 1e-45, 1e-38, 3e38, 448.0], dtype=np.float32)


def histories(seed: int, shapes: list[tuple[int, int]]) -> list[torch.Tensor]:
    draw = np.random.default_rng(seed)
    found = []
    for length, columns in shapes:
        h = np.abs(draw.normal(size=(length, columns)) * np.exp2(draw.integers(-30, 30, size=(length, columns))))
        h = h.astype(np.float32)
        where = draw.random(h.shape) < 0.2
        h[where] = draw.choice(SPECIAL, size=int(where.sum()))
        found.append(torch.from_numpy(h))
    return found


def compare(shapes: list[tuple[int, int]], algorithm: str, margin: int = 0, fp8_max: float = 448.0, seed: int = 0):  # type: ignore[no-untyped-def]
    start = histories(seed, shapes)
    scales = [torch.full((columns,), 3.0) for _, columns in shapes]
    sides = []
    for device in ("cpu", "cuda"):
        h, s = [t.clone().to(device) for t in start], [t.clone().to(device) for t in scales]
        for step in range(3):
            for module in h:
                module[0] = module[-1] * (0.5 + step)  # a new staging row
            twin.scale_update(s, h, fp8_max, margin, algorithm)
        sides.append((s, h))
    for i, pair in enumerate(zip(*sides[0], *sides[1], strict=True)):
        assert_same_bits(pair[2], pair[0], f"scale of module {i} {shapes[i]}")
        assert_same_bits(pair[3], pair[1], f"history of module {i} {shapes[i]}")


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_lengths_around_the_kernels_chunks(algorithm: str) -> None:
    lengths = (1, 2, 3, 5, 16, 255, 256, 257, 1023, 1024, 1025, 2048, 4097)
    compare([(length, 1 + i % 6) for i, length in enumerate(lengths)], algorithm)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 70), st.integers(0, 6)), min_size=1, max_size=12),
    algorithm=st.sampled_from(["max", "most_recent"]),
    margin=st.integers(0, 140),
    fp8_max=st.sampled_from([448.0, 57344.0]),
    seed=st.integers(0, 2**20),
)
def test_any_list_of_modules(shapes, algorithm, margin, fp8_max, seed) -> None:  # type: ignore[no-untyped-def]
    compare(shapes, algorithm, margin, fp8_max, seed)


@pytest.mark.sample(1)
@pytest.mark.parametrize("modules", [CAPACITIES[0], CAPACITIES[0] + 1, CAPACITIES[-1], CAPACITIES[-1] + 1])
def test_around_the_capacity_of_a_launch(modules: int) -> None:
    compare([(4, 3)] * modules, "max")


def test_scales_and_histories_on_two_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="one CUDA device for both"):
        twin.scale_update([torch.ones(1, device="cuda")], [torch.ones(2, 1)], 448.0, 0, "max")
