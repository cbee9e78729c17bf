"""Attention layers: layouts, masks, heads, refusals. (The op: test_attention.py.)"""

from typing import Any

import pytest
import torch
from shared.attention_layer_cases import ARBITRARY, CAUSAL, PADDING, exact, numbers

import reference as te

RECIPE = te.DelayedScaling(amax_history_len=4)


@pytest.mark.parametrize(
    ("attn_mask_type", "mask", "hidden"),
    [
        ("no_mask", None, None),
        ("causal", None, CAUSAL),
        ("padding", PADDING, PADDING | PADDING.transpose(2, 3)),
        ("padding_causal", PADDING, PADDING | PADDING.transpose(2, 3) | CAUSAL),
        ("causal,padding", PADDING, PADDING | PADDING.transpose(2, 3) | CAUSAL),
        ("arbitrary", ARBITRARY, ARBITRARY),
    ],
)
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_masks_and_groups(attn_mask_type: str, mask: Any, hidden: torch.Tensor | None, groups: int) -> None:
    layer = te.DotProductAttention(4, 16, num_gqa_groups=groups)
    q, k, v = (numbers(i, 20, 2, h, 16).bfloat16().requires_grad_() for i, h in ((1, 4), (2, groups), (3, groups)))
    g = numbers(4, 20, 2, 64).bfloat16()
    out = layer(q, k, v, mask, attn_mask_type=attn_mask_type)
    out.backward(g)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected = exact(*wide, hidden, 0.25)
    expected.backward(g.double())
    # Weights and result are bf16 (2^-9 each); the gradients see four such roundings.
    assert (out.double() - expected).norm() / expected.norm() < 0.01
    for got, want in zip((q, k, v), wide, strict=True):
        assert (got.grad.double() - want.grad).norm() / want.grad.norm() < 0.02


def test_layouts_are_views_of_each_other(same_bits) -> None:
    layer = te.DotProductAttention(4, 16)
    q, k, v = (numbers(i, 20, 2, 4, 16).bfloat16() for i in (1, 2, 3))
    out = layer(q, k, v)
    other = layer(*(t.transpose(0, 1) for t in (q, k, v)), qkv_format="bshd")
    same_bits(out, other.transpose(0, 1))


def test_an_expanded_gradient_is_taken(same_bits) -> None:
    layer, grads = te.DotProductAttention(2, 16), []
    for reduce in (torch.Tensor.sum, lambda out: out.mul(1.0).sum()):
        q, k, v = (numbers(i, 20, 2, 2, 16).bfloat16().requires_grad_() for i in (1, 2, 3))
        reduce(layer(q, k, v)).backward()
        grads.append((q.grad, k.grad, v.grad))
    for a, b in zip(*grads, strict=True):
        same_bits(a, b)


def test_cross_attention_bottom_right_and_two_masks(same_bits) -> None:
    layer = te.DotProductAttention(2, 16, attention_type="cross", attn_mask_type="causal_bottom_right")
    q, k, v = numbers(1, 5, 1, 2, 16).bfloat16(), numbers(2, 9, 1, 2, 16).bfloat16(), numbers(3, 9, 1, 2, 16).bfloat16()
    hidden = torch.arange(9)[None, :] > torch.arange(5)[:, None] + 4
    wide = exact(q.double(), k.double(), v.double(), hidden, 0.25)
    assert (layer(q, k, v).double() - wide).norm() / wide.norm() < 0.01
    queries, keys = torch.zeros(1, 1, 1, 5, dtype=torch.bool), torch.zeros(1, 1, 1, 9, dtype=torch.bool)
    keys[..., 7:] = True
    padded = layer(q, k, v, (queries, keys), attn_mask_type="padding")
    same_bits(padded, layer(q, k[:7], v[:7], attn_mask_type="no_mask"))


def test_dropout_is_for_training_and_replays(same_bits) -> None:
    torch.manual_seed(3)
    layer = te.DotProductAttention(2, 16, attention_dropout=0.5)
    q, k, v = (numbers(i, 40, 1, 2, 16).bfloat16() for i in (1, 2, 3))
    first, second = layer(q, k, v), layer(q, k, v)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    again = te.DotProductAttention(2, 16, attention_dropout=0.5)
    same_bits(again(q, k, v), first)
    layer.eval()
    same_bits(layer(q, k, v), te.DotProductAttention(2, 16)(q, k, v))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
def test_checkpoint_core_attention_changes_no_bit(fp8: bool, rotary: bool, same_bits) -> None:
    results = []
    freqs = (numbers(9, 24, 8).abs() * 3).repeat(1, 2).view(24, 1, 1, 16) if rotary else None
    for core in (False, True):
        torch.manual_seed(4)
        layer = te.MultiheadAttention(64, 4, params_dtype=torch.bfloat16, attention_dropout=0.3, input_layernorm=True)
        for step in range(3):
            x = numbers(step, 24, 2, 64).bfloat16().requires_grad_()
            with te.autocast(enabled=fp8, recipe=RECIPE):
                y = layer(x, checkpoint_core_attention=core, rotary_pos_emb=freqs)
            y.backward(torch.ones_like(y))
        results.append((y, x.grad, *(p.grad for p in layer.parameters())))
    for a, b in zip(*results, strict=True):
        same_bits(a, b)


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("fused", [(False, False), (True, False), (True, True)])
def test_projection_layouts(groups: int, fused: tuple[bool, bool], same_bits) -> None:
    """One parameter or three, interleaved or not: the same attention with the rows in another order."""
    fuse, interleaved = fused
    torch.manual_seed(5)
    layer = te.MultiheadAttention(
        64,
        4,
        num_gqa_groups=groups,
        fuse_qkv_params=fuse,
        qkv_weight_interleaved=interleaved,
        params_dtype=torch.bfloat16,
    )
    names = [n for n, _ in layer.qkv.named_parameters()]
    assert names == (
        ["weight", "bias"] if fuse else [f"{p}_{k}" for k in ("weight", "bias") for p in ("query", "key", "value")]
    )
    x = numbers(6, 10, 2, 64).bfloat16()
    weight, per = layer.qkv.joined_weight().detach(), 4 // groups
    order = torch.arange((4 + 2 * groups) * 16)
    if interleaved:
        rows = order.view(groups, per + 2, 16)
        q, k, v = rows[:, :per].reshape(-1), rows[:, per].reshape(-1), rows[:, per + 1].reshape(-1)
    else:
        rows = order.view(per + 2, groups, 16)
        q, k, v = rows[:per].reshape(-1), rows[per].reshape(-1), rows[per + 1].reshape(-1)
    heads = [
        torch.ops.twin.gemm(x.view(20, 64), weight[r], None, torch.bfloat16).view(10, 2, -1, 16).detach()
        for r in (q, k, v)
    ]
    context = te.DotProductAttention(4, 16, num_gqa_groups=groups)(*heads)
    same_bits(layer.eval()(x), layer.proj(context))


def test_cross_attention_module() -> None:
    layer = te.MultiheadAttention(
        64, 4, attention_type="cross", input_layernorm=True, params_dtype=torch.bfloat16, attn_mask_type="no_mask",
        return_bias=True, return_layernorm_output=True,
    )  # fmt: skip
    x, other = (numbers(i, n, 2, 64).bfloat16().requires_grad_() for i, n in ((7, 10), (8, 6)))
    y, bias, normed = layer(x, encoder_output=other)
    assert y.shape == normed.shape == x.shape
    assert bias.shape == (64,)
    y.float().sum().backward()
    assert other.grad is not None
    assert [n for n, _ in layer.named_children()] == ["layernorm_query", "key_value", "core_attention", "proj"]


def test_generator_follows_device_and_copy() -> None:
    import copy

    layer = te.DotProductAttention(2, 16, attention_dropout=0.1)
    assert torch.equal(copy.deepcopy(layer).generator.state, layer.generator.state)
    assert layer.half().generator.state.dtype == torch.int64
    assert layer.to("meta").generator.state.is_meta
    assert list(layer.state_dict()) == ["_extra_state"]


def with_cudnn(attn_mask_type: str, lengths: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    layer = te.DotProductAttention(2, 16, attn_mask_type=attn_mask_type, attention_backend="cudnn")
    q, k, v = (torch.ones(s, 1, 2, 16, dtype=dtype) for s in (lengths[0], lengths[1], lengths[1]))
    return layer(q, k, v)


def test_cudnn_is_said_once_to_be_outside_the_contract(caplog, monkeypatch) -> None:
    monkeypatch.setattr("reference.support.notice._said", set())
    for _ in range(2):
        te.TransformerLayer(64, 64, 4, attention_backend="cudnn")
    assert [record.message for record in caplog.records] == [
        "attention_backend='cudnn': attention is cuDNN's and outside the bit contract (said once)."
    ]
    assert te.TransformerLayer(64, 64, 4).self_attention.core_attention.attention_backend == "exact"


@pytest.mark.gpu
@pytest.mark.parametrize("attn_mask_type", ["no_mask", "causal"])
@pytest.mark.parametrize("groups", [4, 2])
def test_cudnn_computes_the_same_attention(attn_mask_type: str, groups: int) -> None:
    import optimized

    sizes = ((1, 4), (2, groups), (3, groups))
    q, k, v = (numbers(i, 128, 2, h, 64).bfloat16().cuda().requires_grad_() for i, h in sizes)
    g = numbers(4, 128, 2, 256).bfloat16().cuda()
    found = []
    for backend in ("exact", "cudnn"):
        layer = optimized.DotProductAttention(4, 64, groups, attn_mask_type=attn_mask_type, attention_backend=backend)
        q.grad = k.grad = v.grad = None
        out = layer(q, k, v)
        out.backward(g)
        found.append((out, q.grad, k.grad, v.grad))
    for ours, theirs in zip(*found, strict=True):
        assert (ours.double() - theirs.double()).norm() / ours.double().norm() < 0.02  # as in test_masks_and_groups


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (
            lambda: te.DotProductAttention(4, 16, num_gqa_groups=3),
            ValueError,
            "num_gqa_groups=3 with num_attention_heads=4",
        ),
        (lambda: te.MultiheadAttention(64, 4, qkv_format="hdt"), ValueError, "qkv_format='hdt'; one of"),
        (lambda: te.DotProductAttention(4, 16, attn_mask_type="diagonal"), ValueError, "attn_mask_type='diagonal'"),
        (
            lambda: te.DotProductAttention(4, 16, window_size=(-1, 8)),
            ValueError,
            r"window_size=\(-1, 8\) with attn_mask_type='causal'; \(-1, 0\), or a pair that starts with 0 or more",
        ),
        (
            lambda: te.DotProductAttention(4, 16, softmax_type="sparse"),
            ValueError,
            "softmax_type='sparse'; one of",
        ),
        (lambda: te.MultiheadAttention(64, 5), ValueError, "hidden_size=64 with num_attention_heads=5"),
        (lambda: te.MultiheadAttention(64, 4, attention_type="other"), ValueError, "attention_type='other'"),
        (lambda: te.MultiheadAttention(64, 4, qk_norm_type="Norm"), ValueError, "qk_norm_type='Norm'; None or one"),
        (lambda: te.MultiheadAttention(64, 4, tp_size=2), NotImplementedError, "tp_size=2 is not offered"),
        (
            lambda: te.MultiheadAttention(64, 4)(torch.ones(2, 1, 64), encoder_output=torch.ones(2, 1, 64)),
            ValueError,
            "attention_type='self' takes no encoder_output",
        ),
        (
            lambda: te.DotProductAttention(1, 16)(*[torch.ones(4, 1, 1, 16).half()] * 3, attn_mask_type="padding"),
            ValueError,
            "attn_mask_type='padding' needs attention_mask; got None",
        ),
        (
            lambda: te.DotProductAttention(1, 16)(
                *[torch.ones(4, 1, 1, 16).half()] * 3,
                torch.ones(1, 1, 1, 5, dtype=torch.bool),
                attn_mask_type="padding",
            ),
            ValueError,
            r"attention_mask of the queries is torch.bool \[1, 1, 1, 5\]; bool \[1, 1, 1, 4\]",
        ),
        (
            lambda: te.DotProductAttention(1, 16, attention_backend="flash"),
            ValueError,
            r"attention_backend='flash'; one of \('exact', 'cudnn'\)",
        ),
        (lambda: with_cudnn("no_mask", (4, 4)), RuntimeError, "attention_backend='cudnn' on cpu; 'cuda' is accepted"),
        (lambda: with_cudnn("causal", (4, 4), torch.float32), TypeError, "'cudnn' with torch.float32; bfloat16 and"),
        (lambda: with_cudnn("causal", (4, 6)), ValueError, "4 queries and 6 keys under a causal mask; as many keys"),
        (
            lambda: with_cudnn("causal_bottom_right", (4, 4)),
            ValueError,
            r"attn_mask_type='causal_bottom_right'; one of \('no_mask', 'causal'\)",
        ),
    ],
)
def test_refusals(make: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        make()
