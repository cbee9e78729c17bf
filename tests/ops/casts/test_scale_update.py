"""`twin::scale_update` against a scalar loop of the written rule.

On an H200 the bulk update equals its CPU definition in every bit, for any list of modules at once.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.bits import assert_same_bits
from shared.dry_gpu import DryGpu

import optimized  # noqa: F401  (registers the CUDA kernels)
import reference  # noqa: F401
from optimized.cuda import launch
from optimized.ops.casts import scale_update as on_gpu
from optimized.ops.casts.scale_update import CAPACITIES
from optimized.tapes import Tape

FLT_MAX = float(np.finfo(np.float32).max)
twin = torch.ops.twin
SPECIAL = np.array([0.0, -0.0, np.nan, np.inf, 1e-45, 1e-38, 3e38, 448.0], dtype=np.float32)


def scalar_rule(
    scale: np.float32, column: list[np.float32], limit: float, margin: int, algorithm: str
) -> tuple[np.float32, list[np.float32]]:
    """NUMERICS in plain words, one column at a time, IEEE fp32 throughout."""
    last = column[0]
    if last == 0:
        return scale, column
    rolled = [*column[1:], last]
    amax = last
    if algorithm == "max":
        amax = np.float32(0)
        for a in rolled:
            if np.isfinite(a) and a > amax:
                amax = a
    if np.isfinite(amax) and amax > 0:
        with np.errstate(over="ignore"):
            scale = np.float32(limit * 2.0**-margin) / amax
        scale = np.float32(FLT_MAX) if np.isinf(scale) else scale
    return scale, [np.float32(0), *rolled[1:]]


def test_the_golden_vector() -> None:
    """The first vector of the contract: L = 5, max, E4M3."""
    scale, history = torch.ones(1), torch.zeros(5, 1)
    seen = []
    for amax in (8, 1, 1, 1, 1, 1, 1, 0, 2):
        history[0, 0] = max(float(history[0, 0]), amax)
        torch.ops.twin.scale_update([scale], [history], 448.0, 0, "max")
        seen.append(scale.item())
    assert seen == [56, 56, 56, 56, 56, 448, 448, 448, 224]


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize(
    ("length", "margin", "limit"), [(1, 0, 448.0), (2, 3, 57344.0), (7, 1, 448.0), (300, 0, 448.0)]
)
def test_random_histories(algorithm: str, length: int, margin: int, limit: float, same_bits) -> None:
    rng = np.random.default_rng(length)
    special = np.array([0, np.inf, np.nan, 1e-45, 1e-38, 3e38, 1.0, 0.3], dtype=np.float32)
    scales, histories = [], []
    for columns in (1, 3, 2):
        scales.append(rng.random(columns, dtype=np.float32) + 0.5)
        history = rng.random((length, columns), dtype=np.float32) * 10
        spots = rng.random((length, columns)) < 0.3
        history[spots] = rng.choice(special, size=int(spots.sum()))
        histories.append(history)
    got_scales = [torch.from_numpy(s.copy()) for s in scales]
    got_histories = [torch.from_numpy(h.copy()) for h in histories]
    for _ in range(3):
        torch.ops.twin.scale_update(got_scales, got_histories, limit, margin, algorithm)
        for scale, history in zip(scales, histories, strict=True):
            for j in range(len(scale)):
                scale[j], column = scalar_rule(scale[j], list(history[:, j]), limit, margin, algorithm)
                history[:, j] = column
        for got, want in zip(got_scales + got_histories, scales + histories, strict=True):
            same_bits(got, torch.from_numpy(want.copy()))
        for got, want in zip(got_histories, histories, strict=True):
            row = rng.random(got.shape[1], dtype=np.float32)
            want[0] = row
            got[0] = torch.from_numpy(row)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_a_step_that_overflowed_holds_the_scale_for_itself_alone(bad: float, algorithm: str) -> None:
    """However long the history: gradients under a loss scale that was halved need their own scale."""
    scale, history = torch.ones(1), torch.zeros(1024, 1)
    seen = []
    for amax in (bad, 8, bad, 4, 16):
        history[0, 0] = amax
        torch.ops.twin.scale_update([scale], [history], 448.0, 0, algorithm)
        seen.append(scale.item())
    assert seen == [1, 56, 56, 56 if algorithm == "max" else 112, 28]


@pytest.mark.parametrize("amax", [math.inf, math.nan])
def test_a_useless_amax_leaves_the_scale(amax: float) -> None:
    scale, history = torch.tensor([3.0]), torch.tensor([[amax], [0.0]])
    torch.ops.twin.scale_update([scale], [history], 448.0, 0, "most_recent")
    assert scale.item() == 3.0
    assert history[0, 0] == 0


def test_a_tiny_amax_gives_the_largest_float() -> None:
    scale, history = torch.ones(1), torch.tensor([[1e-44]])
    torch.ops.twin.scale_update([scale], [history], 448.0, 0, "max")
    assert scale.item() == FLT_MAX


def test_versions_are_bumped() -> None:
    """Autograd has to notice a scale that changed after it was saved."""
    scale, history = torch.ones(1), torch.ones(2, 1)
    before = scale._version, history._version
    torch.ops.twin.scale_update([scale], [history], 448.0, 0, "max")
    assert scale._version > before[0]
    assert history._version > before[1]


@pytest.mark.parametrize(
    ("scale", "history", "algorithm", "error", "sentence"),
    [
        (torch.ones(2), torch.ones(3, 1), "max", ValueError, r"shape \[2\] and amax_histories\[0\] \[3, 1\]"),
        (torch.ones(1), torch.ones(0, 1), "max", ValueError, r"L >= 1"),
        (torch.ones(1).double(), torch.ones(3, 1), "max", TypeError, r"float32 is accepted"),
        (torch.ones(2), torch.ones(2, 3).t(), "max", ValueError, r"shape|strided"),
        (torch.ones(1), torch.ones(3, 1), "mean", ValueError, r"algorithm='mean'"),
    ],
)
def test_refusals(
    scale: torch.Tensor, history: torch.Tensor, algorithm: str, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        torch.ops.twin.scale_update([scale], [history], 448.0, 0, algorithm)


@pytest.mark.parametrize(
    ("what", "error"), [("strided history", ValueError), ("int32 history", TypeError), ("longer scale", ValueError)]
)
def test_the_gpus_side_refuses_at_known_addresses(what: str, error: type[Exception]) -> None:
    """An update at the addresses of an earlier one makes its launches again, unless something else lies there now."""
    with DryGpu() as gpu:
        rows, row = torch.ones(8, 3, device="cuda"), torch.ones(8, device="cuda")
        scale, history = row[:3], rows[:4]
        other = {
            "strided history": (scale, rows[::2]),
            "int32 history": (scale, history.view(torch.int32)),
            "longer scale": (row[:4], history),
        }[what]
        assert [x.data_ptr() for x in other] == [x.data_ptr() for x in (scale, history)]
        on_gpu.scale_update([scale], [history], 448.0, 0, "max")
        gpu.taken()
        on_gpu.scale_update([row[:3]], [rows[:4]], 448.0, 0, "max")  # the same, by other objects
        (again,) = gpu.taken()
        assert again.startswith("again ")
        with pytest.raises(error, match="twin::scale_update"):
            on_gpu.scale_update([other[0]], [other[1]], 448.0, 0, "max")


def test_the_gpus_side_wants_a_scale_beside_its_history() -> None:
    with DryGpu():
        here, there = torch.ones(3, device="cuda"), torch.ones(4, 3)
        with pytest.raises(ValueError, match="a scale is on cuda:0 and its amax_history on cpu"):
            on_gpu.scale_update([here], [there], 448.0, 0, "max")


@pytest.mark.parametrize("note", ["collecting", "recording"])
def test_launches_that_are_noted_are_not_those_kept(note: str) -> None:
    """A dry pass makes none, a tape around it wants them all: neither is what the next update launches again."""
    with DryGpu() as gpu:
        scale, history = torch.ones(3, device="cuda"), torch.zeros(4, 3, device="cuda")
        gpu.taken()
        tape = Tape()
        with launch.collecting() if note == "collecting" else launch.recording(tape):
            on_gpu.scale_update([scale], [history], 448.0, 0, "max")
        gpu.taken()
        for _ in range(2):
            on_gpu.scale_update([scale], [history], 448.0, 0, "max")
            assert len(gpu.taken()) == 1
        if note == "recording":
            assert len(tape._entries) == 1
            with launch.recording(tape):
                on_gpu.scale_update([scale], [history], 448.0, 0, "max")
            assert len(tape._entries) == 2


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


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_lengths_around_the_kernels_chunks(algorithm: str) -> None:
    lengths = (1, 2, 3, 5, 16, 255, 256, 257, 1023, 1024, 1025, 2048, 4097)
    compare([(length, 1 + i % 6) for i, length in enumerate(lengths)], algorithm)


@pytest.mark.gpu
@pytest.mark.simulated
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


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.sample(1)
@pytest.mark.parametrize("modules", [CAPACITIES[0], CAPACITIES[0] + 1, CAPACITIES[-1], CAPACITIES[-1] + 1])
def test_around_the_capacity_of_a_launch(modules: int) -> None:
    compare([(4, 3)] * modules, "max")


@pytest.mark.gpu
@pytest.mark.simulated
def test_scales_and_histories_on_two_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="one CUDA device for both"):
        twin.scale_update([torch.ones(1, device="cuda")], [torch.ones(2, 1)], 448.0, 0, "max")
