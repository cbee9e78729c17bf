"""Stochastic depth: what `DropPath` drops, and how a `TransformerLayer` with `drop_path_rate` does."""

import copy
import pickle
from typing import Any

import pytest
import torch
from shared.transformer_layers import RECIPE, layer_of, numbers

import reference as te
from reference.nn.core.dropout import DropPath
from reference.ops.random.dropout import keep_scale

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.25, 0.1])
def test_entries_are_dropped_whole(p: float, dtype: torch.dtype, same_bits) -> None:
    path, x = DropPath(p, CPU), numbers(1, 4000, 3, 5).to(dtype).requires_grad_()
    state = path.generator.state.clone()
    y = path(x)
    scale = torch.tensor(keep_scale(p))
    kept = (y != 0).any(-1).any(-1)
    same_bits(y[kept], (x[kept].float() * scale).to(dtype))
    same_bits(y[~kept], x[~kept] * 0)
    assert abs(1 - kept.double().mean() - p) < 5 * (p * (1 - p) / 4000) ** 0.5, "five standard deviations"
    assert path.generator.state.tolist() == [state[0], state[1] + 1]
    g = numbers(2, 4000, 3, 5).to(dtype)
    y.backward(g)
    same_bits(x.grad, torch.where(kept.view(-1, 1, 1), (g.float() * scale).to(dtype), g * 0))
    # The mask is dropout's own of ones.
    same_bits(kept, (torch.ops.twin.bias_dropout_add(torch.ones(1, 4000), None, None, p, state) != 0)[0], "the mask")
    path.p = 0.0
    same_bits(path(x), x, "nothing to drop")


def test_a_vectors_entries_are_its_numbers(same_bits) -> None:
    """They are dropped as the rows of a matrix of one column."""
    path, x = DropPath(0.25, CPU), numbers(1, 4000)
    state = path.generator.state.clone()
    y = path(x)
    path.generator.state.copy_(state)
    same_bits(y, path(x[:, None])[:, 0])
    assert 0 < int((y == 0).sum()) < len(x)


def by_hand(layer: te.TransformerLayer, x: torch.Tensor) -> torch.Tensor:
    """The layer's formula over its submodules; it draws no seeds itself."""
    if layer.parallel_attention_mlp:
        both = x.view_as(x)
        return x + layer.drop_path(layer.self_attention(both) + layer.layernorm_mlp(both))
    y, bias = layer.self_attention(x)
    h = x + layer.drop_path(y + bias)
    y, bias = layer.layernorm_mlp(h)
    return h + layer.drop_path(y + bias)


@pytest.mark.parametrize("arguments", [{}, {"parallel_attention_mlp": True}], ids=["in turn", "parallel"])
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_a_layer_is_its_formula(layout: str, arguments: dict[str, Any], same_bits) -> None:
    layer = layer_of(drop_path_rate=0.4, attn_input_format=layout, **arguments)
    found = []
    for run in (layer, lambda x: by_hand(layer, x)):
        layer.zero_grad()
        te.random.seed(3, layer)
        x = numbers(1, 24, 6, 64).bfloat16().requires_grad_()
        with te.random.undrawn():
            y = run(x)
        y.backward(numbers(2, *y.shape).bfloat16())
        found.append([y, x.grad, *(p.grad for p in layer.parameters())])
    for a, b in zip(*found, strict=True):
        same_bits(a, b)
    whole = (found[0][0] == x).all(-1).all(-1)
    assert 0 < int(whole.sum()) < len(x), "entries of the first dimension that both halves pass by"


def test_seeds_decide_and_evaluation_drops_nothing(same_bits) -> None:
    layer, plain = layer_of(drop_path_rate=0.4), layer_of()
    x = numbers(1, 24, 2, 64).bfloat16()
    outs = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        outs.append(layer(x))
    same_bits(outs[0], outs[2])
    assert not torch.equal(outs[0], outs[1])
    torch.manual_seed(1)
    layer(x)
    assert not torch.equal(layer(x), outs[0]), "another forward, another mask"
    same_bits(layer.eval()(x), plain.eval()(x))
    assert plain.drop_path is None
    assert list(layer.state_dict()) == list(plain.state_dict()), "no entries of its own, as in Transformer Engine"


def test_a_rate_of_one_drops_everything(same_bits) -> None:
    """As in the last layer of a schedule that ends at 1: in training the residual is left."""
    layer, plain = layer_of(drop_path_rate=1.0), layer_of()
    x = numbers(1, 24, 2, 64).bfloat16().requires_grad_()
    y = layer(x)
    same_bits(y, x)
    y.backward(torch.ones_like(y))
    assert x.grad.eq(1).all()
    assert not any(p.grad.any() for p in layer.parameters())
    same_bits(layer.eval()(x), plain.eval()(x))


def test_cross_attention_is_not_dropped(same_bits) -> None:
    """As in Transformer Engine: with an MLP that is zero, and self-attention that is dropped, the rest is left."""
    layer = layer_of(drop_path_rate=0.999, layer_type="decoder")
    x, source = numbers(1, 4, 2, 64).bfloat16(), numbers(2, 8, 2, 64).bfloat16()
    torch.manual_seed(0)
    y, (crossed, bias) = layer(x, encoder_output=source), layer.inter_attention(x, encoder_output=source)
    same_bits(y, x + (crossed + bias))


@pytest.mark.parametrize("fp8", [False, True])
def test_recomputation_copies_and_saved_states(fp8: bool, same_bits) -> None:
    layer = layer_of(drop_path_rate=0.4, hidden_dropout=0.1)
    copies = [layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)]
    runs = [
        lambda one, x: one(x),
        lambda one, x: te.checkpoint(one, x),
        lambda one, x: torch.utils.checkpoint.checkpoint(one, x, use_reentrant=False),
        lambda one, x: one(x),
    ]
    torch.manual_seed(5)
    saved = te.random.get_state(layer)
    assert "drop_path.generator" in saved
    found = []
    for one, run in zip(copies, runs, strict=True):
        te.random.set_state(saved, one)
        x = numbers(1, 24, 2, 64).bfloat16().requires_grad_()
        with te.autocast(enabled=fp8, recipe=RECIPE):
            y = run(one, x)
        y.backward(numbers(2, *y.shape).bfloat16())
        found.append([y, x.grad, *(p.grad for p in one.parameters()), torch.get_rng_state()])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            same_bits(a, b)
