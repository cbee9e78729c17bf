"""`checkpoint`: the bits of a run without it, and one amax per tensor."""

import contextlib
import copy
import threading

import pytest
import torch
import torch.utils.checkpoint

import reference as te

RECIPE = te.DelayedScaling(amax_history_len=4)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = te.Linear(32, 64, params_dtype=torch.bfloat16)
        self.b = te.Linear(64, 32, params_dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))


def data(i: int) -> torch.Tensor:
    return ((torch.arange(8 * 32).reshape(8, 32) * (7 + i)).remainder(13) - 5).to(torch.bfloat16) * 0.25


def train(model: Block, run, steps: int = 4, fp8: bool = True) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    results = []
    for i in range(steps):
        x = data(i).requires_grad_()
        model.zero_grad()
        with te.autocast(enabled=fp8, recipe=RECIPE):
            y = run(model, x)
        y.backward(data(i + 3)[: y.shape[0]] * 1e-3)
        results += [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
    for layer in (model.a, model.b):
        for key in ("scaling_fwd", "scaling_bwd"):
            if fp8:
                results += [layer.fp8_meta[key].scale, layer.fp8_meta[key].amax_history]
    return results


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_no_bit_changes(fp8: bool, use_reentrant: bool, same_bits) -> None:
    model = Block()
    other = copy.deepcopy(model)
    plain = train(model, lambda m, x: m(x), fp8=fp8)
    recomputed = train(other, lambda m, x: te.checkpoint(m, x, use_reentrant=use_reentrant), fp8=fp8)
    for i, (a, b) in enumerate(zip(plain, recomputed, strict=True)):
        same_bits(a, b, f"result {i}")


def test_one_checkpoint_per_layer_and_nested(same_bits) -> None:
    model = Block()
    layers, nested = copy.deepcopy(model), copy.deepcopy(model)
    plain = train(model, lambda m, x: m(x))
    per_layer = train(layers, lambda m, x: te.checkpoint(m.b, torch.relu(te.checkpoint(m.a, x))))

    def inner(m: Block, x: torch.Tensor) -> torch.Tensor:
        return m.b(te.checkpoint(lambda t: torch.relu(m.a(t)), x))

    deep = train(nested, lambda m, x: te.checkpoint(inner, m, x))
    for a, b, c in zip(plain, per_layer, deep, strict=True):
        same_bits(a, b)
        same_bits(a, c)


def test_a_module_used_twice_replays_both_runs(same_bits) -> None:
    layer = te.Linear(32, 32, params_dtype=torch.bfloat16)
    other = copy.deepcopy(layer)
    grads = []
    for module, run in ((layer, lambda f, x: f(x)), (other, te.checkpoint)):
        for i in range(3):
            x = data(i).requires_grad_()
            with te.autocast(recipe=RECIPE):
                y = run(lambda t, m=module: m(m(t)), x)
            y.backward(torch.ones_like(y))
        grads.append(module.weight.grad)
    same_bits(*grads)


def test_autocast_inside_the_checkpointed_function_updates_once(same_bits) -> None:
    model = Block()
    other = copy.deepcopy(model)

    def inside(m: Block, x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=RECIPE):
            return m(x)

    plain = train(model, lambda m, x: m(x))
    results = []
    for i in range(4):
        x = data(i).requires_grad_()
        other.zero_grad()
        y = te.checkpoint(inside, other, x)
        y.backward(data(i + 3) * 1e-3)
        results += [y.detach(), x.grad, *(p.grad.clone() for p in other.parameters())]
    for layer in (other.a, other.b):
        for key in ("scaling_fwd", "scaling_bwd"):
            results += [layer.fp8_meta[key].scale, layer.fp8_meta[key].amax_history]
    for a, b in zip(plain, results, strict=True):
        same_bits(a, b)


def test_memory_is_really_given_back() -> None:
    """Nothing but the input is saved by the first run."""
    model, x = Block(), data(0).requires_grad_()
    saved: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), te.autocast(recipe=RECIPE):
        model(x)
        plain = len(saved)
        saved.clear()
        te.checkpoint(model, x)
    assert len(saved) < plain


def test_tensor_parallel_arguments_are_refused() -> None:
    with pytest.raises(
        NotImplementedError, match="distribute_saved_activations=True is not offered; False is accepted"
    ):
        te.checkpoint(torch.relu, torch.ones(1), distribute_saved_activations=True)
    with pytest.raises(TypeError, match="checkpoint: tp_group='tp'; None and a process group of which"):
        te.checkpoint(torch.relu, torch.ones(1), tp_group="tp")


class Tracker:
    """As Megatron's: named states of a generator, one of which is used inside `fork`."""

    def __init__(self) -> None:
        self.states = {"model-parallel-rng": torch.Generator().manual_seed(7).get_state()}

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states = dict(states)

    def numbers(self, *shape: int) -> torch.Tensor:
        generator = torch.Generator()
        generator.set_state(self.states["model-parallel-rng"])
        found = torch.rand(*shape, generator=generator)
        self.states["model-parallel-rng"] = generator.get_state()
        return found


@pytest.mark.parametrize("kept", [False, True])
def test_the_states_of_a_tracker_are_those_of_the_first_run(kept: bool, same_bits) -> None:
    results = []
    for run in (lambda f, x, **_: f(x), te.checkpoint):
        torch.manual_seed(0)
        model, tracker = Block(), Tracker()

        def function(x: torch.Tensor, model: Block = model, tracker: Tracker = tracker) -> torch.Tensor:
            return model(x * (tracker.numbers(*x.shape) > 0.5)) * tracker.numbers(1)

        for i in range(2):
            x = data(i).requires_grad_()
            with te.autocast(recipe=RECIPE):
                y = run(function, x, get_rng_state_tracker=lambda tracker=tracker: tracker)
            tracker.numbers(3)
            if kept:
                y.float().sum().backward(retain_graph=True)
            y.float().square().sum().backward()
        results.append([x.grad, *(p.grad for p in model.parameters()), *tracker.get_states().values()])
    for a, b in zip(*results, strict=True):
        same_bits(a, b)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_graph_that_is_kept_goes_backward_twice(fp8: bool, same_bits) -> None:
    """With `retain_graph=True`, and for two losses: each pass recomputes, with the scales of the first run."""
    results = []
    for run in (lambda f, x: f(x), te.checkpoint):
        torch.manual_seed(0)
        model = Block()
        for i in range(3):
            x = data(i).requires_grad_()
            with te.autocast(enabled=fp8, recipe=RECIPE):
                y, z = run(lambda t, m=model: (m(t), m.a(t)), x)
            y.sum().backward(retain_graph=True)
            y.backward(data(i + 1) * 1e-2, retain_graph=True)
            z.float().square().sum().backward()
        states = [layer.fp8_meta[key] for layer in (model.a, model.b) for key in ("scaling_fwd", "scaling_bwd") if fp8]
        results.append([x.grad, *(p.grad for p in model.parameters()), *(s.amax_history for s in states)])
    for a, b in zip(*results, strict=True):
        same_bits(a, b)


def test_recomputation_in_another_thread_leaves_the_first_ones_update_alone(same_bits) -> None:
    """Autograd runs a backward on CUDA in a thread of its own; the scales still follow the forward's autocast."""
    results = []
    for threaded in (False, True):
        torch.manual_seed(0)
        model = Block()
        for i in range(3):
            x = data(i).requires_grad_()
            with te.autocast(recipe=RECIPE):
                y = te.checkpoint(model, x)
            if threaded:
                thread = threading.Thread(target=y.backward, args=(data(i + 3) * 1e-3,))
                thread.start()
                thread.join()
            else:
                y.backward(data(i + 3) * 1e-3)
        states = [layer.fp8_meta[key] for layer in (model.a, model.b) for key in ("scaling_fwd", "scaling_bwd")]
        results.append([x.grad, *(s.scale for s in states), *(s.amax_history for s in states)])
    for a, b in zip(*results, strict=True):
        same_bits(a, b)


def test_contexts_of_the_users_own_are_entered_around_both_runs() -> None:
    seen: list[str] = []

    class Noting(contextlib.AbstractContextManager[None]):
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            seen.append(self.name)

        def __exit__(self, *_: object) -> None:
            seen.append(f"end of {self.name}")

    model = Block()
    with te.autocast(recipe=RECIPE):
        y = te.checkpoint(
            model, data(0), context_fn=lambda: (Noting("first"), Noting("again")), determinism_check="none"
        )
    y.sum().backward()
    assert seen == ["first", "end of first", "again", "end of again"]
    with pytest.raises(TypeError, match="checkpoint: function=None; a module or function is accepted"):
        te.checkpoint(None, data(0))  # type: ignore[arg-type]
