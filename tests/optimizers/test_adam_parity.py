"""On an H200 `twin::adam` equals its CPU definition in every bit, and so does training with `FusedAdam`."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.bits import assert_same_bits

import optimized  # noqa: F401  (registers the CUDA kernels)
import reference as te
from optimized.ops.optimizers.adam import CAPACITIES
from reference.float8.float8_tensor import Float8Tensor
from reference.ops.optimizers.adam import correction

pytestmark = pytest.mark.gpu

twin = torch.ops.twin
SPECIAL = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45, 1e-38, 3e38, 65504.0])
KINDS = {
    "fp32": (torch.float32, torch.float32, False),
    "bf16": (torch.bfloat16, torch.bfloat16, False),
    "fp16": (torch.float16, torch.float16, False),
    "bf16, masters": (torch.bfloat16, torch.float32, False),
    "bf16, masters and copies": (torch.bfloat16, torch.float32, True),
    "fp16, masters and copies": (torch.float16, torch.float32, True),
}


def numbers(seed: int, size: int, dtype: torch.dtype, special: bool) -> torch.Tensor:
    draw = np.random.default_rng(seed)
    x = torch.from_numpy((draw.normal(size=size) * np.exp2(draw.integers(-20, 10, size=size))).astype(np.float32))
    if special and size:
        at = torch.from_numpy(draw.random(size) < 0.1)
        x[at] = SPECIAL[torch.from_numpy(draw.integers(0, len(SPECIAL), size=int(at.sum())))]
    return x.to(dtype)


def compare(
    sizes: list[int], kind: str, decoupled: bool, offset: int = 0, special: bool = False, seed: int = 0
) -> None:
    """Three steps of tensors that begin `offset` elements after a multiple of 16 bytes."""
    wide, param, copies = KINDS[kind]
    sides = []
    for device in ("cpu", "cuda"):
        lists: list[list[torch.Tensor]] = [[], [], [], [], []]
        for i, size in enumerate(sizes):
            for j, dtype in enumerate((wide, param, torch.float32, torch.float32, wide)):
                x = numbers(seed + 5 * i + j, size, dtype, special and j < 2)
                room = torch.zeros(size + offset, dtype=dtype, device=device)[offset:]
                lists[j].append(room.copy_(x.abs() if j == 3 else x))
        grads, params, first, second, rounded = lists
        for step in (1, 2, 3):
            scalars = (1e-2, 0.9, 0.999, 1e-8, 0.1, correction(0.9, step), correction(0.999, step))
            twin.adam(grads, params, first, second, rounded if copies else [], *scalars, decoupled)
        sides.append([x for part in lists for x in part])
    for i, (a, b) in enumerate(zip(*sides, strict=True)):
        assert_same_bits(b, a, f"{kind}, tensor {i % len(sizes)} of list {i // len(sizes)}")


@pytest.mark.simulated
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind: str, decoupled: bool) -> None:
    compare([1, 7, 8, 9, 2047, 2048, 2049, 0, 70001], kind, decoupled)
    compare([2049, 3], kind, decoupled, special=True)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=9),
    kind=st.sampled_from(list(KINDS)),
    decoupled=st.booleans(),
    offset=st.integers(0, 9),
    seed=st.integers(0, 2**20),
)
def test_any_list_at_any_address(sizes: list[int], kind: str, decoupled: bool, offset: int, seed: int) -> None:
    compare(sizes, kind, decoupled, offset, True, seed)


@pytest.mark.parametrize("count", [CAPACITIES[0], CAPACITIES[0] + 1, CAPACITIES[1] + 1])
def test_around_the_capacity_of_a_launch(count: int) -> None:
    compare([5 + i % 7 for i in range(count)], "bf16, masters and copies", True)


@pytest.mark.parametrize("quantized", [False, True], ids=["16-bit weights", "FP8 weights"])
def test_training_has_the_bits_of_a_cpu(quantized: bool) -> None:
    recipe = te.DelayedScaling(amax_history_len=4)
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=quantized, recipe=recipe):
        layer = te.TransformerLayer(64, 128, 4, fuse_qkv_params=True, params_dtype=torch.bfloat16)
    pair = (layer, copy.deepcopy(layer).to("cuda"))
    optimizers = [te.optimizers.FusedAdam(m.parameters(), 1e-2, weight_decay=0.1, master_weights=True) for m in pair]
    for step in range(9):
        x0 = numbers(step, 33 * 2 * 64, torch.bfloat16, False).view(33, 2, 64)
        seen = []
        for module, optimizer in zip(pair, optimizers, strict=True):
            x = x0.to(next(module.parameters()).device)
            optimizer.zero_grad()
            torch.manual_seed(step)  # of the masks
            with te.autocast(recipe=recipe):
                y = module(x)
            y.backward(torch.full_like(y, 0.01))
            optimizer.step()
            found = {"y": y}
            for name, p in module.named_parameters():
                parts = (p.codes, p.codes_t, p._scale_inv) if isinstance(p, Float8Tensor) else (p,)
                found |= {f"{name}.{i}": part.detach().clone() for i, part in enumerate(parts)}
                found |= {f"{name}.{key}": value.clone() for key, value in optimizer.state[p].items()}
            seen.append(found)
        for name, value in seen[0].items():
            assert_same_bits(value, seen[1][name], f"step {step}, {name}")
