"""A bias on attention's scores: against float64 and PyTorch, the written order of its gradient, ALiBi, the layers."""

import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from shared.attention_cases import Case, check_against_float64, inputs, run
from shared.bits import assert_same_bits

import reference as te
from reference.nn.attentions.attention_bias import alibi
from reference.ops.attentions import attention
from reference.ops.attentions.attention_backward import Tiles
from reference.ops.attentions.attention_bias import default_slopes

twin = torch.ops.twin
SHAPES = ("bhss", "1hss", "b1ss", "11ss")


@pytest.mark.parametrize("bias", SHAPES)
@pytest.mark.parametrize("mask_type", attention.MASK_TYPES)
def test_against_float64(bias: str, mask_type: str) -> None:
    dtype = torch.bfloat16 if bias[0] == "b" else torch.float16
    case = Case(2, 2, 2, 140, 170, 24, dtype, mask_type, dropout=0.1, bias=bias, bias_is_fp32=bias[1] == "h")
    check_against_float64(case)


@pytest.mark.sample(2)
@pytest.mark.parametrize("mask_type", attention.MASK_TYPES)
@pytest.mark.parametrize("bias", ["h slopes", "bh slopes"])
def test_alibi_is_a_bias_in_every_bit(bias: str, mask_type: str) -> None:
    case = Case(2, 2, 2, 140, 300, 24, mask_type=mask_type, mask="padding", bias=bias, dropout=0.1)
    check_against_float64(case)
    given = inputs(case)
    found = run(case, inputs(case))
    values = alibi(given["slopes"], mask_type, case.sq, case.skv)
    for name, value in run(case, given | {"slopes": None, "bias": values}).items():
        if name != "dbias":
            assert_same_bits(found[name], value, name)


def test_a_bias_of_minus_infinity_hides() -> None:
    case = Case(2, 1, 2, 150, 200, 24, mask="arbitrary", bias="bhss", bias_is_fp32=True)
    given = inputs(case)
    masked = run(case, given)
    hidden = given["bias"].masked_fill(given["mask"], -math.inf)
    for name, value in run(case, given | {"bias": hidden, "mask": None}).items():
        # A hidden weight of +0 times a negative number is -0, which no sum shows.
        assert_same_bits(masked[name], value, name)


def test_the_order_of_the_gradient_is_the_written_one() -> None:
    """Batches, then heads, one sum in fp32; the order can be told from the reverse."""
    case = Case(3, 1, 3, 20, 30, 16, torch.float16, bias="11ss", bias_is_fp32=True, seed=3)
    given = inputs(case)
    found = run(case, given)
    shares = []
    for batch, head in np.ndindex(3, 3):
        tensors = {name: (given | found)[name][batch, head : head + 1] for name in ("q", "grad", "out", "m", "inv")}
        tensors |= {name: given[name][batch, :1] for name in ("k", "v")}
        one = Tiles(tensors, attention.factor(case.softmax_scale), 0.0, None)
        bias = given["bias"][0, 0].numpy()
        shares.append(one.gradients(slice(0, 20), slice(0, 30), np.zeros((20, 30), np.bool_), bias)[1][0])

    def added(order: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(20, 30)
        for share in order:
            total = total + share
        return total[None, None]

    assert_same_bits(found["dbias"], added(shares), "dbias")
    assert not torch.equal(found["dbias"], added(shares[::-1]))


def test_the_scores_are_the_written_ones() -> None:
    """One query, one block of keys: t = fma(S, c, b log2 e), m = max t and weights on the grid of 2^-15."""
    case = Case(sq=1, skv=9, d=16, scale=0.7, bias="bhss", bias_is_fp32=True, dtype=torch.float16)
    given = inputs(case)
    found = run(case, given)
    from reference.numbers import elementary, tensor_core

    s = tensor_core.gemm(given["q"][0, 0], given["k"][0, 0])[0].numpy()
    c, b = np.float32(0.7 * math.log2(math.e)), given["bias"][0, 0, 0].numpy() * np.float32(math.log2(math.e))
    t = (np.longdouble(s) * np.longdouble(c) + np.longdouble(b)).astype(np.float32)
    m = np.float32(384) - (np.float32(384) - t.max())
    p = elementary.exp2_grid(torch.from_numpy((t + (np.float32(384) - m)) - np.float32(384)))
    lanes = [float(p[2 * q] + p[2 * q + 1]) for q in range(4)]
    lanes[0] = float((p[0] + p[8]) + p[1])
    total = np.float32(np.float32(lanes[0] + lanes[1]) + np.float32(lanes[2] + lanes[3]))
    assert found["m"].item() == m
    assert found["inv"].item() == np.float32(1) / total
    out = tensor_core.gemm(p.half()[None], given["v"][0, 0].t()) * found["inv"].item()
    assert_same_bits(found["out"][0, 0], out.half(), "out")


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 20])
def test_default_slopes_are_transformer_engines(heads: int) -> None:
    n = 2 ** math.floor(math.log2(heads))
    m = torch.pow(2.0 ** (-8.0 / n), torch.arange(1, 1 + n))
    if n < heads:
        m = torch.cat([m, torch.pow(2.0 ** (-4.0 / n), torch.arange(1, 1 + 2 * (heads - n), 2))])
    assert torch.allclose(default_slopes(heads), m.float(), rtol=3e-7, atol=0)
    assert default_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]


X = torch.zeros(2, 4, 16, 32, dtype=torch.bfloat16)
REFUSALS = [
    ({"bias": torch.zeros(2, 4, 16, 16), "slopes": torch.zeros(4)}, "bias and slopes are both given; one of them"),
    ({"bias": torch.zeros(2, 4, 16, 16).half()}, "bias must be torch.float32 or q's torch.bfloat16; got torch.float16"),
    ({"bias": torch.zeros(4, 16, 16)}, "bias must be [1 or 2, 1 or 4, 16, 16]"),
    ({"bias": torch.zeros(1, 2, 16, 16)}, "bias must be [1 or 2, 1 or 4, 16, 16]"),
    ({"bias": torch.zeros(1, 1, 1, 16)}, "got [1, 1, 1, 16]"),
    ({"bias": torch.zeros(1, 1, 16, 16, device="meta")}, "bias is on meta, q on cpu"),
    ({"slopes": torch.zeros(4).double()}, "slopes must be torch.float32 [4] or [2, 4]; got torch.float64 [4]"),
    ({"slopes": torch.zeros(2)}, "slopes must be torch.float32 [4] or [2, 4]; got torch.float32 [2]"),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSALS)
def test_refusals(changes: dict[str, Any], sentence: str) -> None:
    given = {"bias": None, "slopes": None} | changes
    with pytest.raises(ValueError, match=re.escape(sentence)):
        twin.attention(X, X, X, 1.0, "none", -1, -1, None, 0.0, None, given["bias"], given["slopes"])


def test_a_gradient_needs_a_bias() -> None:
    row = torch.zeros(2, 4, 16)
    with pytest.raises(ValueError, match=r"attention_bias_backward: bias is None; a tensor is accepted\.$"):
        twin.attention_bias_backward(X, X, X, X, X, row, row, 1.0, "none", -1, -1, None, 0.0, None, None)


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


@pytest.mark.parametrize("attn_mask_type", ["no_mask", "causal", "padding"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_against_pytorch(dtype: torch.dtype, attn_mask_type: str) -> None:
    """Output and all gradients, of a bias that batches share; fp32 is PyTorch's own attention with the same bias."""
    q, k, v, g = (numbers(i, 20, 2, 4, 16).to(dtype).requires_grad_() for i in range(4))
    bias = numbers(5, 1, 4, 20, 20).to(dtype).requires_grad_()
    padding = (
        (torch.arange(20) >= torch.tensor([[20], [13]])).view(2, 1, 1, 20) if attn_mask_type == "padding" else None
    )
    layer = te.DotProductAttention(4, 16, attn_mask_type=attn_mask_type)
    out = layer(q, k, v, padding, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
    out.backward(g.detach().flatten(2))
    wide = [t.detach().double().requires_grad_() for t in (q, k, v, bias)]
    scores = torch.einsum("ibhd,jbhd->bhij", *wide[:2]) * 0.25 + wide[3]
    hidden = (
        torch.ones(20, 20, dtype=torch.bool).triu(1)
        if attn_mask_type == "causal"
        else torch.zeros(20, 20, dtype=torch.bool)
    )
    if padding is not None:
        hidden = hidden | padding | padding.transpose(2, 3)
    weights = torch.nan_to_num(scores.masked_fill(hidden, -torch.inf).softmax(-1))
    expected = torch.einsum("bhij,jbhd->ibhd", weights, wide[2]).flatten(2)
    expected.backward(g.detach().double().flatten(2))
    pairs = [(out, expected), *((t.grad, w.grad) for t, w in zip((q, k, v, bias), wide, strict=True))]
    for found, want in pairs:
        assert (found.double() - want).norm() / want.norm() < (1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layers_alibi(dtype: torch.dtype) -> None:
    q, k = numbers(1, 20, 2, 4, 16).to(dtype), numbers(2, 30, 2, 4, 16).to(dtype)
    for attn_mask_type, mask_type in (
        ("causal", "causal"),
        ("no_mask", "none"),
        ("causal_bottom_right", "causal_bottom_right"),
    ):
        layer = te.DotProductAttention(4, 16, attn_mask_type=attn_mask_type)
        found = layer(q, k, k, core_attention_bias_type="alibi")
        values = alibi(default_slopes(4), mask_type, 20, 30)
        same = layer(q, k, k, core_attention_bias_type="post_scale_bias", core_attention_bias=values)
        given = layer(q, k, k, core_attention_bias_type="alibi", alibi_slopes=default_slopes(4).expand(2, 4))
        assert_same_bits(found, given)
        assert_same_bits(found, same)
        assert not torch.equal(found, layer(q, k, k))


def trained(layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor, **arguments: Any) -> list[torch.Tensor]:
    x, bias = x.clone().requires_grad_(), bias.clone().requires_grad_()
    named = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
    y = layer(x, **arguments, **named)
    y.backward(torch.ones_like(y))
    return [y, x.grad, bias.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("settings", [{}, {"layer_type": "decoder"}])
def test_a_layers_bias_reaches_attention(settings: dict[str, Any]) -> None:
    """Recomputing attention changes no bit; a bias that hides is a mask."""

    def layer() -> te.TransformerLayer:
        torch.manual_seed(3)
        return te.TransformerLayer(64, 128, 4, params_dtype=torch.bfloat16, hidden_dropout=0.0, **settings)

    x, bias = numbers(4, 20, 2, 64).bfloat16(), numbers(5, 1, 4, 20, 20)
    more = {"encoder_output": numbers(6, 20, 2, 64).bfloat16()} if settings else {}
    found = trained(layer(), x, bias, **more)
    for a, b in zip(found, trained(layer(), x, bias, checkpoint_core_attention=True, **more), strict=True):
        assert_same_bits(a, b)
    assert not torch.equal(found[0], layer()(x, **more))
    hidden = torch.zeros(1, 1, 20, 20).masked_fill(numbers(7, 20, 20) > 1.0, -math.inf)
    both = {"self_attn_mask_type": "no_mask"}
    arbitrary = {"attention_mask": hidden.isinf(), "self_attn_mask_type": "arbitrary"}
    if settings:
        arbitrary |= {"enc_dec_attn_mask": hidden.isinf(), "enc_dec_attn_mask_type": "arbitrary"}
    zeros = torch.zeros(1, 1, 20, 20)
    one = trained(layer(), x, hidden, **both, **more)
    other = trained(layer(), x, zeros, **arbitrary, **more)
    for number, (a, b) in enumerate(zip(one, other, strict=True)):
        if number != 2:
            assert_same_bits(a, b)


BAD = [
    ({"core_attention_bias_type": "pre_scale_bias"}, ValueError, "core_attention_bias_type='pre_scale_bias'; one of"),
    ({"core_attention_bias_type": None}, ValueError, "core_attention_bias_type=None; one of"),
    ({"core_attention_bias_type": 3}, TypeError, "core_attention_bias_type=3; one of"),
    (
        {"core_attention_bias_type": "post_scale_bias"},
        ValueError,
        "core_attention_bias=None with core_attention_b",
    ),
    ({"core_attention_bias": torch.zeros(1, 1, 20, 20)}, ValueError, "core_attention_bias with core_attention_bias_ty"),
    ({"alibi_slopes": torch.ones(4)}, ValueError, "alibi_slopes with core_attention_bias_type='no_bias'; it goes with"),
    (
        {"core_attention_bias_type": "alibi", "core_attention_bias": torch.zeros(1, 1, 20, 20)},
        ValueError,
        "core_attention_bias with core_attention_bias_type='alibi'; it goes with 'post_scale_bias' alone",
    ),
    (
        {"core_attention_bias_type": "alibi", "alibi_slopes": torch.ones(3)},
        ValueError,
        "alibi_slopes is torch.float32 [3]; float32 [4] or [2, 4] is accepted",
    ),
    (
        {"core_attention_bias_type": "alibi", "alibi_slopes": torch.ones(4, requires_grad=True)},
        NotImplementedError,
        "alibi_slopes with requires_grad=True is not offered",
    ),
    (
        {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": torch.zeros(1, 1, 1, 20)},
        ValueError,
        "core_attention_bias is torch.float32 [1, 1, 1, 20]; float32 or torch.bfloat16 [1 or 2, 1 or 4, 20, 20]",
    ),
    (
        {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": np.zeros((1, 1, 20, 20))},
        TypeError,
        "core_attention_bias=ndarray; a dense tensor is accepted",
    ),
]


@pytest.mark.parametrize("layer", ["DotProductAttention", "MultiheadAttention", "TransformerLayer"])
@pytest.mark.parametrize(("arguments", "error", "sentence"), BAD)
def test_layers_refuse(layer: str, arguments: dict[str, Any], error: type[Exception], sentence: str) -> None:
    if layer == "DotProductAttention":
        made, given = te.DotProductAttention(4, 16), [numbers(i, 20, 2, 4, 16).bfloat16() for i in range(3)]
    else:
        sizes = (64, 4) if layer == "MultiheadAttention" else (64, 128, 4)
        made, given = getattr(te, layer)(*sizes, params_dtype=torch.bfloat16), [numbers(1, 20, 2, 64).bfloat16()]
    with pytest.raises(error, match=re.escape(f"{layer}") + ".*" + re.escape(sentence)):
        made(*given, **arguments)


def test_cudnn_has_no_bias() -> None:
    q = numbers(1, 3, 2, 2, 16).bfloat16()
    with pytest.raises(ValueError, match="'cudnn' with core_attention_bias_type='alibi'; 'no_bias' is accepted"):
        te.DotProductAttention(2, 16, attention_backend="cudnn")(q, q, q, core_attention_bias_type="alibi")


@pytest.mark.parametrize("shape", [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
def test_nothing(shape: tuple[int, int, int]) -> None:
    b, sq, skv = shape
    found = run(*(lambda case: (case, inputs(case)))(Case(b=b, sq=sq, skv=skv, bias="1hss")))
    assert found["dbias"].shape == (1, 1, sq, skv)
    assert not bool(found["dbias"].any())


def test_rows_that_see_nothing() -> None:
    case = dataclasses.replace(Case(sq=40, skv=50, bias="bhss"), mask="everything")
    found = run(case, inputs(case))
    assert not any(bool(found[name].any()) for name in ("out", "inv", "dq", "dk", "dv", "dbias"))
