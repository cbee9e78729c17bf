"""`twin::adafactor` and `Adafactor`: each rounding and each sum, torch's Adafactor, state, and what is refused.

On an H200 the op equals its CPU definition in every bit.
"""

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.adam_parameters import (
    BF16,
    assert_unchanged,
    awkward,
    everything,
    numbers,
    parameter,
    parameters,
    through_a_file,
    train,
)
from shared.bits import assert_same_bits
from shared.dry_gpu import DryGpu

import optimized  # noqa: F401  (registers the CUDA kernels)
import reference as te
from reference.optimizers.adafactor import power

twin = torch.ops.twin
FP16, FP32 = torch.float16, torch.float32
Adafactor = te.optimizers.Adafactor
F = np.float32
KINDS = {"fp32": (FP32, FP32), "bf16": (BF16, BF16), "fp16": (FP16, FP16), "bf16, fp32 parameters": (BF16, FP32)}
SHAPES = [
    *[(), (1,), (255,), (70001,), (1, 1), (1, 300), (300, 1), (63, 257), (64, 256), (65, 512), (129, 2049), (700, 33)],
    *[(3, 65, 40), (2, 3, 7, 5), (1, 1, 40000), (40000, 1), (0,), (0, 3), (3, 0)],
]


def halved(values: list[float]) -> float:
    while len(values) > 1:
        half = len(values) // 2
        values = [a + b for a, b in zip(values[:half], values[half:], strict=True)]
    return values[0]


def lanes(values: list[float]) -> float:
    """The order of a row's sum; Python's floats are float64."""
    found = []
    for lane in range(256):
        total = 0.0
        for value in values[lane::256]:
            total += value
        found.append(total)
    return halved([halved(found[i : i + 32]) for i in range(0, 256, 32)])


def blocks(values: list[float]) -> float:
    """The order of a column's sum."""
    total = 0.0
    for start in range(0, len(values), 64):
        part = 0.0
        for value in values[start : start + 64]:
            part += value
        total += part
    return total


def rms(x: np.ndarray) -> Any:
    """By `twin::grad_norm`'s order, of one chunk."""
    padded = np.zeros(32768)
    padded[: x.size] = x.reshape(-1).astype(np.float64) ** 2
    columns = [0.0] * 2048
    for i in range(16):
        columns = [a + b for a, b in zip(columns, padded[2048 * i : 2048 * (i + 1)].tolist(), strict=True)]
    for count in (8, 32, 8):
        columns = [halved(columns[i : i + count]) for i in range(0, len(columns), count)]
    return F(math.sqrt(columns[0] / x.size))


def lerp(x: Any, y: Any, w: Any) -> Any:
    return x + w * (y - x) if w < 0.5 else y - (y - x) * (F(1) - w)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(("weight", "decay"), [(1.0, 1.0), (0.3, 0.99), (0.7, 0.9)])
@pytest.mark.parametrize("shape", [(2, 70, 30), (7, 300), (600,), ()])
@pytest.mark.parametrize(("wide", "dtype"), [(FP32, FP32), (BF16, BF16), (FP16, FP32)])
def test_every_operation_is_rounded_once_in_the_order_that_is_written(
    wide: torch.dtype, dtype: torch.dtype, shape: tuple[int, ...], weight: float, decay: float, maximize: bool
) -> None:
    grad, param = numbers(0, shape, wide), numbers(1, shape, dtype)
    matrix = len(shape) > 1
    row = numbers(2, (*shape[:-1], 1) if matrix else shape).square()
    col = numbers(3, (*shape[:-2], 1, shape[-1])).square() if matrix else None
    g, p = (
        x.float().numpy().reshape(-1, *(shape[-2:] if matrix else (1, max(1, grad.numel())))) for x in (grad, param)
    )
    w, one = F(weight), F(1)
    a = np.maximum(F(1e-3), rms(p)) * F(0.01)
    if matrix:
        batch, rows, cols = g.shape
        squares = g.astype(np.float64) ** 2
        mean = np.array([[F(lanes(r.tolist()) / cols) for r in b] for b in squares], F)
        new_row = lerp(row.numpy().reshape(batch, rows), mean, w)
        mean = np.array([[F(blocks(c.tolist()) / rows) for c in b.T] for b in squares], F)
        assert col is not None
        new_col = lerp(col.numpy().reshape(batch, cols), mean, w)
        f = np.maximum(np.array([F(lanes([float(x) for x in b]) / rows) for b in new_row], F), F(1e-7))
        v = (new_row[:, :, None] * new_col[:, None, :]) / f[:, None, None]
    else:
        v = new_row = lerp(row.numpy().reshape(g.shape), g * g, w)
    u = (one / np.sqrt(np.maximum(v, F(1e-14)))) * g
    c = a / np.maximum(one, rms(u) / F(1.5))
    p = p * F(decay) if decay != 1 else p
    p = p + c * u if maximize else p - c * u
    twin.adafactor(grad, param, row, col, 0.01, weight, decay, 1e-7, 1e-14, 1e-3, 1.5, maximize)
    assert_same_bits(row, torch.from_numpy(new_row.reshape(row.shape)), "rows")
    if col is not None:
        assert_same_bits(col, torch.from_numpy(new_col.reshape(col.shape)), "columns")
    assert_same_bits(param, torch.from_numpy(p.reshape(shape)).to(dtype), "parameter")


@pytest.mark.parametrize("shape", [(40, 24), (3, 17, 9), (2, 2, 5, 6), (50,), ()])
@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.1}, {"lr": 0.5, "d": 2.0, "beta2_decay": -0.5, "eps": (1e-6, 1e-2)},
                {"maximize": True}], ids=str
)  # fmt: skip
def test_it_is_torchs_adafactor_but_for_roundings(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    ours, theirs = (torch.nn.Parameter(numbers(1, shape)) for _ in range(2))
    optimizers = [Adafactor([ours], **options), torch.optim.Adafactor([theirs], **options)]
    for step in range(8):
        for p, optimizer in zip((ours, theirs), optimizers, strict=True):
            p.grad = numbers(2 + step, shape)
            assert optimizer.step(lambda: 3.5) == 3.5
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    for name, x in optimizers[0].state[ours].items():
        torch.testing.assert_close(x, optimizers[1].state[theirs][name], rtol=1e-5, atol=1e-7)


def test_arguments_and_defaults_are_torchs() -> None:
    found, wanted = (inspect.signature(kind).parameters for kind in (Adafactor, torch.optim.Adafactor))
    assert [(one.name, one.default, one.kind) for one in found.values()] == [
        (one.name, one.default, one.kind) for one in wanted.values()
    ]


def test_powers() -> None:
    for step in (1, 2, 3, 10, 12345, 2**24):
        for exponent in (-0.8, -0.5, 0.0, -1.0, -1e-3):
            assert power(step, exponent) == pytest.approx(step**exponent, rel=1e-15)
    assert power(4, -0.5) == 0.5


@pytest.mark.parametrize("way", [copy.deepcopy, through_a_file], ids=["in memory", "weights_only file"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("kind", [Adafactor, torch.optim.Adafactor])
def test_state_keeps_every_bit(kind: Any, dtype: torch.dtype, way: Callable[[Any], Any]) -> None:
    params = parameters(dtype)
    optimizer = kind(params, lr=0.1)
    train(params, optimizer, range(3))
    saved = way(optimizer.state_dict())
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = Adafactor(copies, lr=7.0)
    other.load_state_dict(saved)
    for p, q in zip(params, copies, strict=True):
        assert other.state[q].keys() == optimizer.state[p].keys()
        for name, x in other.state[q].items():
            assert_same_bits(x, optimizer.state[p][name].float(), name)
    if kind is Adafactor:
        for one, optim in ((params, optimizer), (copies, other)):
            train(one, optim, range(3, 5))
        for p, q in zip(params, copies, strict=True):
            assert_same_bits(p, q)
    assert saved["state"][0]["step"] == 3, "nothing is shared with what was loaded"


def test_tensors_without_numbers_are_left_alone() -> None:
    for shape in ((0,), (0, 3), (3, 0), (2, 0, 3)):
        p = torch.nn.Parameter(torch.zeros(shape))
        p.grad = torch.zeros(shape)
        optimizer = Adafactor([p])
        optimizer.step()
        assert optimizer.state[p]["step"] == 1
        assert all(bool(x.isfinite().all()) for x in optimizer.state[p].values())


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"lr": -1.0}, ValueError, "lr=-1.0; a number >= 0"),
        ({"lr": torch.ones(())}, TypeError, r"lr=tensor\(1.\); a number >= 0"),
        ({"beta2_decay": 0.1}, ValueError, "beta2_decay=0.1; a number <= 0"),
        ({"beta2_decay": math.nan}, ValueError, "beta2_decay=nan; a number <= 0"),
        ({"eps": 1e-3}, TypeError, "eps=0.001; a pair of numbers >= 0"),
        ({"eps": (1e-30, None)}, TypeError, r"eps\[1\]=None; a number >= 0"),
        ({"eps": (-1.0, 1e-3)}, ValueError, r"eps\[0\]=-1.0; a number >= 0"),
        ({"d": 0.5}, ValueError, "d=0.5; a number >= 1"),
        ({"weight_decay": math.inf}, ValueError, "weight_decay=inf; a number >= 0"),
        ({"foreach": "no"}, TypeError, "foreach='no'; True and False"),
        ({"maximize": None}, TypeError, "maximize=None; True and False"),
    ],
)
def test_arguments_that_are_refused(change: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=f"Adafactor: {sentence}"):
        Adafactor([parameter()], **change)
    optimizer = Adafactor([parameter()])
    optimizer.param_groups[0].update(change)
    p = optimizer.param_groups[0]["params"][0]
    before = p.detach().clone()
    with pytest.raises(error, match=f"Adafactor: {sentence.partition(';')[0]} in group 0"):
        optimizer.step()
    assert_same_bits(p, before)
    assert not optimizer.state


def put(name: str, value: Any) -> Callable[[Any], None]:
    return lambda state: state["state"][0].__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (
            put("row_var", torch.ones(4)),
            ValueError,
            r"\[0\]\['row_var'\] is torch.float32 \[4\]; float32, bfloat16 and",
        ),
        (put("row_var", torch.full((4, 1), math.nan)), ValueError, r"\['row_var'\] holds what is no number >= 0"),
        (put("col_var", -torch.ones(1, 3)), ValueError, r"\['col_var'\] holds what is no number >= 0"),
        (put("col_var", None), TypeError, r"\['col_var'\] is a NoneType; a dense tensor"),
        (
            put("variance", torch.ones(4)),
            ValueError,
            r"\[0\] has \['step', 'row_var', 'col_var', 'variance'\]; \['step'",
        ),
        (
            lambda state: state["state"][1].pop("variance"),
            ValueError,
            r"\[1\] has \['step'\]; \['step', 'variance'\] are",
        ),
        (lambda state: state["param_groups"][0].update(d=0), ValueError, "d=0 in state_dict.*; a number >= 1"),
        (lambda state: state["param_groups"][0].pop("eps"), ValueError, "'eps' is missing in state_dict"),
        (lambda state: state["param_groups"][0]["params"].pop(), ValueError, r"groups of \[2\] parameters; .* \[3\]"),
        (
            lambda state: state.pop("state"),
            TypeError,
            "state_dict must be a dict with 'state', a dict, and 'param_groups'",
        ),
        (lambda state: state["param_groups"].insert(0, 3), TypeError, "'param_groups', a list of dicts with 'params'"),
        (
            lambda state: state["state"].update({0: 3}),
            TypeError,
            r"state_dict\['state'\]\[0\] is a int; a dict is accepted",
        ),
    ],
)
def test_what_does_not_fit_is_not_loaded(change: Callable[[Any], None], error: type[Exception], sentence: str) -> None:
    params = parameters()
    optimizer = Adafactor(params)
    train(params, optimizer, range(2))
    given = copy.deepcopy(optimizer.state_dict())
    change(given)
    before = everything(optimizer)
    with pytest.raises(error, match=f"Adafactor: .*{sentence}"):
        optimizer.load_state_dict(given)
    assert_unchanged(before, optimizer)


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"grad": torch.ones(4, 3).double()}, TypeError, "grad is torch.float64; float32, bfloat16 and float16"),
        ({"grad": torch.ones(3, 4).t()}, ValueError, "grad must be contiguous"),
        ({"param": torch.ones(4, 3, dtype=BF16)}, TypeError, "param is torch.bfloat16; torch.float32 and float32 are"),
        ({"param": torch.ones(3, 4)}, ValueError, r"param must be contiguous torch.float32 \[4, 3\]"),
        ({"row_var": torch.ones(4)}, ValueError, r"row_var must be contiguous torch.float32 \[4, 1\]"),
        ({"col_var": torch.ones(3)}, ValueError, r"col_var must be contiguous torch.float32 \[1, 3\]"),
        ({"col_var": None}, ValueError, "col_var is None for a grad of 2 dimensions"),
    ],
)
def test_refusals_of_the_op(change: dict[str, Any], error: type[Exception], sentence: str) -> None:
    given = {
        "grad": torch.ones(4, 3),
        "param": torch.ones(4, 3),
        "row_var": torch.ones(4, 1),
        "col_var": torch.ones(1, 3),
    }
    given.update(change)
    with pytest.raises(error, match=f"twin::adafactor: {sentence}"):
        twin.adafactor(*given.values(), 0.01, 1.0, 1.0, 1e-7, 1e-14, 1e-3, 1.0, False)


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


@pytest.mark.parametrize("shape", [(), (700, 333), (200_000,)])
def test_sums_of_parameters_and_of_updates_lie_apart(shape: tuple[int, ...]) -> None:
    """Each block of either kernel writes one float64: all into one tensor, and no two into the same place."""
    with DryGpu(written=False) as gpu:
        grad, param, *rest = (torch.empty(shape, device="cuda") for _ in range(3))
        row = rest[0][..., :1].contiguous() if len(shape) > 1 else rest[0]
        col = rest[0][:1].contiguous() if len(shape) > 1 else None
        twin.adafactor(grad, param, row, col, 0.01, 0.6, 0.999, 1e-7, 1e-14, 1e-3, 1.0, False)
        both = [one for one in gpu.launches if one.kernel.name in ("grad_squares", "adafactor_squares")]
        room = {gpu.bytes_at(int(one.args[-1])) for one in both}
    assert len(both) == 2
    blocks = both[0].grid[0]
    assert both[1].grid == (blocks,)
    assert room == {2 * 8 * blocks}
    assert abs(int(both[0].args[-1]) - int(both[1].args[-1])) == 8 * blocks


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_kind(shape: tuple[int, ...], kind: str) -> None:
    compare(shape, kind)
    compare(shape, kind, special=True, maximize=True)


@pytest.mark.gpu
@settings(max_examples=25, deadline=None)
@given(
    shape=st.lists(st.integers(1, 90), min_size=0, max_size=3),
    kind=st.sampled_from(list(KINDS)),
    special=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_any_shape(shape: list[int], kind: str, special: bool, seed: int) -> None:
    compare(tuple(shape), kind, special, seed=seed)
