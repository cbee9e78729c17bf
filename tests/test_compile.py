"""`torch.compile(fullgraph=True)` runs the layers with eager mode's bits, FP8 state included, and compiles once."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import assert_same_bits

import reference as te
from reference import scaling

# The compiler itself uses what PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
BF16 = torch.bfloat16
HIDDEN, HEADS = 32, 2


def attention_input(heads: int = HEADS) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(4, 2, heads, 8, dtype=BF16, requires_grad=True) for _ in range(3))


def hidden() -> tuple[torch.Tensor, ...]:
    return (torch.randn(4, 2, HIDDEN, dtype=BF16, requires_grad=True),)


LAYERS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "Linear": (lambda: te.Linear(HIDDEN, 48, params_dtype=BF16), hidden),
    "LayerNorm": (lambda: te.LayerNorm(HIDDEN, params_dtype=BF16), hidden),
    "RMSNorm": (lambda: te.RMSNorm(HIDDEN, params_dtype=BF16), hidden),
    "LayerNormLinear": (lambda: te.LayerNormLinear(HIDDEN, 48, params_dtype=BF16), hidden),
    "LayerNormMLP": (lambda: te.LayerNormMLP(HIDDEN, 64, activation="swiglu", params_dtype=BF16), hidden),
    "DotProductAttention": (lambda: te.DotProductAttention(HEADS, 8, attention_dropout=0.1), attention_input),
    "MultiheadAttention": (
        lambda: te.MultiheadAttention(HIDDEN, HEADS, input_layernorm=True, fuse_qkv_params=True, params_dtype=BF16),
        hidden,
    ),
    "TransformerLayer": (lambda: te.TransformerLayer(HIDDEN, 64, HEADS, params_dtype=BF16), hidden),
}


@pytest.fixture(autouse=True)
def one_compilation() -> Iterator[None]:
    """A second compilation of the same code is an error."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


def fp8_state(module: torch.nn.Module) -> list[torch.Tensor]:
    """Scales and histories of every layer inside."""
    metas = [m.fp8_meta[key] for m in module.modules() if getattr(m, "fp8_meta", None) for key in scaling.KEYS]
    return [t for meta in metas for t in (meta.scale, meta.amax_history)]


def train(run: Callable[..., Any], module: torch.nn.Module, inputs: Any, fp8: bool, steps: int) -> list[torch.Tensor]:
    """Every output, gradient, scale and history of `steps` steps."""
    seen: list[torch.Tensor] = []
    for step in range(steps):
        tensors = [(t * 2.0**step).detach().requires_grad_() for t in inputs]
        with te.autocast(enabled=fp8, recipe=te.DelayedScaling(amax_history_len=3)):
            out = run(*tensors)
        out.backward(torch.ones_like(out) * 2.0**-step)
        seen += [out, *(t.grad for t in tensors)]
        for p in module.parameters():
            seen.append(p.grad)
            p.data = p.data - 0.5 * p.grad
            p.grad = None
        seen += [t.clone() for t in fp8_state(module)]
    return seen


def compare(name: str, fp8: bool, backend: str, steps: int = 4) -> None:
    torch.manual_seed(1)
    build, arguments = LAYERS[name]
    eager, inputs = build(), arguments()
    module = copy.deepcopy(eager)
    expected = train(eager, eager, inputs, fp8, steps)
    actual = train(torch.compile(module, fullgraph=True, backend=backend), module, inputs, fp8, steps)
    assert len(expected) == len(actual)
    for position, (a, b) in enumerate(zip(expected, actual, strict=True)):
        assert_same_bits(a, b, f"{name}, tensor {position} of {len(expected)}")


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_compiled_layer_has_the_bits_of_eager_mode(name: str, fp8: bool) -> None:
    compare(name, fp8, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("name", LAYERS)
def test_inductor_has_the_bits_of_eager_mode(name: str, fp8: bool) -> None:
    compare(name, fp8, "inductor")
