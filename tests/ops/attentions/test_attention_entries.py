"""Lengths of a batch's entries in attention's ops: the bits of the mask that hides all else, and of each entry alone.

The definition on a CPU; and the kernels in the simulator.
"""

import itertools
import re
from typing import Any

import pytest
import simulator
import torch
from hypothesis import HealthCheck, given, settings
from shared.attention_cases import (
    BIASES,
    CASES,
    Case,
    check_against_float64,
    exact,
    inputs,
    run,
    to_cuda,
    without_lengths,
)
from shared.bits import assert_same_bits
from simulator import Simulator

from reference.inspect.recorded_step.float64 import evaluated
from reference.ops.attentions.attention import LOWEST, MASK_TYPES

twin = torch.ops.twin
GIVEN = ("queries", "keys", "both")
simulated = pytest.mark.simulated
FUZZ = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def check_like_a_mask(case: Case) -> None:
    masked, changed = without_lengths(case)
    expected = run(masked, changed)
    for name, value in run(case, inputs(case)).items():
        assert_same_bits(expected[name], value, f"{name} of {case}")


OPTIONS: list[dict[str, Any]] = [
    {},
    {"dropout": 0.3, "mask": "arbitrary"},
    {"bias": "1hss", "dropout": 0.1},
    {"bias": "bh slopes"},
    {"sinks": True},
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("window", [(-1, -1), (40, 20), (140, 0)])
@pytest.mark.parametrize("mask_type", MASK_TYPES)
def test_lengths_are_a_mask(mask_type: str, window: tuple[int, int]) -> None:
    for seed, more in enumerate(OPTIONS):
        lengths = GIVEN[seed % 3]
        case = Case(3, 1, 2, 140, 300, 16, torch.bfloat16, mask_type, window=window, lengths=lengths, seed=seed, **more)
        check_like_a_mask(case)


@pytest.mark.slow
@settings(max_examples=60, **FUZZ)
@given(CASES)
def test_lengths_are_a_mask_whatever_the_options(case: Case) -> None:
    check_like_a_mask(case)


@pytest.mark.parametrize("mask_type", MASK_TYPES)
def test_an_entry_has_the_bits_that_it_has_alone(mask_type: str) -> None:
    """Without dropout. What lies beyond its lengths is NaN."""
    case = Case(5, 1, 2, 150, 300, 24, mask_type=mask_type, window=(100, -1), lengths="both", bias="b1ss")
    cpu = inputs(case)
    cpu["q_lengths"] = torch.tensor([150, 0, 130, 64, 1], dtype=torch.int32)
    cpu["kv_lengths"] = torch.tensor([300, 20, 0, 129, 140], dtype=torch.int32)
    sizes = list(zip(cpu["q_lengths"].tolist(), cpu["kv_lengths"].tolist(), strict=True))
    of_queries = ("q", "grad", "out", "dq", "m", "inv")
    for n, (sq, skv) in enumerate(sizes):
        for name, rest in (("q", sq), ("grad", sq), ("k", skv), ("v", skv)):
            cpu[name][n, :, rest:] = float("nan")
    cpu["bias"] = cpu["bias"].clone()
    found = run(case, cpu)
    for n, (sq, skv) in enumerate(sizes):
        cut = {
            name: None if x is None else x[n : n + 1, :, : sq if name in of_queries else skv]
            for name, x in cpu.items()
            if name in ("q", "k", "v", "grad")
        }
        one = {**dict.fromkeys(cpu), **cut, "bias": cpu["bias"][n : n + 1, :, :sq, :skv]}
        for name, value in run(case, one).items():
            of, size = found[name][n : n + 1], sq if name in of_queries else skv
            if name == "dbias":
                assert_same_bits(of[:, :, :sq, :skv], value, name)
                assert not bool(of[:, :, sq:].any())
                assert not bool(of[:, :, :, skv:].any())
                continue
            assert_same_bits(of[:, :, :size], value, f"{name} of {n}")
            rest = float(LOWEST) if name == "m" else 0.0
            assert_same_bits(of[:, :, size:], torch.full_like(of[:, :, size:], rest), f"{name} beyond {n}")


@pytest.mark.parametrize("mask_type", MASK_TYPES)
def test_against_float64(mask_type: str) -> None:
    for seed, more in enumerate(OPTIONS):
        check_against_float64(Case(2, 1, 2, 150, 140, 24, mask_type=mask_type, lengths="both", seed=seed, **more))


@pytest.mark.parametrize("more", OPTIONS[:2])
def test_a_recorded_steps_float64_knows_lengths(more: dict[str, Any]) -> None:
    case = Case(3, 1, 2, 50, 70, 16, mask_type="causal_bottom_right", window=(30, 0), lengths="both", **more)
    cpu = inputs(case)
    rest = (
        case.softmax_scale,
        case.mask_type,
        *case.window,
        cpu["mask"],
        case.dropout,
        cpu["rng_state"],
        None,
        None,
        None,
    )
    args = [cpu["q"], cpu["k"], cpu["v"], *rest, cpu["q_lengths"], cpu["kv_lengths"]]
    truth, _ = exact(case, cpu)
    assert torch.allclose(evaluated("attention", args)[0], truth["out"])
    found = evaluated("attention_backward", [cpu["grad"], *args[:3], cpu["q"], cpu["q"], cpu["q"], *args[3:]])
    for name, value in zip(("dq", "dk", "dv"), found, strict=True):
        assert torch.allclose(value, truth[name]), name
    assert evaluated("attention", [*args[:12], torch.ones(2), None, None]) == []


def test_a_recorded_steps_float64_leaves_out_more_scores_than_it_has_memory_for() -> None:
    """Before it makes any of them: the tensors here have no memory."""
    q, k = (torch.empty(1 << 13, 1, length, 16, device="meta") for length in (1 << 7, (1 << 7) + 1))
    rest = (1.0, "none", -1, -1)
    assert evaluated("attention", [q, k, k, *rest]) == []
    assert evaluated("attention_backward", [q, q, k, k, q, q, q, *rest]) == []


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


REFUSALS: list[tuple[dict[str, Any], str]] = [
    (
        {"q_lengths": int32(3, 4).long()},
        "q_lengths must be contiguous torch.int32 [2], one number for each entry of the ",
    ),
    (
        {"kv_lengths": int32(3)},
        "kv_lengths must be contiguous torch.int32 [2], one number for each entry of the batch; got",
    ),
    ({"kv_lengths": int32(3, 0, 4, 0)[::2]}, "kv_lengths must be contiguous torch.int32 [2]"),
    ({"q_lengths": int32(3, 8)}, "q_lengths is [3, 8]; lengths from 0 to 7 are accepted."),
    ({"q_lengths": int32(3, -1)}, "q_lengths is [3, -1]; lengths from 0 to 7 are accepted."),
    ({"kv_lengths": int32(10, 3)}, "kv_lengths is [10, 3]; lengths from 0 to 9 are accepted."),
    ({"q_lengths": int32(3, 4).to("meta")}, "q_lengths is on meta, q on cpu."),
]


@pytest.mark.parametrize(("change", "sentence"), REFUSALS)
def test_refusals(change: dict[str, Any], sentence: str) -> None:
    case = Case(2, 1, 1, 7, 9, 16, lengths="both", bias="bhss", dropout=0.5)
    cpu = inputs(case)
    rest = (0.25, "none", -1, -1, None, 0.5, cpu["rng_state"], cpu["bias"], None, None)
    more = {name: cpu[name] for name in ("q_lengths", "kv_lengths")}
    q, k, v, before = cpu["q"], cpu["k"], cpu["v"], cpu["rng_state"].clone()
    found = twin.attention(q, k, v, *rest, **more)
    cpu["rng_state"].copy_(before)
    for op, given_first in (
        (twin.attention, (q, k, v)),
        (twin.attention_backward, (cpu["grad"], q, k, v, *found)),
        (twin.attention_bias_backward, (cpu["grad"], q, k, v, *found)),
    ):
        with pytest.raises(ValueError, match=r"^twin::attention\w*: " + re.escape(sentence)):
            op(*given_first, *rest, **(more | change))
    assert torch.equal(cpu["rng_state"], before)


def check_in_simulator(case: Case, when: int = simulator.LATE, processors: int = 3) -> list[str]:
    """Returns the launches."""
    expected, cpu = run(case, inputs(case)), inputs(case)
    with Simulator(processors, when, seed=case.seed) as one:
        found = run(case, cpu)
    for name, value in found.items():
        assert_same_bits(expected[name], value, f"{name} of {case}")
    return one.launches


@simulated
@pytest.mark.slow
@pytest.mark.parametrize("when", [simulator.AT_ONCE, simulator.LATE, simulator.AT_RANDOM])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_kernels(d: int, when: int) -> None:
    for seed, (lengths, mask_type, more) in enumerate(itertools.product(GIVEN, MASK_TYPES, OPTIONS)):
        if seed % 3 == when:
            case = Case(3, 1, 2, 197, 300, d - 8, torch.float16, mask_type, lengths=lengths, seed=seed, **more)
            check_in_simulator(case, when)


@simulated
@pytest.mark.parametrize("d", [64, 128, 256])
def test_kernels_with_few_multiprocessors_and_many_entries(d: int) -> None:
    """Works wait for others' shares of dq; some entries have no queries, or no keys."""
    case = Case(9, 1, 1, 130, 260, d, mask_type="causal_bottom_right", lengths="both", seed=4)
    name = "attention_wide" if d > 128 else "attention"
    assert f"{name}.attention_ticket" in check_in_simulator(case, processors=2)


@pytest.mark.sample(2)
@simulated
@pytest.mark.parametrize("more", OPTIONS)
def test_wide_heads_of_which_values_have_another_size(more: dict[str, Any]) -> None:
    case = Case(3, 1, 1, 140, 150, 136, mask_type="causal_bottom_right", window=(60, 0), lengths="both", e=40, **more)
    check_in_simulator(case)


@simulated
def test_lengths_out_of_range_are_the_nearest_ones_in_kernels() -> None:
    case = Case(3, 1, 1, 70, 90, 64, lengths="both")
    cpu = inputs(case) | {"q_lengths": int32(70, 0, 33), "kv_lengths": int32(0, 90, 90)}
    expected = run(case, cpu)
    with Simulator():
        found = run(case, cpu | {"q_lengths": int32(900, -5, 33), "kv_lengths": int32(-(2**31), 2**31 - 1, 91)})
    for name, value in found.items():
        assert_same_bits(expected[name], value, name)


@simulated
@pytest.mark.slow
@settings(max_examples=40, **FUZZ)
@given(CASES.filter(lambda case: case.lengths != "none" and case.sq * case.skv * case.h * case.b < 300_000))
def test_kernels_whatever_the_options(case: Case) -> None:
    check_in_simulator(case, case.seed % 3)


@pytest.mark.gpu
@pytest.mark.parametrize(("lengths", "bias"), [*((x, "none") for x in GIVEN), *(("both", x) for x in BIASES[1:])])
@pytest.mark.parametrize(("d", "dropout"), [(64, 0.0), (64, 0.1), (128, 0.0), (128, 0.1), (256, 0.0), (256, 0.1)])
def test_on_a_gpu_the_bits_are_the_same(d: int, dropout: float, lengths: str, bias: str) -> None:
    for seed, (mask_type, sinks) in enumerate(itertools.product(MASK_TYPES, (False, True))):
        more: dict[str, Any] = {"bias": bias} if not sinks or bias != "none" else {"sinks": True}
        case = Case(4, 2, 2, 330, 290, d, mask_type=mask_type, lengths=lengths, dropout=dropout, seed=seed, **more)
        cpu = inputs(case)
        cuda = {name: to_cuda(x) for name, x in cpu.items()}
        expected = run(case, cpu)
        for name, value in run(case, cuda).items():
            assert_same_bits(expected[name], value, f"{name} of {case}")
