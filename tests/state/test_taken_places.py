"""Places of gradients, in one process: who writes there, and the words of a backward without them.

DDP's own part is in test_gradient_places.py, tapes' in tests/tapes/test_relocation.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits
from torch.utils._python_dispatch import TorchDispatchMode

import reference as te
from reference.state import gradient_places
from reference.state.gradient_places import offering, place_of

BF16, F32 = torch.bfloat16, torch.float32


def layer_of(**options: Any) -> Any:
    torch.manual_seed(1)
    return te.Linear(32, 32, **{"params_dtype": BF16, **options})


def x_of(dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(2)).to(dtype)


def place_for(p: torch.Tensor) -> torch.Tensor:
    """In the middle of a bucket."""
    return torch.full((3 * p.numel(),), 7.0, dtype=p.dtype)[p.numel() : 2 * p.numel()].view(p.shape)


class Sees(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def once(layer: Any) -> None:
    layer(x_of()).sum().backward()


def twice(layer: Any) -> None:
    layer(torch.tanh(layer(x_of()))).sum().backward()


def one_after_the_other(layer: Any) -> None:
    for factor in (1.0, 3.0):
        (factor * layer(x_of())).sum().backward()


def with_torchs(layer: Any) -> None:
    (layer(x_of()).sum() + (layer.weight * layer.weight).sum()).backward()


def observed(layer: Any) -> None:
    with Sees():
        once(layer)


def of_some(layer: Any) -> None:
    layer(x_of()).sum().backward(inputs=[layer.bias])


def in_fp8(layer: Any) -> None:
    with te.autocast(recipe=te.recipe.Float8CurrentScaling()):
        y = layer(x_of(layer.weight.dtype))
    y.sum().backward()


CASES: dict[str, tuple[Callable[[Any], None], dict[str, Any], bool]] = {  # what runs, the layer, whether it ends there
    "once": (once, {}, True),
    "in FP8": (in_fp8, {}, True),
    "fp32": (in_fp8, {"params_dtype": F32}, True),
    "twice": (twice, {}, False),
    "one after the other": (one_after_the_other, {}, True),
    "with torch's": (with_torchs, {}, False),
    "observed": (observed, {}, False),
    "of another tensor": (of_some, {}, False),
}


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_has_the_words_of_one_elsewhere(name: str) -> None:
    run, options, there = CASES[name]
    alone, layer = layer_of(**options), layer_of(**options)
    run(alone)
    place = place_for(layer.weight)
    with offering({layer.weight: place}):
        run(layer)
    assert not gradient_places.offered
    for one, other in zip(layer.parameters(), alone.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            assert_same_bits(one.grad, other.grad)
    if layer.weight.grad is not None:
        assert (layer.weight.grad.data_ptr() == place.data_ptr()) == there
    rest = place._base
    assert rest is not None
    assert bool((rest[: place.numel()] == 7).all() and (rest[2 * place.numel() :] == 7).all())


def test_a_gradient_is_not_added_to_itself() -> None:
    """Where `.grad` lies in the place already, what it holds is added to."""
    layer, alone = layer_of(), layer_of()
    once(alone)
    layer.weight.grad = place = place_for(layer.weight)
    wanted = place + alone.weight.grad
    with offering({layer.weight: place}):
        once(layer)
    assert_same_bits(layer.weight.grad, wanted)


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_what_a_hook_gets_is_no_place(hook: str) -> None:
    layer, kept = layer_of(), []
    getattr(layer.weight, hook)(lambda x: kept.append(x if x.grad is None else x.grad))
    place = place_for(layer.weight)
    with offering({layer.weight: place}):
        once(layer)
    assert len(kept) == 1
    assert {x.data_ptr() for x in kept}.isdisjoint({place.data_ptr()})


def test_what_the_user_asked_for_is_no_place() -> None:
    layer = layer_of()
    place = place_for(layer.weight)
    with offering({layer.weight: place}):
        (found,) = torch.autograd.grad(layer(x_of()).sum(), layer.weight)
        assert layer.weight in gradient_places.offered
    assert_same_bits(place, torch.full_like(place, 7.0))
    assert found.data_ptr() != place.data_ptr()


def test_the_gradient_of_another_tensor_is_not_the_weights() -> None:
    """functional_call puts a tensor in the weight's place while a layer runs forward."""
    layer = layer_of()
    place, other = place_for(layer.weight), layer.weight.detach().clone().requires_grad_()
    with offering({layer.weight: place}):
        torch.func.functional_call(layer, {"weight": other}, (x_of(),)).sum().backward()
    assert layer.weight.grad is None
    assert other.grad is not None
    assert_same_bits(place, torch.full_like(place, 7.0))


def test_a_weight_in_parts_has_gradients_of_its_own() -> None:
    layer, alone = (layer_of(parameters_split=("a", "b")) for _ in range(2))
    once(alone)
    with offering({p: place_for(p) for p in layer.parameters()}):
        once(layer)
    for one, other in zip(layer.parameters(), alone.parameters(), strict=True):
        assert_same_bits(one.grad, other.grad)


def test_an_error_in_a_backward_leaves_no_place_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from reference.nn.core import autograd

    layer = layer_of()
    y = layer(x_of()).sum()
    with monkeypatch.context() as patched, offering({layer.weight: place_for(layer.weight)}):
        patched.setattr(autograd.runner, "backward", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            y.backward()
    assert gradient_places.here.taken == ()
    assert not gradient_places.offered


def test_what_is_a_place() -> None:
    p, flat = torch.nn.Parameter(torch.zeros(16, 32, dtype=BF16)), torch.zeros(2048, dtype=BF16)
    there = place_of(p, flat[256:768].view(16, 32))
    assert there is not None
    assert there.data_ptr() == flat[256:].data_ptr()
    assert place_of(p, flat[255:767].view(16, 32)) is None  # no multiple of 512 bytes
    assert place_of(p, flat[:512].view(32, 16)) is None
    assert place_of(p, flat[:512].view(16, 32).float()) is None
    assert place_of(p, flat[:512].view(32, 16).t()) is None
    assert place_of(torch.nn.Parameter(p.detach().t()), flat[:512].view(32, 16)) is None
    assert place_of(torch.nn.Parameter(torch.zeros(512, dtype=BF16)), flat[:512]) is None
    assert place_of(torch.nn.Parameter(torch.zeros(0, 4, dtype=BF16)), flat[:0].view(0, 4)) is None
