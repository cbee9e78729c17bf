"""Attention on the H200 equals its definition on the CPU in every bit: results, statistics and all gradients."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from shared.attention_cases import BIASES, CASES, LAYOUTS, MASKS, Case, inputs, run, to_cuda
from shared.bits import assert_same_bits

import optimized  # noqa: F401  (registers the CUDA ops)
from optimized.cuda import launch
from optimized.ops.attentions import attention_backward
from reference.ops.attentions.attention import MASK_TYPES

pytestmark = pytest.mark.gpu


def compare(case: Case, change=None) -> None:  # type: ignore[no-untyped-def]
    cpu = inputs(case)
    if change is not None:
        change(cpu)
    cuda = {name: to_cuda(x) for name, x in cpu.items()}
    expected = run(case, cpu)
    for name, value in run(case, cuda).items():
        assert_same_bits(expected[name], value, f"{name} of {case}")


FORCED = list(itertools.product((torch.bfloat16, torch.float16), (64, 128, 256), (0.0, 0.1)))


@pytest.mark.parametrize(("dtype", "d", "dropout"), FORCED)
@pytest.mark.parametrize("mask_type", MASK_TYPES)
def test_every_configuration(dtype: torch.dtype, d: int, dropout: float, mask_type: str) -> None:
    compare(Case(b=2, hkv=2, group=2, sq=197, skv=261, d=d, dtype=dtype, mask_type=mask_type, dropout=dropout))


@pytest.mark.parametrize(("sq", "skv"), [(700, 700), (130, 600), (600, 130)])
@pytest.mark.parametrize("window", [(0, 0), (100, -1), (-1, 100), (128, 128), (127, 1), (300, 257), (2**31 - 1, 5)])
@pytest.mark.parametrize(("mask_type", "d", "dropout"), [("none", 40, 0.0), ("causal", 128, 0.1), ("none", 136, 0.1)])
def test_windows(window: tuple[int, int], mask_type: str, d: int, dropout: float, sq: int, skv: int) -> None:
    compare(Case(hkv=2, group=2, sq=sq, skv=skv, d=d, mask_type=mask_type, window=window, dropout=dropout))


@pytest.mark.parametrize("mask_type", MASK_TYPES)
def test_a_long_window_takes_turns(mask_type: str) -> None:
    """More tiles than multiprocessors, so that blocks take tickets; up to five key blocks add to a tile's dq."""
    compare(Case(hkv=8, group=2, sq=1100, skv=1100, d=64, mask_type=mask_type, window=(400, 70)))


@pytest.mark.parametrize("keep", [1, 3 * 384 * 48])
def test_dropout_where_bits_fit_of_some_heads_alone(keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one head of keys, or of three, whose 300 queries and keys take 384 * 48 bytes a head of queries."""
    monkeypatch.setattr(attention_backward, "KEEP", keep)
    compare(Case(b=2, hkv=4, group=1, sq=300, skv=300, d=128, mask_type="causal", dropout=0.1))


@pytest.mark.parametrize(("d", "group", "dropout", "lengths"), [(128, 4, 0.0, "none"), (64, 5, 0.1, "both")])
@pytest.mark.parametrize("mask_type", ["causal", "causal_bottom_right"])
def test_parts_of_heads(
    mask_type: str, d: int, group: int, dropout: float, lengths: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last heads of keys, two or all of them, are taken in parts, of one head of the group or of two."""
    monkeypatch.setattr(attention_backward, "AT_LEAST", 7 / launch.processors(0))  # ... of four key blocks
    case = Case(b=2, hkv=2, group=group, sq=400, skv=450, d=d, mask_type=mask_type, dropout=dropout, lengths=lengths)
    compare(case)
    monkeypatch.setattr(attention_backward, "KEEP", 3 * 512 * 64 * group)  # of two heads at a time, where three fit
    compare(replace(case, b=1, hkv=5) if dropout else replace(case, b=1))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("mask_type", MASK_TYPES)
def test_masks(mask: str, mask_type: str) -> None:
    compare(Case(b=2, hkv=1, group=2, sq=300, skv=150, mask=mask, mask_type=mask_type, dtype=torch.float16))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize(("sq", "skv"), [(70, 512), (70, 640), (70, 642), (1, 643), (1, 640)])
def test_a_mask_of_keys(sq: int, skv: int, d: int, dropout: float) -> None:
    """Blocks of keys of which none, one and all are hidden; rows of the mask that start at any byte."""

    def change(given: dict[str, torch.Tensor | None]) -> None:
        mask = torch.zeros(3, 1, 1, skv, dtype=torch.bool)
        mask[0, ..., 127] = mask[1, ..., 128] = mask[2, ..., 256:384] = mask[2, ..., -1] = True
        given["mask"] = mask

    compare(Case(b=3, hkv=2, sq=sq, skv=skv, d=d, dropout=dropout), change)


@pytest.mark.simulated
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    compare(Case(b=2, hkv=2, group=1, sq=130, skv=130, d=40, layout=layout, mask_type="causal", dropout=0.1))


@pytest.mark.parametrize(("sq", "skv"), [(1, 1), (1, 129), (128, 128), (129, 1), (64, 65), (512, 17), (257, 640)])
@pytest.mark.parametrize("mask_type", MASK_TYPES)
def test_ragged(sq: int, skv: int, mask_type: str) -> None:
    compare(Case(hkv=2, group=1, sq=sq, skv=skv, d=24, mask_type=mask_type, dropout=0.25))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=CASES)
def test_any_shape(case: Case) -> None:
    compare(case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_scores(dtype: torch.dtype) -> None:
    """Weights that underflow, m that jumps by hundreds from block to block."""
    compare(Case(sq=200, skv=400, d=64, dtype=dtype, scale=20.0, mask_type="causal_bottom_right"))


def special(given: dict[str, torch.Tensor | None]) -> None:
    for name, row, value in (("q", 3, "inf"), ("k", 7, "nan"), ("v", 140, "inf"), ("grad", 150, "-inf")):
        given[name][0, 0, row, 1] = float(value)


@pytest.mark.parametrize("mask_type", MASK_TYPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_infinity_and_nan(dtype: torch.dtype, mask_type: str) -> None:
    compare(Case(hkv=2, sq=160, skv=160, d=32, dtype=dtype, mask_type=mask_type), special)


@pytest.mark.parametrize(("b", "sq", "skv"), [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
def test_nothing(b: int, sq: int, skv: int) -> None:
    compare(Case(b=b, sq=sq, skv=skv))


@pytest.mark.parametrize(("dtype", "d", "dropout"), FORCED)
@pytest.mark.parametrize("bias", BIASES[1:])
def test_every_configuration_with_a_bias(dtype: torch.dtype, d: int, dropout: float, bias: str) -> None:
    sizes = {"b": 2, "hkv": 2, "group": 2, "sq": 197, "skv": 261, "d": d, "dtype": dtype, "dropout": dropout}
    compare(Case(**sizes, bias=bias, bias_is_fp32=d == 128, mask_type="causal_bottom_right"))


@pytest.mark.parametrize(("sq", "skv"), [(1, 1), (1, 129), (128, 128), (129, 1), (64, 65), (512, 17), (257, 640)])
@pytest.mark.parametrize(("mask_type", "mask"), [("causal", "none"), ("none", "arbitrary")])
@pytest.mark.parametrize(("bias", "d"), [("11ss", 24), ("1hss", 136), ("h slopes", 72)])
def test_ragged_with_a_bias(sq: int, skv: int, mask_type: str, mask: str, bias: str, d: int) -> None:
    compare(Case(2, 2, 1, sq, skv, d, torch.float16, mask_type, mask, (100, -1), 0.25, bias=bias))


def test_a_bias_of_any_strides() -> None:
    def transposed(cpu: dict[str, torch.Tensor | None]) -> None:
        cpu["bias"] = cpu["bias"].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)

    compare(Case(2, 2, 2, 150, 140, 64, bias="bhss"), transposed)
    compare(
        Case(2, 2, 2, 150, 140, 64, bias="bhss"),
        lambda cpu: cpu.update(bias=cpu["bias"][:1, :1, :1].expand(2, 4, 150, -1)),
    )


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_infinity_and_nan_in_a_bias(value: str) -> None:
    def change(cpu: dict[str, torch.Tensor | None]) -> None:
        cpu["bias"][0, 0, 3, 7:140] = float(value)
        cpu["bias"][0, 1, 5] = float(value)

    for d in (64, 128, 256):
        compare(Case(2, 2, 1, 150, 160, d, bias="1hss"), change)


@pytest.mark.parametrize("options", [{}, {"bias": "1hss"}, {"sinks": True}, {"mask": "arbitrary", "window": (200, 0)}])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("d", "e"), [(192, 128), (64, 128), (128, 40), (96, 256), (8, 16), (256, 8)])
def test_heads_of_two_sizes(d: int, e: int, dropout: float, options: dict) -> None:
    sizes = {"b": 2, "hkv": 2, "group": 2, "sq": 197, "skv": 261, "d": d, "e": e}
    compare(Case(**sizes, mask_type="causal", dropout=dropout, layout="sbhd", **options))


@pytest.mark.parametrize(("dtype", "d", "dropout"), FORCED)
def test_every_configuration_with_sinks(dtype: torch.dtype, d: int, dropout: float) -> None:
    compare(Case(2, 2, 2, 197, 261, d, dtype, "causal_bottom_right", dropout=dropout, sinks=True))


@pytest.mark.parametrize(("sq", "skv"), [(1, 1), (1, 129), (129, 1), (512, 17), (600, 640)])
@pytest.mark.parametrize("value", [None, "1e30", "-1e30", "100", "inf", "-inf", "nan"])
def test_sinks(sq: int, skv: int, value: str | None) -> None:
    def change(cpu: dict[str, torch.Tensor | None]) -> None:
        if value is not None:
            cpu["sinks"][1] = float(value)

    compare(Case(2, 2, 1, sq, skv, 72, mask_type="causal", mask="arbitrary", window=(200, 0), sinks=True), change)


def test_a_graph_draws_a_new_mask_at_each_replay() -> None:
    case = Case(hkv=2, sq=100, skv=100, dropout=0.5)
    given = {name: to_cuda(x) for name, x in inputs(case).items()}
    start = given["rng_state"].clone()
    run(case, {**given, "rng_state": start.clone()})  # loads the modules
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(case, given)
    given["rng_state"].copy_(start)
    state = start.cpu()
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        expected = run(case, {name: None if x is None else x.cpu() for name, x in given.items()} | {"rng_state": state})
        for name, value in captured.items():
            assert_same_bits(expected[name], value, name)
