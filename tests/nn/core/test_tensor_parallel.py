"""Layers that ranks share have the words of one process: outputs, gradients, weights and scales after three steps."""

import copy
import io
import itertools
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from shared.processes import run
from shared.tensor_ranks import (
    BACKENDS,
    BF16,
    RECIPES,
    again_too,
    compare,
    here,
    in_one,
    numbers,
    on_ranks,
    part,
    trained,
    twice,
)

import reference as te
from reference.inspect.statistics import collect_stats
from reference.parallel import exchange, ordered_reduce
from reference.recipe import Float8CurrentScaling, Float8RowwiseScaling
from reference.support import groups

SEQUENCE, BATCH, IN, OUT = 12, 3, 512, 512


def linear(
    group: Any, count: int, rank: int, recipe: str, mode: str, sequence: bool, bias: bool, split: bool
) -> dict[str, torch.Tensor]:
    """Three steps with SGD."""
    torch.manual_seed(5)
    more: dict[str, Any] = {"parameters_split": {"a_": OUT // 2, "b_": OUT // 2}} if split else {}
    layer = te.Linear(
        IN, OUT, bias=bias, params_dtype=BF16, tp_group=group, parallel_mode=mode, sequence_parallel=sequence, **more
    )
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.25)
    found: dict[str, torch.Tensor] = {}
    for step in range(3):
        x = numbers(step, SEQUENCE, BATCH, IN)
        g = numbers(100 + step, SEQUENCE, BATCH, OUT, scale=2.0**-7)
        x_dim, g_dim = (0 if sequence else None, 2) if mode == "column" else (2, 0 if sequence else None)
        x, g = part(x, x_dim, rank, count), part(g, g_dim, rank, count, 2 if split and g_dim == 2 else 1)
        x.requires_grad_()
        with te.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
            y = layer(x)
        y.backward(g)
        found |= {f"{step}.y": y.detach(), f"{step}.dx": x.grad}
        found |= {f"{step}.{name}.grad": p.grad.clone() for name, p in layer.named_parameters()}  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    found |= {name: p.detach() for name, p in layer.named_parameters()}
    if recipe == "delayed":
        for key in ("scaling_fwd", "scaling_bwd"):
            meta = layer.fp8_meta[key]
            found |= {f"{key}.scale": meta.scale, f"{key}.history": meta.amax_history}
    return found


def normed(group: Any, count: int, rank: int, recipe: str, kind: str, sequence: bool, more: Any) -> dict[str, Any]:
    """Three steps of a layer that begins with a norm."""
    torch.manual_seed(7)
    of_all: dict[str, Any] = {"params_dtype": BF16, "tp_group": group, "sequence_parallel": sequence, **dict(more)}
    layer: Any
    if kind == "LayerNormLinear":
        layer = te.LayerNormLinear(IN, OUT, parallel_mode="column", **of_all)
    else:
        layer = te.LayerNormMLP(IN, OUT, set_parallel_mode=True, **of_all)
    with torch.no_grad():
        layer.layer_norm_weight.copy_(1 + numbers(3, IN, scale=2.0**-6))
    y_dim = 2 if kind == "LayerNormLinear" else 0 if sequence else None
    return steps(layer, recipe, rank, count, 0 if sequence else None, y_dim, (IN, OUT if y_dim == 2 else IN))


def steps(
    layer: Any, recipe: str, rank: int, count: int, x_dim: int | None, y_dim: int | None, sizes: tuple[int, int]
) -> dict[str, torch.Tensor]:
    """`trained` in three steps, on a rank's parts of the same numbers."""

    def given(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = part(numbers(step, SEQUENCE, BATCH, sizes[0], scale=2.0**-3), x_dim, rank, count)
        return x, part(numbers(100 + step, SEQUENCE, BATCH, sizes[1], scale=2.0**-7), y_dim, rank, count)

    return trained(layer, recipe, 3, given)


def dims_of_normed(case: tuple[Any, ...], name: str) -> Any:
    _, kind, sequence, more = case
    if name.endswith((".y", ".dx")):
        return 2 if name.endswith(".y") and kind == "LayerNormLinear" else 0 if sequence else None
    if "scaling" in name or "layer_norm" in name or "fc2_bias" in name:
        return None
    gated = dict(more).get("activation") in ("swiglu",)
    return 1 if "fc2_weight" in name else (0, 2 if gated else 1)


NORMED = {
    f"{kind}{' sequence' * sequence} {recipe} {more}": (recipe, kind, sequence, tuple(more.items()))
    for recipe in RECIPES
    for sequence in (False, True)
    for kind, more in (
        ("LayerNormLinear", {}),
        ("LayerNormLinear", {"normalization": "RMSNorm", "bias": False}),
        ("LayerNormMLP", {}),
        ("LayerNormMLP", {"activation": "swiglu", "normalization": "RMSNorm", "bias": False}),
        ("LayerNormMLP", {"activation": "swiglu"}),
    )
}
FAST_NORMED = {  # of each recipe two, one of them gated: without a bias in half of the recipes
    name: case
    for name, case in NORMED.items()
    if case[2] and len(case[3]) == (3 if case[0] in ("bf16", "blocks") else 1) * (case[1] == "LayerNormMLP")
}


def attention(
    group: Any, count: int, rank: int, recipe: str, kind: str, sequence: bool, more: Any, width: int = IN
) -> dict[str, torch.Tensor]:
    """Three steps of `MultiheadAttention` or `TransformerLayer`, with dropout."""
    torch.manual_seed(9)
    of_all: dict[str, Any] = {"params_dtype": BF16, "tp_group": group, "sequence_parallel": sequence}
    of_all |= {"set_parallel_mode": True, "attention_dropout": 0.2, **dict(more)}
    layer: Any
    if kind == "MultiheadAttention":
        layer = te.MultiheadAttention(width, 8, **of_all)
    else:
        layer = te.TransformerLayer(width, 2 * width, 8, **{"hidden_dropout": 0.3, **of_all})
    torch.manual_seed(11)
    tokens = 0 if sequence else None
    return steps(layer, recipe, rank, count, tokens, tokens, (width, width))


def dims_of_attention(case: tuple[Any, ...], name: str) -> Any:
    _, _, sequence, more, *_ = case
    if name.endswith((".y", ".dx")):
        return 0 if sequence else None
    if "scaling" in name or "layer_norm" in name or "fc2_bias" in name or "proj.bias" in name:
        return None
    gated = dict(more).get("activation") in ("swiglu",)
    return 1 if "fc2_weight" in name or "proj.weight" in name else (0, 2 if gated and "fc1" in name else 1)


LLAMA = {
    "normalization": "RMSNorm",
    "bias": False,
    "activation": "swiglu",
    "num_gqa_groups": 4,
    "fuse_qkv_params": True,
}
ATTENTION = {
    f"{kind}{' sequence' * sequence} {recipe} {more}": (recipe, kind, sequence, tuple(more.items()))
    for recipe in RECIPES
    for sequence in (False, True)
    for kind, more in (
        ("MultiheadAttention", {"input_layernorm": True, "num_gqa_groups": 4}),
        ("MultiheadAttention", {"fuse_qkv_params": True, "attn_mask_type": "no_mask", "return_bias": False}),
        ("TransformerLayer", {}),
        ("TransformerLayer", LLAMA),
        ("TransformerLayer", {"parallel_attention_mlp": True, "fuse_qkv_params": True}),
        ("TransformerLayer", {"apply_residual_connection_post_layernorm": True}),
    )
}
FAST_ATTENTION = {
    f"{recipe} {sequence} {more}": (recipe, "TransformerLayer", sequence, tuple(more.items()), 256)
    for recipe, sequence, more in (
        ("bf16", True, {}),
        ("delayed", True, {}),
        ("delayed", False, {"fuse_qkv_params": True}),
        ("current", True, LLAMA | {"num_gqa_groups": 8}),
        ("blocks", True, LLAMA | {"num_gqa_groups": 8}),
    )
}


def dims(case: tuple[Any, ...], name: str) -> Any:
    """The dimension along which ranks have parts of a tensor."""
    _, mode, sequence, _, split = case
    row = mode == "row"
    if name.endswith(".y"):
        return (0 if sequence else None) if row else (2, 2 if split else 1)
    if name.endswith(".dx"):
        return 2 if row else 0 if sequence else None
    if "scaling" in name:
        return None
    if "bias" in name:
        return None if row else 0
    return 1 if row else 0


CASES = {
    f"{recipe} {mode}{' sequence' * sequence}{' bias' * bias}{' split' * split}": (recipe, mode, sequence, bias, split)
    for recipe, (mode, sequence, bias, split) in itertools.product(
        RECIPES,
        [
            *itertools.product(("column", "row"), (False, True), (False, True), (False,)),
            ("column", True, True, True),
            ("column", False, False, True),
            ("row", True, False, True),
        ],
    )
}
FAST = {  # of each recipe a column and a row
    name: case
    for name, case in CASES.items()
    if case[2] is case[3] is (case[0] in ("bf16", "current")) and (case[4] or case[1] == "row")
}


def compare_cases(
    count: int, folder: Path, cases: dict[str, tuple[Any, ...]], program: Any = linear, dims: Any = dims
) -> None:
    whole, found = in_one(program, cases), on_ranks(count, folder, program, cases)
    for name, case in cases.items():
        compare(name, whole[name], [one[name] for one in found], lambda tensor, case=case: dims(case, tensor))


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_a_linear_layer_in_every_form(count: int, tmp_path: Path) -> None:
    # A rank of four has 64 rows of each half of a split weight: no multiple of a chain of split accumulation.
    cases = {name: case for name, case in CASES.items() if count == 2 or case[0] == "bf16" or not case[4]}
    compare_cases(count, tmp_path, cases)


@pytest.mark.slow
def test_sums_of_many_rows_on_four_ranks(tmp_path: Path) -> None:
    compare_cases(4, tmp_path, EXCHANGED, exchanged, dims_of_exchanged)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_layers_with_a_norm_in_every_form(count: int, tmp_path: Path) -> None:
    compare_cases(count, tmp_path, NORMED, normed, dims_of_normed)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_attention_and_layers_in_every_form(count: int, tmp_path: Path) -> None:
    # A rank of four has 64 rows of k and of v in parameters of their own: no multiple of a chain of split accumulation.
    apart = {"input_layernorm": True, "num_gqa_groups": 4}
    cases = {
        name: case for name, case in ATTENTION.items() if count == 2 or case[0] == "bf16" or dict(case[3]) != apart
    }
    compare_cases(count, tmp_path, cases, attention, dims_of_attention)


def others(group: Any, count: int, rank: int, what: str) -> dict[str, torch.Tensor]:
    """One step in other ways than the tests above."""
    torch.manual_seed(3)
    given: dict[str, Any] = {"params_dtype": BF16, "set_parallel_mode": True, "sequence_parallel": True}
    given |= {"tp_size": count} if what == "given later" else {"tp_group": group}
    if what == "given later":  # there is no rank yet whose part of a weight could be drawn
        given |= {"init_method": lambda w: w.fill_(0.01), "output_layer_init_method": lambda w: w.fill_(-0.02)}
    layer = te.TransformerLayer(256, 512, 8, hidden_dropout=0.1, attention_dropout=0.1, **given)
    if what == "given later" and group is not None:
        layer.set_tensor_parallel_group(group)
    if what == "copied":
        layer = copy.deepcopy(layer)
    if what == "pickled":
        file = io.BytesIO()
        torch.save(layer, file)
        layer = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    found: dict[str, torch.Tensor] = {}
    torch.manual_seed(4)
    for step, first in enumerate((True, False)):
        x = part(numbers(step, SEQUENCE, BATCH, 256), 0, rank, count).requires_grad_()
        with te.autocast(recipe=te.DelayedScaling(amax_history_len=1, reduce_amax=False)):
            if what == "computed again":
                y = te.checkpoint(layer, x, tp_group=group)
            else:
                y = layer(x, is_first_microbatch=first if what == "microbatches" else None)
        y.backward(part(numbers(9, SEQUENCE, BATCH, 256), 0, rank, count))
        found |= {f"{step}.y": y.detach(), f"{step}.dx": x.grad}  # type: ignore[dict-item]
    empty = layer(here(torch.zeros(0, BATCH, 256, dtype=BF16)))
    assert empty.shape == (0, BATCH, 256)
    found |= {f"{name}.grad": p.grad for name, p in layer.named_parameters()}  # type: ignore[misc]
    return found


def pairs(group: Any, count: int, rank: int, pair: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Two of four ranks share a layer, the other two another one; then without gradients, and statistics."""
    if group is not None:
        made = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        pair, (group, rank), count = rank // 2, (made[rank // 2], rank % 2), 2
    torch.manual_seed(3)
    given: dict[str, Any] = {"params_dtype": dtype, "set_parallel_mode": True, "sequence_parallel": True}
    layer = te.LayerNormMLP(256, 512, tp_group=group, **given)
    x = part(numbers(pair, SEQUENCE, BATCH, 256), 0, rank, count).to(dtype).requires_grad_()
    found: dict[str, torch.Tensor] = {}
    for step in range(2):
        with te.autocast(recipe=te.DelayedScaling(amax_history_len=1, reduce_amax=False)):
            y = layer(x)
        y.sum().backward()
        found |= {f"{step}.y": y.detach(), f"{step}.dx": x.grad.clone()}  # type: ignore[union-attr]
    with torch.no_grad(), te.autocast(recipe=Float8CurrentScaling()):
        found["2.y"] = layer(x.detach())
    found |= {f"{name}.grad": p.grad for name, p in layer.named_parameters()}  # type: ignore[misc]
    return found


def test_groups_of_some_ranks(tmp_path: Path) -> None:
    dtypes = (torch.float32, BF16)
    found = on_ranks(4, tmp_path, pairs, {str(dtype): (0, dtype) for dtype in dtypes})
    for pair, dtype in itertools.product(range(2), dtypes):
        whole = in_one(pairs, {"": (pair, dtype)})[""]
        of_pair = [one[str(dtype)] for one in found[2 * pair : 2 * pair + 2]]
        compare(f"pair {pair}, {dtype}", whole, of_pair, lambda name: dims_of_normed(("", "", True, ()), name))


def banded(group: Any, count: int, rank: int, recipe: str, mode: str, rows: int) -> dict[str, torch.Tensor]:
    """A step with so many tokens that the sums go through the ranks in bands, the last of them short."""
    torch.manual_seed(3)
    split = {"parameters_split": ("a", "b")} if mode == "column" else {}
    layer = te.Linear(512, 512, tp_group=group, parallel_mode=mode, params_dtype=BF16, **split)  # type: ignore[arg-type]
    x = part(numbers(1, rows, 512), None if mode == "column" else 1, rank, count).requires_grad_()
    with te.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
        y = layer(x)
    y.backward(part(numbers(2, rows, 512), 1 if mode == "column" else None, rank, count, 2 if mode == "column" else 1))
    return {"y": y.detach(), "dx": x.grad}  # type: ignore[dict-item]


def exchanged(
    group: Any, count: int, rank: int, recipe: str, kind: str, sequence: bool, more: Any
) -> dict[str, torch.Tensor]:
    """Two steps of so many tokens that ranks send each other codes, in place of sums."""
    with (
        mock.patch.object(exchange, "ROWS", 128),
        mock.patch.object(exchange, "begin", wraps=exchange.begin) as begun,
    ):
        torch.manual_seed(5)
        of_all: dict[str, Any] = {"params_dtype": BF16, "tp_group": group, "sequence_parallel": sequence, **dict(more)}
        layer: Any
        if kind == "LayerNormMLP":
            layer = te.LayerNormMLP(256, 512, set_parallel_mode=True, **of_all)
        else:
            layer = te.Linear(512, 512, parallel_mode=kind, **of_all)
        width = 256 if kind == "LayerNormMLP" else 512
        found: dict[str, torch.Tensor] = {}
        tokens = 0 if sequence else None
        for step in range(2):
            x = part(numbers(step, 512, width, scale=2.0**-3), 1 if kind == "row" else tokens, rank, count)
            g = numbers(100 + step, 512, width, scale=2.0**-7)
            g = part(g, 1 if kind == "column" else tokens, rank, count)
            x.requires_grad_()
            with te.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
                y = layer(x)
            y.backward(g)
            found |= {f"{step}.y": y.detach(), f"{step}.dx": x.grad}  # type: ignore[dict-item]
        if x.device.type == "cpu":  # a tape plays without it
            assert begun.called is (group is not None)
        assert not groups.under_way.works  # nothing is left of what was sent, or sent ahead
        assert not groups.under_way.ahead
        return found | {f"{name}.grad": p.grad for name, p in layer.named_parameters()}  # type: ignore[misc]


def dims_of_exchanged(case: tuple[Any, ...], name: str) -> Any:
    recipe, kind, sequence, _ = case
    if kind == "LayerNormMLP":
        return dims_of_normed(case, name)
    if name.endswith((".y", ".dx")):  # of two dimensions
        return 1 if (kind == "column") is name.endswith(".y") else 0 if sequence else None
    return dims((recipe, kind, sequence, True, False), name)


def refused(group: Any, count: int, rank: int) -> dict[str, torch.Tensor]:
    """Calls that are refused, on each rank alike and before anything is changed."""
    x = numbers(0, 4, 256)
    for make, recipe, sentence in (
        (lambda: te.Linear(96, 64, tp_group=group, parallel_mode="row", params_dtype=BF16), "delayed", "48 columns of"),
        (lambda: te.Linear(96, 64, tp_group=group, parallel_mode="column", params_dtype=BF16), "current", "32 rows of"),
        (lambda: te.Linear(96, 8, tp_group=group, parallel_mode="column", params_dtype=BF16), "bf16", "4 rows of"),
        (lambda: te.Linear(128, 64, tp_group=group, parallel_mode="row", params_dtype=BF16), "blocks", "64 columns of"),
        (lambda: te.Linear(256, 256, tp_size=2, parallel_mode="row"), "bf16", "tp_size=2 and no tp_group"),
    ):
        layer = make()
        on = te.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe])
        with pytest.raises((ValueError, RuntimeError), match=rf"^Linear: .*{sentence}"), on:
            layer(x[:, : layer.in_features])
        assert not layer.fp8_meta.get("scaling_fwd") or not layer.fp8_meta["scaling_fwd"].amax_history.any()
    odd = te.Linear(256, 64, tp_group=group, parallel_mode="row", sequence_parallel=True, params_dtype=BF16)
    with pytest.raises(ValueError, match=r"^Linear: inp has shape \[3, 128\] .* the sequence a multiple of 2"):
        odd(x[:3, :128])
    rowwise = te.Linear(256, 256, tp_group=group, parallel_mode="row", params_dtype=BF16)
    sentence = r"ranks that share tensors with quantizers of .* DelayedScaling"
    with pytest.raises(NotImplementedError, match=sentence), te.autocast(recipe=Float8RowwiseScaling()):
        rowwise(x[:, :128])
    for make, sentence in (
        (lambda: te.Linear(64, 65, tp_group=group, parallel_mode="column"), "out_features=65 with tp_size=2 and"),
        (lambda: te.LayerNormLinear(64, 64, tp_group=group, parallel_mode="row"), "parallel_mode='row' with tp_size=2"),
        (lambda: te.LayerNormMLP(64, 64, tp_group=group), "tp_size=2 with set_parallel_mode=False"),
        (lambda: te.DotProductAttention(3, 16, tp_group=group), "num_attention_heads=3 with tp_size=2; a multiple"),
        (lambda: te.DotProductAttention(4, 16, 1, tp_group=group), "num_gqa_groups=1 with tp_size=2; a multiple"),
        (lambda: te.DotProductAttention(4, 16, tp_size=2)(x, x, x), "tp_size=2 and no tp_group; set_tensor_parallel"),
        (lambda: _attention(group, num_gqa_groups=1), "num_gqa_groups=1 with tp_size=2"),
        (lambda: _attention(group, qk_norm_type="RMSNorm"), "qk_norm_type='RMSNorm' with tp_size=2 is not offered"),
        (
            lambda: _attention(group, fuse_qkv_params=True, qkv_weight_interleaved=False),
            "qkv_weight_interleaved=False with tp_size=2 is not offered",
        ),
    ):
        with pytest.raises((ValueError, NotImplementedError, RuntimeError), match=sentence):
            make()
    with (
        te.quantized_model_init(recipe=RECIPES["delayed"]),
        pytest.raises(NotImplementedError, match="is made outside"),
    ):
        te.Linear(256, 256, tp_group=group, parallel_mode="row")
    shared = "^collect_stats: 0 is shared by the ranks of a tensor-parallel group"
    with pytest.raises(NotImplementedError, match=shared), collect_stats(torch.nn.Sequential(rowwise)):
        pass
    with pytest.raises(NotImplementedError, match="core_attention_bias_type='alibi' with"):
        _attention(group)(numbers(0, 4, 1, 256), core_attention_bias_type="alibi")
    return {}


def _attention(group: Any, **more: Any) -> te.MultiheadAttention:
    return te.MultiheadAttention(256, 4, tp_group=group, set_parallel_mode=True, params_dtype=BF16, **more)


def core(group: Any, count: int, rank: int, recipe: Any, more: Any, forward: Any) -> dict[str, torch.Tensor]:
    """Attention between projections that others make, as Megatron-Core's are: each rank has some of the heads."""
    torch.manual_seed(3)
    given: dict[str, Any] = {"tp_group": group, "tp_size": count, "attention_dropout": 0.2, **dict(more)}
    layer = te.DotProductAttention(8, 16, 4, **given)
    sinks = layer.softmax_offset
    if isinstance(sinks, torch.nn.Parameter):
        with torch.no_grad():
            sinks.copy_(part(numbers(8, 8).float(), 0, rank, count))
    found: dict[str, torch.Tensor] = {}
    for step in range(2):
        q, k, v = (
            part(numbers(3 * step + n, 40, 2, heads, 16), 2, rank, count).requires_grad_()
            for n, heads in enumerate((8, 4, 4))
        )
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(q, k, v, **dict(forward))
        y.backward(part(numbers(9, 40, 2, 128), 2, rank, count))
        found |= {f"{step}.y": y.detach(), f"{step}.dq": q.grad, f"{step}.dk": k.grad, f"{step}.dv": v.grad}  # type: ignore[dict-item]
    if isinstance(sinks, torch.nn.Parameter):
        found["sinks"] = sinks.grad  # type: ignore[assignment]
    for key, meta in layer.fp8_meta.items():
        if key.startswith("scaling"):
            found |= {f"{key}.scale": meta.scale, f"{key}.history": meta.amax_history}
    return found


CORES = {
    "dropout": (None, (), ()),
    "sinks": (None, (("softmax_type", "learnable"), ("attn_mask_type", "no_mask")), ()),
    "alibi": (None, (), (("core_attention_bias_type", "alibi"),)),
    "FP8": (te.DelayedScaling(amax_history_len=2, fp8_dpa=True), (), ()),
}


def of_program(group: Any, count: int, rank: int, program: Any, *case: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = program(group, count, rank, *case)
    return found


def dims_of_banded(case: tuple[Any, ...], name: str) -> Any:
    return {"y": (1, 2), "dx": None}[name] if case[1] == "column" else {"y": None, "dx": 1}[name]


def dims_of_core(case: tuple[Any, ...], name: str) -> Any:
    found = {"y": 2, "dq": 2, "dk": 2, "dv": 2, "sinks": 0, "scale": None, "history": None}
    return found[name.rpartition(".")[2]]


WAYS = {one: (one,) for one in ("given later", "copied", "pickled", "computed again", "microbatches")}
BANDED = {f"{recipe} {mode}": (recipe, mode, 301) for recipe in RECIPES for mode in ("column", "row")}
SWIGLU = {"activation": "swiglu", "normalization": "RMSNorm", "bias": False}
EXCHANGED = {
    f"{recipe} {kind}{' sequence' * sequence} {more}": (recipe, kind, sequence, tuple(more.items()))
    for recipe in RECIPES
    for kind, sequence, more in (
        ("column", False, {}),
        ("row", True, {}),
        ("LayerNormMLP", False, {}),
        ("LayerNormMLP", True, SWIGLU),
    )
}
OF_TWO: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "a linear layer": (linear, dims, FAST),
    "layers with a norm": (normed, dims_of_normed, FAST_NORMED),
    "attention and layers": (attention, dims_of_attention, FAST_ATTENTION),
    "other ways to run a layer": (others, lambda _, name: dims_of_attention(("", "", True, ()), name), WAYS),
    "sums that go through the ranks in bands": (banded, dims_of_banded, BANDED),
    "sums of many rows": (exchanged, dims_of_exchanged, EXCHANGED),
    "attention of some heads": (core, dims_of_core, CORES),
}


def test_what_two_ranks_share_and_what_is_refused(tmp_path: Path) -> None:
    """All that two ranks do in the fast suite: starting them takes longer than most of it."""
    given = {
        f"{what}: {name}": (program, *case)
        for what, (program, _, cases) in OF_TWO.items()
        for name, case in cases.items()
    }
    found = on_ranks(2, tmp_path, of_program, given | {"refused": (refused,)})
    for name, whole in in_one(of_program, given).items():
        of_case, case = OF_TWO[name.partition(": ")[0]][1], given[name][1:]
        compare(name, whole, [one[name] for one in found], lambda tensor: of_case(case, tensor))  # noqa: B023


NO_DROPOUT = (("attention_dropout", 0.0), ("hidden_dropout", 0.0))
SEQUENCE_TOO = {name: CASES[name] for name in ("bf16 column sequence bias split", "current row sequence bias")}
ON_GPUS: dict[str, dict[str, tuple[Any, Any, dict[str, Any]]]] = {
    "without dropout": {
        "a linear layer": (linear, dims, FAST | SEQUENCE_TOO),
        "layers with a norm": (normed, dims_of_normed, FAST_NORMED),
        "attention and layers": (
            attention,
            dims_of_attention,
            {name: (*case[:3], (*case[3], *NO_DROPOUT), case[4]) for name, case in FAST_ATTENTION.items()},
        ),
        "sums that go through the ranks in bands": (banded, dims_of_banded, BANDED),
        "sums of many rows": (exchanged, dims_of_exchanged, EXCHANGED),
    },
    "with dropout": {
        "attention and layers": (attention, dims_of_attention, FAST_ATTENTION),
        "other ways to run a layer": (others, lambda _, name: dims_of_attention(("", "", True, ()), name), WAYS),
        "attention of some heads": (core, dims_of_core, {"dropout": CORES["dropout"]}),
    },
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", ON_GPUS)
def test_what_two_gpus_share(which: str, backend: str, tmp_path: Path) -> None:
    """Over NCCL, with the words of one process on the CPU; all of it twice, so that tapes are played.

    Over gloo the same on CPUs.
    """
    programs = ON_GPUS[which]
    given = {
        f"{what}: {name}": (program, *case)
        for what, (program, _, cases) in programs.items()
        for name, case in cases.items()
    }
    found = on_ranks(2, tmp_path, twice, given, backend)
    for name, whole in in_one(of_program, given).items():
        of_case, case = programs[name.partition(": ")[0]][1], given[name][1:]
        compare(name, again_too(whole), [one[name] for one in found], lambda tensor: of_case(case, tensor))  # noqa: B023


def test_the_bands_of_an_output() -> None:
    assert ordered_reduce.bands(300) == [(0, 128), (128, 256), (256, 300)]
    for rows in (1, 128, 640, 1000, 5000):
        cut = ordered_reduce.bands(rows)
        assert len(cut) <= ordered_reduce.BANDS
        assert [first for first, _ in cut] == [0, *(last for _, last in cut[:-1])]
        assert cut[-1][1] == rows
        assert len({last - first for first, last in cut[:-1]}) <= 1
        assert all(first % 128 == 0 for first, _ in cut)


@pytest.mark.parametrize("count", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("number", [1, 2, 3, 8])
def test_the_order_of_a_chain_finds_every_other_end(count: int, rounds: int, number: int) -> None:
    """Even where a rank does one thing after the other, and a send or a receive ends when its other end is there."""
    left = [list(ordered_reduce.schedule(rank, count, rounds, number)) for rank in range(count)]
    for rank, steps in enumerate(left):
        assert [(piece, band) for what, piece, band in steps if what == "part"] == list(
            itertools.product(range(rounds), range(number))
        )
        for piece, band in itertools.product(range(rounds), range(number)):
            part = steps.index(("part", piece, band))
            assert (("receive", piece, band) in steps[:part]) == bool(rank or piece)
            assert (("send", piece, band) in steps[part:]) == (rank + 1 < count or piece + 1 < rounds)
    while any(left):
        moved = False
        for rank, steps in enumerate(left):
            if not steps:
                continue
            what, piece, band = steps[0]
            to = (rank + 1) % count
            if what == "send" and left[to][:1] == [("receive", piece + (to == 0), band)]:
                left[to].pop(0)
            elif what != "part":
                continue
            steps.pop(0)
            moved = True
        assert moved, left


def test_what_a_rank_receives_ahead_is_bounded() -> None:
    for rank, most in ((0, 8), (1, ordered_reduce.AHEAD), (2, ordered_reduce.AHEAD), (3, 8)):
        held = largest = 0
        for what, piece, _ in ordered_reduce.schedule(rank, 4, 2, 8):
            held += {"receive": 1, "part": -bool(rank or piece), "send": 0}[what]
            largest = max(largest, held)
        assert largest == most


_DRY = """
import json
import torch
from shared.dry_gpu import DryGpu
import optimized, reference as te
from optimized.tapes import call_groups
from reference.nn.core import tensor_parallel
from reference.parallel import exchange, ordered_reduce
from reference.support import groups

calls = []


def noted(name):
    def call(*args):
        calls.append(name)

    call.__name__ = name
    return call


for name in ("_receive", "_send", "_end", "_hand_out", "_take", "_gather"):
    setattr(ordered_reduce, name, noted(name))
for name in ("_find_rooms", "_send", "_arrive", "_end"):
    setattr(exchange, name, noted("exchange" + name))
exchange.ROWS = {least}
groups.largest = noted("largest")
groups.group_of = lambda name: None
ordered_reduce.ranks_of = lambda group: ({rank}, 2)
tensor_parallel.check_same_on_ranks = lambda *args: None
with DryGpu() as gpu:
    gpu.tapes()
    layer = optimized.Linear(
        *(512, 512), parallel_mode="{mode}", tp_size=2, sequence_parallel=True, params_dtype=torch.bfloat16
    )
    layer.tp_name = "some"
    layer._take_roles()
    x = torch.empty({rows}, {width}, dtype=torch.bfloat16, device="cuda").requires_grad_()
    steps = []
    for step in range(6):
        gpu.lines.clear()
        calls.clear()
        with te.autocast(recipe=te.DelayedScaling(reduce_amax=False)):
            y = layer(x)
        y.backward(torch.empty_like(y))
        layer.zero_grad(set_to_none=True)
        x.grad = y = None
        played = [line.split() for line in gpu.lines if line.startswith("again ")]
        names = [one[2] if one[1] == "Collective" else one[1].partition(".")[0] for one in played]
        steps.append([calls.copy(), names, [group.usable for group in call_groups._groups.values()]])
print(json.dumps(steps))
"""


def of_notes(**given: Any) -> list[Any]:
    """The steps of `_DRY`: of each its calls, what its tapes have, and whether they can be used."""
    program = _DRY
    for name, value in given.items():
        program = program.replace(f"{{{name}}}", str(value))
    done = run(program)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found[-1][0] == ["largest", "largest"]  # of the update of scales, in each direction
    assert all(found[-1][2])
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("mode", ["row", "column"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_tape_contains_a_chain(rank: int, mode: str) -> None:
    """Of a GPU that only takes notes: the launches and what communicates lie on the tape in their order."""
    row = mode == "row"
    first, *_, last = of_notes(rank=rank, mode=mode, width=256 if row else 512, rows=600, least=10**9)
    bands = len(ordered_reduce.bands(600 if row else 1200))
    expected = {"_receive": bands, "_end": bands + 1} if rank else {"_send": bands, "_end": 2}  # one of the gathering
    for called in (first[0], last[1]):
        assert {name: called.count(name) for name in ("_receive", "_send", "_end") if name in called} == expected
        assert called.count("_take") == 1
        assert called.count("_hand_out") == (bands if rank else 0)
        assert called.count("_gather") == 1  # numbers for a bias's gradient, or codes
    assert last[1].count("gemm_fp8_part") == bands  # the last rank's with what follows it
    assert "end_gemm" not in last[1]
    at = last[1].index("gemm_fp8_part")
    assert last[1][at - 1] == "_end" if rank else last[1][at + 1] == "_send"


@pytest.mark.parametrize("mode", ["row", "column"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_tape_contains_what_ranks_exchange(rank: int, mode: str) -> None:
    """Both operands are sent before anything is waited for; of a column-parallel map dw is computed in between."""
    row = mode == "row"
    first, *_, last = of_notes(rank=rank, mode=mode, width=256 if row else 512, rows=512, least=256)
    for called in (first[0], last[1]):
        assert {name: called.count(f"exchange{name}") for name in ("_find_rooms", "_send", "_arrive", "_end")} == {
            "_find_rooms": 2,
            "_send": 2,
            "_arrive": 2,
            "_end": 2,
        }
        assert called.count("_gather") == 1  # numbers for a bias's gradient, or codes
        assert "_receive" not in called
    played = last[1]
    sent = [i for i, name in enumerate(played) if name == "exchange_send"]
    arrived, parts = played.index("exchange_arrive"), [i for i, name in enumerate(played) if name == "gemm_fp8_part"]
    assert len(parts) == 2  # a part of each rank's K
    assert max(sent) < arrived < parts[1 - rank] < played.index("exchange_end")
    assert rank or parts[0] < arrived  # rank 0 begins with its own
    assert row or "gemm_fp8" in played[max(sent) : arrived]
