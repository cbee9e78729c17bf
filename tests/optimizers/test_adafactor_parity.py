"""On an H200 `twin::adafactor` equals its CPU definition in every bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.adam_parameters import awkward
from shared.bits import assert_same_bits

import optimized  # noqa: F401  (registers the CUDA kernels)

pytestmark = pytest.mark.gpu

twin = torch.ops.twin
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KINDS = {"fp32": (FP32, FP32), "bf16": (BF16, BF16), "fp16": (FP16, FP16), "bf16, fp32 parameters": (BF16, FP32)}
SHAPES = [
    *[(), (1,), (255,), (70001,), (1, 1), (1, 300), (300, 1), (63, 257), (64, 256), (65, 512), (129, 2049), (700, 33)],
    *[(3, 65, 40), (2, 3, 7, 5), (1, 1, 40000), (40000, 1), (0,), (0, 3), (3, 0)],
]


def compare(shape: tuple[int, ...], kind: str, special: bool = False, maximize: bool = False, seed: int = 0) -> None:
    """Three steps."""
    wide, dtype = KINDS[kind]
    count = torch.Size(shape).numel()
    sides = []
    for device in ("cpu", "cuda"):
        grad, param = (
            awkward(seed + i, count, one, special).view(shape).to(device) for i, one in enumerate((wide, dtype))
        )
        matrix = len(shape) > 1
        row = torch.zeros((*shape[:-1], 1) if matrix else shape, device=device)
        col = torch.zeros((*shape[:-2], 1, shape[-1]), device=device) if matrix else None
        for weight in (1.0, 0.6, 0.3):
            twin.adafactor(grad, param, row, col, 0.01, weight, 0.999, 1e-7, 1e-14, 1e-3, 1.0, maximize)
        sides.append([x for x in (param, row, col) if x is not None])
    for name, a, b in zip(("param", "row_var", "col_var"), *sides, strict=False):
        assert_same_bits(b, a, f"{kind}, {shape}, {name}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_kind(shape: tuple[int, ...], kind: str) -> None:
    compare(shape, kind)
    compare(shape, kind, special=True, maximize=True)


@settings(max_examples=25, deadline=None)
@given(
    shape=st.lists(st.integers(1, 90), min_size=0, max_size=3),
    kind=st.sampled_from(list(KINDS)),
    special=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_any_shape(shape: list[int], kind: str, special: bool, seed: int) -> None:
    compare(tuple(shape), kind, special, seed=seed)
