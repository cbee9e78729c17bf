"""Training steps of Transformer Engine's layers: cases, inputs, and the step itself for either library.

tests/golden/record_transformer_engine.py runs `Run` with Transformer Engine on an H200, and
`optimized.recordings.transformer_engine` runs it with `reference` on a CPU. Both get the same words: inputs and first
parameters come from PCG64's raw stream (`linear.words`), later parameters follow from the recorded gradients.

Delayed scaling has six steps, since its scales come from the steps before. The other recipes have no state between
steps, so one or two steps say as much.

A `TransformerLayer` runs without its attention, whose order of sums is cuDNN's. `select` takes its place: it chooses
elements and adds once, so that both libraries must agree about everything around it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from optimized.compare import fp8_state
from optimized.recordings.linear import GROWTH, LEARNING_RATE, STEPS, words

__all__ = ["CASES", "Run", "first_parameters", "inputs", "known", "select", "updated"]
PARTS = ("Linear", "LayerNormLinear", "LayerNormMLP")  # modules with FP8 state

Tensors = dict[str, torch.Tensor]


class Case(NamedTuple):
    """One recorded training run: the layer, its dtype, its recipe, the leading sizes of x, the layer's arguments.

    `algorithm` and `history` are delayed scaling's. `power_of_two` says which scales the other two recipes have.
    """

    layer: str
    dtype: torch.dtype
    fp8_format: str
    algorithm: str
    history: int
    lead: tuple[int, ...]
    sizes: tuple[int, ...]
    arguments: Mapping[str, Any] = {}
    environment: Mapping[str, str] = {}  # Transformer Engine's switches, read when the layer is made
    recipe: str = "delayed"  # or "current", or "block"
    power_of_two: bool = False
    steps: int = STEPS


_MAX, _RECENT = ("HYBRID", "max", 4), ("E4M3", "most_recent", 3)
_BF16, _FP16 = torch.bfloat16, torch.float16
_RMS = {"normalization": "RMSNorm"}
_BLOCK = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "self_attn_mask_type": "no_mask"}
_LAYER = ((8, 2), (32, 32, 2))
_UNFUSED = {"NVTE_BIAS_DROPOUT_FUSION": "0"}

CASES = {
    "Linear, bf16": Case("Linear", _BF16, *_MAX, (16,), (96, 16)),
    "Linear, fp16": Case("Linear", _FP16, *_RECENT, (32,), (48, 16)),
    "Linear without bias, bf16": Case("Linear", _BF16, *_RECENT, (16,), (96, 16), {"bias": False}),
    "LayerNormLinear, bf16": Case("LayerNormLinear", _BF16, *_MAX, (16,), (96, 16)),
    "LayerNormLinear, fp16": Case("LayerNormLinear", _FP16, *_RECENT, (32,), (64, 16)),
    "LayerNormLinear, RMSNorm, bf16": Case(
        "LayerNormLinear", _BF16, *_RECENT, (16,), (64, 16), {**_RMS, "bias": False, "zero_centered_gamma": True}
    ),
    "LayerNormLinear, RMSNorm, fp16": Case("LayerNormLinear", _FP16, *_MAX, (16,), (80, 16), _RMS),
    "LayerNormMLP, gelu, bf16": Case("LayerNormMLP", _BF16, *_MAX, (16,), (32, 48)),
    "LayerNormMLP, gelu, fp16": Case("LayerNormMLP", _FP16, *_RECENT, (16,), (32, 48)),
    "LayerNormMLP, RMSNorm, swiglu, bf16": Case(
        "LayerNormMLP", _BF16, *_MAX, (16,), (32, 32), {**_RMS, "activation": "swiglu"}
    ),
    "LayerNormMLP, swiglu, fp16": Case("LayerNormMLP", _FP16, *_RECENT, (16,), (32, 32), {"activation": "swiglu"}),
    "TransformerLayer, bf16": Case("TransformerLayer", _BF16, *_MAX, *_LAYER, _BLOCK),
    "TransformerLayer, fp16": Case("TransformerLayer", _FP16, *_RECENT, *_LAYER, _BLOCK),
    "TransformerLayer, RMSNorm, bias_dropout_add unfused, bf16": Case(
        "TransformerLayer", _BF16, *_MAX, *_LAYER, {**_BLOCK, **_RMS}, _UNFUSED
    ),
}


def _of(recipe: str, fp8_format: str, steps: int, power_of_two: bool | None = None) -> dict[str, Any]:
    """The fields of a case's recipe; by default block scaling has powers of two and current scaling has not."""
    chosen = recipe == "block" if power_of_two is None else power_of_two
    delayed = {"algorithm": "", "history": 0}
    return delayed | {"fp8_format": fp8_format, "recipe": recipe, "power_of_two": chosen, "steps": steps}


def _case(
    layer: str,
    dtype: torch.dtype,
    lead: tuple[int, ...],
    sizes: tuple[int, ...],
    how: dict[str, Any],
    arguments: Mapping[str, Any] = {},
) -> Case:
    return Case(layer=layer, dtype=dtype, lead=lead, sizes=sizes, arguments=arguments, **how)


_CURRENT, _CURRENT_E4M3 = _of("current", "HYBRID", 2), _of("current", "E4M3", 2)
_IN_BLOCKS, _IN_BLOCKS_ONCE = _of("block", "E4M3", 2), _of("block", "E4M3", 1)  # large cases have one step
_SWIGLU = {"activation": "swiglu"}
# A seed is the place of its case here: new cases go to the end.
CASES |= {
    "Linear, current scaling, bf16": _case("Linear", _BF16, (16,), (96, 16), _CURRENT),
    "Linear, current scaling, E4M3, fp16": _case("Linear", _FP16, (32,), (48, 16), _CURRENT_E4M3),
    "Linear, current scaling by powers of two, bf16": _case(
        "Linear", _BF16, (16,), (96, 16), _of("current", "HYBRID", 2, True)
    ),
    "LayerNormLinear, current scaling, bf16": _case("LayerNormLinear", _BF16, (16,), (96, 16), _CURRENT),
    "LayerNormLinear, RMSNorm, current scaling, fp16": _case("LayerNormLinear", _FP16, (16,), (80, 16), _CURRENT, _RMS),
    "LayerNormMLP, gelu, current scaling, bf16": _case("LayerNormMLP", _BF16, (16,), (32, 48), _CURRENT),
    "LayerNormMLP, gelu, current scaling, fp16": _case("LayerNormMLP", _FP16, (16,), (32, 48), _CURRENT),
    "LayerNormMLP, RMSNorm, swiglu, current scaling, bf16": _case(
        "LayerNormMLP", _BF16, (16,), (32, 32), _CURRENT, {**_RMS, **_SWIGLU}
    ),
    "LayerNormMLP, swiglu, current scaling, E4M3, fp16": _case(
        "LayerNormMLP", _FP16, (16,), (32, 32), _CURRENT_E4M3, _SWIGLU
    ),
    "TransformerLayer, current scaling, bf16": _case("TransformerLayer", _BF16, *_LAYER, _CURRENT, _BLOCK),
    # 144 is one whole block of 128 and a part of another
    "Linear, block scaling, bf16": _case("Linear", _BF16, (144,), (144, 16), _IN_BLOCKS),
    "Linear, block scaling, fp16": _case("Linear", _FP16, (32,), (32, 144), _IN_BLOCKS),
    "Linear, block scaling, whole blocks, bf16": _case("Linear", _BF16, (128,), (128, 128), _IN_BLOCKS_ONCE),
    "Linear, block scaling, HYBRID, bf16": _case("Linear", _BF16, (16,), (144, 32), _of("block", "HYBRID", 2)),
    "Linear, block scaling in fp32, bf16": _case("Linear", _BF16, (144,), (144, 32), _of("block", "E4M3", 1, False)),
    "LayerNormLinear, block scaling, bf16": _case("LayerNormLinear", _BF16, (16,), (144, 16), _IN_BLOCKS),
    "LayerNormLinear, RMSNorm, block scaling, fp16": _case("LayerNormLinear", _FP16, (32,), (48, 16), _IN_BLOCKS, _RMS),
    "LayerNormMLP, gelu, block scaling, bf16": _case("LayerNormMLP", _BF16, (16,), (144, 48), _IN_BLOCKS_ONCE),
    "LayerNormMLP, gelu, block scaling, fp16": _case("LayerNormMLP", _FP16, (16,), (32, 48), _IN_BLOCKS),
    "LayerNormMLP, RMSNorm, swiglu, block scaling, bf16": _case(
        "LayerNormMLP", _BF16, (144,), (32, 32), _IN_BLOCKS_ONCE, {**_RMS, **_SWIGLU}
    ),
    "TransformerLayer, block scaling, bf16": _case("TransformerLayer", _BF16, *_LAYER, _IN_BLOCKS, _BLOCK),
}


def recipe_of(case: Case, recipes: Any) -> Any:
    """The recipe of a case, of the module `recipes`."""
    fp8_format = getattr(recipes.Format, case.fp8_format)
    if case.recipe == "delayed":
        how = {"amax_history_len": case.history, "amax_compute_algo": case.algorithm}
        return recipes.DelayedScaling(fp8_format=fp8_format, **how)
    if case.recipe == "current":
        found = recipes.Float8CurrentScaling(fp8_format=fp8_format, use_power_2_scales=case.power_of_two)
    else:
        found = recipes.Float8BlockScaling(fp8_format=fp8_format, use_f32_scales=not case.power_of_two)
    for tensor in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        # Transformer Engine's modules read these, which it makes of the environment when it is imported
        if getattr(found, tensor).power_2_scale != case.power_of_two:
            setattr(found, tensor, recipes.QParams(power_2_scale=case.power_of_two))
    return found


def _seed(name: str) -> int:
    return 100_000 + 1000 * list(CASES).index(name)


def inputs(name: str, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x and g = dL/dy of one step."""
    case = CASES[name]
    out = case.sizes[1] if case.layer.endswith("Linear") else case.sizes[0]
    seed, growth = _seed(name) + 10 * step, GROWTH[step]
    x = words(seed + 1, (*case.lead, case.sizes[0]), growth)
    return x.to(case.dtype), words(seed + 2, (*case.lead, out), 1e-3 * growth).to(case.dtype)


def first_parameters(name: str, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    """The parameters before the first step, by name: weights and biases around 0, γ around 1 unless zero-centered."""
    case, found = CASES[name], {}
    for i, key in enumerate(sorted(shapes)):
        is_gamma = key.endswith("layer_norm_weight")
        scale = 0.25 if is_gamma else 0.05 if len(shapes[key]) == 2 else 0.1
        value = words(_seed(name) + 900 + i, shapes[key], scale)
        if is_gamma and not case.arguments.get("zero_centered_gamma", False):
            value = value + 1
        found[key] = value.to(case.dtype)
    return found


def updated(parameters: Tensors, gradients: Tensors) -> Tensors:
    """p − (lr·g), each operation rounded to fp32, then to the parameter's dtype."""
    return {
        key: (value.float() - (gradients[f"d {key}"].float() * LEARNING_RATE)).to(value.dtype)
        for key, value in parameters.items()
    }


def known(x: torch.Tensor, gradient: torch.Tensor, parameters: Tensors) -> Tensors:
    """What a step starts from, by name. The weights of q, k and v are also there as one, as their GEMM reads them."""
    found = {"x": x, "g": gradient, **parameters}
    for kind in ("weight", "bias"):
        parts = [f"self_attention.layernorm_qkv.{part}_{kind}" for part in ("query", "key", "value")]
        if parts[0] in parameters:
            found[f"self_attention.layernorm_qkv.{kind}"] = torch.cat([parameters[part] for part in parts])
    return found


def select(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """v plus q in even channels and k in odd ones, `[s, b, heads·d]`: one rounding forward, none backward."""
    even = torch.arange(q.shape[-1], device=q.device) % 2 == 0
    return (v + torch.where(even, q, k)).flatten(2)


def _stand_in(q: Any, k: Any, v: Any, *_: Any, qkv_layer: Any = None, qkv_interleave_dim: Any = None, **__: Any) -> Any:
    """`select` with the arguments of a `DotProductAttention`; Transformer Engine may pass q, k and v as one tensor."""
    if qkv_layer is not None:
        q, k, v = qkv_layer.unbind(qkv_interleave_dim)
    return select(q, k, v)


class Run:
    """A case's layer in `library` (`reference`, or Transformer Engine's package), and its steps.

    Args:
        library: where the layers and `autocast` are.
        recipes: where the recipes and `Format` are.
    """

    def __init__(self, name: str, library: Any, recipes: Any, device: str) -> None:
        self.name, self.case, self.library, self.device = name, CASES[name], library, device
        case = self.case
        self.recipe = recipe_of(case, recipes)
        self.layer = getattr(library, case.layer)(*case.sizes, params_dtype=case.dtype, device=device, **case.arguments)
        if case.layer == "TransformerLayer":
            self.layer.self_attention.core_attention.forward = _stand_in

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters, by name."""
        return {key: tuple(value.shape) for key, value in self.layer.named_parameters()}

    def parts(self) -> dict[str, Any]:
        """The modules with FP8 state, by a prefix for their tensors' names."""
        found = {key: part for key, part in self.layer.named_modules() if type(part).__name__ in PARTS}
        return {f"{key}." if key else "": part for key, part in found.items()}

    @torch.no_grad()
    def load(self, parameters: Tensors) -> None:
        """Set the parameters."""
        for key, parameter in self.layer.named_parameters():
            parameter.copy_(parameters[key])

    def step(self, x: torch.Tensor, gradient: torch.Tensor) -> Tensors:
        """One step forward and backward: y, dx, gradients (`d <parameter>`), and delayed scaling's state after it."""
        x = x.detach().to(self.device).requires_grad_()
        self.layer.zero_grad(set_to_none=True)
        with self.library.autocast(enabled=True, recipe=self.recipe):
            y = self.layer(x)
        y.backward(gradient.to(self.device))
        found = {"y": y, "dx": x.grad}
        found |= {f"d {key}": parameter.grad for key, parameter in self.layer.named_parameters()}
        states = {key: value.cpu().clone() for key, value in self.states().items()}
        return {key: value.detach().cpu() for key, value in found.items()} | states

    def states(self) -> Tensors:
        """The scales and amax histories of all modules, by name; none where the recipe has no state."""
        if self.case.recipe != "delayed":
            return {}
        parts = self.parts().items()
        return {f"{prefix}{key}": x.detach() for prefix, part in parts for key, x in fp8_state(part).items()}
