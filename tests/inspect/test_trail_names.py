"""A trail's names are made once; whatever changes in a model between two steps, they are what naming it anew gives."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shared.recorded_steps import RECIPES, given, made, step

import reference as te
from reference.inspect.trails import state_again
from reference.inspect.trails.state import state_of
from reference.inspect.trails.state_again import StateAgain
from reference.inspect.trails.sums import sums
from reference.inspect.trails.trail import KINDS

CHANGES: dict[str, Callable[[Any], object]] = {
    "a gradient is gone": lambda m: setattr(m[0].weight, "grad", None),
    "all are gone": lambda m: m.zero_grad(),
    "a gradient of other strides": lambda m: setattr(m[0].weight, "grad", torch.randn(8, 8).t()),
    "a main gradient": lambda m: setattr(m[0].weight, "main_grad", torch.randn(8, 8)),
    "no tensor": lambda m: setattr(m[0].weight, "main_grad", 3),
    "another dtype": lambda m: m.bfloat16(),
    "another dtype of data": lambda m: setattr(m[2].weight, "data", m[2].weight.data.double()),
    "another shape": lambda m: setattr(m[0].bias, "data", torch.randn(2, 4)),
    "other strides": lambda m: setattr(m[0].weight, "data", torch.randn(8, 8).t()),
    "a new parameter of the name": lambda m: setattr(m[0], "bias", torch.nn.Parameter(torch.randn(8))),
    "no bias": lambda m: setattr(m[0], "bias", None),
    "a parameter more": lambda m: m[1].register_parameter("more", torch.nn.Parameter(torch.randn(3))),
    "a buffer more": lambda m: m.register_buffer("more", torch.randn(3)),
    "a buffer less": lambda m: delattr(m[1], "running_var"),
    "a module more": lambda m: m[2].add_module("more", torch.nn.Linear(2, 3)),
    "a module of ours more": lambda m: m.append(made("Linear")),
    "a module in another's place": lambda m: m.__setitem__(0, torch.nn.Linear(8, 8)),
    "modules in another order": lambda m: m.insert(0, m.pop(2)),
    "weights tied": lambda m: setattr(m[2], "weight", m[0].weight),
    "memory tied": lambda m: setattr(m[2].weight, "data", m[0].weight.data),
    "a gradient in another's memory": lambda m: setattr(m[2].weight, "grad", m[0].weight.grad),
    "weights that were tied": lambda m: setattr(m[4], "weight", torch.nn.Parameter(m[3].weight.detach().clone())),
    "memory that was tied": lambda m: setattr(m[4].weight, "data", m[4].weight.data.clone()),
    "a parameter moves to the next module": lambda m: moved(m[5][0], m[5][1], "w"),
    "a buffer moves to the next module": lambda m: moved(m[5][0], m[5][1], "b"),
    "a module moves to the next": lambda m: moved(m[5][0], m[5][1], "x"),
    "FP8 state moves to the next module": lambda m: setattr(m[5][1], "fp8_meta", m[5][0].__dict__.pop("fp8_meta")),
    "a part has another name": lambda m: setattr(m[5].parts, "called", "second"),
    "empty ones that were tied": lambda m: setattr(m[5], "other", torch.nn.Parameter(torch.zeros(0))),
    "nothing": lambda m: None,
    "words": lambda m: m[0].weight.data.add_(1),
}


class Marked(torch.nn.Parameter):
    """Of another class, and nothing else."""


class Part(torch.Tensor):
    """One tensor by a name that changes."""

    called = "first"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        setattr(self, self.called, self.detach().as_subclass(torch.Tensor))
        return [self.called], None


def moved(a: torch.nn.Module, b: torch.nn.Module, name: str) -> None:
    its = getattr(a, name)
    delattr(a, name)
    if isinstance(its, torch.Tensor) and not isinstance(its, torch.nn.Parameter):
        b.register_buffer(name, its)
    else:
        setattr(b, name, its)


def others() -> torch.nn.Module:
    """What a network seldom has: two modules of which one has everything, parts, empty parameters."""
    found = torch.nn.Sequential(torch.nn.Module(), torch.nn.Module())
    found[0].x, found[0].w = torch.nn.Linear(3, 2), torch.nn.Parameter(torch.randn(5))
    found[0].register_buffer("b", torch.randn(5))
    found[0].fp8_meta = {"scaling_fwd": SimpleNamespace(scale=torch.randn(2), amax_history=torch.randn(4, 2))}
    found.register_buffer("parts", torch.randn(3).as_subclass(Part))
    found.empty = found.other = torch.nn.Parameter(torch.zeros(0))
    return found


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    m = torch.nn.Sequential(
        torch.nn.Linear(8, 8),
        torch.nn.BatchNorm1d(8),
        torch.nn.Linear(8, 8),
        torch.nn.Linear(8, 8),
        torch.nn.Linear(8, 8),
    )
    m[4].weight = m[3].weight
    m(torch.randn(4, 8)).sum().backward()
    return m.append(others())


def assert_named_as_anew(names: StateAgain, m: torch.nn.Module) -> None:
    named, groups = names.now()
    expected = state_of("trail", m, None, KINDS)
    assert [(one.name, one.dtype, one.shape) for one in named] == [
        (name, str(x.dtype).removeprefix("torch."), tuple(x.shape)) for name, x in expected.items()
    ]
    (group,) = groups
    order = torch.tensor(group.order).argsort()
    assert torch.equal(sums(group.tensors)[order], sums(list(expected.values())))


@pytest.mark.parametrize("change", CHANGES)
def test_names_follow_the_model(change: str) -> None:
    m = model()
    names = StateAgain("trail", m, KINDS)
    for _ in range(2):
        assert_named_as_anew(names, m)
    CHANGES[change](m)
    for _ in range(2):
        assert_named_as_anew(names, m)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("name", ["Linear", "LayerNormMLP", "TransformerLayer"])
def test_layers_of_ours_are_named_once(name: str, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that are new each step, scales and random states are found without naming anything."""
    with te.quantized_model_init(enabled=kept):
        m = made(name)
    names = StateAgain("trail", m, KINDS)
    assert_named_as_anew(names, m)
    step(m, given(), RECIPES["delayed"])
    assert_named_as_anew(names, m)  # FP8 state has come
    asked = []
    monkeypatch.setattr(state_again, "state_of", lambda *args: asked.append(args) or state_of(*args))
    for _ in range(2):
        m.zero_grad()
        step(m, given(), RECIPES["delayed"])
        assert_named_as_anew(names, m)
    assert asked == []


def test_a_gradient_that_becomes_sparse_is_refused_by_its_name() -> None:
    m = torch.nn.Embedding(8, 4, sparse=True)
    names = StateAgain("trail", m, KINDS)
    names.now()
    m(torch.arange(3)).sum().backward()
    with pytest.raises(TypeError, match=r"trail: gradients/weight.grad is torch.sparse_coo; dense tensors"):
        names.now()


@pytest.mark.parametrize("gradient", [False, True])
def test_a_parameter_of_another_class_is_seen(gradient: bool) -> None:
    m = torch.nn.Linear(3, 2)
    m.weight = Marked(torch.randn(2, 3))
    m.register_buffer("more", torch.randn(4).as_subclass(Marked))
    if gradient:
        m.weight.grad = torch.randn(2, 3).as_subclass(Marked)
    names, before = StateAgain("trail", m, KINDS), te.digest(m)
    assert {"parameters/weight", "buffers/more"} <= set(before)
    assert ("gradients/weight.grad" in before) == gradient
    for _ in range(2):
        assert_named_as_anew(names, m)
    m.weight.data.add_(1)
    after = te.digest(m)
    assert [name for name in before if before[name] != after[name]] == ["parameters/weight"]


class Opaque(torch.Tensor):
    """A wrapper that does not say of what."""

    @staticmethod
    def __new__(cls) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (2, 3))  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        return cls() if func is torch.ops.aten.detach.default else NotImplemented


@pytest.mark.parametrize(
    ("weight", "sentence"),
    [
        (torch.nn.UninitializedParameter, "is uninitialized; a model whose lazy modules have been called"),
        (lambda: torch.nn.Parameter(Opaque()), "is a Opaque without memory or __tensor_flatten__; tensors"),
        (lambda: torch.nn.Parameter(torch.ones(2, 3, dtype=torch.complex64).conj()), "is a view of conjugates or neg"),
    ],
)
def test_what_has_no_words_is_refused_by_its_name(weight: Callable[[], Any], sentence: str) -> None:
    m = torch.nn.Linear(3, 2)
    names = StateAgain("trail", m, KINDS)
    names.now()
    m.weight = weight()
    for what, call in (("digest", lambda: te.digest(m)), ("trail", StateAgain("trail", m, KINDS).now)):
        with pytest.raises(TypeError, match=rf"^{what}: parameters/weight {sentence}"):
            call()
    with pytest.raises(TypeError, match=rf"^trail: parameters/weight {sentence}"):
        names.now()
