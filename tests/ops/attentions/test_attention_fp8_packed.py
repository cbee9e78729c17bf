"""Packed sequences and lengths in attention in FP8: the words of a padded batch with a mask that hides all else.

The definition on a CPU; and the kernels, in the simulator and on a GPU.
"""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared.attention_cases import Case, inputs
from shared.attention_fp8_cases import CASES, FP8, cast, transposed
from shared.attention_packed_cases import int32, packed_inputs, packed_of, rows_of, starts_of
from shared.bits import assert_same_bits
from shared.dry_gpu import DryGpu
from torch.utils.flop_counter import FlopCounterMode

from optimized.ops.attentions.attention_fp8 import moved_values, with_room
from reference.ops.attentions.attention_lengths import hidden_by_lengths
from reference.ops.attentions.attention_options import Options
from reference.ops.attentions.attention_packed import by_heads
from reference.ops.casts.cast import ROOM

twin = torch.ops.twin
simulated = pytest.mark.simulated
NAN = 0x7F
AWKWARD = (0, 1, 127, 128, 129, 64)
Call = dict[str, Any]


def calls_of(case: Case, gaps: list[int], after: int) -> tuple[Call, Call, dict[str, list[slice]]]:
    """One case padded and packed, with NaN codes in rows of no sequence; and where sequences lie."""
    given, (packed, where) = inputs(case), packed_inputs(case, gaps, after)
    padded: Call = dict(given)
    for name in ("q", "k", "v"):
        codes, padded[f"{name}_inv"] = cast(given[name])
        side = "q" if name == "q" else "kv"
        for one, rows in zip(codes.view(torch.uint8), where[side], strict=True):
            one[:, rows.stop - rows.start :] = 0
        tokens = packed[name].shape[0]
        numbers = packed_of(codes.view(torch.uint8).float(), where[side], tokens)
        padded[name], packed[name] = codes, numbers.nan_to_num(NAN).to(torch.uint8).view(FP8)
        packed[f"{name}_inv"] = padded[f"{name}_inv"]
    return padded, packed, where


def run(case: Case, call: Call, device: Any = "cpu", masked: bool = False) -> dict[str, torch.Tensor]:
    """Every result by name, on the CPU. Padded, lengths may become a mask."""
    there = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    q, k, v, grad, state = (there[name] for name in ("q", "k", "v", "grad", "rng_state"))
    is_packed = q.dim() == 3
    options = Options(case.softmax_scale, case.mask_type, *case.window, there["mask"], case.dropout)
    options = options._replace(q_lengths=there["q_lengths"], kv_lengths=there["kv_lengths"])
    if is_packed:
        starts = {"q_starts": there["q_starts"], "kv_starts": there["kv_starts"]}
        options = options._replace(**starts, longest_q=case.sq, longest_kv=case.skv)
        bytes_of_v = torch.zeros(*v.shape[1:], -(-v.shape[0] // 16) * 16, dtype=torch.uint8, device=v.device)
        bytes_of_v[..., : v.shape[0]] = v.view(torch.uint8).permute(1, 2, 0)
        v_t = bytes_of_v[..., : v.shape[0]].view(FP8)
    else:
        v_t = transposed(v)
    if masked:
        lengths = (options.q_lengths, options.kv_lengths)
        shape = (*q.shape[:3], k.shape[2])
        mask_type, left, right, hidden = hidden_by_lengths(case.mask_type, *case.window, shape, *lengths)
        hidden = hidden if options.mask is None else hidden | options.mask
        options = options._replace(
            mask_type=mask_type, left=left, right=right, mask=hidden, q_lengths=None, kv_lengths=None
        )
    factors = [there[f"{name}_inv"] for name in "qkv"]
    before = None if state is None else state.clone()
    drawn = options._replace(rng_state=state)
    results = twin.attention_fp8(q, k, v_t, *factors, *drawn.of_pairs, case.dtype, *drawn.of_entries)
    drawn = options._replace(rng_state=before)
    grads = twin.attention_fp8_backward(grad, q, k, v, *factors, *results, *drawn.of_pairs, *drawn.of_entries)
    found = dict(zip(("out", "m", "inv", "dq", "dk", "dv"), (*results, *grads), strict=True))
    found |= {} if state is None else {"rng_state": state}
    return {name: x.cpu() for name, x in found.items()}


def check_definition(case: Case, gaps: list[int], after: int) -> None:
    padded, packed, where = calls_of(case, gaps, after)
    masked = run(case, {**padded, "rng_state": copied(padded)}, masked=True)
    lengths = run(case, {**padded, "rng_state": copied(padded)})
    for name, value in run(case, packed).items():
        assert_same_bits(lengths[name], masked[name], f"{name} of {case} with lengths")
        expected = masked[name]
        if name in ("out", "dq", "dk", "dv"):
            rows = where["q" if name in ("out", "dq") else "kv"]
            expected = packed_of(expected, rows, value.shape[0]).nan_to_num(0.0)
        assert_same_bits(expected, value, f"{name} of {case}")


def copied(call: Call) -> torch.Tensor | None:
    return None if call["rng_state"] is None else call["rng_state"].clone()


def check_kernels(case: Case, gaps: list[int], after: int, device: torch.device) -> None:
    padded, packed, _ = calls_of(case, gaps, after)
    for call in (padded, packed):
        expected = run(case, {**call, "rng_state": copied(call)})
        for name, value in run(case, call, device).items():
            assert_same_bits(expected[name], value, f"{name} of {case}")


@pytest.mark.sample(3)
@pytest.mark.parametrize("window", [(-1, -1), (40, 20)])
@pytest.mark.parametrize("mask_type", ["none", "causal", "causal_bottom_right"])
def test_packed_is_padded(mask_type: str, window: tuple[int, int]) -> None:
    for seed, more in enumerate(({}, {"dropout": 0.3, "mask": "arbitrary"}, {"dtype": torch.float16})):
        case = Case(3, 1, 2, 140, 150, 32, mask_type=mask_type, window=window, lengths="both", seed=seed, **more)
        check_definition(case, [0, 0, 0, 0] if seed % 2 else [2, 0, 3, 1], seed % 3)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=CASES, b=st.integers(1, 4))
def test_packed_is_padded_whatever_the_options(case: Case, b: int) -> None:
    case = replace(case, b=b, lengths="both")
    check_definition(case, [case.seed % n % 5 for n in range(3, 4 + b)], case.seed % 4)


@simulated
@pytest.mark.gpu
@pytest.mark.sample(2)
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("more", [{}, {"dropout": 0.3, "mask": "arbitrary"}], ids=str)
def test_kernels_read_packed_sequences(more: dict[str, Any], d: int, device: torch.device) -> None:
    """NaN lies between sequences, and after the last one."""
    types = ("none", "causal", "causal_bottom_right")
    case = Case(3, 1, 2, 140, 130, d, mask_type=types[d // 64 % 3], lengths="both", seed=d, **more)
    check_kernels(case, [1, 0, 2, 3], 2, device)


@simulated
@pytest.mark.gpu
@pytest.mark.sample(3)
@pytest.mark.parametrize("mask_type", ["none", "causal", "causal_bottom_right"])
@pytest.mark.parametrize("turn", range(3))
def test_kernels_and_awkward_lengths(turn: int, mask_type: str, device: torch.device) -> None:
    """A sequence is as long as a tile, longer, shorter; the next one's codes are NaN."""
    queries, keys = (AWKWARD[n:] + AWKWARD[:n] for n in (2 * turn, 2 * turn + 1))
    call: Call = {"mask": None, "rng_state": None, "q_lengths": int32(*queries), "kv_lengths": int32(*keys)}
    generator, d = torch.Generator().manual_seed(turn), (64, 128, 208)[turn]
    for side, lengths in (("q", queries), ("kv", keys)):
        call[f"{side}_starts"] = starts_of(int32(*lengths), [0] * 7)
    for name, lengths, heads in (("q", queries, 2), ("k", keys, 1), ("v", keys, 1), ("grad", queries, 2)):
        x = torch.randn(sum(lengths), heads, d, generator=generator)
        if name == "grad":
            call[name] = x.to(torch.float16)
            continue
        call[name], call[f"{name}_inv"] = (x * 40).to(FP8), torch.tensor([1 / 40])
        last = rows_of(int32(*lengths), call["q_starts" if name == "q" else "kv_starts"])[3]
        call[name].view(torch.uint8)[last] = NAN
    case = Case(6, 1, 2, 129, 129, d, torch.float16, mask_type, window=(100, -1) if turn == 1 else (-1, -1))
    expected, found = run(case, call), run(case, call, device)
    for name, value in found.items():
        assert_same_bits(expected[name], value, name)
    for n, rows in enumerate(rows_of(call["q_lengths"], call["q_starts"])):
        assert n == 3 or bool(found["out"][rows].isfinite().all()), "another sequence's NaN"


@simulated
@pytest.mark.gpu
@pytest.mark.parametrize("room", [True, False])
def test_values_begin_at_multiples_of_128_columns(room: bool, device: torch.device) -> None:
    """From every byte of 16 on, NaN around them; a sequence is followed by zeros. Without room v_t is copied."""
    lengths = [3, 0, 128, 129, 1, *range(16), 127, 300]
    starts = starts_of(int32(*lengths), [2, *(n % 3 for n in range(len(lengths)))])
    tokens = int(starts[-1]) + (0 if room else 3)
    memory = torch.full((2, 48, -(-tokens // 16) * 16 if room else tokens), NAN, dtype=torch.uint8)
    values = memory[..., :tokens]
    for rows in rows_of(int32(*lengths), starts):
        values[..., rows] = torch.randint(1, 120, values[..., rows].shape, dtype=torch.uint8)
    options = Options(1.0, "none", -1, -1, kv_lengths=int32(*lengths).to(device), kv_starts=starts.to(device))
    options = options._replace(q_starts=options.kv_starts, longest_q=300, longest_kv=300)
    found = moved_values(memory.to(device)[..., :tokens].view(FP8).unsqueeze(0), options)[0].view(torch.uint8).cpu()
    for n, rows in enumerate(rows_of(int32(*lengths), starts)):
        first, count = rows.start // 128 * 128 + 128 * n, rows.stop - rows.start
        assert_same_bits(values[..., rows], found[..., first : first + count], f"sequence {n}")
        assert not found[..., first + count : first + -(-count // 128) * 128].any(), f"after sequence {n}"


@simulated
@pytest.mark.gpu
def test_values_of_every_row_are_moved(device: torch.device) -> None:
    """Of so many heads that their rows are no multiple of those of a block of threads, nor of one row more."""
    values = torch.randint(1, 120, (129, 16, 16), dtype=torch.uint8)
    options = Options(1.0, "none", -1, -1, kv_lengths=int32(16).to(device), kv_starts=int32(0, 16).to(device))
    options = options._replace(q_starts=options.kv_starts, longest_q=16, longest_kv=16)
    found = moved_values(values.to(device).view(FP8).unsqueeze(0), options)[0].view(torch.uint8).cpu()
    assert_same_bits(found[..., :16], values)
    assert not found[..., 16:].any()


@pytest.mark.parametrize("missing", [3, 1, 0, -16])
def test_values_are_copied_only_where_memory_ends_too_soon(missing: int) -> None:
    """Rows are read 16 bytes at a time; the last one has 13 and, behind them, 3 less `missing`."""
    with DryGpu() as gpu:
        memory = torch.empty(2 * 16 * 32 - missing, dtype=torch.uint8, device="cuda")
        v_t = memory.as_strided((1, 2, 16, 13), (2 * 16 * 32, 16 * 32, 32, 1), 16).view(FP8)
        starts = torch.empty(2, dtype=torch.int32, device="cuda")
        options = Options(1.0, "none", -1, -1, q_starts=starts, kv_starts=starts, longest_q=13, longest_kv=13)
        moved_values(v_t, options._replace(kv_lengths=starts[:1]))
        ((launched,), at) = gpu.launches, v_t.data_ptr()
    assert (launched.args[0] == at) == (missing <= 0)


@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (6, 1), (2, 3), (6, 3)])
def test_keys_are_copied_only_where_memory_ends_too_soon(tokens: int, heads: int) -> None:
    """A kernel reads `ROOM` rows behind the last one."""
    size = (tokens + ROOM) * heads * 32
    for missing in (1, 0, -1):
        memory = torch.randint(1, 120, (size - missing,), dtype=torch.uint8)
        k = by_heads(memory[: tokens * heads * 32].view(FP8).view(tokens, heads, 32))
        found = with_room(k)
        assert (found is k) == (missing <= 0)
        assert found.untyped_storage().nbytes() >= size
        assert_same_bits(found.view(torch.uint8), k.view(torch.uint8))


@simulated
@pytest.mark.gpu
def test_places_out_of_range_are_the_nearest_ones_in_kernels(device: torch.device) -> None:
    case = Case(2, 1, 1, 70, 90, 64, lengths="both")
    _, call, _ = calls_of(case, [0, 0, 0], 0)
    tokens, keys = call["q"].shape[0], call["k"].shape[0]
    wrong = {"q_lengths": int32(900, 2**31 - 1), "q_starts": int32(-7, 10**6, 0)}
    wrong |= {"kv_lengths": int32(-5, 2**31 - 1), "kv_starts": int32(0, 0, keys)}
    right = {"q_lengths": int32(min(tokens, 70), 0), "q_starts": int32(0, tokens, tokens)}
    right |= {"kv_lengths": int32(0, min(keys, 90)), "kv_starts": int32(0, 0, keys)}
    expected = run(case, call | right)
    for name, value in run(case, call | wrong, device).items():
        assert_same_bits(expected[name], value, name)


@simulated
@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_kernels_and_few_keys(tokens: int, device: torch.device) -> None:
    """With fewer rows than there are maps of them; a copy, and codes with room behind them."""
    case = Case(2, 2, 1, 3, tokens, 32)
    _, call, _ = calls_of(replace(case, lengths="both"), [0, 0, 0], 0)
    first = min(1, tokens - 1)
    call |= {"kv_lengths": int32(first, tokens - first), "kv_starts": int32(0, first, tokens)}
    call |= {name: torch.randn(tokens, 2, 32).to(FP8) for name in ("k", "v")}
    expected = run(case, {**call, "rng_state": None})
    memory = torch.cat([call["k"].view(torch.uint8), torch.full((3, 2, 32), NAN, dtype=torch.uint8)]).to(device)
    for k in (call["k"].to(device), memory[:tokens].view(FP8)):
        for name, value in run(case, {**call, "k": k, "rng_state": None}, device).items():
            assert_same_bits(expected[name], value, name)


@simulated
@pytest.mark.gpu
@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=CASES.filter(lambda case: case.sq * case.skv * case.h * case.b < 200_000))
def test_kernels_whatever_the_options(case: Case, device: torch.device) -> None:
    case = replace(case, lengths="both")
    check_kernels(case, [case.seed % n % 5 for n in range(3, 4 + case.b)], case.seed % 4, device)


SMALL = Case(2, 1, 2, 7, 8, 16, lengths="both", seed=5)


def arguments(**change: Any) -> tuple[Any, ...]:
    """Of a small call of the forward."""
    _, call, _ = calls_of(SMALL, [1, 0, 2], 0)
    names = ("q_lengths", "kv_lengths", "q_starts", "kv_starts")
    given = {name: call[name] for name in names} | {"longest_q": 7, "longest_kv": 8, **change}
    v_t = call["v"].view(torch.uint8).permute(1, 2, 0).contiguous().view(FP8)
    codes = {"q": call["q"], "k": call["k"], "v_t": v_t}
    codes = {name: given.pop(name, x) for name, x in codes.items()}
    options = Options(0.25, "causal", -1, -1, **given)
    factors = [call[f"{name}_inv"] for name in "qkv"]
    return *codes.values(), *factors, *options.of_pairs, torch.bfloat16, *options.of_entries


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"q_starts": None}, "q_starts must be given with packed sequences; got None."),
    ({"q_lengths": None}, "q_lengths must be given with packed sequences; got None."),
    ({"longest_q": -1}, "longest_q=-1; the longest sequence's tokens, 0 or more, are accepted."),
    ({"k": torch.zeros(1, 8, 1, 16).to(FP8)}, "k must be 3-D, [tokens, heads, head_dim], with q_starts; got [1, 8, "),
    ({"v_t": torch.zeros(1, 16, 3).to(FP8)}, "v_t must be [1, 1, 16, "),
    ({"q_starts": int32(0, 3)}, "kv_starts must be contiguous torch.int32 [2], of each sequence and of the end; got"),
    ({"q_starts": int32(3, 0, 9)}, "q_starts is [3, 0, 9] with the lengths ["),
    ({"kv_starts": int32(0, 3, 700)}, "kv_starts is [0, 3, 700] with the lengths ["),
    ({"q_lengths": int32(1, 2, 3)}, "q_lengths must be contiguous torch.int32 [2], one number for each entry"),
]


@pytest.mark.parametrize(("change", "sentence"), REFUSED, ids=[sentence[:30] for _, sentence in REFUSED])
def test_refusals(change: dict[str, Any], sentence: str) -> None:
    twin.attention_fp8(*arguments())
    with pytest.raises(ValueError, match="^twin::attention_fp8: " + re.escape(sentence)):
        twin.attention_fp8(*arguments(**change))


def backward_arguments(results: tuple[torch.Tensor, ...], args: tuple[Any, ...]) -> tuple[Any, ...]:
    v = args[2].view(torch.uint8).permute(2, 0, 1).contiguous().view(FP8)
    return (results[0], *args[:2], v, *args[3:6], *results, *args[6:13], *args[14:])


def test_opcheck() -> None:
    args = arguments()
    torch.library.opcheck(twin.attention_fp8.default, args, test_utils="test_faketensor")
    given = backward_arguments(twin.attention_fp8(*args), args)
    torch.library.opcheck(twin.attention_fp8_backward.default, given, test_utils="test_faketensor")


def test_flops_are_the_padded_calls() -> None:
    args = arguments()
    with FlopCounterMode(display=False) as counter:
        twin.attention_fp8_backward(*backward_arguments(twin.attention_fp8(*args), args))
    assert counter.get_total_flops() == 14 * 2 * 2 * 7 * 8 * 16
