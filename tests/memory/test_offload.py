"""`get_cpu_offload_context`: what it moves, when it comes back, and that no bit changes."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shared.transformer_layers import RECIPE, layer_of, numbers
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import reference as te
from reference.memory import offload

OFF = {"enabled": False}
BF16 = torch.bfloat16
LAYERS, LEAST = 3, 1 << 18


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
    monkeypatch.setattr(offload, "_moves", lambda t, _: not isinstance(t, torch.nn.Parameter) and t.numel() > 64)
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


@pytest.mark.sample(4)
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
    assert not offload._moves(large, LEAST), "there is nothing to move on a CPU"
    assert type(te.get_cpu_offload_context()[0]).__name__ == "nullcontext"
    assert te.get_cpu_offload_context()[1](large) is large


def test_small_activations_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that Transformer Engine leaves on the GPU; its older code leaves fewer there."""
    monkeypatch.setattr(offload, "_is_on_gpu", lambda t: True)
    sizes = [(1 << 8) - 1, 1 << 8, (1 << 18) - 1, 1 << 18]
    for older, moved in (("0", 1), ("1", 3)):
        monkeypatch.setenv("NVTE_CPU_OFFLOAD_V1", older)
        context, _ = te.get_cpu_offload_context(enabled=True, num_layers=1, model_layers=2)
        assert [n for n in sizes if offload._moves(torch.zeros(n), context.least)] == sizes[-moved:]


@pytest.mark.gpu
def test_large_activations_leave_the_gpu() -> None:
    weight = torch.nn.Parameter(torch.zeros(512, 512, device="cuda"))
    large = torch.zeros(1 << 18, device="cuda")
    assert offload._moves(large, LEAST)
    assert not offload._moves(large[1:], LEAST)
    assert not offload._moves(weight, LEAST)
    assert not offload._moves(weight.t(), LEAST)
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


def test_weights_stay_with_a_warning() -> None:
    """As in Transformer Engine, which no longer moves them."""
    for activations, moves in ((True, True), (False, False)):
        with pytest.warns(DeprecationWarning, match="^get_cpu_offload_context: offload_weights=True has no effect$"):
            context, synchronize = te.get_cpu_offload_context(
                True, 1, 2, offload_activations=activations, offload_weights=True
            )
        assert isinstance(context, offload._Offload) is moves
        assert moves or synchronize(3) == 3


def model_of(name: str, package: Any, device: str, hidden: int) -> torch.nn.Module:
    """A model of Transformer Engine's test."""
    heads = max(2, hidden // 64)
    on: dict[str, Any] = {"params_dtype": BF16, "device": device}
    ops: dict[str, Any] = {"dtype": BF16, "device": device}
    made: dict[str, Callable[[], torch.nn.Module]] = {
        "linear": lambda: package.Linear(hidden, hidden, **on),
        "layernorm_mlp": lambda: package.LayerNormMLP(hidden, hidden, **on),
        "layernorm_linear": lambda: package.LayerNormLinear(hidden, hidden, **on),
        "multihead_attention": lambda: package.MultiheadAttention(hidden, heads, **on),
        "transformer_layer": lambda: package.TransformerLayer(hidden, hidden, heads, hidden_dropout=0.0, **on),
        "linear_op": lambda: package.ops.Linear(hidden, hidden, **ops),
        "layernorm_mlp_ops": lambda: package.ops.Sequential(
            package.ops.LayerNorm(hidden, **ops),
            package.ops.Linear(hidden, hidden, **ops),
            package.ops.GELU(),
            package.ops.Linear(hidden, hidden, **ops),
        ),
    }
    return made[name]()


MODELS = ["linear", "layernorm_mlp", "layernorm_linear", "multihead_attention", "transformer_layer", "linear_op"]
MODELS += ["layernorm_mlp_ops"]
FORMATS = {"bf16": None, "current": te.recipe.Float8CurrentScaling(), "delayed": te.DelayedScaling()}


def forward(layers: Any, recipe: Any, x: torch.Tensor, offloads: bool) -> torch.Tensor:
    """A forward as in Transformer Engine's test: a step after the last layer moves that one's tensors, too."""
    count = len(layers)
    context, synchronize = te.get_cpu_offload_context(offloads, count, count + 1)
    for layer in layers:
        with te.autocast(enabled=recipe is not None, recipe=recipe), context:
            x = layer(x)
        x = synchronize(x)
    with context:
        x = x.clone()
    out: torch.Tensor = synchronize(x)
    return out


def copies_of_weights(layers: Any, recipe: Any) -> int:
    """The bytes that a backward reads of their FP8 copies: the transposed codes."""
    return 0 if recipe is None else sum(p.numel() for layer in layers for p in layer.parameters() if p.dim() == 2)


class Alive(TorchDispatchMode):
    """The memory that ops have made, as long as it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        given, results = (
            [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]
            for tree in ((args, kwargs), out)
        )
        old = {x.untyped_storage()._cdata for x in given if not hasattr(x, "_kept")}
        for storage in (x.untyped_storage() for x in results if not hasattr(x, "_kept")):
            if storage._cdata not in old:
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def bytes(self) -> int:
        gc.collect()
        return sum(nbytes for reference, nbytes in self.made.values() if not reference.expired())


@pytest.mark.sample(2)
@pytest.mark.parametrize("recipe", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_all_but_the_copies_of_weights_leaves(name: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what Transformer Engine's older offloading moves; on a CPU, by what is still alive after a forward."""
    made = offload._Kept.__init__

    def elsewhere(self: Any, t: torch.Tensor) -> None:
        with _disable_current_modes():  # the copies are not on the GPU
            made(self, t)

    monkeypatch.setattr(offload._Kept, "__init__", elsewhere)
    monkeypatch.setattr(offload, "_is_on_gpu", lambda t: True)
    monkeypatch.setenv("NVTE_CPU_OFFLOAD_V1", "1")
    layers = [model_of(name, te, "cpu", 64) for _ in range(2)]
    used = []
    x = numbers(1, 16, 16, 64).bfloat16().requires_grad_()
    forward(layers, FORMATS[recipe], x, False).sum().backward()  # makes FP8 state
    for offloads in (False, True):
        with Alive() as alive:
            y = forward(layers, FORMATS[recipe], x, offloads)
        used.append(alive.bytes() - y.nbytes)
        y.sum().backward()
    assert used[1] < used[0]
    rest = used[1] - copies_of_weights(layers, FORMATS[recipe])
    assert 0 <= rest < 2000 * len(layers), "scales, and random states"


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_the_gpus_memory_grows_by_the_copies_of_weights(
    name: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformer Engine's own measure, with its sizes; its layers keep two copies of an FP8 weight, ours keep one."""
    import optimized

    monkeypatch.setenv("NVTE_CPU_OFFLOAD_V1", "1")
    layers = [model_of(name, optimized, "cuda", 512) for _ in range(5)]
    used = []
    for offloads in (False, False, True):  # the first forward makes FP8 state
        gc.collect()
        torch.cuda.empty_cache()
        x = torch.randn(128, 512, 512, dtype=BF16, device="cuda", requires_grad=True)
        before = torch.cuda.memory_allocated()
        y = forward(layers, FORMATS[recipe], x, offloads)
        used.append(torch.cuda.memory_allocated() - y.nbytes - before)
        y.sum().backward()
        torch.cuda.synchronize()
        del x, y
    assert used[2] < used[1]
    assert abs(used[2] - copies_of_weights(layers, FORMATS[recipe])) < 0.1 * 2**20


def test_what_is_marked_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_is_on_gpu", lambda t: True)
    x, y = torch.zeros(1 << 18), torch.zeros(1 << 18)
    te.mark_not_offload(x, None)
    assert not offload._moves(x, LEAST)
    assert not offload._moves(x.view(512, 512), LEAST)
    assert offload._moves(y, LEAST)
    weight = te.Float8Quantizer(torch.ones(1), torch.zeros(1), te.DType.kFloat8E4M3)(torch.ones(512, 512))
    te.mark_not_offload(weight)
    assert not offload._moves(weight._kept.codes, LEAST)
    with pytest.raises(TypeError, match="mark_not_offload: 3; tensors and None are accepted"):
        te.mark_not_offload(y, 3)
    assert offload._moves(y, LEAST)


def test_refusals() -> None:
    make = te.get_cpu_offload_context
    for arguments, error, sentence in (
        ({"enabled": True}, ValueError, "num_layers=1 with model_layers=1; fewer are accepted"),
        ({"enabled": 1}, TypeError, "enabled=1; True and False are accepted"),
        ({"enabled": True, "offload_activations": False}, ValueError, "offload_activations=False with enabled=True"),
        ({"offload_weights": 1}, TypeError, "offload_weights=1; True and False are accepted"),
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
