"""Cases of `twin parity`: the layers, each trained for eight steps, with dropout if it has any.

Dropout's masks follow from the random states that a layer was made with (`te.random.undrawn`), as in a CUDA graph. In
cases that are "seeded" they follow from torch's seed before each step, as in eager mode.

After each step p = round(p - round(lr·g)) in p's dtype. Compared are y, dx and every gradient of each step, and the
parameters, FP8 scales, amax histories and random states after the last one.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

import reference as te
from optimized.compare import fp8_state
from optimized.recordings.case import HALVES, WIDE, Case, Outputs, short
from reference.nn.core.dropout import Generator
from reference.numbers import philox
from reference.ops.activations.activation import RECORDED as ACTIVATIONS

LEARNING_RATE = 0.03125
GROWTH = (1.0, 4.0, 0.25, 1.0, 16.0, 1.0, 1e-2, 1.0)  # factors of the inputs at each step, so that scales change
FORMATS = {None: "16 bits", te.Format.HYBRID: "FP8", te.Format.E4M3: "FP8"}
Make = Callable[[torch.dtype], torch.nn.Module]


class PackedAttention(torch.nn.Module):
    """`DotProductAttention` with one input `[s, b, (heads + 2·groups)·d]`, so that it trains like any layer."""

    def __init__(self, heads: int, groups: int, channels: int, **arguments: Any) -> None:
        super().__init__()
        self.parts = (heads, groups, groups)
        self.channels = channels
        self.core = te.DotProductAttention(heads, channels, num_gqa_groups=groups, device="cpu", **arguments)

    def forward(self, x: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """`[s, b, ..]` to `[s, b, heads·d]`."""
        q, k, v = x.unflatten(2, (-1, self.channels)).split(self.parts, dim=2)
        return self.core(q, k, v, **arguments)


def _trained(
    make: Make,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    recipe: te.recipe.Recipe | None,
    extra: dict[str, torch.Tensor],
    seeded: bool,
    device: torch.device,
) -> Outputs:
    arguments = {name: tensor.to(device) for name, tensor in extra.items()}
    found: Outputs = {}
    with torch.random.fork_rng(devices=[]), contextlib.nullcontext() if seeded else te.random.undrawn():
        torch.manual_seed(171)
        layer = make(dtype).to(device)
        for step, growth in enumerate(GROWTH):
            x = philox.normal(shape, std=growth, seed=172 + step).to(dtype).to(device).requires_grad_()
            layer.zero_grad(set_to_none=True)
            torch.manual_seed(200 + step)
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                y = layer(x, **arguments)
            y.backward(philox.normal(y.shape, std=1e-2 * growth, seed=182 + step).to(dtype).to(device))
            gradients = {f"d {name}": parameter.grad for name, parameter in layer.named_parameters()}
            for name, tensor in {"y": y, "dx": x.grad, **gradients}.items():
                assert tensor is not None
                found[f"{name}{step}"] = tensor.detach().clone()
            with torch.no_grad():
                for parameter in layer.parameters():
                    assert parameter.grad is not None
                    parameter.copy_(parameter - (parameter.grad * LEARNING_RATE))
    found |= {name: parameter.detach() for name, parameter in layer.named_parameters()}
    for name, part in layer.named_modules():
        state = {"state": part.state} if isinstance(part, Generator) else fp8_state(part)
        found |= {f"{name}.{key}": tensor for key, tensor in state.items()}
    return found


def _case(
    layer: str,
    label: str,
    make: Make,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    fmt: te.Format | None = None,
    extra: dict[str, torch.Tensor] | None = None,
    algorithm: str = "max",
    live: bool = False,
    seeded: bool = False,
) -> Case:
    parts = (short(dtype), "" if fmt is None else fmt.name, label, "seeded" if seeded else "")
    name = ", ".join(filter(None, parts))
    precision = "fp32" if dtype == torch.float32 and fmt is None else FORMATS[fmt]
    recipe = None
    if fmt is not None:
        recipe = te.DelayedScaling(fp8_format=fmt, amax_history_len=3, amax_compute_algo=algorithm)
    run = partial(_trained, make, shape, dtype, recipe, extra or {}, seeded)
    return Case(f"{layer} ({precision})", name, run, live)


def _of(layer: str, *sizes: int, **arguments: Any) -> Make:
    return lambda dtype: getattr(te, layer)(*sizes, params_dtype=dtype, device="cpu", **arguments)


def linears() -> Iterator[Case]:
    """`Linear`."""
    for (tokens, inputs, outputs), live in (((7, 48, 32), False), ((200, 272, 144), True)):
        size, make = f"{tokens}x{inputs}x{outputs}", _of("Linear", inputs, outputs)
        for dtype in HALVES:
            yield _case("Linear", size, make, (tokens, inputs), dtype, live=live)
        for dtype, fmt, algorithm in product(WIDE, (te.Format.HYBRID, te.Format.E4M3), ("max", "most_recent")):
            label = f"{algorithm}, {size}"
            yield _case("Linear", label, make, (tokens, inputs), dtype, fmt, None, algorithm, live)


def norms() -> Iterator[Case]:
    """`LayerNorm`, `RMSNorm`, `LayerNormLinear` and `LayerNormMLP`."""
    for kind, dtype in product(("LayerNorm", "RMSNorm"), WIDE):
        yield _case(kind, "", _of(kind, 200), (33, 200), dtype)
    for kind, dtype, fmt in product(("LayerNorm", "RMSNorm"), HALVES, FORMATS):
        make = _of("LayerNormLinear", 80, 48, normalization=kind, zero_centered_gamma=True)
        yield _case("LayerNormLinear", kind, make, (37, 80), dtype, fmt)
    for activation, dtype, fmt in product(ACTIVATIONS, HALVES, FORMATS):
        make = _of("LayerNormMLP", 48, 80, activation=activation)
        yield _case("LayerNormMLP", activation, make, (37, 48), dtype, fmt)


def _padding(length: int, *lengths: int) -> torch.Tensor:
    return (torch.arange(length) >= torch.tensor(lengths)[:, None]).view(-1, 1, 1, length)


def attention() -> Iterator[Case]:
    """`DotProductAttention` and `MultiheadAttention`."""
    padding = {"attention_mask": _padding(50, 50, 31)}
    for dtype, (groups, mask, extra, dropout) in product(
        HALVES,
        (
            (4, "causal", None, 0.0),
            (2, "no_mask", None, 0.1),
            (2, "padding_causal", padding, 0.1),
            (4, "padding", padding, 0.0),
        ),
    ):

        def make(_: torch.dtype, groups: int = groups, mask: str = mask, dropout: float = dropout) -> torch.nn.Module:
            return PackedAttention(4, groups, 16, attn_mask_type=mask, attention_dropout=dropout)

        label = f"{mask}, {groups} groups, dropout {dropout}"
        for seeded in (False, True)[: 1 + (dropout > 0)]:
            size = (50, 2, (4 + 2 * groups) * 16)
            yield _case("DotProductAttention", label, make, size, dtype, None, extra, seeded=seeded)
    freqs = {"rotary_pos_emb": (torch.arange(40.0)[:, None] * philox.uniform((1, 16), seed=190)).view(40, 1, 1, 16)}
    memory = {"encoder_output": philox.normal((21, 2, 64), seed=191)}
    for dtype, fmt in product(HALVES, FORMATS):
        make_self = _of("MultiheadAttention", 64, 4, num_gqa_groups=2, input_layernorm=True)
        yield _case("MultiheadAttention", "self, GQA, rotary", make_self, (40, 2, 64), dtype, fmt, freqs)
        make_cross = _of("MultiheadAttention", 64, 4, attention_type="cross", attn_mask_type="no_mask")
        extra = {name: tensor.to(dtype) for name, tensor in memory.items()}
        yield _case("MultiheadAttention", "cross", make_cross, (30, 2, 64), dtype, fmt, extra)


LAYERS: dict[str, dict[str, Any]] = {
    "causal": {},
    "unmasked": {"self_attn_mask_type": "no_mask"},
    "padded": {"self_attn_mask_type": "padding_causal"},
    "GQA, swiglu, RMSNorm, no bias": {
        "num_gqa_groups": 2, "activation": "swiglu", "normalization": "RMSNorm", "bias": False,
    },
    "one QKV, batch first, geglu": {"fuse_qkv_params": True, "attn_input_format": "bshd", "activation": "geglu"},
    "residual after the norm, relu": {"apply_residual_connection_post_layernorm": True, "activation": "relu"},
    "output norm, silu": {"output_layernorm": True, "activation": "silu"},
}  # fmt: skip


def transformer_layers() -> Iterator[Case]:
    """`TransformerLayer`, encoder and decoder, with hidden and attention dropout 0.1."""
    padding = {"attention_mask": _padding(40, 40, 17)}
    for label, arguments in LAYERS.items():
        shape = (2, 40, 64) if "batch first" in label else (40, 2, 64)
        for dtype, fmt in (
            (torch.bfloat16, None),
            (torch.float16, None),
            (torch.bfloat16, te.Format.HYBRID),
            (torch.float16, te.Format.E4M3),
        ):
            make = _of("TransformerLayer", 64, 96, 4, **arguments)
            extra = padding if label == "padded" else None
            for seeded in (False, True):
                yield _case("TransformerLayer", label, make, shape, dtype, fmt, extra, seeded=seeded)
    for dtype, fmt in product(HALVES, (None, te.Format.HYBRID)):
        make = _of("TransformerLayer", 64, 96, 4, layer_type="decoder")
        memory = {"encoder_output": philox.normal((21, 2, 64), seed=192).to(dtype)}
        for seeded in (False, True):
            yield _case("TransformerLayer", "decoder", make, (34, 2, 64), dtype, fmt, memory, seeded=seeded)


RECIPES: dict[str, te.recipe.Recipe] = {
    "current": te.recipe.Float8CurrentScaling(),
    "current, E4M3, powers of two": te.recipe.Float8CurrentScaling(True, te.Format.E4M3),
    "blocks": te.recipe.Float8BlockScaling(),
    "blocks, HYBRID, fp32 scales": te.recipe.Float8BlockScaling(use_f32_scales=True, fp8_format=te.Format.HYBRID),
    "blocks of rows": te.recipe.Float8BlockScaling(w_block_scaling_dim=1),
    "rows": te.recipe.Float8RowwiseScaling(),
    "rows, weight gradients in 16 bits": te.recipe.Float8RowwiseScaling("high_precision"),
    "blocks, dequantized": te.recipe.Float8BlockScaling(backward_override="dequantized"),
}
MIXED: dict[str | torch.nn.Module, te.recipe.Recipe | str | None] = {
    "*": RECIPES["blocks"],
    "*layernorm_qkv": RECIPES["current"],
    "*proj": RECIPES["rows"],
}


def _mixed(dtype: torch.dtype) -> torch.nn.Module:
    layer = _of("TransformerLayer", 64, 144, 4)(dtype)
    te.recipe.by_layer(layer, MIXED)
    return layer


def recipes() -> Iterator[Case]:
    """Layers under the other recipes, and one whose parts differ; a last block of 128 is not full."""
    made = {
        "Linear": (_of("Linear", 144, 272), (200, 144)),
        "LayerNormMLP": (_of("LayerNormMLP", 144, 272, activation="swiglu", normalization="RMSNorm"), (1, 144)),
        "TransformerLayer": (_of("TransformerLayer", 64, 144, 4), (67, 2, 64)),
    }
    for (label, recipe), (layer, (make, shape)) in product(RECIPES.items(), made.items()):
        for dtype in HALVES:
            run = partial(_trained, make, shape, dtype, recipe, {}, False)
            yield Case(f"{layer} (FP8)", f"{short(dtype)}, {label}", run)
    run = partial(_trained, _mixed, (67, 2, 64), torch.bfloat16, te.DelayedScaling(amax_history_len=3), {}, False)
    yield Case("TransformerLayer (FP8)", "bf16, a recipe for each part", run)


def cases() -> Iterator[Case]:
    yield from linears()
    yield from norms()
    yield from attention()
    yield from transformer_layers()
    yield from recipes()
