"""Attention as one equation: a block with any option has the bits of its modules one after the other.

A layer whose parts have hooks runs as modules, each with a pair of functions of its own.
"""

from typing import Any

import numpy as np
import pytest
import torch
from shared.transformer_layers import numbers
from torch.utils._pytree import tree_map

import reference as te
from reference.nn.attentions import attention_extras, torch_attention
from reference.nn.attentions.exact_attention import Equation
from reference.nn.transformer import halves

RECIPES: dict[str, Any] = {
    "16 bits": None,
    "delayed": te.DelayedScaling(amax_history_len=4),
    "current": te.recipe.Float8CurrentScaling(),
    "fp8 attention": te.DelayedScaling(amax_history_len=4, fp8_dpa=True),
}
PADDING = ("padding", "padding_causal", "padding_causal_bottom_right")
MASKS = ("causal", "no_mask", "causal_bottom_right", "arbitrary", *PADDING)
LENGTHS = torch.tensor([13, 20], dtype=torch.int32)
B, S = 2, 20
CASES = 240


def drawn(seed: int) -> dict[str, Any]:
    """A case: settings that go together."""
    rng = np.random.default_rng(seed)

    def one(*among: Any) -> Any:
        return among[rng.integers(len(among))]

    case: dict[str, Any] = {"seed": seed}
    case["layer"] = one("layer", "layer", "layer", "decoder", "self", "cross")
    case["layout"] = one("sbhd", "bshd", "thd")
    case["recipe"] = one(*RECIPES)
    packed, fp8 = case["layout"] == "thd", case["recipe"] == "fp8 attention"
    case["mask"] = one(*PADDING) if packed else one(*MASKS)
    case["lengths"] = packed or (case["mask"] in PADDING and one(True, False))
    case["bias"] = "no_bias" if fp8 else one("no_bias", "alibi", "post_scale_bias")
    case["softmax"] = "vanilla" if fp8 or case["bias"] != "no_bias" else one("vanilla", "off-by-one", "learnable")
    case["window"] = one(None, (7, 0)) if case["mask"] != "arbitrary" else None
    case["qk_norm"] = one(None, "RMSNorm", "LayerNorm", "L2Normalization")
    case["before_rope"] = case["qk_norm"] is not None and one(True, False)
    case["rotary"] = one(None, False, True)
    case["groups"], case["fused"] = one(4, 2), one(True, False)
    case["dropout"], case["recomputes"], case["training"] = one(0.0, 0.2), one(True, False), one(True, True, False)
    case["dtype"] = one(torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)
    if case["dtype"] == torch.float32:  # PyTorch's own attention knows no sinks and no FP8
        case["softmax"], case["recipe"] = "vanilla", "delayed" if fp8 else case["recipe"]
    case["depth"] = case["layer"] in ("layer", "decoder") and one(0.0, 0.0, 0.3)
    case["parallel"] = case["layer"] == "layer" and one(True, False, False)
    case["norm"] = one("input", "input", "none", "residual")
    case["bias_of_linear"] = one(True, True, False)
    return case


def module_of(case: dict[str, Any], library: Any = te) -> Any:
    """A module on its library's device, with the same weights on each."""
    made = _made(case, library)
    if library is te:
        with torch.no_grad():
            for i, p in enumerate(made.parameters()):
                p.add_((numbers(i, *p.shape) * 0.05).to(p.dtype))
    else:
        made.load_state_dict(module_of(case).state_dict())
    return made


def _made(case: dict[str, Any], library: Any) -> Any:
    shared: dict[str, Any] = {
        "attention_dropout": case["dropout"],
        "num_gqa_groups": case["groups"],
        "fuse_qkv_params": case["fused"],
        "softmax_type": case["softmax"],
        "qk_norm_type": case["qk_norm"],
        "qk_norm_before_rope": case["before_rope"],
        "rotary_pos_interleaved": bool(case["rotary"]),
        "params_dtype": case["dtype"],
        "bias": case["bias_of_linear"],
    }
    if case["layer"] in ("layer", "decoder"):
        torch.manual_seed(1)
        return library.TransformerLayer(
            64,
            128,
            4,
            hidden_dropout=case["dropout"],
            attn_input_format=case["layout"],
            self_attn_mask_type=case["mask"],
            **({"layer_type": "decoder", "enc_dec_attn_mask_type": case["mask"]} if case["layer"] == "decoder" else {}),
            drop_path_rate=case["depth"],
            parallel_attention_mlp=case["parallel"],
            attention_backend=case.get("backend", "exact"),
            output_layernorm=case["norm"] == "none" and not case["parallel"],
            apply_residual_connection_post_layernorm=case["norm"] == "residual" and not case["parallel"],
            **shared,
        )
    torch.manual_seed(1)
    return library.MultiheadAttention(
        64,
        4,
        qkv_format=case["layout"],
        attn_mask_type=case["mask"],
        attention_type=case["layer"],
        input_layernorm=case["norm"] != "none",
        return_layernorm_output=case["norm"] == "residual",
        return_bias=case["seed"] % 2 == 0,
        **shared,
    )


def arguments_of(case: dict[str, Any]) -> dict[str, Any]:
    """What forward takes beside the input, apart from tensors with a gradient."""
    found: dict[str, Any] = {"window_size": case["window"], "checkpoint_core_attention": case["recomputes"]}
    crosses = case["layer"] in ("decoder", "cross")
    if case["layer"] == "decoder" and case["window"] is not None:
        found["enc_dec_window_size"] = (7, 3) if case["mask"] in ("no_mask", "padding") else (7, 0)
    if case["lengths"]:
        ends = torch.cat([torch.zeros(1, dtype=torch.int32), LENGTHS.cumsum(0, dtype=torch.int32)])
        found |= {"cu_seqlens_q": ends, "cu_seqlens_kv": ends} if crosses else {"cu_seqlens_q": ends}
        if case["layer"] == "self":
            found["cu_seqlens_kv"] = ends
        if case["layout"] == "thd" and case["seed"] % 3:
            padded = torch.tensor([0, 15, 37], dtype=torch.int32)
            found["cu_seqlens_q_padded"] = padded
            if case["layer"] != "layer":
                found["cu_seqlens_kv_padded"] = padded
    elif case["mask"] == "arbitrary":
        hidden = numbers(7, B, 1, S, S) > 0.7
        found["attention_mask"] = hidden
        found |= {"enc_dec_attn_mask": hidden.flip(2)} if case["layer"] == "decoder" else {}
    elif case["mask"] in PADDING:
        mask = (torch.arange(S) >= LENGTHS[:, None]).view(B, 1, 1, S)
        cross = (mask, (torch.arange(S) >= LENGTHS.flip(0)[:, None]).view(B, 1, 1, S))
        found["attention_mask"] = cross if case["layer"] == "cross" else mask
        found |= {"enc_dec_attn_mask": cross} if case["layer"] == "decoder" else {}
    if case["rotary"] is not None:
        found["rotary_pos_emb"] = numbers(8, S, 1, 1, 8)
    if case["bias"] != "no_bias":
        found["core_attention_bias_type"] = case["bias"]
    return found


def run(case: dict[str, Any], hooked: bool = False, library: Any = te, steps: int = 2) -> list[torch.Tensor | None]:
    """Steps: outputs, gradients, and what FP8 keeps."""
    module, found, on = module_of(case, library).train(case["training"]), [], "cpu" if library is te else "cuda"
    if hooked:
        for one in module.modules():
            one.register_forward_hook(lambda *_: None)
    shape = {"thd": (40, 64), "sbhd": (S, B, 64), "bshd": (B, S, 64)}[case["layout"]]
    torch.manual_seed(2)
    for _ in range(steps):
        tensors = {"x": numbers(1, *shape).to(on, case["dtype"])}
        given = tree_map(lambda x: x.to(on) if isinstance(x, torch.Tensor) else x, arguments_of(case))
        if case["layer"] in ("decoder", "cross"):
            tensors["encoder_output"] = numbers(2, *shape).to(on, case["dtype"])
        if case["bias"] == "post_scale_bias":
            tensors["core_attention_bias"] = numbers(3, 1, 4, S, S).to(on)
        for t in tensors.values():
            t.requires_grad_()
        module.zero_grad()
        with te.autocast(enabled=RECIPES[case["recipe"]] is not None, recipe=RECIPES[case["recipe"]]):
            out = module(tensors["x"], **given, **{n: t for n, t in tensors.items() if n != "x"})
        outs = [t for t in (out if isinstance(out, tuple) else (out,)) if t is not None]
        wanted = [t for t in outs if t.requires_grad and not isinstance(t, torch.nn.Parameter)]
        torch.autograd.backward(wanted, [numbers(4 + i, *t.shape).to(on, t.dtype) for i, t in enumerate(wanted)])
        found += [*outs, *(t.grad for t in tensors.values()), *(p.grad for p in module.parameters())]
        found = [None if t is None else t.detach().cpu().clone() for t in found]
    return found + [t.cpu() for n, t in module.state_dict().items() if "_extra_state" in n]


@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", range(CASES))
def test_a_block_has_the_bits_of_its_modules(seed: int, same_bits, monkeypatch: pytest.MonkeyPatch) -> None:
    case = drawn(seed)
    if seed % 2:
        monkeypatch.setattr(halves, "SMALL", 0)
    for a, b in zip(run(case, hooked=False), run(case, hooked=True), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            same_bits(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [seed for seed in range(0, CASES, 4) if drawn(seed)["dtype"] != torch.float32])
def test_a_block_has_the_same_bits_on_a_gpu(seed: int, same_bits) -> None:
    """Steps enough for tapes to be recorded, and replayed. Not in fp32, whose attention is PyTorch's own."""
    import optimized

    for a, b in zip(run(drawn(seed), steps=4), run(drawn(seed), library=optimized, steps=4), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            same_bits(a, b)


def nodes(out: torch.Tensor) -> list[str]:
    """The names of a graph's nodes, without those that add to a leaf's gradient."""
    found, left = set(), [out.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [before for before, _ in node.next_functions]
    return sorted(name for name in (type(node).__name__ for node in found) if name != "AccumulateGrad")


FUSED: dict[str, dict[str, Any]] = {
    "plain": {},
    "alibi": {"bias": "alibi"},
    "a bias": {"bias": "post_scale_bias"},
    "sinks": {"softmax": "learnable"},
    "lengths": {"mask": "padding_causal", "lengths": True},
    "packed": {"mask": "padding_causal", "lengths": True, "layout": "thd"},
    "qk-norm": {"qk_norm": "RMSNorm", "rotary": False},
    "qk-norm before": {"qk_norm": "L2Normalization", "rotary": False, "before_rope": True},
    "recomputed in fp8": {"recipe": "fp8 attention", "recomputes": True},
    "no norm": {"norm": "none"},
    "stochastic depth": {"depth": 0.3},
}
PLAIN: dict[str, Any] = {
    "seed": 0, "layout": "sbhd", "recipe": "delayed", "mask": "causal", "lengths": False, "bias": "no_bias",
    "softmax": "vanilla", "window": None, "qk_norm": None, "before_rope": False, "rotary": None, "groups": 4,
    "fused": True, "dropout": 0.2, "recomputes": False, "training": True, "dtype": torch.bfloat16, "depth": 0.0,
    "parallel": False, "norm": "input", "bias_of_linear": True,
}  # fmt: skip


@pytest.mark.parametrize(("layer", "small"), [("layer", 0), ("layer", halves.SMALL), ("self", 0)])
@pytest.mark.parametrize("option", FUSED)
def test_an_option_adds_no_node(option: str, small: int, layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer with it is as many pairs of functions as the plain layer: one, or two halves."""
    monkeypatch.setattr(halves, "SMALL", small)
    case = {**PLAIN, "layer": layer, **FUSED[option]}
    module, extra = module_of(case), {}
    if case["bias"] == "post_scale_bias":
        extra["core_attention_bias"] = numbers(3, 1, 4, S, S).requires_grad_()
    x = numbers(1, *((40, 64) if case["layout"] == "thd" else (S, B, 64))).bfloat16().requires_grad_()
    with te.autocast(recipe=RECIPES[case["recipe"]]):
        out = module(x, **arguments_of(case), **extra)
    pairs = [name for name in nodes(out[0] if isinstance(out, tuple) else out) if name != "ViewBackward0"]
    expected = 1 if small or layer == "self" else 2
    assert pairs == ["_PairBackward"] * (expected + (layer == "layer" and case["norm"] == "none"))


@pytest.mark.parametrize("recipe", ["16 bits", "delayed"])
@pytest.mark.parametrize("layer", ["layer", "decoder", "self", "cross"])
def test_around_torchs_attention_is_the_block(layer: str, recipe: str) -> None:
    """In fp32: a pair before it and one after it, and one of the MLP."""
    case = {**PLAIN, "layer": layer, "dtype": torch.float32, "recipe": recipe, "qk_norm": "RMSNorm", "rotary": False}
    x, more = numbers(1, S, B, 64).requires_grad_(), arguments_of(case)
    if layer in ("decoder", "cross"):
        more["encoder_output"] = numbers(2, S, B, 64)
    with te.autocast(enabled=recipe != "16 bits", recipe=RECIPES[recipe]):
        out = module_of(case)(x, **more)
    pairs = [name for name in nodes(out[0] if isinstance(out, tuple) else out) if name == "_PairBackward"]
    assert len(pairs) == {"layer": 3, "decoder": 5, "self": 2, "cross": 2}[layer]


AROUND: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp8": {"recipe": "delayed"},
    "stochastic depth": {"recipe": "delayed", "depth": 0.3},
    "a bias": {"bias": "post_scale_bias", "groups": 2},
    "packed": {"mask": "padding_causal", "lengths": True, "layout": "thd", "recipe": "delayed"},
    "lengths, recomputed": {"mask": "padding_causal", "lengths": True, "layout": "bshd", "recomputes": True},
    "qk-norm": {"qk_norm": "LayerNorm", "bias_of_linear": False, "fused": False},
    "evaluated": {"training": False, "rotary": True},
}


@pytest.mark.parametrize("option", AROUND)
def test_parallel_halves_around_torchs_attention_are_their_modules(option: str, same_bits) -> None:
    """In fp32: a pair before attention, with the MLP in it, and one after it."""
    case = {**PLAIN, "layer": "layer", "parallel": True, "dtype": torch.float32, "recipe": "16 bits", **AROUND[option]}
    for a, b in zip(run(case), run(case, hooked=True), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            same_bits(a, b)
    module, extra = module_of(case), {}
    if case["bias"] == "post_scale_bias":
        extra["core_attention_bias"] = numbers(3, 1, 4, S, S)
    x = numbers(1, *{"thd": (40, 64), "sbhd": (S, B, 64), "bshd": (B, S, 64)}[case["layout"]]).requires_grad_()
    with te.autocast(enabled=case["recipe"] != "16 bits", recipe=RECIPES[case["recipe"]]):
        out = module(x, **arguments_of(case), **extra)
    moved = 4 if case["layout"] == "thd" else 0  # q, k, v and the result of packed sequences
    assert nodes(out).count("_PairBackward") == 2 + moved


@pytest.mark.parametrize("trained", ["self_attention", "layernorm_mlp", "self_attention.proj", "input"])
def test_parallel_halves_of_which_a_part_is_trained(trained: str, same_bits) -> None:
    """In fp32; gradients of all others are none, and no graph leads into attention that nobody asks for."""
    case = {**PLAIN, "layer": "layer", "parallel": True, "dtype": torch.float32, "dropout": 0.0}
    found = []
    for hooked in (False, True):
        module, x = module_of(case), numbers(1, S, B, 64).requires_grad_(trained == "input")
        for name, p in module.named_parameters():
            p.requires_grad_(name.startswith(trained))
        for one in module.modules() if hooked else ():
            one.register_forward_hook(lambda *_: None)
        with te.autocast(recipe=RECIPES["delayed"]):
            out = module(x)
        assert ("PermuteBackward0" in nodes(out)) == (trained in ("self_attention", "input"))
        out.backward(numbers(4, S, B, 64))
        found.append([out.detach(), x.grad, *(p.grad for p in module.parameters())])
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            same_bits(a, b)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize(("groups", "recomputes"), [(2, False), (4, True)])
def test_around_cudnns_attention_is_the_block(
    groups: int, recomputes: bool, parallel: bool, same_bits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With grouped heads, or recomputed; PyTorch's own attention stands in for cuDNN's."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, equation: Equation) -> torch.Tensor:
        return torch_attention.torch_attention(q.float(), k.float(), v.float(), equation, None).to(q.dtype)

    monkeypatch.setattr(torch_attention, "cudnn_attention", attention)
    monkeypatch.setattr(attention_extras, "check_cudnn", lambda *_: None)
    case = {**PLAIN, "layer": "layer", "groups": groups, "recomputes": recomputes, "parallel": parallel, "depth": 0.3}
    found = [run(case | {"backend": "cudnn"}, hooked) for hooked in (False, True)]
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            same_bits(a, b)


@pytest.mark.parametrize("recipe", ["16 bits", "fp8 attention"])
def test_a_result_of_attention_that_is_changed_in_place_is_not_read_by_backward(recipe: str) -> None:
    """Backward reads the result, so a change of it before must be seen."""
    core = te.DotProductAttention(4, 16)
    q, k, v = (numbers(i, S, B, 4, 16).bfloat16().requires_grad_() for i in range(3))
    with te.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
        out = core(q, k, v)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
