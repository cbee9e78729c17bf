"""The casts of packed sequences: codes and amax are those of the same sequences in a batch padded with zeros.

The definition on a CPU; and the kernels, in the simulator and on a GPU.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared.attention_packed_cases import int32, rows_of, starts_of
from shared.bits import assert_same_bits

import optimized  # noqa: F401  (registers the CUDA kernels)
from reference.inspect.recorded_step.float64 import evaluated
from reference.numbers import formats
from reference.ops.casts.cast import ROOM
from reference.recipes.quantizer import HighPrecision

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
twin = torch.ops.twin
NAMES = {"cast": ("q", "scale_inv"), "cast_transpose": ("q", "q_t", "scale_inv")}
LENGTHS = st.lists(st.sampled_from((0, 1, 2, 7, 16, 31, 33, 127, 128, 129)), min_size=1, max_size=6)
whatever = given(
    lengths=LENGTHS,
    seed=st.integers(0, 2**31),
    cols=st.sampled_from((16, 48, 80, 272)),
    wide=st.sampled_from(formats.WIDE_DTYPES),
    dtype=st.sampled_from((E4M3, E5M2)),
    scale=st.sampled_from((1.0, 37.5, float("inf"), 0.0)),
)


def drawn(
    lengths: list[int], seed: int, cols: int, wide: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x with NaN, infinities and large numbers in rows of no sequence; lengths, starts."""
    generator = torch.Generator().manual_seed(seed)
    gaps = torch.randint(0, 5, (len(lengths) + 1,), generator=generator).tolist()
    starts, after = starts_of(int32(*lengths), gaps), seed % 3
    x = torch.randn(int(starts[-1]) + after, cols, generator=generator).to(wide)
    alone = torch.ones(x.shape[0], dtype=torch.bool)
    for rows in rows_of(int32(*lengths), starts):
        alone[rows] = False
    x[alone] = (torch.nan, torch.inf, 30000.0)[seed % 3]
    return x, int32(*lengths), starts


def cast(op: str, x: torch.Tensor, scale: float, dtype: torch.dtype, *places: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every result by name, on the CPU."""
    history = torch.full((2, 3), 0.125, device=x.device)
    found = getattr(twin, op)(x, torch.tensor([1.0, scale], device=x.device), history, 1, dtype, *places)
    named = dict(zip((*NAMES[op], "amax_history"), (*found, history), strict=True))
    return {name: (one.view(torch.uint8) if one.dtype in (E4M3, E5M2) else one).cpu() for name, one in named.items()}


@pytest.mark.parametrize("op", NAMES)
@settings(max_examples=40, deadline=None)
@whatever
def test_codes_and_amax_are_those_of_the_sequences_alone(
    op: str, lengths: list[int], seed: int, cols: int, wide: torch.dtype, dtype: torch.dtype, scale: float
) -> None:
    x, *places = drawn(lengths, seed, cols, wide)
    found = cast(op, x, scale, dtype, *places)
    rows = rows_of(*places)
    together = cast(op, torch.cat([x[one] for one in rows]).contiguous(), scale, dtype)
    expected, at = torch.zeros_like(found["q"]), 0
    for one in rows:
        expected[one] = together["q"][at : at + one.stop - one.start]
        at += one.stop - one.start
    assert_same_bits(found["q"], expected)
    assert_same_bits(found["amax_history"], together["amax_history"])
    assert_same_bits(found["scale_inv"], together["scale_inv"])
    if op == "cast_transpose":
        assert_same_bits(found["q_t"][:, : x.shape[0]], expected.t())
        assert not found["q_t"][:, x.shape[0] :].any()


@pytest.mark.simulated
@pytest.mark.gpu
@pytest.mark.parametrize("op", NAMES)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@whatever
def test_kernels(
    op: str, device: torch.device, lengths: list[int], seed: int, cols: int, wide: torch.dtype, dtype: torch.dtype,
    scale: float,
) -> None:  # fmt: skip
    x, *places = drawn(lengths, seed, cols, wide)
    expected = cast(op, x, scale, dtype, *places)
    for name, one in cast(op, x.to(device), scale, dtype, *(p.to(device) for p in places)).items():
        assert_same_bits(one, expected[name], name)


@pytest.mark.simulated
@pytest.mark.gpu
@pytest.mark.parametrize("op", NAMES)
def test_kernels_and_many_sequences(op: str, device: torch.device) -> None:
    """More than a block has threads, several of them in a word of 32 rows; and one that covers whole tiles."""
    lengths = [n % 4 for n in range(700)] + [600]
    starts = starts_of(int32(*lengths), [n % 3 for n in range(len(lengths) + 1)])
    x = torch.randn(int(starts[-1]), 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = cast(op, x, 4.0, E4M3, int32(*lengths), starts)
    for name, one in cast(op, x.to(device), 4.0, E4M3, int32(*lengths).to(device), starts.to(device)).items():
        assert_same_bits(one, expected[name], name)


@pytest.mark.simulated
@pytest.mark.gpu
@pytest.mark.parametrize("op", NAMES)
def test_places_out_of_range_are_the_nearest_ones_in_kernels(op: str, device: torch.device) -> None:
    x = torch.randn(70, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    expected = cast(op, x, 4.0, E4M3, int32(20, 0, 5, 0), int32(0, 20, 65, 70, 70))
    wrong = int32(20, -7, 2**31 - 1, 2**31 - 1), int32(-3, 30, 65, 10**6, 0)
    for name, one in cast(op, x.to(device), 4.0, E4M3, *(p.to(device) for p in wrong)).items():
        assert_same_bits(one, expected[name], name)


def test_there_is_room_behind_the_codes() -> None:
    """The attention kernels read keys four rows at a time."""
    x, *places = drawn([5, 8], 0, 16, torch.bfloat16)
    for op, least in (("cast", ROOM), ("cast_transpose", ROOM)):
        q, *_ = getattr(twin, op)(x, torch.ones(1), None, 0, E4M3, *places)
        assert q.is_contiguous()
        assert q.untyped_storage().nbytes() == q.numel() + least * 16


def test_other_quantizers_take_rows_of_none_for_zeros() -> None:
    x, *places = drawn([5, 8], 0, 16, torch.float32)
    row, column = HighPrecision(torch.bfloat16).quantize_packed(x, *places, True)
    expected = torch.zeros_like(x)
    for rows in rows_of(*places):
        expected[rows] = x[rows]
    assert_same_bits(row.codes, expected.bfloat16())
    assert column is not None
    assert_same_bits(column.codes, expected.bfloat16().t())


def test_a_recorded_steps_float64_knows_them() -> None:
    x, *places = drawn([5, 8], 0, 16, torch.bfloat16)
    (found,) = evaluated("cast", [x, torch.ones(1), None, 0, E4M3, *places])
    expected = torch.zeros(x.shape, dtype=torch.float64)
    for rows in rows_of(*places):
        expected[rows] = x[rows].double()
    assert_same_bits(found, expected)


def changed(**change: Any) -> Callable[[str], Any]:
    """A cast with some arguments changed."""
    given: dict[str, Any] = {"lengths": int32(3, 2), "starts": int32(0, 3, 6)} | change
    x = torch.zeros(6, 16)
    return lambda op: getattr(twin, op)(x, torch.ones(1), None, 0, E4M3, given["lengths"], given["starts"])


@pytest.mark.parametrize("op", NAMES)
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"lengths": None}, "lengths=None; both or none are accepted."),
        ({"starts": None}, "starts=None; both or none are accepted."),
        (
            {"starts": int32(0, 3)},
            "lengths must be contiguous torch.int32 [1], one number for each entry of the batch;",
        ),
        ({"starts": int32(0, 3, 6).long()}, "starts must be contiguous torch.int32 [3], of each sequence and of the"),
        (
            {"starts": int32(0, 3, 7)},
            "starts is [0, 3, 7] with the lengths [3, 2]; sequences one after the other among 6",
        ),
        (
            {"starts": int32(0, 2, 6)},
            "starts is [0, 2, 6] with the lengths [3, 2]; sequences one after the other among",
        ),
        (
            {"lengths": int32(3, -1)},
            "starts is [0, 3, 6] with the lengths [3, -1]; sequences one after the other among",
        ),
        ({"lengths": int32(3, 2).to("meta")}, "lengths is on meta, x on cpu."),
    ],
    ids=lambda one: one[:20] if isinstance(one, str) else "",
)
def test_refusals(op: str, change: dict[str, Any], sentence: str) -> None:
    changed()(op)
    with pytest.raises(ValueError, match=f"^twin::{op}: " + re.escape(sentence)):
        changed(**change)(op)


@pytest.mark.parametrize("op", NAMES)
def test_opcheck(op: str) -> None:
    x, *places = drawn([5, 8], 1, 16, torch.bfloat16)
    args = (x, torch.ones(2), torch.zeros(2, 2), 1, E4M3, *places)
    torch.library.opcheck(getattr(twin, op).default, args, test_utils=("test_schema", "test_faketensor"))
