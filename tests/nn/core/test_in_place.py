"""Changes in place around a layer: of its output they act as on `torch.nn.Linear`'s, of its input they are noticed.

Every module, in 16 bits and in FP8. After a change of what a forward has read, a backward either has the gradients of
what it read, or ends in PyTorch's sentence.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shared.argument_values import ANGLES, BF16, LAYERS, QKV, SOURCE, X, numbers

import reference as te

# Further ways to run a layer, whose results are several or other ones: a layer, and arguments of its constructor.
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "LayerNormLinear, norm": ("LayerNormLinear", {"return_layernorm_output": True, "return_bias": True}),
    "LayerNormMLP, norm": ("LayerNormMLP", {"return_layernorm_output": True, "activation": "swiglu"}),
    "LayerNormMLP, checkpoint": ("LayerNormMLP", {"checkpoint": True}),
    "Linear, bias": ("Linear", {"return_bias": True}),
    "Linear, parts": ("Linear", {"parameters_split": ("a_", "b_")}),
    "Linear, fp32": ("Linear", {"params_dtype": torch.float32}),
    "MultiheadAttention, norm": ("MultiheadAttention", {"return_layernorm_output": True, "qk_norm_type": "RMSNorm"}),
    "MultiheadAttention, cross": ("MultiheadAttention", {"attention_type": "cross"}),
    "DotProductAttention, sinks": ("DotProductAttention", {"softmax_type": "learnable"}),
    "TransformerLayer, parallel": ("TransformerLayer, encoder", {"parallel_attention_mlp": True}),
    "TransformerLayer, post": ("TransformerLayer, encoder", {"apply_residual_connection_post_layernorm": True}),
    "TransformerLayer, last norm": ("TransformerLayer, encoder", {"output_layernorm": True}),
}
CASES = [name for name in LAYERS if name != "RotaryPositionEmbedding"] + list(MORE)
# Whose output is the input itself or a view of it, as that of torch.nn.Identity.
ALIASES = ("ops.MakeExtraOutput", "ops.Reshape", "ops.Quantize")
# Whose backward reads the output, as that of torch.nn.functional.scaled_dot_product_attention.
READS_OUTPUT = ("DotProductAttention", "DotProductAttention, sinks")
SENTENCE = re.compile("modified by an inplace operation|was changed in place")
Change = Callable[[torch.Tensor], Any]
ACTIVATIONS = ("inp", "input", "hidden_states", "encoder_output", "query_layer", "key_layer", "value_layer")
ACTIVATIONS += ("extra_input",)
# What te.autocast changes nothing about is run in 16 bits alone.
IN_FP8 = [(case, True) for case in CASES if "ops" not in case or "Linear" in case or "Quantize" in case]
IN_FP8.remove(("Embedding", True))


def layer_of(case: str) -> tuple[Any, dict[str, Any]]:
    """A layer and the arguments of its forward."""
    name, more = MORE.get(case, (case, {}))
    kind, given, call = LAYERS[name]
    taken = inspect.signature(kind).parameters
    common = {"params_dtype" if "params_dtype" in taken else "dtype": BF16, "device": "cpu"}
    torch.manual_seed(1)
    layer = kind(**{**{key: x for key, x in common.items() if key in taken}, **given, **more})
    dtype = more.get("params_dtype", BF16)
    for n, p in enumerate(layer.parameters()):
        p.data += numbers(50 + n, *p.shape, dtype=p.dtype) * 0.3
    call = {**call, "encoder_output": SOURCE} if more.get("attention_type") == "cross" else call
    return layer, {
        key: x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype == BF16 else x for key, x in call.items()
    }


def gradients(
    case: str, fp8: bool, output: Change | None = None, inputs: Change | None = None, weights: Change | None = None
) -> list[Any]:
    """Outputs, and the gradients of activations and parameters, where one of them is changed before the backward."""
    layer, call = layer_of(case)
    torch.manual_seed(5)
    call = {key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in call.items()}
    leaves = {key: x.requires_grad_(x.is_floating_point()) for key, x in call.items() if key in ACTIVATIONS}
    given = {**call, **{key: x * 1 for key, x in leaves.items()}}  # no leaves: these may be changed
    with te.autocast(enabled=fp8):
        found = layer(**given)
    outputs = [x for x in (found if isinstance(found, tuple) else (found,)) if isinstance(x, torch.Tensor)]
    outputs = [x for x in outputs if not isinstance(x, torch.nn.Parameter)]
    with torch.no_grad():
        for x in [given[key] for key in leaves] if inputs is not None else []:
            inputs(x)  # type: ignore[misc]
        for p in layer.parameters() if weights is not None else []:
            weights(p)  # type: ignore[misc]
    if output is not None:
        output(outputs[0])
    torch.autograd.backward(outputs, [numbers(70 + n, *x.shape).to(x.dtype) for n, x in enumerate(outputs)])
    return [x.detach().clone() for x in outputs] + [x.grad for x in (*leaves.values(), *layer.parameters())]


def same(a: list[Any], b: list[Any]) -> bool:
    return all(x is y is None or torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.sample(24)
@pytest.mark.parametrize(("case", "fp8"), [*[(case, False) for case in CASES], *IN_FP8])
def test_an_output_changed_in_place(case: str, fp8: bool) -> None:
    if case in READS_OUTPUT:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(case, fp8, lambda x: x.add_(1))
        return
    before = gradients(case, fp8)
    results = gradients(case, fp8, lambda x: x.add_(1))
    assert isinstance(before[0], te.Float8Tensor) or torch.equal(results[0], before[0] + 1)
    if case not in ALIASES:
        assert same(results[1:], before[1:])
    if not fp8:
        relu = gradients(case, fp8, torch.nn.functional.relu_)
        assert torch.equal(relu[0], before[0].relu())


@pytest.mark.sample(26)
@pytest.mark.parametrize("what", ["inputs", "weights"])
@pytest.mark.parametrize("case", [case for case in CASES if case not in ALIASES])
def test_what_a_forward_has_read_changed_in_place(case: str, what: str) -> None:
    for fp8 in (False, True) if (case, True) in IN_FP8 else (False,):
        before, refused = gradients(case, fp8), ""
        try:
            results = gradients(case, fp8, **{what: lambda x: x.mul_(2)})
        except RuntimeError as error:
            refused = str(error)
        if refused:
            assert SENTENCE.search(refused)
            assert "no_grad mode" not in refused
        else:
            assert same(results, before)


HIDDEN = torch.zeros(2, 1, 8, 8, dtype=torch.bool)
READS: dict[str, tuple[str, dict[str, Any], dict[str, Any], torch.Tensor]] = {
    # name: a layer, arguments of its constructor, of its forward, and which of them is changed
    "angles": ("TransformerLayer, encoder", {}, {"rotary_pos_emb": ANGLES}, ANGLES),
    "angles, modules": ("MultiheadAttention", {}, {"rotary_pos_emb": ANGLES}, ANGLES),
    "mask": ("DotProductAttention", {"attn_mask_type": "arbitrary"}, {"attention_mask": HIDDEN}, HIDDEN),
    "mask of a layer": (
        "TransformerLayer, encoder", {"self_attn_mask_type": "arbitrary"}, {"attention_mask": HIDDEN}, HIDDEN,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", READS)
def test_a_mask_or_angles_changed_in_place(case: str) -> None:
    """A mask's memory that the next microbatch uses again would give this one other gradients."""
    name, more, call, read = READS[case]
    kind, given, _ = LAYERS[name]
    changed = read.clone()
    call = {key: changed if x is read else x for key, x in call.items()}
    torch.manual_seed(1)
    layer = kind(**given, **more, device="cpu").to(BF16)
    tensors = [QKV.clone().requires_grad_() for _ in range(3)] if name == "DotProductAttention" else [X.clone()]
    out = layer(*tensors, **call)
    changed.logical_not_() if changed.dtype == torch.bool else changed.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation since the forward: a mask, rotary_pos"):
        out.sum().backward()


def test_slopes_changed_in_place() -> None:
    layer, slopes = te.DotProductAttention(2, 16), torch.tensor([0.1, 0.2])
    q, k, v = (QKV.clone().requires_grad_() for _ in range(3))
    out = layer(q, k, v, core_attention_bias_type="alibi", alibi_slopes=slopes)
    out.sum().backward(retain_graph=True)
    slopes.mul_(2)
    with pytest.raises(RuntimeError, match="alibi_slopes; a change after backward, or of a clone, is accepted"):
        out.sum().backward()
