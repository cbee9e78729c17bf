"""Which ops a training step of a GPT layer calls, and how many bytes they move: for lessons 4 and 15.

An op moves each tensor that goes in or comes out once: the least that its kernel must move. The layer has its real
size, and needs no memory: large results are allocated and never written.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import reference as te
from optimized.bench.layers import layer, layer_models, timeline, tutorial_layers
from reference.recipe import DelayedScaling, Float8CurrentScaling

CASE = layer_models.CASES[0]
T, H, F = CASE.tokens, CASE.hidden, CASE.ffn
BF16 = torch.bfloat16
Op = dict[str, Any]


class Account(TorchDispatchMode):
    """Notes the ops that run inside, and their bytes. With `pretend`, large results are only allocated."""

    def __init__(self, pretend: bool = False) -> None:
        super().__init__()
        self.pretend = pretend
        self.ops: list[Op] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        large = sum(x.numel() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)) > 1000
        unchanged = func.is_view or "empty" in name or name in ("detach", "_unsafe_view")
        run = _shapes_only if self.pretend and large and not unchanged else _call
        out = run(func, args, kwargs)
        if not unchanged:
            self.ops.append(layer.describe(name, args, out, causal=True))
        return out


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _shapes_only(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an op on tensors without memory, and allocate what it gives."""
    given: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def without_memory(one: Any) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        meta = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta")
        given[id(meta)] = meta, one
        return meta

    def allocated(one: Any) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        return given[id(one)][1] if id(one) in given else torch.empty_strided(one.shape, one.stride(), dtype=one.dtype)

    return tree_map(allocated, _call(func, *tree_map(without_memory, (args, kwargs))))


class Plain(tutorial_layers.BasicTransformerLayer):
    """Plain PyTorch, with PyTorch's fused attention."""

    def attend_heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _untouched(weight: torch.Tensor) -> None:
    """An initialisation that writes nothing."""


def _plain() -> torch.nn.Module:
    linear = functools.partial(torch.nn.utils.skip_init, torch.nn.Linear, dtype=BF16)
    return Plain(H, F, CASE.heads, linear, functools.partial(torch.nn.LayerNorm, dtype=BF16))


def _modules(kind: Any = tutorial_layers.ModulesLayer) -> torch.nn.Module:
    return kind(H, F, CASE.heads, 0.0, True, _untouched, BF16)


def _whole() -> torch.nn.Module:
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": BF16, "fuse_qkv_params": True}
    options |= {"init_method": _untouched, "output_layer_init_method": _untouched, "self_attn_mask_type": "causal"}
    return te.TransformerLayer(H, F, CASE.heads, **options)


STAGES: dict[str, tuple[Callable[[], torch.nn.Module], Any]] = {  # how it is built, and its recipe
    "PyTorch, bf16": (_plain, None),
    "te.Linear, te.LayerNorm, bf16": (_modules, None),
    "te.Linear, te.LayerNorm, FP8": (_modules, DelayedScaling()),
    "LayerNormLinear, LayerNormMLP, FP8": (lambda: _modules(tutorial_layers.FusedLayer), DelayedScaling()),
    "TransformerLayer, FP8": (_whole, DelayedScaling()),
    "TransformerLayer, FP8, current scaling": (_whole, Float8CurrentScaling()),
}


@functools.cache
def ops(stage: str) -> list[Op]:
    """The ops of a training step, the second: the first one makes scales and histories, too."""
    build, recipe = STAGES[stage]
    module = build()
    for _ in range(2):
        module.zero_grad()
        x = torch.empty(CASE.sequence, CASE.batch, H, dtype=BF16, requires_grad=True)
        with Account(pretend=True) as account:
            with te.autocast(recipe=recipe) if recipe else contextlib.nullcontext():
                out = module(x)
            out.backward(torch.empty_like(out))
    for op in account.ops:
        if op["op"] == "gemm_fp8_activation_backward":  # on the GPU two kernels: the gradient between them moves, too
            second = (2 + 2 + 1 + 1) * T * F  # reads it and h, writes both copies of the codes
            op["bytes"] += 2 * 2 * T * F - second
            account.ops.append({"op": "activation_cast_transpose", "bytes": second, "flop": 0})
            break
        if op["op"] == "gemm_fp8_activation_scale":  # what casts reads h again
            op["bytes"] += 2 * T * F
        if op["op"] == "norm_scale_cast_transpose":  # it reads x twice: for the amax, then for the codes
            op["bytes"] += 2 * T * H
    return account.ops


def kind(op: str) -> str:
    """An op's category, as recorded traces have it."""
    if op.startswith(("addmm", "mm", "gemm")):
        return "GEMM"
    return "other" if op == "dbias" else timeline.category(op)  # in 16 bits the bias gradient is an op of its own


def gigabytes(stage: str) -> dict[str, float]:
    """What a training step moves, by category."""
    found = dict.fromkeys(timeline.CATEGORIES, 0.0)
    for op in ops(stage):
        found[kind(op["op"])] += op["bytes"] / 1e9
    return found


def launches(stage: str) -> int:
    """How many kernels a training step has on a GPU: most ops are one."""
    several = {"norm_backward": 2, "attention": 2, "attention_backward": 3, "activation_cast_transpose": 2}
    return sum(several.get(op["op"], 2 if op["op"].endswith("_dbias") else 1) for op in ops(stage))
