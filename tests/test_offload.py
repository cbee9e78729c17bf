"""`get_cpu_offload_context`: what it moves, when it comes back, and that no bit changes."""

import gc
import weakref
from typing import Any

import pytest
import torch
from transformer_layers import RECIPE, layer_of, numbers

import reference as te
from reference import offload

OFF = {"enabled": False}
LAYERS = 3


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Everything but parameters moves, on a CPU, too; and what happens is noted."""
    events: list[str] = []

    class Kept(offload._Kept):
        def __init__(self, t: torch.Tensor) -> None:
            super().__init__(t)
            events.append("out")

        def fetch(self) -> None:
            if self.back is None:
                events.append("back")
            super().fetch()

    monkeypatch.setattr(offload, "_Kept", Kept)
    monkeypatch.setattr(offload, "_moves", lambda t: not isinstance(t, torch.nn.Parameter) and t.numel() > 64)
    return events


def train(settings: dict[str, Any], fp8: bool, device: str, steps: int = 2, **arguments: Any) -> list[torch.Tensor]:
    layers = torch.nn.ModuleList([layer_of(hidden_dropout=0.1, **arguments) for _ in range(LAYERS)]).to(device)
    context, synchronize = te.get_cpu_offload_context(**settings)
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        layers.zero_grad()
        x = given = numbers(step, 24, 2, 64).bfloat16().to(device).requires_grad_()
        with te.autocast(enabled=fp8, recipe=RECIPE):
            for layer in layers:
                with context:
                    x = layer(x)
                x = synchronize(x)
        x.backward(numbers(9, *x.shape).bfloat16().to(device))
        found += [x, given.grad, *(p.grad.clone() for p in layers.parameters())]
    return found


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("moved", [1, 2])
def test_no_bit_changes(moved: int, fp8: bool, device: str, small: list[str], same_bits) -> None:
    arguments: dict[str, Any] = {"fuse_qkv_params": True}
    expected = train(OFF, fp8, device, **arguments)
    assert small == []
    found = train({"enabled": True, "num_layers": moved, "model_layers": LAYERS}, fp8, device, **arguments)
    assert small.count("out") == small.count("back") > 8 * moved, "and each once"
    for a, b in zip(found, expected, strict=True):
        same_bits(a, b)


def test_a_layer_comes_back_when_backward_reaches_the_next_one(small: list[str]) -> None:
    context, synchronize = te.get_cpu_offload_context(enabled=True, num_layers=2, model_layers=LAYERS)
    x = numbers(1, 8, 64).requires_grad_()
    for i in range(LAYERS):
        with context:
            x = x.exp()  # saves its result
        x = synchronize(x)
        x.register_hook(lambda g, i=i: small.append(f"backward {i}") or g)
    assert small == ["out", "out"]
    x.sum().backward()
    assert small == ["out", "out", "backward 2", "back", "backward 1", "back", "backward 0"]


def test_memory_is_given_back(small: list[str]) -> None:
    context, synchronize = te.get_cpu_offload_context(enabled=True, num_layers=1, model_layers=2)
    x = numbers(1, 8, 64).requires_grad_()
    with context:
        y = x.exp()
    saved, z = weakref.ref(y), synchronize(y)
    with context:
        z = z * 2
    z = synchronize(z)
    del y
    gc.collect()
    assert saved() is None, "only the copy is left"
    z.sum().backward(retain_graph=True)
    z.sum().backward()
    assert small == ["out", "back", "back"]
    torch.testing.assert_close(x.grad, 4 * x.detach().exp())


def test_what_moves() -> None:
    large = torch.zeros(1 << 18)
    assert not offload._moves(large), "there is nothing to move on a CPU"
    assert type(te.get_cpu_offload_context()[0]).__name__ == "nullcontext"
    assert te.get_cpu_offload_context()[1](large) is large


@pytest.mark.gpu
def test_large_activations_leave_the_gpu() -> None:
    weight = torch.nn.Parameter(torch.zeros(512, 512, device="cuda"))
    large = torch.zeros(1 << 18, device="cuda")
    assert offload._moves(large)
    assert not offload._moves(large[1:])
    assert not offload._moves(weight)
    assert not offload._moves(weight.t())
    used = []
    for settings in (OFF, {"enabled": True, "num_layers": 7, "model_layers": 8}):
        context, synchronize = te.get_cpu_offload_context(**settings)
        x = torch.randn(1 << 24, device="cuda", requires_grad=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = x
        for _ in range(8):
            with context:
                y = y.exp().clamp(max=2)
            y = synchronize(y)
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated() - before)
        y.sum().backward()
        del x, y
    assert used[1] < used[0] / 2


def test_refusals() -> None:
    make = te.get_cpu_offload_context
    for arguments, error, sentence in (
        ({"enabled": True}, ValueError, "num_layers=1 with model_layers=1; fewer are accepted"),
        ({"enabled": 1}, TypeError, "enabled=1; True and False are accepted"),
        ({"enabled": True, "offload_activations": False}, ValueError, "offload_activations=False with enabled=True"),
        ({"offload_weights": True}, NotImplementedError, "offload_weights=True is not offered; False is accepted"),
        ({"manual_synchronization": True}, NotImplementedError, "manual_synchronization=True is not offered"),
        ({"num_layers": -1}, ValueError, "num_layers=-1; None or an int from 0"),
    ):
        with pytest.raises(error, match=f"^get_cpu_offload_context: {sentence}"):
            make(**arguments)
    context, synchronize = make(enabled=True, num_layers=1, model_layers=2)
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="its function is called before its context has ended"):
        synchronize(x.exp())
    with context, pytest.raises(RuntimeError, match="its context is open already; one layer at a time is accepted"):
        context.__enter__()
    with pytest.raises(
        ValueError, match=r"its function got a tensor of shape \[2\] without a graph; the layer's output"
    ):
        synchronize(x)
