"""Attention in FP8 on the H200 equals its definition on the CPU in every bit: results, statistics and all gradients."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from shared.attention_cases import LAYOUTS, MASKS, Case, inputs, to_cuda
from shared.attention_fp8_cases import CASES, FP8, arguments, transposed
from shared.bits import assert_same_bits
from shared.training_pairs import train_both

import optimized  # noqa: F401  (registers the CUDA ops)
import reference as te
from reference.ops.attentions.attention import MASK_TYPES

pytestmark = pytest.mark.gpu
twin = torch.ops.twin


def run(given: tuple, v: torch.Tensor, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    """Forward and backward: every result, by name."""
    before = None if given[12] is None else given[12].clone()
    out, m, inv = twin.attention_fp8(*given)
    codes = (*given[:2], v, *given[3:6])
    dq, dk, dv = twin.attention_fp8_backward(grad, *codes, out, m, inv, *given[6:12], before)
    return {"out": out, "m": m, "inv": inv, "dq": dq, "dk": dk, "dv": dv}


def compare(case: Case, headroom: float = 1.0) -> None:
    cpu = arguments(case, headroom)
    more = (transposed(cpu[2]), inputs(case)["grad"])
    cuda = [to_cuda(x) if isinstance(x, torch.Tensor) else x for x in (*cpu, *more)]
    expected = run(cpu, *more)
    for name, value in run(tuple(cuda[:-2]), *cuda[-2:]).items():
        assert_same_bits(expected[name], value, f"{name} of {case}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("mask_type", MASK_TYPES)
def test_every_configuration(dtype: torch.dtype, d: int, dropout: float, mask_type: str) -> None:
    compare(Case(b=2, hkv=2, group=2, sq=197, skv=261, d=d, dtype=dtype, mask_type=mask_type, dropout=dropout))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_masks_and_layouts(mask: str, layout: str) -> None:
    compare(Case(b=2, hkv=1, group=2, sq=300, skv=150, mask=mask, mask_type="causal", layout=layout))


@pytest.mark.parametrize("window", [(0, 0), (100, -1), (-1, 100), (127, 1), (300, 257)])
def test_windows(window: tuple[int, int]) -> None:
    compare(Case(hkv=2, group=2, sq=600, skv=700, d=80, window=window, dropout=0.1))


@pytest.mark.parametrize(("sq", "skv"), [(1, 1), (1, 129), (128, 128), (129, 1), (64, 65), (512, 17), (257, 640)])
def test_ragged(sq: int, skv: int) -> None:
    compare(Case(hkv=2, group=1, sq=sq, skv=skv, d=32, mask_type="causal", dropout=0.25))


def test_more_tiles_than_multiprocessors() -> None:
    compare(Case(b=2, hkv=8, group=2, sq=2100, skv=2100, d=128, mask_type="causal"))


@pytest.mark.parametrize("headroom", [2.0**-12, 30.0])
def test_scales_that_do_not_fit(headroom: float) -> None:
    compare(Case(hkv=2, sq=200, skv=300, d=64, mask_type="causal"), headroom)


def test_nan_codes() -> None:
    case = Case(sq=100, skv=200, d=64, mask_type="causal_bottom_right")
    for operand in range(3):
        cpu = list(arguments(case))
        cpu[operand] = cpu[operand].clone()
        cpu[operand].view(torch.uint8)[0, 0, 50, 30] = 0x7F
        cuda = [to_cuda(x) if isinstance(x, torch.Tensor) else x for x in cpu]
        for a, b in zip(twin.attention_fp8(*cpu), twin.attention_fp8(*cuda), strict=True):
            assert_same_bits(a, b)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=CASES)
def test_any_shape(case: Case) -> None:
    compare(case)


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_layer(layout: str, recomputes: bool, same_bits) -> None:  # type: ignore[no-untyped-def]
    layer = te.TransformerLayer(64, 96, 4, params_dtype=torch.bfloat16, attn_input_format=layout)
    recipe = te.DelayedScaling(amax_history_len=4, fp8_dpa=True)
    train_both(layer, (70, 2, 64), torch.bfloat16, recipe, same_bits, checkpoint_core_attention=recomputes)


def test_codes_that_the_copy_engine_cannot_read_are_copied() -> None:
    case = Case(b=2, hkv=2, sq=70, skv=75, d=32)
    q, k, v_t, *rest = arguments(case)
    assert v_t.stride(2) % 16
    wide = torch.zeros(2, 2, 70, 40, dtype=torch.uint8).view(FP8)[..., 1:33]
    wide.copy_(q)
    expected = twin.attention_fp8(q, k, v_t, *rest)
    operands = (to_cuda(x) for x in (wide, k, v_t))
    found = twin.attention_fp8(*operands, *(to_cuda(x) if isinstance(x, torch.Tensor) else x for x in rest))
    for a, b in zip(expected, found, strict=True):
        assert_same_bits(a, b)
