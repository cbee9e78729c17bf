"""`make_graphed_callables`'s hooks, the backward that may run again, and captures that fail."""

import copy
from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits
from shared.graph_cases import BF16, HIDDEN, RECIPE, pretended, state

import reference as te
from reference.state import graph_seeds

__all__ = ["pretended"]  # a fixture

NAMES = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


def layers(package: Any = te, count: int = 2, device: str = "cpu") -> list[torch.nn.Module]:
    torch.manual_seed(2)
    return [package.LayerNormLinear(HIDDEN, HIDDEN, params_dtype=BF16, device=device) for _ in range(count)]


def sample(device: str = "cpu") -> torch.Tensor:
    return torch.ones(4, HIDDEN, dtype=BF16, device=device, requires_grad=True)


def noted(modules: list[torch.nn.Module], **options: Any) -> tuple[Any, list[str]]:
    """The callables, and what the hooks note."""
    seen: list[str] = []
    hooks = [
        {
            name: {0: lambda module, name=name, i=i: seen.append(f"{name[:-6]} {modules.index(module)}")}
            for name in NAMES
        }
        for i in range(len(modules))
    ]

    def around(name: str) -> Any:
        return lambda: seen.append(name)

    made = te.make_graphed_callables(
        modules,
        num_warmup_iters=2,
        pre_warmup_hook=around("before"),
        post_warmup_hook=around("after"),
        capture_time_hooks=hooks,
        **options,
    )
    return made, seen


def both(i: int) -> list[str]:
    return [f"forward_pre {i}", f"forward {i}", f"backward_pre {i}", f"backward {i}"]


@pytest.mark.usefixtures("pretended")
def test_hooks_run_beside_warm_up_and_capture() -> None:
    made, seen = noted(layers(), sample_args=[(sample(),)] * 2)
    forwards, backwards = both(0)[:2] + both(1)[:2], both(1)[2:] + both(0)[2:]
    assert seen == ["before", *both(0) * 2, *both(1) * 2, "after", *forwards, *backwards]
    made[1](made[0](sample())).sum().backward()
    assert len(seen) == 26, "a replay runs none"


@pytest.mark.gpu
def test_hooks_run_outside_of_a_real_capture() -> None:
    modules = layers(__import__("optimized"), device="cuda")
    capturing: list[bool] = []
    hook = {name: {0: lambda module: capturing.append(graph_seeds.capturing())} for name in NAMES}
    eager = copy.deepcopy(modules)
    made = te.make_graphed_callables(modules, [(sample("cuda"),)] * 2, capture_time_hooks=[hook, None])
    assert capturing == [False] * 4 * 4
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert_same_bits(made[1](made[0](sample("cuda"))), eager[1](eager[0](sample("cuda"))))


@pytest.mark.usefixtures("pretended")
def test_hooks_run_for_each_pass_of_a_schedule() -> None:
    _, seen = noted(layers(), sample_args=[(sample(),)] * 4, _order=[1, 2, 1, 2, -2, -1, -2, -1])
    passes = [0, 0, 1, 1]
    warm = [event for i in passes for event in both(i) * 2]
    assert seen == ["before", *warm, "after", *(event for i in passes for event in both(i))]


@pytest.mark.sample(3)
@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("where", ["forward_hooks", "backward_pre_hooks", "post_warmup_hook", "forward"])
@pytest.mark.parametrize("ordered", [False, True])
def test_what_fails_leaves_the_modules_as_they_were(where: str, ordered: bool) -> None:
    modules = layers()
    modules[0].weight.main_grad = torch.ones(HIDDEN, HIDDEN)
    options: dict[str, Any] = {"_order": [1, 2, -2, -1]} if ordered else {}

    def fails(*_: Any) -> int:
        if where == "post_warmup_hook":
            raise KeyError(where)
        return 3

    if where == "forward":
        modules[1].forward = lambda x: x.no_such_method()  # type: ignore[method-assign]
    elif where == "post_warmup_hook":
        options[where] = fails
    else:
        options["capture_time_hooks"] = [None, {where: {"mine": fails}}]
    own = modules[1].forward if where == "forward" else None
    with te.autocast(recipe=RECIPE):
        modules[0](sample())
    before = state(modules[0])
    error, words = {
        "forward": (AttributeError, "no_such_method"),
        "post_warmup_hook": (KeyError, where),
    }.get(where, (RuntimeError, f"a hook of capture_time_hooks, '{where}' of LayerNormLinear, returned 3; None is"))
    with pytest.raises(error, match=words):
        te.make_graphed_callables(modules, [(sample(),)] * 2, enabled=True, recipe=RECIPE, **options)
    assert "forward" not in vars(modules[0])
    assert vars(modules[1]).get("forward") is own
    for a, b in zip(state(modules[0]), before, strict=True):
        assert_same_bits(a, b)


@pytest.mark.usefixtures("pretended")
def test_modules_that_no_graph_can_stand_for_are_refused() -> None:
    one = layers(count=1)[0]
    handle = one.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="LayerNormLinear has hooks, which its graph would not run; a module withou"):
        te.make_graphed_callables(one, (sample(),))
    handle.remove()
    one.register_buffer("other", torch.ones(1, requires_grad=True))
    with pytest.raises(RuntimeError, match="LayerNormLinear has a buffer with requires_grad=True; only parameters are"):
        te.make_graphed_callables(one, (sample(),))


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
def test_a_backward_of_a_graph_that_retains_runs_again(fp8: bool) -> None:
    import optimized

    torch.manual_seed(2)
    layer = optimized.TransformerLayer(HIDDEN, 64, 2, params_dtype=BF16)
    eager = copy.deepcopy(layer)
    x = torch.ones(4, 2, HIDDEN, dtype=BF16, device="cuda", requires_grad=True)
    te.make_graphed_callables(layer, (x,), enabled=fp8, recipe=RECIPE, retain_graph_in_backward=True)
    assert layer.forward.__self__.saved
    found = []
    for one in (eager, layer):
        torch.manual_seed(5)
        given = torch.randn(4, 2, HIDDEN, device="cuda").to(BF16).requires_grad_()
        with te.autocast(enabled=fp8, recipe=RECIPE):
            y = one(given)
        y.backward(torch.ones_like(y), retain_graph=True)
        y.backward(torch.full_like(y, 0.5))
        found.append([y, given.grad, *(p.grad for p in one.parameters())])
    for a, b in zip(*found, strict=True):
        assert_same_bits(a, b)
    layer.reset()


@pytest.mark.usefixtures("pretended")
def test_what_a_graph_that_retains_has_saved_lives_until_its_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_seeds, "present", graph_seeds.Draws)
    layer = layers(count=1)[0]
    te.make_graphed_callables(layer, (sample(),), num_warmup_iters=0, retain_graph_in_backward=True)
    graph = layer.forward.__self__
    assert any(one.shape == (4, HIDDEN) for one in graph.saved)
    layer.reset()
    assert graph.saved is None
