"""A recipe answers for a role by name, and a layer has as many as it needs."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from shared.bits import assert_same_bits

import reference as te
from reference.nn.core.autograd import differentiable, wanted
from reference.nn.core.context import ModuleContext, WeightRequest, quantize_weights
from reference.nn.core.module import TransformerEngineBaseModule
from reference.recipes.quantized import dgrad, fprop
from reference.recipes.quantizer import HighPrecision, Quantizer
from reference.recipes.roles import Role, Roles, linear_map

BF16 = torch.bfloat16


@dataclass(unsafe_hash=True)
class FirstHalf(te.recipe.DelayedScaling):
    """fc1 in FP8, fc2 in bf16."""

    def quantizer(self, role: Role, state: Any) -> Quantizer:
        return HighPrecision(BF16) if role.part == "fc2" else super().quantizer(role, state)


def mlp() -> Any:
    torch.manual_seed(0)
    return te.LayerNormMLP(32, 48, params_dtype=BF16)


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def halves(layer: Any) -> tuple[Any, Any]:
    """The MLP's two halves as layers of their own."""
    fc1, fc2 = te.LayerNormLinear(32, 48, params_dtype=BF16), te.Linear(48, 32, params_dtype=BF16)
    with torch.no_grad():
        for to, name in ((fc1, "fc1"), (fc2, "fc2")):
            to.weight.copy_(getattr(layer, f"{name}_weight"))
            to.bias.copy_(getattr(layer, f"{name}_bias"))
    return fc1, fc2


def test_a_recipe_chooses_by_role() -> None:
    """An MLP with its first GEMMs in FP8 and its second in 16 bits has the bits of two such layers."""
    layer, activation = mlp(), te.ops.GELU()
    fc1, fc2 = halves(layer)
    for step in range(3):
        x, g = numbers(step, 24, 32), numbers(step + 10, 24, 32)
        one, two = x.clone().requires_grad_(), x.clone().requires_grad_()
        with te.autocast(recipe=FirstHalf()):
            y = layer(one)
        with te.autocast(recipe=te.DelayedScaling()):
            h = fc1(two)
        expected = fc2(activation(h))
        assert_same_bits(y, expected)
        for out in (y, expected):
            out.backward(g)
        pairs = [(one.grad, two.grad), (layer.layer_norm_weight.grad, fc1.layer_norm_weight.grad)]
        for name, of in (("fc1", fc1), ("fc2", fc2)):
            pairs += [(getattr(layer, f"{name}_{p}").grad, getattr(of, p).grad) for p in ("weight", "bias")]
        for a, b in pairs:
            assert_same_bits(a, b)
    scales = layer.fp8_meta["scaling_fwd"].scale.tolist()
    assert [scale != 1 for scale in scales] == [True, True, False, False, False, False]


def test_what_is_not_in_fp8_is_neither_kept_for_later_microbatches_nor_read_as_codes() -> None:
    """Of the same recipe: casts for microbatches, and weights that are kept in FP8."""
    layer, x = mlp(), numbers(1, 24, 32)
    with te.autocast(recipe=FirstHalf()):
        first = layer(x, is_first_microbatch=True)
        second = layer(x, is_first_microbatch=False)
    assert_same_bits(first, second)
    assert [name for name, *_ in layer._store.casts] == ["fc1_weight"]
    torch.manual_seed(0)
    with te.quantized_model_init():
        kept: Any = te.LayerNormMLP(32, 48, params_dtype=BF16)
    plain = mlp()
    with torch.no_grad():
        for name in ("fc1_weight", "fc2_weight"):
            getattr(plain, name).copy_(getattr(kept, name).dequantize())
    for model in (kept, plain):
        with te.autocast(recipe=FirstHalf()):
            model.result = model(x.clone().requires_grad_())
        model.result.sum().backward()
    assert_same_bits(kept.result, plain.result)
    assert_same_bits(kept.fc2_bias.grad, plain.fc2_bias.grad)
    assert_same_bits(kept.fc1_bias.grad, plain.fc1_bias.grad)


class _Plan(NamedTuple):
    dtype: torch.dtype
    needs: tuple[bool, ...]
    gemms: Any
    sizes: tuple[int, ...]


def _forward(plan: _Plan, context: ModuleContext, x: torch.Tensor, *weights: torch.Tensor) -> Any:
    """Rows of x, in groups of `sizes`, each through its expert."""
    gemms = list(context.gemms.values())
    every = [WeightRequest(context, gemm, w, True) for gemm, w in zip(gemms, weights, strict=True)]
    rows = [gemm.input.quantize(part, True) for gemm, part in zip(gemms, x.split(plan.sizes), strict=True)]
    ws = quantize_weights(*every)
    ys = [fprop(q, w, None, plan.dtype, gemm.how) for gemm, q, w in zip(gemms, rows, ws, strict=True)]
    return torch.cat(ys), (tuple([q.column for q in rows]), tuple([w.column for w in ws]))


def _backward(plan: _Plan, context: ModuleContext, saved: Any, grad: torch.Tensor) -> Any:
    dxs, dws = [], []
    for gemm, part, x, w in zip(context.gemms.values(), grad.split(plan.sizes), *saved, strict=True):
        g, _ = gemm.grad.grad(part.contiguous(), transpose=True, dbias=False)
        dxs.append(dgrad(g, w, plan.dtype, gemm.how))
        dws.append(context.weight_grad(gemm, g, x, plan.dtype))
    return torch.cat(dxs), *dws


class Experts(TransformerEngineBaseModule):
    """Several linear maps, each for rows of its own, as a grouped linear layer has them."""

    fp8_sizes = ("features",)
    features = 32

    def __init__(self, count: int) -> None:
        self.count = count
        super().__init__()
        for i in range(count):
            weight = torch.nn.Parameter(numbers(100 + i, 16, 32))
            self.register_parameter(f"weight{i}", weight)

    def own_roles(self) -> Roles:
        return Roles(tuple([linear_map(f"expert {i}", f"weight{i}", i) for i in range(self.count)]))

    def forward(self, x: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
        context = self.context(x.dtype, None)
        tensors = (x, *[getattr(self, f"weight{i}") for i in range(self.count)])
        plan = _Plan(x.dtype, wanted(*tensors), context.key, sizes)
        return differentiable(_forward, _backward, plan, context, *tensors)


@pytest.mark.parametrize("recipe", [te.DelayedScaling(amax_history_len=3), te.recipe.Float8CurrentScaling(), None])
def test_any_number_of_gemms(recipe: Any) -> None:
    """Five experts in one layer have the bits of five layers, scales and checkpoints included."""
    experts, sizes = Experts(5), (3, 17, 8, 1, 16)
    layers = [te.Linear(32, 16, bias=False, params_dtype=BF16) for _ in sizes]
    with torch.no_grad():
        for i, layer in enumerate(layers):
            layer.weight.copy_(getattr(experts, f"weight{i}"))
    for step in range(4):
        x, g = numbers(step, sum(sizes), 32), numbers(step + 10, sum(sizes), 16)
        one, two = x.clone().requires_grad_(), x.clone().requires_grad_()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = experts(one, sizes)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            expected = torch.cat([layer(part) for layer, part in zip(layers, two.split(sizes), strict=True)])
        for out in (y, expected):
            out.backward(g)
        pairs = [(y, expected), (one.grad, two.grad)]
        pairs += [(getattr(experts, f"weight{i}").grad, layer.weight.grad) for i, layer in enumerate(layers)]
        for a, b in pairs:
            assert_same_bits(a, b)
    other = Experts(5)
    other.load_state_dict(experts.state_dict())
    assert_same_bits(other.get_extra_state(), experts.get_extra_state())
    if isinstance(recipe, te.DelayedScaling):
        found = other.fp8_meta["scaling_fwd"].scale.view(5, 3)[:, :2]
        assert_same_bits(found, torch.stack([layer.fp8_meta["scaling_fwd"].scale[:2] for layer in layers]))
        with te.collect_stats(experts, every=1) as stats, te.autocast(recipe=recipe):
            experts(x, sizes).sum().backward()
        found_parts = {(one.part, one.role) for one in stats.samples()}
        assert found_parts == {(f"expert {i}", role) for i in range(5) for role in ("input", "weight", "grad_output")}


def test_each_role_has_a_name_and_a_column_of_its_own() -> None:
    layer = te.TransformerLayer(32, 48, 2, params_dtype=BF16)
    for part in (*layer.modules(), te.ops.Quantize(), Experts(3)):
        roles: Roles = getattr(part, "roles", Roles())
        names, columns = zip(*[(one.name, (one.is_forward, one.column)) for one in roles.all] or [("", 0)], strict=True)
        assert len(set(names)) == len(names)
        assert len(set(columns)) == len(columns)
        for key, count in part.state_columns().items() if roles.all else ():
            assert all(one.column < count for one in roles.all if one.is_forward == (key == "scaling_fwd"))
