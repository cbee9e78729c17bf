"""Layers played from tapes on a pretended GPU: the launches of a plain run, in memory that nothing else needs."""

import contextlib
import re
from typing import Any

import pytest
import torch
from shared.dry_gpu import DryGpu

import optimized
import reference as te
from optimized.tapes import TapeRunner, call_groups
from reference.nn.core import autograd
from reference.nn.transformer import halves

BF16 = torch.bfloat16
ADDRESS = re.compile(r"&(\d+)(?:\+(\d+))?")


MODES = ("bf16", "fp8", "fp8 weights", "microbatches", "frozen")


class Steps:
    """Steps of training a small layer; `lines` has what each launched, with storages by number on `gpu`."""

    def __init__(self, tapes: bool, mode: str, count: int = 6, hooks: Any = None, **options: Any) -> None:
        recipe, shape = options.pop("recipe", None), options.pop("shape", (40, 2))
        call: Any = options.pop("call", dict)  # makes what forward takes beside x
        self.lines: list[list[str]] = []
        self.hits: list[list[int]] = []
        self.changed: list[list[bool]] = []  # of the FP8 state, as autograd knows it
        with DryGpu() as gpu:
            if tapes:
                gpu.tapes()
            with te.quantized_model_init(enabled=mode == "fp8 weights"):
                layer = optimized.TransformerLayer(64, 128, 4, params_dtype=BF16, fuse_qkv_params=True, **options)
            if mode == "frozen":
                layer.layernorm_mlp.fc1_weight.requires_grad_(False)
                layer.self_attention.proj.bias.requires_grad_(False)
            x = torch.empty(*shape, 64, dtype=BF16, device="cuda").requires_grad_()
            grad = torch.empty_like(x)
            for step in range(count):
                gpu.lines.clear()
                before = versions(layer)
                first = step == 0 if mode == "microbatches" else None
                with te.autocast(enabled=mode != "bf16", recipe=recipe), hooks or contextlib.nullcontext():
                    y = layer(x, is_first_microbatch=first, **call())
                y.backward(grad)
                layer.zero_grad(set_to_none=True)
                x.grad = y = None
                self.lines.append(gpu.lines.copy())
                self.hits.append([group.hits for group in call_groups._groups.values()])
                self.changed.append([now > then for now, then in zip(versions(layer), before, strict=False)])
            self.groups = list(call_groups._groups.values()) if tapes else []
            self.gpu = gpu


def versions(layer: torch.nn.Module) -> list[int]:
    """How often autograd was told that scales and amax histories have changed."""
    metas = [getattr(m, "fp8_meta", {}).get(key) for m in layer.modules() for key in ("scaling_fwd", "scaling_bwd")]
    return [x._version for meta in metas if meta is not None for x in (meta.scale, meta.amax_history)]


def launches(lines: list[str]) -> list[str]:
    """Those of kernels, whether made again or not."""
    return [line.removeprefix("again ") for line in lines if re.match(r"(again )?\w+\.\w+ \[", line)]


@pytest.mark.sample(4)
@pytest.mark.parametrize("small", [0, halves.SMALL], ids=["two nodes", "one node"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("mode", MODES)
def test_a_layer_is_played(mode: str, dropout: float, small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "SMALL", small)
    options = {"hidden_dropout": dropout, "attention_dropout": dropout}
    plain, taped = Steps(False, mode, **options), Steps(True, mode, **options)
    assert all(group.usable for group in taped.groups)
    # In the last step everything comes from a calls.
    assert all(now == before + 1 for before, now in zip(*taped.hits[-2:], strict=True))
    assert len(taped.groups) == (2 if small else 4) + (2 if mode != "bf16" else 0)  # updates of scales are played, too
    assert {line.split()[0] for line in taped.lines[-1] if re.match(r"(again )?\w+\.\w+ \[", line)} == {"again"}
    assert taped.changed[1:] == plain.changed[1:]
    assert any(taped.changed[-1]) == (mode != "bf16")
    for step, lines in enumerate(taped.lines):
        found, expected = launches(lines), launches(plain.lines[step])
        assert [ADDRESS.sub("&", line) for line in found] == [ADDRESS.sub("&", line) for line in expected], step
        if step:
            assert_apart(found, expected, taped.gpu, plain.gpu)


def assert_apart(found: list[str], expected: list[str], gpu: DryGpu, plain: DryGpu) -> None:
    """What is a storage of its own in a plain run lies in one place, and nothing else lies there from its first use on
    to its last.
    """
    places: dict[int, tuple[int, int]] = {}  # by storage of the plain run: storage and offset
    uses: dict[int, list[int]] = {}
    for i, (line, other) in enumerate(zip(found, expected, strict=True)):
        for here, there in zip(ADDRESS.finditer(line), ADDRESS.finditer(other), strict=True):
            number, start = int(there[1]), int(here[2] or 0) - int(there[2] or 0)
            assert places.setdefault(number, (int(here[1]), start)) == (int(here[1]), start), (line, other)
            uses.setdefault(number, []).append(i)
    for number, (storage, start) in places.items():
        assert 0 <= start <= gpu.size(storage) - plain.size(number)
        assert start % 512 == 0 or plain.size(number) == 16  # as the allocator's; but for a row of a generator's states
        for other, (beside, at) in places.items():
            together = uses[number][0] <= uses[other][-1] and uses[other][0] <= uses[number][-1]
            if number < other and storage == beside and together:
                assert start + plain.size(number) <= at or at + plain.size(other) <= start, (number, other)


def ends() -> torch.Tensor:
    return torch.empty(3, dtype=torch.int32, device="cuda")


ANGLES = {"rotary_pos_emb": lambda: torch.empty(40, 1, 1, 16, device="cuda")}
PACKED = {"cu_seqlens_q": ends, "max_seqlen_q": lambda: 40}
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "alibi": ({}, {"core_attention_bias_type": lambda: "alibi"}),
    "sinks": ({"softmax_type": "learnable"}, {}),
    "lengths": ({"self_attn_mask_type": "padding_causal"}, {"cu_seqlens_q": ends}),
    "packed": ({"self_attn_mask_type": "padding_causal", "attn_input_format": "thd", "shape": (80,)}, PACKED),
    "packed, rotary": (
        {"self_attn_mask_type": "padding", "attn_input_format": "thd", "shape": (80,)},
        PACKED | ANGLES,
    ),
    "qk-norm": ({"qk_norm_type": "RMSNorm", "num_gqa_groups": 2}, ANGLES),
    "qk-norm before": ({"qk_norm_type": "L2Normalization", "qk_norm_before_rope": True}, ANGLES),
    "no norm": ({"output_layernorm": True}, {}),
    "parallel": ({"parallel_attention_mlp": True}, {}),
    "stochastic depth": ({"drop_path_rate": 0.3, "attn_input_format": "bshd", "shape": (2, 40)}, {}),
    "stochastic depth, parallel": ({"drop_path_rate": 0.3, "parallel_attention_mlp": True}, {}),
    "fp8 attention": ({"recipe": te.DelayedScaling(fp8_dpa=True)}, {}),
}
RECIPES = {
    "current": te.recipe.Float8CurrentScaling(),
    "current, forward alone": te.recipe.Float8CurrentScaling(backward_override="high_precision"),
    "current, dequantized": te.recipe.Float8CurrentScaling(backward_override="dequantized"),
    "block": te.recipe.Float8BlockScaling(),
    "block, dequantized": te.recipe.Float8BlockScaling(backward_override="dequantized"),
    "rowwise": te.recipe.Float8RowwiseScaling(),
    "rowwise, wide gradient": te.recipe.Float8RowwiseScaling(weight_gradient="high_precision"),
    "rowwise, dequantized": te.recipe.Float8RowwiseScaling(backward_override="dequantized"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("mode", ["bf16", "fp8"])
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_of_attention_is_played(option: str, mode: str) -> None:
    settings, makes = OPTIONS[option]

    def call() -> dict[str, Any]:
        return {name: make() for name, make in makes.items()}

    shared = {"hidden_dropout": 0.1, "attention_dropout": 0.1, **settings, "call": call, "count": 4}
    plain, taped = Steps(False, mode, **shared), Steps(True, mode, **shared)
    assert all(group.usable for group in taped.groups)
    assert all(now == before + 1 for before, now in zip(*taped.hits[-2:], strict=True))
    assert [len(launches(lines)) for lines in taped.lines] == [len(launches(lines)) for lines in plain.lines]


@pytest.mark.parametrize("options", [{}, {"activation": "swiglu", "normalization": "RMSNorm", "bias": False}])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_without_state_is_played(recipe: str, options: dict[str, Any]) -> None:
    """Launch for launch: nothing of PyTorch's computes scales."""
    shared = {"recipe": RECIPES[recipe], "hidden_dropout": 0.0, "attention_dropout": 0.0, "count": 4, **options}
    plain, taped = Steps(False, "fp8", **shared), Steps(True, "fp8", **shared)
    assert all(group.usable for group in taped.groups)
    assert all(now == before + 1 for before, now in zip(*taped.hits[-2:], strict=True))
    assert {line.split()[0] for line in taped.lines[-1] if re.match(r"(again )?\w+\.\w+ \[", line)} == {"again"}
    for found, expected in zip(taped.lines, plain.lines, strict=True):
        assert [ADDRESS.sub("&", line) for line in launches(found)] == [
            ADDRESS.sub("&", line) for line in launches(expected)
        ]
    assert_apart(launches(taped.lines[-1]), launches(plain.lines[-1]), taped.gpu, plain.gpu)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_layer_with_grouped_queries_in_one_weight_is_played(fp8: bool) -> None:
    """Its queries are copied out of the groups."""
    options = {"num_gqa_groups": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    taped = Steps(True, "fp8" if fp8 else "bf16", **options)
    assert all(group.usable for group in taped.groups)
    assert all(now == before + 1 for before, now in zip(*taped.hits[-2:], strict=True))


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_layer_with_attention_in_fp8_is_played(dropout: float, layout: str) -> None:
    """Of keys whose number is no multiple of 4 the op makes a copy with room for more, which is not played."""
    options: dict[str, Any] = {"hidden_dropout": dropout, "attention_dropout": dropout, "attn_input_format": layout}
    options["shape"] = (40, 2) if layout == "sbhd" else (2, 40)
    recipe = te.DelayedScaling(fp8_dpa=True)
    plain, taped = (Steps(tapes, "fp8", recipe=recipe, **options) for tapes in (False, True))
    assert all(group.usable for group in taped.groups)
    assert all(now == before + 1 for before, now in zip(*taped.hits[-2:], strict=True))
    for kernel in ("attention_fp8.attention_fp8 ", "attention_fp8_backward.attention_dequantize "):
        assert any(line.startswith(f"again {kernel}") for line in taped.lines[-1])
    for found, expected in zip(map(launches, taped.lines), map(launches, plain.lines), strict=True):
        assert [ADDRESS.sub("&", line) for line in found] == [ADDRESS.sub("&", line) for line in expected]


def test_who_takes_saved_tensors_elsewhere_gets_tensors() -> None:
    seen: list[torch.Tensor] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    steps = Steps(True, "bf16", 3, hooks)
    assert steps.groups == []
    assert {x.dtype for x in seen} >= {BF16, torch.float32}  # an arena would be bytes


def test_another_mode_that_watches_ops_sees_them() -> None:
    """As long as it is there, no tape is recorded."""
    with DryGpu() as gpu:  # is such a mode
        layer = optimized.Linear(64, 64, params_dtype=BF16)
        before = len(call_groups._groups)
        for _ in range(3):
            layer(torch.empty(32, 64, dtype=BF16, device="cuda"))
        assert len(call_groups._groups) == before
        assert len([line for line in gpu.lines if line.startswith("gemm.gemm [")]) == 3
    assert isinstance(autograd.runner, TapeRunner)
