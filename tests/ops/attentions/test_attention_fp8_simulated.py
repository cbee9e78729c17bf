"""The kernels of attention in FP8, run by the simulator on the CPU, give the definition's words."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from shared.attention_cases import Case, inputs
from shared.attention_fp8_cases import CASES, arguments, transposed
from shared.attention_packed_cases import int32
from shared.bits import assert_same_bits
from simulator import AT_ONCE, AT_RANDOM, LATE, Simulator

import reference as te
from reference.ops import library

pytestmark = pytest.mark.simulated
twin = torch.ops.twin


def run(given: tuple, v: torch.Tensor, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    before, given = given[12], tuple(x.clone() if n == 12 and x is not None else x for n, x in enumerate(given))
    out, m, inv = twin.attention_fp8(*given)
    codes = (*given[:2], v, *given[3:6])
    dq, dk, dv = twin.attention_fp8_backward(grad, *codes, out, m, inv, *given[6:12], before)
    found = {"out": out, "m": m, "inv": inv, "dq": dq, "dk": dk, "dv": dv}
    return found if before is None else {**found, "rng_state": given[12]}


def compare(case: Case, headroom: float = 1.0, when: int = LATE, seed: int = 0, processors: int = 4) -> list[str]:
    given = arguments(case, headroom)
    more = (transposed(given[2]), inputs(case)["grad"])
    expected = run(given, *more)
    with Simulator(processors, when, seed) as gpu:
        found = run(given, *more)
    for name, value in expected.items():
        assert_same_bits(value, found[name], f"{name} of {case}")
    return gpu.launches


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize(("dtype", "dropout"), [(torch.bfloat16, 0.0), (torch.float16, 0.1)])
def test_every_capacity(d: int, dtype: torch.dtype, dropout: float) -> None:
    case = Case(hkv=1, group=2, sq=140, skv=170, d=d, dtype=dtype, mask_type="causal", dropout=dropout, layout="sbhd")
    assert "attention_fp8_backward.attention_dequantize" in compare(case)


@pytest.mark.parametrize("when", [AT_ONCE, LATE, AT_RANDOM])
def test_whenever_copies_and_products_happen(when: int) -> None:
    """Blocks take tickets, as there are more tiles than multiprocessors, and stages are used again."""
    case = Case(hkv=2, group=2, sq=400, skv=400, d=32, mask_type="causal", window=(250, -1))
    assert "attention_fp8.attention_fp8_ticket" in compare(case, when=when, seed=3, processors=2)


@pytest.mark.parametrize(("sq", "skv"), [(1, 1), (5, 129), (193, 64), (64, 257)])
@pytest.mark.parametrize("mask", ["padding", "arbitrary"])
def test_ragged_and_masked(sq: int, skv: int, mask: str) -> None:
    compare(Case(b=2, sq=sq, skv=skv, d=48, mask=mask, mask_type="causal" if sq > skv else "causal_bottom_right"))


@pytest.mark.parametrize("headroom", [2.0**-12, 30.0])
def test_scales_that_do_not_fit(headroom: float) -> None:
    compare(Case(sq=70, skv=140, d=16), headroom)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=CASES)
def test_any_shape(case: Case) -> None:
    compare(case, when=AT_RANDOM, seed=case.seed)


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
def test_a_layer(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps: outputs, gradients, scales and histories. Packed, some tokens are in no sequence."""
    monkeypatch.setitem(
        library._IMPLEMENTATIONS["CUDA"], "scale_update", library._IMPLEMENTATIONS["CPU"]["scale_update"]
    )
    torch.manual_seed(0)
    given = {"params_dtype": torch.bfloat16, "qkv_format": layout, "attn_mask_type": "padding_causal"}
    plain = te.MultiheadAttention(64, 2, input_layernorm=True, **given)
    ends, starts = int32(0, 17, 17, 47), int32(1, 18, 20, 55)
    if layout != "thd":
        ends = int32(0, 40, 53)
    places = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": 40, "max_seqlen_kv": 40}
    if layout == "thd":
        places |= {"cu_seqlens_q_padded": starts, "cu_seqlens_kv_padded": starts}
    other, recipe = copy.deepcopy(plain), te.DelayedScaling(amax_history_len=4, fp8_dpa=True)

    def step(number: int, layer: te.MultiheadAttention) -> list[torch.Tensor]:
        torch.manual_seed(number)
        shape = {"sbhd": (40, 2, 64), "bshd": (2, 40, 64), "thd": (59, 64)}[layout]
        x, grad = (torch.randn(shape).bfloat16() for _ in range(2))
        x.requires_grad_()
        layer.zero_grad()
        with te.autocast(recipe=recipe):
            y = layer(x, **places)
        y.backward(grad)
        for one in layer.modules():  # the other's steps leave its scales alone
            vars(one).update({"_membership": None} if hasattr(one, "_membership") else {})
        return [y.detach(), x.grad, *(p.grad for p in layer.parameters()), *layer.state_dict().values()]  # type: ignore[list-item]

    for number in range(3):
        expected = step(number, plain)
        with Simulator() as gpu:
            found = step(number, other)
        launched = {"attention_fp8.attention_fp8", "attention_fp8_backward.attention_dequantize", "cast.cast"}
        assert launched <= set(gpu.launches)
        for a, b in zip(expected, found, strict=True):
            assert_same_bits(a, b, f"step {number}")
