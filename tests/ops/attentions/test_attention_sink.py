"""Sinks of attention's softmax: against float64, the written order of their gradient, the layers."""

import copy
import re
from typing import Any

import numpy as np
import pytest
import torch
from shared.attention_cases import MASKS, Case, check_against_float64, inputs, run
from shared.bits import assert_same_bits

import reference as te
from reference.numbers import elementary
from reference.numbers.elementary import exp2_grid
from reference.ops.attentions.attention import MASK_TYPES
from reference.ops.attentions.attention_backward import row_dots

twin = torch.ops.twin


@pytest.mark.sample(5)
@pytest.mark.parametrize("mask_type", MASK_TYPES)
@pytest.mark.parametrize("mask", MASKS)
def test_against_float64(mask_type: str, mask: str) -> None:
    dtype = torch.bfloat16 if mask == "none" else torch.float16
    check_against_float64(Case(2, 2, 2, 140, 170, 24, dtype, mask_type, mask, dropout=0.1, sinks=True))


def test_a_sink_changes_the_sum_alone() -> None:
    """m is that of attention without sinks, and 1 / inv is larger by 2^(z - m)."""
    case = Case(1, 2, 2, 50, 300, 24, mask_type="causal_bottom_right", sinks=True)
    given = inputs(case)
    found, plain = run(case, given), run(case, given | {"sinks": None})
    assert_same_bits(found["m"], plain["m"], "m")
    z = given["sinks"].view(1, -1, 1) * torch.tensor(elementary.LOG2E)
    assert torch.allclose(1 / found["inv"], 1 / plain["inv"] + exp2_grid(z - plain["m"]), rtol=1e-6)
    lowest = run(case, given | {"sinks": torch.full_like(given["sinks"], -1e30)})
    for name, value in plain.items():
        assert_same_bits(lowest[name], value, name)
    assert not bool(lowest["dsinks"].any())
    highest = run(case, given | {"sinks": torch.full_like(given["sinks"], 1e30)})
    assert not any(bool(highest[name].any()) for name in ("out", "inv", "dq", "dk", "dv", "dsinks"))


def test_the_order_of_the_gradient_is_the_written_one() -> None:
    case = Case(2, 1, 2, 300, 20, 16, torch.float16, sinks=True)
    given = inputs(case)
    found = run(case, given)
    for head in range(2):
        rows = [(given | found)[name][:, head].float().flatten(0, 1).contiguous().numpy() for name in ("grad", "out")]
        dots = np.empty(600, np.float32)
        row_dots(*rows, dots)
        z = given["sinks"][head] * torch.tensor(elementary.LOG2E)
        weights = (exp2_grid(z - found["m"][:, head]) * found["inv"][:, head]).flatten().numpy()
        lanes = np.zeros(256, np.float32)
        for row in range(600):
            exact = np.longdouble(weights[row]) * np.longdouble(dots[row]) + np.longdouble(lanes[row % 256])
            lanes[row % 256] = np.float32(exact)
        for h in (128, 64, 32, 16, 8, 4, 2, 1):
            lanes[:h] += lanes[h : 2 * h]
        assert found["dsinks"][head].item() == -lanes[0]


X = torch.zeros(2, 4, 16, 32, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("bias", "sinks", "sentence"),
    [
        (torch.zeros(1, 1, 16, 16), torch.zeros(4), "sinks and a bias are both given; one of them is accepted."),
        (None, torch.zeros(4).double(), "sinks must be contiguous torch.float32 [4]; got torch.float64 [4]."),
        (None, torch.zeros(2, 4), "sinks must be contiguous torch.float32 [4]; got torch.float32 [2, 4]."),
        (None, torch.zeros(8)[::2], "sinks must be contiguous torch.float32 [4]"),
        (None, torch.zeros(4, device="meta"), "sinks is on meta, q on cpu."),
    ],
)
def test_refusals(bias: Any, sinks: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        twin.attention(X, X, X, 1.0, "none", -1, -1, None, 0.0, None, bias, None, sinks)


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


@pytest.mark.parametrize("softmax_type", ["off-by-one", "learnable"])
def test_a_layer_against_float64(softmax_type: str) -> None:
    layer = te.DotProductAttention(4, 16, attn_mask_type="no_mask", softmax_type=softmax_type)
    names = dict(layer.named_parameters())
    assert list(names) == (["softmax_offset"] if softmax_type == "learnable" else [])
    sinks = torch.zeros(4)
    if softmax_type == "learnable":
        assert names["softmax_offset"].tolist() == [0.0] * 4
        sinks = torch.tensor([-1.0, 0.0, 1.0, 2.0])
        names["softmax_offset"].data.copy_(sinks)
    q, k, v, g = (numbers(i, 20, 2, 4, 16).bfloat16().requires_grad_() for i in range(4))
    out = layer(q, k, v)
    out.backward(g.detach().flatten(2))
    wide = [t.detach().double().requires_grad_() for t in (q, k, v, sinks)]
    scores = torch.einsum("ibhd,jbhd->bhij", *wide[:2]) * 0.25
    weights = torch.cat([scores, wide[3].view(1, 4, 1, 1).expand(2, 4, 20, 1)], -1).softmax(-1)[..., :20]
    expected = torch.einsum("bhij,jbhd->ibhd", weights, wide[2]).flatten(2)
    expected.backward(g.detach().double().flatten(2))
    pairs = [(out, expected), *((t.grad, w.grad) for t, w in zip((q, k, v), wide, strict=False))]
    if softmax_type == "learnable":
        pairs.append((names["softmax_offset"].grad, wide[3].grad))
    for found, want in pairs:
        assert (found.double() - want).norm() / want.norm() < 0.02


def test_the_offset_is_transformer_engines_attribute() -> None:
    """None, zeros outside of `state_dict`, which may want a gradient as its tests have it, or a parameter."""
    vanilla, one, learnable = (
        te.DotProductAttention(4, 16, softmax_type=softmax_type)
        for softmax_type in ("vanilla", "off-by-one", "learnable")
    )
    assert vanilla.softmax_offset is None
    for layer in (one, learnable):
        assert layer.softmax_offset.dtype == torch.float32
        assert layer.softmax_offset.tolist() == [0.0] * 4
    assert "softmax_offset" in learnable.state_dict()
    assert "softmax_offset" not in one.state_dict()
    q, k, v = numbers(4, 3, 20, 2, 4, 16).bfloat16()
    one.softmax_offset.requires_grad = True
    results = []
    for layer in (one, learnable):
        y = layer(q, k, v)
        y.backward(torch.ones_like(y))
        results.append((y, layer.softmax_offset.grad))
        assert layer.softmax_offset.grad.any()
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)
    assert copy.deepcopy(one).to(torch.bfloat16).softmax_offset.dtype == torch.float32
    with torch.no_grad():
        one.softmax_offset.fill_(-1e30)
    assert_same_bits(one(q, k, v), vanilla(q, k, v))


@pytest.mark.parametrize("softmax_type", ["off-by-one", "learnable"])
def test_the_offset_leaves_meta(softmax_type: str) -> None:
    expected = te.DotProductAttention(4, 16, softmax_type=softmax_type)
    q, k, v = numbers(4, 3, 20, 2, 4, 16).bfloat16()
    for move in ("to_empty", "to", "nothing"):
        layer = te.DotProductAttention(4, 16, softmax_type=softmax_type, device="meta")
        assert layer.softmax_offset.is_meta
        if softmax_type == "learnable":
            layer.softmax_offset = torch.nn.Parameter(torch.zeros(4))
        if move != "nothing":
            getattr(layer, move)(device="cpu")
            assert layer.softmax_offset.device.type == "cpu"
        if softmax_type == "learnable":
            layer.softmax_offset.data.zero_()
        assert_same_bits(layer(q, k, v), expected(q, k, v))


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("softmax_type", ["off-by-one", "learnable"])
def test_a_layers_sinks_are_trained(softmax_type: str, recomputes: bool) -> None:
    """The encoder's and the decoder's; sinks far below all scores change no bit."""

    def trained(softmax_type: str, lowest: bool = False) -> tuple[te.TransformerLayer, list[torch.Tensor]]:
        torch.manual_seed(3)
        settings: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": torch.bfloat16}
        layer = te.TransformerLayer(64, 128, 4, softmax_type=softmax_type, layer_type="decoder", **settings)
        for name, parameter in layer.named_parameters():
            if lowest and name.endswith("softmax_offset"):
                parameter.data.fill_(-1e30)
        x = numbers(1, 20, 2, 64).bfloat16().requires_grad_()
        y = layer(x, encoder_output=numbers(2, 20, 2, 64).bfloat16(), checkpoint_core_attention=recomputes)
        y.backward(torch.ones_like(y))
        return layer, [y, x.grad]

    layer, found = trained(softmax_type)
    offsets = [p for name, p in layer.named_parameters() if name.endswith("core_attention.softmax_offset")]
    assert [bool(p.grad.any()) for p in offsets] == ([True, True] if softmax_type == "learnable" else [])
    _, plain = trained("vanilla")
    assert not torch.equal(found[0], plain[0])
    if softmax_type == "learnable":
        for a, b in zip(trained(softmax_type, lowest=True)[1], plain, strict=True):
            assert_same_bits(a, b)


def test_layers_refuse() -> None:
    layer, q = te.DotProductAttention(4, 16, softmax_type="learnable"), numbers(1, 8, 2, 4, 16)
    with pytest.raises(NotImplementedError, match="'alibi' with softmax_type='learnable' is not offered"):
        layer(q.bfloat16(), q.bfloat16(), q.bfloat16(), core_attention_bias_type="alibi")
    with pytest.raises(NotImplementedError, match=r"softmax_type='learnable' in torch.float32 with"):
        layer(q, q, q)
    for make in (
        te.MultiheadAttention(64, 4, softmax_type="off-by-one"),
        te.TransformerLayer(64, 64, 4, softmax_type="off-by-one"),
    ):
        with pytest.raises(NotImplementedError, match=r"softmax_type='off-by-one' in torch.float32 with"):
            make(numbers(1, 8, 2, 64))
    with pytest.raises(ValueError, match="softmax_type='sigmoid'; one of"):
        te.DotProductAttention(4, 16, softmax_type="sigmoid")
