"""A recomputation reads what its first run read, or says what has changed since."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import reference as te

BF16 = torch.bfloat16
CHANGES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda layer: layer.weight.mul_(2),
    "another parameter": lambda layer: setattr(layer, "weight", torch.nn.Parameter(layer.weight * 2)),
    ".data": lambda layer: setattr(layer.weight, "data", layer.weight.data * 2),
    "a bias": lambda layer: layer.bias.add_(1),
}
RUNS: dict[str, Callable[..., torch.Tensor]] = {
    "te.checkpoint": te.checkpoint,
    "of a function": lambda layer, x: te.checkpoint(lambda y: layer(y), x),
    "of a partial": lambda layer, x: te.checkpoint(functools.partial(layer.forward, is_first_microbatch=True), x),
    "nested": lambda layer, x: te.checkpoint(lambda y: te.checkpoint(layer, y), x),
    "PyTorch's": lambda layer, x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False),
}
SENTENCE = r"^checkpoint: .*{} \[.*\] was {} between the first run and its recomputation in backward, which would comp"


def data() -> torch.Tensor:
    return torch.linspace(-2, 2, 32 * 32).view(32, 32).to(BF16).requires_grad_()


@pytest.mark.parametrize("kind", ["fp8", "16 bits", "weights in fp8"])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_layers_weights(change: str, run: str, kind: str) -> None:
    with te.quantized_model_init(enabled=kind == "weights in fp8"):
        layer = te.Linear(32, 32, params_dtype=BF16)
    with te.autocast(enabled=kind != "16 bits"):
        y = RUNS[run](layer, data())
    with torch.no_grad():
        if kind == "weights in fp8" and change in (".data", "another parameter"):  # it takes no plain numbers
            layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
        else:
            CHANGES[change](layer)
    how = "changed in place" if change in ("in place", "a bias") else "replaced"
    with pytest.raises(RuntimeError, match=SENTENCE.format("bias" if change == "a bias" else "weight", how)):
        y.sum().backward()


@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD", "torch"])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "weights in fp8"])
@pytest.mark.parametrize("run", ["te.checkpoint", "PyTorch's"])
def test_an_optimizers_step_between_forward_and_backward(run: str, kind: str, name: str) -> None:
    if kind == "weights in fp8" and name != "FusedAdam":
        pytest.skip("they have no master weights")
    with te.quantized_model_init(enabled=kind == "weights in fp8"):
        layer = te.Linear(32, 32, params_dtype=torch.float32 if kind == "fp32" else BF16)
    master = {"master_weights": True} if name == "FusedAdam" and kind != "fp32" else {}
    made: Any = {"FusedAdam": te.optimizers.FusedAdam, "FusedSGD": te.optimizers.FusedSGD, "torch": torch.optim.SGD}
    optimizer = made[name](layer.parameters(), lr=0.5, **master)
    with te.autocast():
        layer(data()).sum().backward()
        y = RUNS[run](layer, data().to(layer.bias.dtype))
    optimizer.step()
    with pytest.raises(RuntimeError, match=SENTENCE.format("weight", "changed in place")):
        y.sum().backward()


def block() -> Any:
    torch.manual_seed(2)
    layers: list[Any] = [torch.nn.Linear(16, 16), torch.nn.GELU(), te.LayerNorm(16, params_dtype=torch.float32)]
    return torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(16, affine=False).eval())


OF_BLOCK: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "a weight": (lambda block, x: block[0].weight.mul_(2), "0.weight"),
    "a bias": (lambda block, x: block[0].bias.add_(2), "0.bias"),
    "a norm's weight": (lambda block, x: block[2].weight.mul_(2), "2.weight"),
    "a buffer": (lambda block, x: block[3].running_mean.add_(2), "3.running_mean"),
    "an input": (lambda block, x: x.mul_(2), "an input"),
}


@pytest.mark.parametrize("what", OF_BLOCK)
@pytest.mark.parametrize("nested", [False, True])
def test_modules_of_torch_and_inputs_by_name(what: str, nested: bool) -> None:
    found, x = block(), torch.ones(4, 16)
    change, name = OF_BLOCK[what]
    if nested and what == "an input":
        y = te.checkpoint(lambda more: te.checkpoint(found, input=more["x"]), {"x": x})
    elif nested:
        y = te.checkpoint(lambda x: te.checkpoint(found, x), x)
    else:
        y = te.checkpoint(found, input=x)
    with torch.no_grad():
        change(found, x)
    with pytest.raises(RuntimeError, match=SENTENCE.format(name, "changed in place")):
        y.sum().backward()


@pytest.mark.parametrize("autocast", [False, True])
def test_what_a_function_reads_of_torchs_layers(autocast: bool) -> None:
    first, second, scale = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16), torch.ones(16, requires_grad=True)
    for changed, name in ((first.weight, "first.weight"), (second.weight, "second.weight"), (scale, "scale")):
        with torch.autocast("cpu", BF16, enabled=autocast):
            y = te.checkpoint(lambda x: second(first(x) * scale), torch.ones(4, 16, requires_grad=True))
        with torch.no_grad():
            changed.mul_(2)
        with pytest.raises(RuntimeError, match=SENTENCE.format(name, "changed in place")):
            y.sum().backward()


@pytest.mark.parametrize("part", ["fc1_weight", "fc2_weight", "layer_norm_weight", "fc2_bias"])
def test_a_layer_that_checkpoints_itself(part: str) -> None:
    layer = te.LayerNormMLP(32, 64, params_dtype=BF16, checkpoint=True)
    with te.autocast():
        y = layer(data())
    with torch.no_grad():
        getattr(layer, part).add_(1)
    with pytest.raises(RuntimeError, match=SENTENCE.format(f"LayerNormMLP's {part}", "changed in place")):
        y.sum().backward()


def test_buffers_that_the_function_changes_itself_are_its_own() -> None:
    found = block().train()
    x = torch.linspace(-1, 1, 64).view(4, 16).requires_grad_()
    one, two = te.checkpoint(found, x), te.checkpoint(found, x * 2)
    (one + two).sum().backward()


def test_an_optimizer_inside_of_the_backward() -> None:
    """Each layer's step is made as soon as its gradient is there: before earlier layers are recomputed."""
    model = torch.nn.ModuleList([te.Linear(32, 32, params_dtype=BF16) for _ in range(3)])

    def step(weight: Any) -> None:
        with torch.no_grad():
            weight.sub_(weight.grad, alpha=0.1)
        weight.grad = None

    grads = []
    for checkpointed in (False, True):
        x, y = data(), None
        one = copy.deepcopy(model)
        for weight in one.parameters():
            weight.register_post_accumulate_grad_hook(step)
        with te.autocast():
            y = x
            for layer in one:
                y = te.checkpoint(lambda y, layer=layer: layer(y), y) if checkpointed else layer(y)
        y.sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_changes_of_what_is_not_read_or_after_the_backward_are_accepted() -> None:
    layer, other = te.Linear(32, 32, params_dtype=BF16), te.Linear(32, 32, params_dtype=BF16)
    with te.autocast():
        y = te.checkpoint(layer, data())
    with torch.no_grad():
        other.weight.mul_(2)
        layer.weight.clone().mul_(2)
    for retain in (True, False):
        y.sum().backward(retain_graph=retain)
    with torch.no_grad():
        layer.weight.mul_(2)
    with te.autocast():
        te.checkpoint(layer, data()).sum().backward()


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("choice", [None, te.recipe.Float8CurrentScaling(), te.DelayedScaling(margin=3)])
def test_a_choice_by_layer_after_the_first_run_is_not_the_recomputations(run: str, choice: Any, same_bits: Any) -> None:
    layer = te.Linear(32, 32, params_dtype=torch.bfloat16)
    grads = []
    for later in (False, True):
        one = copy.deepcopy(layer)
        with te.autocast():
            y = RUNS[run](one, data())
        if later:
            te.recipe.by_layer(one, {"": choice})
        y.sum().backward()
        grads.append(one.weight.grad)
    same_bits(*grads)
