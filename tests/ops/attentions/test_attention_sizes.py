"""Attention whose values have heads of another size: against float64 and padded tensors; layers, the cache."""

from typing import Any

import numpy as np
import pytest
import torch
from shared.attention_cases import LAYOUTS, MASKS, Case, check_against_float64, inputs, run
from shared.bits import assert_same_bits
from shared.dry_gpu import DryGpu
from torch.nn.functional import pad
from torch.utils.flop_counter import FlopCounterMode

import optimized
import reference as te
from reference.numbers import tensor_core
from reference.ops.attentions.attention import MASK_TYPES

BF16 = torch.bfloat16
SIZES = ((24, 16), (16, 40), (192, 128), (64, 72), (8, 256))


@pytest.mark.sample(5)
@pytest.mark.parametrize("mask_type", MASK_TYPES)
@pytest.mark.parametrize("mask", MASKS)
def test_against_float64(mask_type: str, mask: str) -> None:
    dtype = BF16 if mask == "none" else torch.float16
    check_against_float64(Case(2, 2, 2, 140, 150, 48, dtype, mask_type, mask, dropout=0.1, e=24))


@pytest.mark.parametrize(("d", "e"), SIZES)
def test_sizes_against_float64(d: int, e: int) -> None:
    check_against_float64(Case(1, 1, 2, 70, 140, d, mask_type="causal_bottom_right", layout="sbhd", e=e))


# --- heads of one size, with zeros for what is missing -------------------------------------------------


def padded(given: dict[str, Any], size: int) -> dict[str, Any]:
    """q, k, v and grad with zeros behind their channels."""
    more = {name: pad(given[name], (0, size - given[name].shape[3])) for name in ("q", "k", "v", "grad")}
    return {name: None if x is None else x.clone() for name, x in (given | more).items()}


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"mask_type": "causal", "dropout": 0.2, "dtype": torch.float16},
    "window": {"window": (60, 5), "mask": "padding"},
    "bias": {"bias": "1hss", "mask_type": "causal"},
    "slopes": {"bias": "h slopes", "dtype": torch.float16},
    "sinks": {"sinks": True, "mask": "arbitrary"},
}


@pytest.mark.sample(15)
@pytest.mark.parametrize(("d", "e"), SIZES)
@pytest.mark.parametrize("options", OPTIONS)
def test_zeros_change_no_bit(options: str, d: int, e: int) -> None:
    """All results are those of attention with heads of one size, whose channels beyond d and e are zeros."""
    case = Case(1, 2, 2, 40, 140, d, layout="bshd", e=e, scale=0.3, **OPTIONS[options])
    given = inputs(case)
    wide = padded(given, max(d, e))
    found, expected = run(case, given), run(case, wide)
    for name, value in expected.items():
        size = {"out": e, "dv": e, "dq": d, "dk": d}.get(name)
        assert_same_bits(found[name], value if size is None else value[..., :size], name)
        if size is not None:
            assert found[name].shape[3] == size
            assert not bool(value[..., size:].any())
            assert not bool(value[..., size:].signbit().any())


def special(dtype: torch.dtype, rows: int, k: int, seed: int) -> torch.Tensor:
    """Numbers of all magnitudes, and rows of -0, infinities, NaN and of products that underflow."""
    random = np.random.default_rng(seed)
    x = torch.from_numpy(random.normal(size=(rows, k)) * 2.0 ** random.integers(-12, 13, (rows, k))).to(dtype)
    x[0], x[1, 0], x[2, 0], x[3] = -0.0, torch.inf, torch.nan, -torch.finfo(dtype).smallest_normal / 4
    return x


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("k", [8, 16, 40, 192])
def test_a_step_over_zeros_changes_no_bit(k: int, dtype: torch.dtype) -> None:
    """Nor does it of -0, infinity and NaN, whatever the chain starts from."""
    a, b = special(dtype, 12, k, 1), special(dtype, 9, k, 2)
    start = torch.from_numpy(np.random.default_rng(3).normal(size=(12, 9)).astype(np.float32))
    start[4], start[5, 0], start[5, 1] = -0.0, torch.inf, torch.nan
    for c in (None, start):
        expected = tensor_core.gemm(a, b, c=c)
        for zeros in (8, 16, 72):
            found = tensor_core.gemm(pad(a, (0, zeros)), pad(b, (0, zeros)), c=c)
            assert_same_bits(found, expected, f"{zeros} zeros")
        assert not bool(((expected == 0) & expected.signbit()).any())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_result_lies_in_memory_as_the_queries_do(layout: str) -> None:
    given = inputs(Case(2, 2, 1, 10, 12, 24, layout=layout, e=40))
    found = run(Case(2, 2, 1, 10, 12, 24, layout=layout, e=40), given)
    alike = run(Case(2, 2, 1, 10, 12, 24, layout=layout), given | {"v": given["k"], "grad": given["q"]})
    for name in ("out", "dq", "dk", "dv"):
        order = [sorted(range(4), key=lambda n, x=x: -x.stride(n)) for x in (found[name], alike[name])]
        assert order[0] == order[1], name
        assert found[name].stride(3) == 1


def test_what_the_op_refuses() -> None:
    given = inputs(Case(1, 1, 1, 10, 12, 24, e=40))
    q, k, v, grad = (given[name] for name in ("q", "k", "v", "grad"))
    rest = (0.2, "none", -1, -1, None, 0.0, None)
    for args, sentence in (
        ((q, k, v[..., :12]), "v's head_dim must be a multiple of 8 from 8 to 256; got 12"),
        ((q, k, v[:, :, :9]), "k and v must be .* got .1, 1, 12, 24. and .1, 1, 9, 40."),
        ((q, v, v), "and k with q's head_dim 24; got"),
    ):
        with pytest.raises(ValueError, match=sentence):
            torch.ops.twin.attention(*args, *rest)
    out, m, inv = torch.ops.twin.attention(q, k, v, *rest)
    with pytest.raises(ValueError, match=r"grad must be torch.bfloat16 \[1, 1, 10, 40\] on cpu, as the forward's out"):
        torch.ops.twin.attention_backward(grad[..., :24], q, k, v, out, m, inv, *rest)


def test_flops_count_both_sizes() -> None:
    given = inputs(Case(1, 2, 2, 10, 12, 24, e=40))
    with FlopCounterMode(display=False) as counter:
        run(Case(1, 2, 2, 10, 12, 24, e=40), given)
    pairs = 2 * 4 * 10 * 12  # a multiplication and an addition for each head's pairs
    assert counter.get_total_flops() == pairs * (24 + 40) + pairs * (24 * 3 + 40 * 2)


# --- DotProductAttention -------------------------------------------------------------------------------


def numbers(seed: int, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).to(dtype).requires_grad_()


def outputs(layer: torch.nn.Module, q: Any, k: Any, v: Any, **more: Any) -> list[torch.Tensor]:
    """The result and the gradients."""
    out = layer(q, k, v, **more)
    grads = torch.autograd.grad(out.float().square().sum(), [q, k, v])
    return [out.detach(), *grads]


@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd"])
def test_a_layer_is_one_of_equal_sizes_with_zeros(qkv_format: str) -> None:
    """With the queries' scale, and the same results in either layout."""
    layer = te.DotProductAttention(4, (24, 16), num_gqa_groups=2, qkv_format=qkv_format)
    wide = te.DotProductAttention(4, 24, num_gqa_groups=2, qkv_format=qkv_format)
    assert layer.softmax_scale == wide.softmax_scale == 24**-0.5
    q, k, v = numbers(1, 20, 20, 4, 24), numbers(2, 20, 20, 2, 24), numbers(3, 20, 20, 2, 16)
    found = outputs(layer, q, k, v)
    out, *grads = outputs(wide, q, k, pad(v.detach(), (0, 8)).requires_grad_())
    assert found[0].shape == (20, 20, 64)
    assert_same_bits(found[0], out.view(20, 20, 4, 24)[..., :16].flatten(2), "out")
    for name, mine, theirs in zip("qkv", found[1:], grads, strict=True):
        assert_same_bits(mine, theirs[..., : mine.shape[3]], name)


def test_layers_in_fp32_and_under_torch_autocast() -> None:
    """In fp32 PyTorch's own attention; under torch.autocast that of bf16."""
    layer = te.DotProductAttention(2, (24, 40), attn_mask_type="causal")
    q, k, v = (numbers(i, 12, 2, 2, n, dtype=torch.float32) for i, n in ((1, 24), (2, 24), (3, 40)))
    out = layer(q, k, v)
    scores = torch.einsum("sbhd,tbhd->bhst", q.double(), k.double()) / 24**0.5
    hidden = torch.ones(12, 12, dtype=torch.bool).triu(1)
    exact = torch.einsum("bhst,tbhd->sbhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v.double())
    assert torch.allclose(out.double(), exact.flatten(2), atol=1e-6)
    with torch.autocast("cpu", BF16):
        assert_same_bits(layer(q, k, v), layer(*(x.bfloat16() for x in (q, k, v))), "out")


def test_checkpointing_dropout_and_thd() -> None:
    """Packed sequences have the bits that each has alone, and a recomputation those of the first run."""
    layer = te.DotProductAttention(2, (24, 16), qkv_format="thd", attn_mask_type="padding_causal")
    q, k, v = numbers(1, 17, 2, 24), numbers(2, 17, 2, 24), numbers(3, 17, 2, 16)
    ends = torch.tensor([0, 5, 17], dtype=torch.int32)
    found = outputs(layer, q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=12, max_seqlen_kv=12)
    assert found[0].shape == (17, 32)
    alone = te.DotProductAttention(2, (24, 16), qkv_format="bshd", attn_mask_type="causal")
    for first, last in ((0, 5), (5, 17)):
        parts = [x.detach()[None, first:last].requires_grad_() for x in (q, k, v)]
        for name, mine, theirs in zip(("out", *"qkv"), found, outputs(alone, *parts), strict=True):
            assert_same_bits(mine[first:last], theirs[0], name)
    results = []
    for again in (False, True):
        torch.manual_seed(5)
        layer = te.DotProductAttention(2, (24, 16), attention_dropout=0.3)
        four = [x.detach()[:, None].requires_grad_() for x in (q, k, v)]
        results.append(outputs(layer, *four, checkpoint_core_attention=again))
    for mine, theirs in zip(*results, strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize("softmax", ["vanilla", "off-by-one"])
def test_a_cache_of_both_sizes(softmax: str) -> None:
    """A prompt, tokens one by one, and several at once: the words of one causal forward."""
    core = te.DotProductAttention(4, (24, 40), num_gqa_groups=2, qkv_format="bshd", softmax_type=softmax).eval()
    q, k, v = (numbers(i, 2, 12, n, c).detach() for i, n, c in ((1, 4, 24), (2, 2, 24), (3, 2, 40)))
    cache = te.InferenceParams(3, 16, 2, 24, BF16, head_dim_v=40)
    assert "head_dim_v=40" in repr(cache)
    outs, at = [], 0
    with torch.no_grad():
        for n in (7, 1, 1, 3):
            cache.pre_step({0: n, 1: n})
            cache.allocate_memory(1)
            outs.append(core(*(x[:, at : at + n] for x in (q, k, v)), inference_params=cache))
            at += n
        assert [tuple(x.shape) for x in cache.cache[1]] == [(3, 16, 2, 24), (3, 16, 2, 40)]
        assert_same_bits(torch.cat(outs, 1), core(q, k, v), "out")
        equal = te.InferenceParams(3, 16, 2, 24, BF16)
        equal.pre_step({0: 1, 1: 1})
        equal.allocate_memory(1)
        with pytest.raises(ValueError, match=r"heads of 24 \(keys\) and 40 \(values\) channels, and .* \(2, 24, 24\)"):
            core(q[:, :1], k[:, :1], v[:, :1], inference_params=equal)


def test_what_a_gpu_launches() -> None:
    """The kernels of the larger size, without a padded copy of v; training, and a cache of both sizes."""
    bf16: dict[str, Any] = {"dtype": BF16, "device": "cuda"}
    with DryGpu() as gpu:
        core = optimized.DotProductAttention(4, (192, 128), num_gqa_groups=2, attention_dropout=0.1)
        sizes = ((4, 192), (2, 192), (2, 128))
        q, k, v = (torch.empty(70, 2, *size, **bf16).requires_grad_() for size in sizes)
        out = core(q, k, v)
        out.backward(torch.empty_like(out))
        cache = optimized.InferenceParams(2, 128, 2, 192, BF16, head_dim_v=128)
        core.eval()
        with torch.no_grad():
            for n in (5, 1, 2):
                cache.pre_step({0: n, 1: n})
                cache.allocate_memory(1)
                assert core(q[:n], k[:n], v[:n], inference_params=cache).shape == (n, 2, 512)
    assert [x.shape[-1] for x in (out, q.grad, k.grad, v.grad)] == [512, 192, 192, 128]
    kernels = [(one.kernel.kernel, one.kernel.name) for one in gpu.launches]
    forward, ends = ("attention_wide", "attention"), "attention_backward_ends"
    backward = [(ends, "dots"), (ends, "attention_keep"), ("attention_backward_wide", "attention_backward")]
    backward.append((ends, "attention_dq"))
    assert kernels == [forward, ("dropout", "advance"), *backward, forward, forward, forward]


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ((16, 12), r"kv_channels=\(16, 12\); a multiple of 8 from 8 to 256, or a pair of them \(queries and keys, v"),
        ((16,), r"kv_channels=\(16,\); a multiple of 8"),
        ((16, None), r"kv_channels=\(16, None\); a multiple of 8"),
        ([16, 8], r"kv_channels=\[16, 8\]; a multiple of 8"),
        ((264, 8), r"kv_channels=\(264, 8\); a multiple of 8"),
    ],
)
def test_sizes_that_are_refused(sizes: Any, sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"DotProductAttention: {sentence}"):
        te.DotProductAttention(2, sizes)


def test_what_the_layer_refuses() -> None:
    layer = te.DotProductAttention(2, (24, 16))
    q, k, v = (numbers(i, 5, 1, 2, n).detach() for i, n in ((1, 24), (2, 24), (3, 16)))
    with pytest.raises(ValueError, match=r"value_layer has shape \[5, 1, 2, 24\]; \[s, b, 2, 16\] is accepted"):
        layer(q, k, k)
    with pytest.raises(ValueError, match=r"key_layer has shape \[5, 1, 2, 16\]; \[s, b, 2, 24\] is accepted"):
        layer(q, v, v)
    with pytest.raises(ValueError, match=r"value_layer \[4, 1, 2, 16\]; one length is accepted"):
        layer(q, k, v[:4])
    with pytest.raises(NotImplementedError, match=r"kv_channels=\(24, 16\) with attention_backend='cudnn' is not off"):
        te.DotProductAttention(2, (24, 16), attention_backend="cudnn")
    assert layer(q, k, v).shape == (5, 1, 32)
