"""Layers under `fp8_dpa=True`: what is cast by which scale, what later tokens change, checkpoints, refusals."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from shared.attention_fp8_layer_cases import PLAIN, RECIPE, assert_same, core_of, layer, numbers, train
from shared.attention_packed_cases import int32
from shared.bits import assert_same_bits
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import reference as te
from reference.ops.attentions.attention_fp8_backward import dequantized
from reference.ops.attentions.attention_packed import maps_of, to_sequences, to_tokens
from reference.ops.library import twin

FP8 = torch.float8_e4m3fn
COLUMNS = {"q": 0, "k": 1, "v": 4}


def history(module: Any) -> torch.Tensor:
    return module.fp8_meta["scaling_fwd"].amax_history


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("groups", [4, 2])
def test_the_layer_is_casts_and_the_op(layout: str, groups: int) -> None:
    core = te.DotProductAttention(4, 32, num_gqa_groups=groups, qkv_format=layout, attn_mask_type="causal")
    s, b, scales = 37, 3, {}
    shape = (s, b) if layout == "sbhd" else (b, s)
    order = (1, 2, 0, 3) if layout == "sbhd" else (0, 2, 1, 3)
    for step in range(3):
        given = {
            name: numbers(7 * step + n, *shape, 4 if n == 0 else groups, 32) * (n + 1) for n, name in enumerate("qkv")
        }
        leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
        with te.autocast(recipe=RECIPE):
            out = core(*leaves.values())
        grad = numbers(50 + step, *out.shape)
        out.backward(grad)

        codes, invs = {}, {}
        for name, x in given.items():
            scale = torch.tensor([scales.get(name, 1.0)])
            found, invs[name] = twin.cast(x.reshape(s * b, -1).contiguous(), scale, None, 0, FP8)
            codes[name] = found.view(x.shape).permute(order)
            scales[name] = float(torch.tensor(448.0) / max(float(x.abs().max()), 448 / scales.get(name, 1e9)))
        options = (32**-0.5, "causal", -1, -1, None, 0.0, None)
        v_t = codes["v"].contiguous().view(torch.uint8).transpose(2, 3).contiguous().view(FP8)
        expected, m, inv = twin.attention_fp8(codes["q"], codes["k"], v_t, *invs.values(), *options, torch.bfloat16)
        back = order[:1] and tuple(np.argsort(order))
        assert_same_bits(out, expected.permute(back).reshape(*shape, 128))
        wide = [dequantized(codes[name], invs[name], torch.bfloat16) for name in "qkv"]
        heads_first = grad.view(*shape, 4, 32).permute(order)
        grads = twin.attention_backward(heads_first, *wide, expected, m, inv, *options)
        for (name, leaf), one in zip(leaves.items(), grads, strict=True):
            assert_same_bits(leaf.grad, one.permute(back), f"d{name}")  # type: ignore[arg-type]


def test_scales_are_delayed() -> None:
    """A step's scale is 448 over the largest amax of the steps before it; the other columns stay unused."""
    core = te.DotProductAttention(2, 16)
    seen: dict[str, list[float]] = {name: [] for name in COLUMNS}
    for step in range(6):
        scale = core.fp8_meta["scaling_fwd"].scale.clone() if step else torch.ones(6)
        for name, column in COLUMNS.items():
            amaxes = seen[name][-4:]  # rows of the history
            assert scale[column] == (torch.tensor(448.0) / max(amaxes) if amaxes else 1), (step, name)
        given = {name: numbers(3 * step + n, 10, 2, 2, 16) * 2.0 ** (n - step) for n, name in enumerate(COLUMNS)}
        with te.autocast(recipe=RECIPE):
            core(*given.values())
        for name, x in given.items():
            seen[name].append(float(x.abs().max()))
    unused = [n for n in range(6) if n not in COLUMNS.values()]
    assert not history(core)[:, unused].any()
    assert bool((core.fp8_meta["scaling_fwd"].scale[unused] == 1).all())
    assert not core.fp8_meta["scaling_bwd"].amax_history.any()


NEWEST = te.DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent", fp8_dpa=True)


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_later_tokens_change_no_earlier_output(p: float) -> None:
    """Not one bit, in any of three steps: the scales of a step come from the steps before it."""
    module = layer(hidden_dropout=p, attention_dropout=p)
    for step in range(3):
        x = numbers(step, 150, 2, 64)
        other = copy.deepcopy(module)
        changed = x.clone()
        changed[130:] = 1e4 * numbers(100 + step, 20, 2, 64)
        plain, leaked = train(module, x, NEWEST), train(other, changed, NEWEST)
        assert_same_bits(plain["y"][:130], leaked["y"][:130], f"step {step}")
        assert not torch.equal(plain["y"][130:], leaked["y"][130:])


def test_later_keys_change_no_earlier_output_however_large_they_are() -> None:
    core = te.DotProductAttention(2, 32)
    for step in range(3):
        given = [numbers(3 * step + n, 200, 2, 2, 32) for n in range(3)]
        changed = [torch.cat([x[:150], 1e4 * x[150:]]) for x in given]
        other, scales = copy.deepcopy(core), []
        with te.autocast(recipe=NEWEST):
            out = core(*given)
            scales.append(core.fp8_meta["scaling_fwd"].scale.clone())
        with te.autocast(recipe=NEWEST):
            assert_same_bits(other(*changed)[:150], out[:150], f"step {step}")
            scales.append(other.fp8_meta["scaling_fwd"].scale.clone())
        assert_same_bits(*scales, "the scales inside the step")
        assert bool((other.fp8_meta["scaling_fwd"].scale[[0, 1, 4]] < 1).all())


def test_a_scale_of_the_same_step_would_leak() -> None:
    """What the test above would find, and why `Float8CurrentScaling` has no fp8_dpa."""
    x = numbers(0, 150, 32)
    changed = x.clone()
    changed[130:] *= 100
    codes = []
    for one in (x, changed):
        scale = 448 / one.abs().max().float().view(1)
        codes.append(dequantized(*twin.cast(one, scale, None, 0, FP8), torch.bfloat16)[:130])
    assert not torch.equal(*codes)


def test_the_recipe_decides_and_leaves_nothing_behind() -> None:
    """16-bit attention after FP8 attention has the bits that it has in a layer that never ran in FP8 attention."""
    one, other = layer(), layer()
    x = numbers(0, 40, 2, 64)
    in_fp8, plain = train(one, x), train(other, x, PLAIN)
    assert not torch.equal(in_fp8["y"], plain["y"])
    assert core_of(one).fp8
    assert not core_of(other).fp8
    assert not core_of(other).fp8_meta
    one.load_state_dict(other.state_dict())
    assert_same(train(one, x, PLAIN), train(other, x, PLAIN))
    assert not core_of(one).fp8


def test_a_transformer_layer_is_its_modules() -> None:
    """With hooks it runs module by module in any case; under fp8_dpa that is how it runs."""
    one, other = layer(), layer()
    other.self_attention.proj.register_forward_hook(lambda *_: None)
    x = numbers(0, 40, 2, 64)
    for _ in range(3):
        assert_same(train(one, x), train(other, x))


def test_cross_attention_and_masks() -> None:
    module = layer(layer_type="decoder", self_attn_mask_type="padding_causal")
    x, encoder = numbers(0, 20, 2, 64), numbers(1, 30, 2, 64)
    mask = (torch.arange(20) >= torch.tensor([[20], [13]])).view(2, 1, 1, 20)
    found = [train(module, x, attention_mask=mask, encoder_output=encoder) for _ in range(2)]
    assert all(bool(g.isfinite().all()) for g in found[1].values() if g is not None)
    cross = module.inter_attention.core_attention
    assert history(cross)[-1, [0, 1, 4]].all()
    assert history(core_of(module))[-1, [0, 1, 4]].all()


def test_packed_sequences_have_the_bits_that_they_have_alone() -> None:
    core = te.DotProductAttention(2, 16, qkv_format="thd", attn_mask_type="padding_causal")
    q, k, v = (numbers(n, 50, 2, 16) for n in range(3))
    ends = torch.tensor([0, 20, 50], dtype=torch.int32)
    alone = copy.deepcopy(core)
    with te.autocast(recipe=RECIPE):
        both = core(q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends)
    with te.autocast(recipe=RECIPE):
        last = alone(*(x[20:, None] for x in (q, k, v)), qkv_format="sbhd", attn_mask_type="causal")
    assert_same_bits(both[20:], last[:, 0])


def test_packed_sequences_are_those_of_a_padded_batch_wherever_they_lie() -> None:
    """Outputs, gradients, scales: a cast of the tokens that are in no sequence would have other amaxes, and NaN."""
    lengths, starts, tokens = [20, 0, 37, 1], int32(2, 25, 25, 63, 64), 66
    maps, ends = maps_of(int32(*lengths), starts, 40, tokens), int32(0, *np.cumsum(lengths).tolist())

    def steps(layout: str) -> list[torch.Tensor]:
        kind = {"qkv_format": layout, "attn_mask_type": "padding_causal_bottom_right"}
        core, found = te.DotProductAttention(4, 32, num_gqa_groups=2, **kind), []
        more = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": 40, "max_seqlen_kv": 40}
        if layout == "thd":
            more |= {"cu_seqlens_q_padded": starts, "cu_seqlens_kv_padded": starts}
        for step in range(3):
            given = [numbers(4 * step + n, tokens, 4 if n in (0, 3) else 2, 32) * (n + 1) for n in range(4)]
            for x in given:
                x[maps.alone] = torch.nan
            *qkv, grad = given if layout == "thd" else [to_sequences(x, maps) for x in given]
            for x in qkv:
                x.requires_grad_()
            with te.autocast(recipe=RECIPE, enabled=step > 0, calibrating=step == 0):
                out = core(*qkv, **more)
            out.backward(grad.flatten(-2))
            results = [out.unflatten(-1, (4, 32)), *(x.grad for x in qkv)]
            found += results if layout == "thd" else [to_tokens(x, maps) for x in results]
            assert bool(history(core).isfinite().all())
            found.append(history(core).clone())
        return found

    for n, (one, other) in enumerate(zip(steps("thd"), steps("bshd"), strict=True)):
        assert_same_bits(one, other, f"step {n // 5}, {('out', 'dq', 'dk', 'dv', 'history')[n % 5]}")


# --- recomputation, compilers, replicas ----------------------------------------------------------------------


def _ours(module: Any, x: torch.Tensor, **more: Any) -> Any:
    return te.checkpoint(module, x, **more)


def _torchs(module: Any, x: torch.Tensor, **more: Any) -> Any:
    return torch_checkpoint(module, x, use_reentrant=False, **more)


class Wrapped(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.run = inner, run

    def forward(self, x: torch.Tensor, **more: Any) -> Any:
        return self.run(self.inner, x, **more)


@pytest.mark.parametrize("how", ["core", "ours", "torch's"])
def test_recomputation_has_the_same_bits(how: str) -> None:
    plain, other = layer(), layer()
    run = {"core": lambda m, x: m(x, checkpoint_core_attention=True), "ours": _ours, "torch's": _torchs}[how]
    x = numbers(0, 40, 2, 64)
    for step in range(3):
        expected = train(plain, x * (step + 1))
        found = train(Wrapped(other, run), x * (step + 1))
        assert_same(expected, {name.removeprefix("inner."): g for name, g in found.items()})
        assert_same_bits(history(core_of(plain)), history(core_of(other)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_it_has_the_same_bits() -> None:
    plain, other = layer(), layer()
    compiled = torch.compile(other, fullgraph=True)
    x = numbers(0, 40, 2, 64)
    for step in range(3):
        assert_same(train(plain, x), {n.removeprefix("_orig_mod."): g for n, g in train(compiled, x).items()})
        assert_same_bits(history(core_of(plain)), history(core_of(other)), f"step {step}")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_keep_the_state(copied: Callable[[Any], Any]) -> None:
    module, x = layer(), numbers(0, 40, 2, 64)
    train(module, x)
    other = copied(module)
    assert core_of(other).fp8_meta["scaling_fwd"] is not core_of(module).fp8_meta["scaling_fwd"]
    for _ in range(2):
        assert_same(train(module, x), train(other, x))


# --- which layers, calibration, refusals ---------------------------------------------------------------------


def test_by_layer() -> None:
    model = torch.nn.Sequential(layer(), layer())
    te.recipe.by_layer(model, {"0.*": None, "1.self_attention.core_attention": None})
    x = numbers(0, 40, 2, 64)
    with te.autocast(recipe=RECIPE):
        model(x)
    assert not any(core_of(one).fp8_meta for one in model)
    assert not model[0].layernorm_mlp.fp8_meta
    assert model[1].layernorm_mlp.fp8_meta
    te.recipe.by_layer(model, {model[0]: RECIPE})
    with te.autocast(recipe=PLAIN):
        model(x)
    assert core_of(model[0]).fp8
    assert not core_of(model[1]).fp8_meta


def test_calibration_finds_the_scales_of_a_step_in_16_bits() -> None:
    one, other, x = layer(), layer(), numbers(0, 40, 2, 64)
    torch.manual_seed(3)
    with te.autocast(enabled=False, calibrating=True, recipe=RECIPE):
        calibrated = one(x)
    torch.manual_seed(3)
    plain = other(x)
    assert_same_bits(calibrated, plain)
    assert history(core_of(one))[0, [0, 1, 4]].all()
    assert not core_of(one).fp8


def refused(module: Any, sentence: str, *args: Any, error: type[Exception] = NotImplementedError, **more: Any) -> None:
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(error, match=sentence), te.autocast(recipe=RECIPE):
        module(*args, **more)
    assert module.state_dict().keys() == before.keys()
    for name, value in module.state_dict().items():
        assert_same_bits(value, before[name], name)


def test_refusals() -> None:
    x = numbers(0, 40, 2, 64)
    end = r" under a recipe with fp8_dpa=True is not offered; fp8_dpa=False is accepted, or a recipe of the attention's"
    bias = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": numbers(1, 1, 4, 40, 40)}
    refused(layer(), "^TransformerLayer: a bias" + end, x, **bias)
    refused(layer(), "^TransformerLayer: torch.float32 activations without torch.autocast" + end, x.float())
    refused(layer(softmax_type="learnable"), "^TransformerLayer: softmax_type='learnable'" + end, x)
    cached = te.InferenceParams(2, 64, 4, 16, torch.bfloat16)
    cached.pre_step({0: 40, 1: 40})
    with torch.no_grad():
        refused(layer(layer_number=1), "^TransformerLayer: inference_params" + end, x, inference_params=cached)
    q = numbers(0, 40, 2, 2, 16)
    cudnn = te.DotProductAttention(2, 16, attention_backend="cudnn")
    refused(cudnn, "cudnn", q, q, q, error=Exception)
    core = te.DotProductAttention(2, 16)
    more = {"core_attention_bias_type": "alibi"}
    refused(core, "^DotProductAttention: a bias" + end, q, q, q, **more)
    refused(core, "^DotProductAttention: torch.float32 activations", *[q.float()] * 3)
    narrow = te.MultiheadAttention(64, 8, params_dtype=torch.bfloat16)  # heads of 8
    refused(narrow, r"^MultiheadAttention: kv_channels=8 \(no multiple of 16.*\)" + end, x)
    with te.autocast(recipe=PLAIN):
        narrow(x)  # attention in 16 bits takes them
    refused(narrow, r"^MultiheadAttention: kv_channels=8 \(no multiple of 16.*\)" + end, x)


def test_with_torch_autocast_fp32_is_cast() -> None:
    core = te.DotProductAttention(2, 16)
    q, k, v = (numbers(n, 10, 2, 2, 16).float() for n in range(3))
    with torch.autocast("cpu", torch.bfloat16), te.autocast(recipe=RECIPE):
        out = core(q, k, v)
    assert out.dtype == torch.bfloat16
    assert core.fp8


def test_codes_are_what_backward_keeps() -> None:
    core = te.DotProductAttention(2, 16)
    kept: list[torch.Tensor] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x),
        te.autocast(recipe=RECIPE),
    ):
        core(*(numbers(n, 10, 2, 2, 16).requires_grad_() for n in range(3)))
    assert [x.dtype for x in kept[:3]] == [FP8] * 3
    assert sum(x.dtype == torch.bfloat16 for x in kept) == 1  # out
