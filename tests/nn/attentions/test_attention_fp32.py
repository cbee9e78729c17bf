"""Attention in fp32: PyTorch's own, outside the bit contract, with Transformer Engine's masks and conventions."""

import copy
from typing import Any

import pytest
import torch
from shared.attention_layer_cases import ARBITRARY, CAUSAL, PADDING, exact, numbers

import reference as te
from reference.support import notice

RECIPE = te.DelayedScaling(amax_history_len=4)
BOTTOM_RIGHT = torch.ones(20, 26, dtype=torch.bool).triu(7)
CROSS = (PADDING, torch.arange(26).view(1, 1, 1, 26) >= 17)
MORE_KEYS = torch.tensor([17 - 20, 17 - 13]).view(2, 1, 1, 1)  # than queries has each sequence of CROSS
OWN_RIGHT = torch.arange(26) > torch.arange(20)[:, None] + MORE_KEYS
BLIND = torch.ones(20, 12, dtype=torch.bool).triu(-7)  # causal from the bottom right, with fewer keys than queries
# attn_mask_type -> (keys, mask as it is given, pairs that are hidden)
MASKS: dict[str, tuple[int, Any, torch.Tensor | None]] = {
    "no_mask": (20, None, None),
    "causal": (20, None, CAUSAL),
    "causal, more keys": (26, None, torch.ones(20, 26, dtype=torch.bool).triu(1)),
    "causal_bottom_right": (26, None, BOTTOM_RIGHT),
    "causal_bottom_right, fewer keys": (12, None, BLIND),
    "padding": (20, PADDING, PADDING | PADDING.transpose(2, 3)),
    "padding, two masks": (26, CROSS, CROSS[0].transpose(2, 3) | CROSS[1]),
    "padding_causal": (20, PADDING, PADDING | PADDING.transpose(2, 3) | CAUSAL),
    "causal,padding": (20, PADDING, PADDING | PADDING.transpose(2, 3) | CAUSAL),
    "padding_causal_bottom_right": (26, CROSS, CROSS[0].transpose(2, 3) | CROSS[1] | OWN_RIGHT),
    "arbitrary": (20, ARBITRARY, ARBITRARY),
    "arbitrary, nothing is seen": (20, torch.ones(1, 1, 1, 1, dtype=torch.bool), torch.ones(20, 20, dtype=torch.bool)),
}


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """To some hundred roundings of fp32; a result that has to be zero is zero."""
    assert got.dtype == torch.float32
    return bool((got.double() - want).norm() <= 2e-5 * want.norm())


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("case", MASKS)
@pytest.mark.parametrize("core", [False, True])
def test_masks_and_groups(case: str, groups: int, core: bool) -> None:
    keys, mask, hidden = MASKS[case]
    attn_mask_type = "causal,padding" if case == "causal,padding" else case.partition(", ")[0]
    layer = te.DotProductAttention(4, 16, num_gqa_groups=groups, attention_type="cross" if keys != 20 else "self")
    sizes = ((20, 4), (keys, groups), (keys, groups))
    q, k, v = (numbers(i, s, 2, h, 16).requires_grad_() for i, (s, h) in enumerate(sizes))
    g = numbers(4, 20, 2, 64)
    out = layer(q, k, v, mask, attn_mask_type=attn_mask_type, checkpoint_core_attention=core)
    out.backward(g)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected = exact_with_blind_rows(*wide, hidden)
    expected.backward(g.double())
    assert close(out, expected)
    for got, want in zip((q, k, v), wide, strict=True):
        assert close(got.grad, want.grad)


def exact_with_blind_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None) -> Any:
    """`exact`, whose gradient is NaN where a query sees no key: such a row sees all here, and is then cleared."""
    if hidden is None:
        return exact(q, k, v, None, 0.25)
    blind = hidden.all(-1, keepdim=True)
    out = exact(q, k, v, hidden & ~blind, 0.25)
    rows = blind.expand(2, 4, 20, 1).permute(2, 0, 1, 3)
    return out.unflatten(2, (4, 16)).masked_fill(rows, 0).flatten(2)


def test_dropout_is_torchs() -> None:
    layer = te.DotProductAttention(2, 16, attention_dropout=0.25)
    q, k, v = numbers(1, 64, 2, 2, 16), numbers(2, 64, 2, 2, 16), torch.ones(64, 2, 2, 16)
    state = layer.generator.state.clone()
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(layer(q, k, v, attn_mask_type="no_mask"))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert torch.equal(state, layer.generator.state)
    # Every number is a sum of kept weights over 0.75: of 256 rows of a softmax that sums to 1.
    assert abs(found[0].mean() - 1) < 0.05
    assert torch.equal(layer.eval()(q, k, v), te.DotProductAttention(2, 16)(q, k, v))


def test_it_is_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "_said", set())
    layer, x = te.DotProductAttention(2, 16), numbers(1, 4, 2, 2, 16)
    with caplog.at_level("WARNING", "twin"):
        layer(x.bfloat16(), x.bfloat16(), x.bfloat16())
        assert caplog.messages == []
        layer(x, x, x)
        layer(x, x, x)
    assert caplog.messages == ["attention in fp32 is PyTorch's own and outside the bit contract (said once)."]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_autocast_makes_it_16_bits(dtype: torch.dtype, same_bits) -> None:
    layer, tensors = te.DotProductAttention(2, 16), [numbers(i, 20, 2, 2, 16) for i in (1, 2, 3)]
    with torch.autocast("cpu", dtype):
        same_bits(layer(*tensors), layer(*(t.to(dtype) for t in tensors)))


VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "gqa, swiglu, rmsnorm, no bias": {
        "num_gqa_groups": 2, "activation": "swiglu", "normalization": "RMSNorm", "bias": False,
    },
    "one qkv parameter, batch first": {"fuse_qkv_params": True, "attn_input_format": "bshd"},
    "output norm, post-norm residual": {
        "output_layernorm": True, "apply_residual_connection_post_layernorm": True,
    },
    "decoder": {"layer_type": "decoder"},
    "padding": {"self_attn_mask_type": "padding_causal"},
    "rotary": {},
    "main_grad": {"fuse_wgrad_accumulation": True, "fuse_qkv_params": True},
}  # fmt: skip


def extras(variant: str) -> dict[str, Any]:
    return {
        "decoder": {"encoder_output": numbers(20, 12, 2, 64)},
        "padding": {"attention_mask": (torch.arange(24) >= torch.tensor([[24], [15]])).view(2, 1, 1, 24)},
        "rotary": {"rotary_pos_emb": numbers(9, 24, 1, 1, 16)},
    }.get(variant, {})


@pytest.mark.sample(5)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_first_program_of_every_introduction(variant: str, fp8: bool) -> None:
    """Default dtype and dropout, torch.optim.SGD; checkpoints around attention or the whole layer change no bit."""
    if variant == "one qkv parameter, batch first":
        shape = (2, 24, 64)
    else:
        shape = (24, 2, 64)
    results, losses = [], []
    for way in ("plain", "core", "whole"):
        torch.manual_seed(1)
        layer = te.TransformerLayer(64, 128, 4, **VARIANTS[variant])
        for p in layer.parameters():
            p.main_grad = torch.zeros(p.shape)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
        x, more = numbers(1, *shape).requires_grad_(), extras(variant)
        for _ in range(2):  # the second has scales other than 1
            optimizer.zero_grad()
            with te.autocast(enabled=fp8, recipe=RECIPE):
                if way == "whole":
                    y = te.checkpoint(layer, x, **more)
                else:
                    y = layer(x, checkpoint_core_attention=way == "core", **more)
            loss = (y - 1).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
        assert y.dtype == torch.float32
        results.append((y, x.grad, *layer.parameters(), *(p.main_grad for p in layer.parameters())))
    assert losses[1] < losses[0]
    for one, two, three in zip(*results, strict=True):
        assert bool(one.isfinite().all())
        assert torch.equal(one, two)
        assert torch.equal(one, three)


@pytest.mark.parametrize(
    "variant",
    [
        "a layer alone",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("defaults", "padding", "decoder")),
        pytest.param("gqa, swiglu, rmsnorm, no bias", marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiler_follows_it(variant: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(1)
    layer: torch.nn.Module
    if variant == "a layer alone":  # attention in fp32 is below, the whole layer in test_compile.py
        layer = te.LayerNormLinear(64, 64)
    else:
        arguments = {"hidden_dropout": 0.0, "attention_dropout": 0.0, **VARIANTS[variant]}
        layer = te.TransformerLayer(64, 128, 4, **arguments)
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend="aot_eager")
    grads = []
    for run in (layer, compiled):
        x = numbers(1, 24, 2, 64).requires_grad_()
        y = run(x, **extras(variant))
        y.backward(numbers(2, 24, 2, 64))
        grads.append((y, x.grad))
    for a, b in zip(*grads, strict=True):
        assert close(b, a.double())
    torch._dynamo.reset()


def test_a_compiled_dropout_drops() -> None:
    torch._dynamo.reset()
    layer = te.DotProductAttention(2, 16, attention_dropout=0.5)
    x = numbers(1, 20, 2, 2, 16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert not torch.equal(compiled(x, x, x), compiled(x, x, x))
    torch._dynamo.reset()


@pytest.mark.parametrize("keys", [0, 5])
@pytest.mark.parametrize("attn_mask_type", ["no_mask", "causal", "causal_bottom_right", "padding", "arbitrary"])
def test_no_keys_and_no_queries(attn_mask_type: str, keys: int) -> None:
    """As `twin::attention`: zeros, and gradients of zeros."""
    for dtype in (torch.float32, torch.bfloat16):
        queries = 3 if keys == 0 else 0
        q = torch.ones(queries, 2, 2, 16, dtype=dtype, requires_grad=True)
        k, v = (torch.ones(keys, 2, 2, 16, dtype=dtype, requires_grad=True) for _ in range(2))
        pair = torch.zeros(2, 1, 1, queries, dtype=torch.bool), torch.zeros(2, 1, 1, keys, dtype=torch.bool)
        mask = torch.zeros(2, 2, queries, keys, dtype=torch.bool) if attn_mask_type == "arbitrary" else pair
        out = te.DotProductAttention(2, 16, attention_type="cross")(q, k, v, mask, attn_mask_type=attn_mask_type)
        assert out.shape == (queries, 2, 32)
        assert not out.any()
        out.sum().backward()
        for t in (q, k, v):
            assert t.grad is None or (t.grad.shape == t.shape and not t.grad.any())


@pytest.mark.gpu
@pytest.mark.parametrize("case", MASKS)
def test_masks_on_a_gpu(case: str) -> None:
    """TF32 is off by default, so the same bound holds."""
    import optimized

    keys, mask, hidden = MASKS[case]
    attn_mask_type = "causal,padding" if case == "causal,padding" else case.partition(", ")[0]
    layer = optimized.DotProductAttention(4, 16, num_gqa_groups=2)
    sizes = ((20, 4), (keys, 2), (keys, 2))
    q, k, v = (numbers(i, s, 2, h, 16).cuda().requires_grad_() for i, (s, h) in enumerate(sizes))
    given = tuple(m.cuda() for m in mask) if isinstance(mask, tuple) else None if mask is None else mask.cuda()
    out = layer(q, k, v, given, attn_mask_type=attn_mask_type)
    out.backward(numbers(4, 20, 2, 64).cuda())
    wide = [t.detach().cpu().double().requires_grad_() for t in (q, k, v)]
    expected = exact_with_blind_rows(*wide, hidden)
    expected.backward(numbers(4, 20, 2, 64).double())
    for got, want in zip((out, q.grad, k.grad, v.grad), (expected, *(t.grad for t in wide)), strict=True):
        assert close(got.cpu(), want)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
def test_a_layer_on_a_gpu_has_nearly_the_cpus_numbers(fp8: bool) -> None:
    import optimized

    torch.manual_seed(1)
    cpu = te.TransformerLayer(64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0)
    gpu = optimized.TransformerLayer(64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0)
    gpu.load_state_dict(cpu.state_dict())
    found = []
    for layer, device in ((cpu, "cpu"), (gpu, "cuda")):
        x = numbers(1, 24, 2, 64).to(device).requires_grad_()
        with te.autocast(enabled=fp8, recipe=RECIPE):
            y = layer(x)
        y.backward(numbers(2, 24, 2, 64).to(device))
        found.append((y.cpu(), x.grad.cpu()))
    for a, b in zip(*found, strict=True):
        # In FP8 a last bit of attention may move a code to its neighbour: 2^-3 of one of 64 terms.
        assert (a - b).norm() / a.norm() < (0.02 if fp8 else 2e-5)
