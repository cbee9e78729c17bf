"""Packed sequences in attention's ops: the bits of the padded call, whatever lies between and beyond sequences.

The definition on a CPU; and the kernels, in the simulator and on a GPU.
"""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from shared.attention_cases import CASES, Case, inputs, run
from shared.attention_packed_cases import int32, packed_inputs, packed_of, packed_run, rows_of, starts_of
from shared.bits import assert_same_bits
from torch.utils.flop_counter import FlopCounterMode

from reference.inspect.recorded_step.float64 import evaluated
from reference.ops.attentions.attention_options import Options

twin = torch.ops.twin
simulated = pytest.mark.simulated
AWKWARD = (0, 1, 127, 128, 129, 64)
OF_QUERIES = ("q", "grad", "out", "dq")
OPTIONS: list[dict[str, Any]] = [
    {},
    {"dropout": 0.3, "mask": "arbitrary"},
    {"bias": "bhss", "dropout": 0.1},
    {"bias": "bh slopes"},
    {"sinks": True},
    {"e": 40},
]


def check_definition(case: Case, gaps: list[int], after: int) -> None:
    """Sequences have the padded call's rows, other tokens +0, and everything else is the padded call's."""
    padded = run(case, inputs(case))
    cpu, where = packed_inputs(case, gaps, after)
    for name, value in packed_run(case, cpu).items():
        expected = padded[name]
        if name in ("out", "dq", "dk", "dv"):
            rows = where["q" if name in OF_QUERIES else "kv"]
            expected = packed_of(expected, rows, value.shape[0]).nan_to_num(0.0)
        assert_same_bits(expected, value, f"{name} of {case}")


def check_kernels(case: Case, gaps: list[int], after: int, device: torch.device) -> None:
    cpu, _ = packed_inputs(case, gaps, after)
    again, _ = packed_inputs(case, gaps, after)
    expected = packed_run(case, again)
    for name, value in packed_run(case, cpu, device).items():
        assert_same_bits(expected[name], value, f"{name} of {case}")


@pytest.mark.sample(3)
@pytest.mark.parametrize("window", [(-1, -1), (40, 20)])
@pytest.mark.parametrize("mask_type", ["none", "causal", "causal_bottom_right"])
def test_packed_is_padded(mask_type: str, window: tuple[int, int]) -> None:
    for seed, more in enumerate(OPTIONS):
        case = Case(3, 1, 2, 140, 150, 24, mask_type=mask_type, window=window, lengths="both", seed=seed, **more)
        gaps = [0, 0, 0, 0] if seed % 2 else [2, 0, 3, 1]
        check_definition(case, gaps, seed % 3)


@simulated
@pytest.mark.gpu
@pytest.mark.sample(2)
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("more", OPTIONS, ids=str)
def test_kernels_read_packed_sequences(more: dict[str, Any], d: int, device: torch.device) -> None:
    """NaN lies between sequences, and after the last one."""
    types = ("none", "causal", "causal_bottom_right")
    case = Case(3, 1, 2, 140, 130, d, mask_type=types[len(more) % 3], lengths="both", seed=d, **more)
    check_kernels(case, [1, 0, 2, 3], 2, device)


@simulated
@pytest.mark.gpu
@pytest.mark.sample(3)
@pytest.mark.parametrize("mask_type", ["none", "causal", "causal_bottom_right"])
@pytest.mark.parametrize("turn", range(3))
def test_kernels_and_awkward_lengths(turn: int, mask_type: str, device: torch.device) -> None:
    """A sequence is as long as a tile, longer, shorter; the next one's numbers are infinite."""
    queries, keys = (AWKWARD[n:] + AWKWARD[:n] for n in (2 * turn, 2 * turn + 1))
    given = {"q_lengths": int32(*queries), "kv_lengths": int32(*keys)}
    generator, d = torch.Generator().manual_seed(turn), (64, 128, 200)[turn]

    def numbers(lengths: tuple[int, ...], heads: int) -> torch.Tensor:
        x = torch.randn(sum(lengths), heads, d, generator=generator).to(torch.float16)
        last = rows_of(int32(*lengths), starts_of(int32(*lengths), [0] * 7))[3]
        x[last] = torch.inf
        return x

    cpu: dict[str, Any] = {**dict.fromkeys(("mask", "bias", "slopes", "sinks", "rng_state")), **given}
    cpu |= {"q": numbers(queries, 2), "grad": numbers(queries, 2), "k": numbers(keys, 1), "v": numbers(keys, 1)}
    cpu |= {f"{side}_starts": starts_of(given[f"{side}_lengths"], [0] * 7) for side in ("q", "kv")}
    case = Case(6, 1, 2, 129, 129, d, torch.float16, mask_type, window=(100, -1) if turn == 1 else (-1, -1))
    expected, found = packed_run(case, cpu), packed_run(case, cpu, device)
    for name, value in found.items():
        assert_same_bits(expected[name], value, name)
    for n, rows in enumerate(rows_of(given["q_lengths"], cpu["q_starts"])):
        assert n == 3 or bool(found["out"][rows].isfinite().all()), "another sequence's infinities"


@simulated
@pytest.mark.gpu
def test_places_out_of_range_are_the_nearest_ones_in_kernels(device: torch.device) -> None:
    case = Case(2, 1, 1, 70, 90, 64, lengths="both")
    cpu, _ = packed_inputs(case, [0, 0, 0], 0)
    for name in ("q", "grad", "k", "v"):
        cpu[name] = cpu[name].nan_to_num(0.0)
    tokens, keys = cpu["q"].shape[0], cpu["k"].shape[0]
    wrong = {"q_lengths": int32(900, 2**31 - 1), "q_starts": int32(-7, 10**6, 0)}
    wrong |= {"kv_lengths": int32(-5, 2**31 - 1), "kv_starts": int32(0, 0, keys)}
    right = {"q_lengths": int32(min(tokens, 70), 0), "q_starts": int32(0, tokens, tokens)}
    right |= {"kv_lengths": int32(0, min(keys, 90)), "kv_starts": int32(0, 0, keys)}
    expected = packed_run(case, cpu | right)
    for name, value in packed_run(case, cpu | wrong, device).items():
        assert_same_bits(expected[name], value, name)


@simulated
@pytest.mark.gpu
@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=CASES.filter(lambda case: case.sq * case.skv * case.h * case.b < 300_000))
def test_kernels_whatever_the_options(case: Case, device: torch.device) -> None:
    case = replace(case, lengths="both")
    gaps = [case.seed % n % 5 for n in range(3, 4 + case.b)]
    check_definition(case, gaps, case.seed % 4)
    check_kernels(case, gaps, case.seed % 4, device)


SMALL = Case(2, 1, 2, 7, 8, 16, lengths="both", seed=5)


def arguments(**change: Any) -> tuple[Any, ...]:
    """q, k, v and the options of a small call."""
    cpu, _ = packed_inputs(SMALL, [1, 0, 2], 0)
    names = ("q_lengths", "kv_lengths", "q_starts", "kv_starts")
    given = {name: cpu[name] for name in names} | {"longest_q": 7, "longest_kv": 8, **change}
    qkv = (given.pop(name, cpu[name]) for name in ("q", "k", "v"))
    return (*qkv, *Options(0.25, "causal", -1, -1, **given))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"q_starts": None}, "q_starts must be given with packed sequences; got None."),
    ({"longest_kv": None}, "longest_kv must be given with packed sequences; got None."),
    ({"q_lengths": None}, "q_lengths must be given with packed sequences; got None."),
    ({"longest_q": -1}, "longest_q=-1; the longest sequence's tokens, 0 or more, are accepted."),
    ({"longest_kv": -3}, "longest_kv=-3; the longest sequence's tokens, 0 or more, are accepted."),
    (
        {"k": torch.zeros(1, 8, 1, 16).bfloat16()},
        "k must be 3-D, [tokens, heads, head_dim], with q_starts; got [1, 8, ",
    ),
    ({"q_starts": int32(0, 3)}, "kv_starts must be contiguous torch.int32 [2], of each sequence and of the end; got"),
    ({"q_starts": int32(0, 3, 7).long()}, "q_starts must be contiguous torch.int32 [3], of each sequence and of the"),
    ({"kv_starts": int32(0, 3, 7).to("meta")}, "kv_starts is on meta, q on cpu."),
    ({"q_starts": int32(3, 0, 9)}, "q_starts is [3, 0, 9] with the lengths ["),
    ({"kv_starts": int32(0, 3, 700)}, "kv_starts is [0, 3, 700] with the lengths ["),
    ({"q_lengths": int32(1, 2, 3)}, "q_lengths must be contiguous torch.int32 [2], one number for each entry"),
]


@pytest.mark.parametrize(("change", "sentence"), REFUSED, ids=[sentence[:30] for _, sentence in REFUSED])
def test_refusals(change: dict[str, Any], sentence: str) -> None:
    twin.attention(*arguments())
    with pytest.raises(ValueError, match="^twin::attention: " + re.escape(sentence)):
        twin.attention(*arguments(**change))


def test_packed_tensors_are_refused_without_starts() -> None:
    q, k, v, *_ = arguments()
    with pytest.raises(ValueError, match=r"^twin::attention: q must be 4-D, "):
        twin.attention(q, k, v, 0.25, "causal", -1, -1, None, 0.0, None)
    grad, m = torch.zeros(9, 2, 16).bfloat16(), torch.zeros(2, 2, 7)
    for lengths, starts, sentence in (
        (int32(3, 4), None, "q_starts=None; both or none are accepted."),
        (None, int32(0, 3, 9), "q_lengths=None; both or none are accepted."),
        (int32(3, 4), int32(0, 3), "q_lengths must be contiguous torch.int32 [1]"),
    ):
        with pytest.raises(ValueError, match="^twin::attention_sink_backward: " + re.escape(sentence)):
            twin.attention_sink_backward(grad, grad, m, m, torch.zeros(2), lengths, starts)


def test_flops_are_the_padded_calls() -> None:
    args = arguments()
    with FlopCounterMode(display=False) as counter:
        results = twin.attention(*args)
        twin.attention_backward(results[0], *args[:3], *results, *args[3:])
    assert counter.get_total_flops() == 14 * 2 * 2 * 7 * 8 * 16


def test_a_recorded_steps_float64_knows_them() -> None:
    case = Case(3, 1, 2, 60, 70, 24, mask_type="causal", lengths="both")
    cpu, _ = packed_inputs(case, [1, 0, 2, 1], 1)
    found = packed_run(case, cpu)
    more = {name: cpu[name] for name in ("q_lengths", "kv_lengths", "q_starts", "kv_starts")}
    options = Options(case.softmax_scale, "causal", -1, -1, **more, longest_q=60, longest_kv=70)
    args = [cpu[name].nan_to_num(0.0) for name in ("q", "k", "v")]
    (out,) = evaluated("attention", [*args, *options])
    torch.testing.assert_close(out, found["out"].double(), rtol=0.02, atol=0.02)  # a bf16 result
    grad = cpu["grad"].nan_to_num(0.0)
    given = [grad, *args, found["out"], found["m"], found["inv"], *options]
    for value, name in zip(evaluated("attention_backward", given), ("dq", "dk", "dv"), strict=True):
        torch.testing.assert_close(value, found[name].double(), rtol=0.02, atol=0.05)
