"""`detect_anomaly`: the sentence names what a fault was put into, and no bit of a healthy step changes."""

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits
from torch.utils._python_dispatch import TorchDispatchMode

import reference as te
from reference.inspect import anomaly

BF16 = torch.bfloat16
DELAYED, CURRENT = te.DelayedScaling(amax_history_len=4), te.recipe.Float8CurrentScaling()


class Fault(torch.autograd.Function):
    """Writes a number into a tensor forward, and into its gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: int, value: float | None, grad: float | None) -> torch.Tensor:
        ctx.index, ctx.grad = index, grad
        return Fault.with_number(x, index, value)

    @staticmethod
    def with_number(x: torch.Tensor, index: int, value: float | None) -> torch.Tensor:
        found = x.clone()
        if value is not None:
            word = found.view(-1)[index : index + 1]
            zero = word - word
            word.copy_(zero / zero if math.isnan(value) else (zero + 1e30) * 1e30)
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return Fault.with_number(grad, ctx.index, ctx.grad), None, None, None


class GPT(torch.nn.Module):
    """Two layers, an embedding and a head; `fault` is put between the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 32, dtype=BF16)
        self.layers = torch.nn.ModuleList([te.TransformerLayer(32, 64, 2, params_dtype=BF16) for _ in range(2)])
        self.head = te.LayerNormLinear(32, 16, params_dtype=BF16)
        self.fault: tuple[int, float | None, float | None] | None = None

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        h = self.layers[0](self.embedding(text))
        if self.fault is not None:
            h = Fault.apply(h, *self.fault)
        out: torch.Tensor = self.head(self.layers[1](h))
        return out


def made() -> GPT:
    torch.manual_seed(2)
    return GPT()


def step(model: Any, recipe: Any = DELAYED, loss: Callable[[torch.Tensor], torch.Tensor] | None = None) -> list[Any]:
    torch.manual_seed(4)
    model.zero_grad(set_to_none=True)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(torch.arange(12).view(6, 2) % 10)
    value = y.float().logsumexp(-1).mean() if loss is None else loss(y.float())
    value.backward()
    state = [meta for m in model.modules() for key, meta in getattr(m, "fp8_meta", {}).items() if key != "recipe"]
    return [y.detach(), *(p.grad for p in model.parameters()), *(t for m in state for t in (m.scale, m.amax_history))]


def sentence(run: Callable[[], Any], model: torch.nn.Module) -> str:
    with pytest.raises(FloatingPointError) as raised, te.detect_anomaly(model):
        run()
    text = str(raised.value)
    assert text.startswith("detect_anomaly: ")
    assert text.endswith(".")
    return text


@pytest.mark.sample(2)
@pytest.mark.parametrize("recipe", [DELAYED, CURRENT, None], ids=["delayed", "current", "16 bits"])
def test_a_healthy_step_raises_nothing_and_has_its_bits(recipe: Any) -> None:
    model = made()
    other = copy.deepcopy(model)
    for _ in range(3):
        with te.detect_anomaly(model):
            found = step(model, recipe)
        for a, b in zip(found, step(other, recipe), strict=True):
            assert_same_bits(a, b)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_masks_with_infinities_and_rows_that_see_nothing_are_healthy() -> None:
    attention = te.MultiheadAttention(32, 2, params_dtype=BF16, attention_dropout=0.0)
    x = torch.randn(6, 2, 32).to(BF16).requires_grad_()
    hidden = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    hidden[:, :, 1:] = torch.triu(hidden[:, :, 1:], 1)
    with te.detect_anomaly(attention):
        attention(x, hidden, attn_mask_type="arbitrary").sum().backward()
    scores = torch.randn(4, 4, requires_grad=True)
    with te.detect_anomaly(attention):
        mask = torch.full((4, 4), -math.inf).triu(1)
        (scores + mask).softmax(-1).sum().backward()
        scores.masked_fill(torch.ones(4, 4).triu(1).bool(), -math.inf).softmax(-1).sum().backward()
        torch.nn.functional.scaled_dot_product_attention(
            scores[None], scores[None], scores[None], is_causal=True
        ).sum().backward()


@pytest.mark.parametrize("recipe", [DELAYED, None], ids=["fp8", "16 bits"])
def test_the_first_op_of_the_first_module_is_named(recipe: Any) -> None:
    """A bias of the second MLP is so large that its GEMM overflows to infinity."""
    model = made()
    with torch.no_grad():
        model.layers[1].layernorm_mlp.fc2_bias[5] = 3.3e38
        model.layers[1].self_attention.proj.bias[5] = 3.3e38
    text = sentence(lambda: step(model, recipe), model)
    made_by = "the first infinity was made by twin::bias_dropout_add in layers.1 (forward), in output 0 of shape "
    where = re.fullmatch(rf"detect_anomaly: {re.escape(made_by)}\[.*\], at index \[.*5\]\.", text)
    assert where is not None, text


def test_a_nan_in_the_loss_and_one_in_its_derivative() -> None:
    model = made()
    text = sentence(lambda: step(model, loss=lambda y: (y * 0).log().sum()), model)
    assert text == (
        "detect_anomaly: the first infinity was made by aten::log in code outside of the model's modules (forward), in "
        "output 0 of shape [6, 2, 16], at index [0, 0, 0]."
    )
    text = sentence(lambda: step(model, loss=lambda y: (y - y).norm(dim=-1).sqrt().sum()), model)
    assert text.startswith("detect_anomaly: the first infinity was made by aten::")
    assert " in code outside of the model's modules (backward), in output 0 of shape [6, 2], at index [0, 0]." in text


@pytest.mark.parametrize("which", ["nan", "inf"])
@pytest.mark.parametrize("index", [0, 5 * 64 + 33])
def test_a_fault_between_two_modules(which: str, index: int) -> None:
    """It is put there by ops on one element: the index is the element's in them, the module is the one around."""
    model = made()
    model.fault = (index, float(which), None)
    text = sentence(lambda: step(model), model)
    name = {"nan": "NaN was made by aten::div", "inf": "infinity was made by aten::mul"}[which]
    assert f"the first {name} in GPT (forward), in output 0 of shape [1], at index [0]" in text


def test_a_fault_in_a_gradient_is_one_of_the_module_whose_backward_runs() -> None:
    model = made()
    model.fault = (7, None, math.nan)
    text = sentence(lambda: step(model), model)
    assert "the first NaN was made by aten::div in GPT (backward), in output 0 of shape [1], at index [0]" in text


class Large(torch.nn.Module):
    """Multiplies by a weight; gradients beyond fp16's range become infinite in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = te.Linear(16, 16, params_dtype=torch.float16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        return out


def test_an_overflow_in_a_layers_backward_names_the_layer() -> None:
    model = torch.nn.Sequential(Large(), torch.nn.ReLU(), Large())
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.linear.weight.fill_(100.0)
    x = torch.full((16, 16), 0.25, dtype=torch.float16, requires_grad=True)

    def run() -> None:
        model(x * 1e-3).backward(torch.full((16, 16), 1000.0, dtype=torch.float16))

    text = sentence(run, model)
    assert "the first infinity was made by twin::gemm in 2.linear (backward), in output 0 of shape [16, 16]" in text
    assert text.endswith("at index [0, 0].")


def test_the_codes_of_a_cast_are_looked_at() -> None:
    """A scale that is NaN makes codes that are NaN of finite numbers."""
    layer = te.Linear(32, 16, params_dtype=BF16)
    x = torch.randn(4, 32).to(BF16)
    with te.autocast(recipe=DELAYED):
        layer(x)
    layer.fp8_meta["scaling_fwd"].scale[0] = math.nan

    def run() -> None:
        with te.autocast(recipe=DELAYED):
            layer(x).sum().backward()

    text = sentence(run, layer)
    assert (
        "no op made a NaN, one was there before the step, in its data or in a gradient: twin::cast_transpose in Linear"
        in text
    )


def test_a_parameter_that_was_bad_before() -> None:
    model = made()
    with torch.no_grad():
        model.layers[0].layernorm_mlp.fc1_weight[3, 4] = math.inf
    assert sentence(lambda: None, model) == (
        "detect_anomaly: the first infinity was there before the step, in the parameter layers.0.layernorm_mlp."
        "fc1_weight, at index [3, 4]."
    )
    with te.quantized_model_init():
        kept: Any = te.Linear(32, 16, params_dtype=BF16)
    with torch.no_grad():
        kept.weight.codes.view(torch.uint8)[1, 2] = 0x7F
    assert "was there before the step, in the parameter weight, at index [1, 2]." in sentence(lambda: None, kept)


def test_data_that_were_bad_before() -> None:
    layer = te.Linear(32, 16, params_dtype=BF16)
    x = torch.randn(4, 32).to(BF16)
    x[2, 3] = math.nan
    text = sentence(lambda: layer(x), layer)
    assert text == (
        "detect_anomaly: no op made a NaN, one was there before the step, in its data or in a gradient: twin::gemm in "
        "Linear (forward) is the first that has it, in output 0 of shape [4, 16], at index [2, 0]."
    )


def test_changed_arguments_are_looked_at() -> None:
    """An optimizer inside the `with`."""
    parameter = torch.nn.Parameter(torch.zeros(5))
    module = torch.nn.Module()
    module.register_parameter("p", parameter)
    parameter.grad = torch.full((5,), 3e38)
    adam = te.optimizers.FusedAdam(module.parameters(), lr=1.0)
    text = sentence(adam.step, module)
    assert "the first infinity was made by twin::adam in code outside of the model's modules (forward)" in text
    assert "in the changed argument 'exp_avg_sqs' of shape [5], at index [0]" in text


class Reads(TorchDispatchMode):
    """Counts where a number is read from the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_the_device_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with Reads() as usually:
        step(made())
    with Reads() as watched, te.detect_anomaly(model := made()):
        step(model)
    assert watched.count == usually.count, "nothing is read op by op"
    reads: list[torch.Size] = []
    usual = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: reads.append(x.shape) or usual(x))
    model = made()
    with te.detect_anomaly(model):
        step(model)
    reads = [shape for shape in reads if len(shape) == 2]  # others are random states
    assert len(reads) == 1
    assert reads[0][0] > 200


@pytest.mark.parametrize("bad", [False, True])
def test_a_checkpointed_part(bad: bool) -> None:
    """Its recomputation runs in backward, and may stop early."""
    model = made()

    def run() -> None:
        with te.autocast(recipe=DELAYED):
            h = te.checkpoint(model.layers[0], model.embedding(torch.arange(12).view(6, 2) % 10))
            y = te.checkpoint(model.head, te.checkpoint(model.layers[1], h))
        (y.float().logsumexp(-1).mean() * (torch.tensor(3e38) if bad else 1.0)).backward(torch.tensor(1e3))

    if bad:
        assert "the first infinity was made by aten::mul in code outside of" in sentence(run, model)
    with te.detect_anomaly(model):
        model.zero_grad()
        bad = False
        run()


def test_an_index_is_that_of_row_major_order() -> None:
    shape = torch.Size((3, 4, 5))
    for index in (0, 1, 19, 20, 59):
        assert anomaly._index(2 * index + 1, shape) == [int(i) for i in torch.unravel_index(torch.tensor(index), shape)]
    assert anomaly._index(0, torch.Size(())) == []


def test_refusals_and_errors_inside() -> None:
    model = made()
    with pytest.raises(TypeError, match=r"^detect_anomaly: model=1; a torch.nn.Module is accepted\.$"):
        te.detect_anomaly(1)  # type: ignore[arg-type]
    watch = te.detect_anomaly(model)
    with pytest.raises(RuntimeError, match=r"^detect_anomaly: it is open already"), watch, watch:
        pass

    def fails() -> None:
        with te.detect_anomaly(model):
            torch.tensor(0.0).log()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    handle = model.head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), te.detect_anomaly(model):
        step(model)
    handle.remove()
    with te.detect_anomaly(model):
        step(model)
