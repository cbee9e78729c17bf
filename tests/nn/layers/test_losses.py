"""`cross_entropy`, `parallel_cross_entropy`, `fused_linear_cross_entropy`: PyTorch's values, what is kept, refusals."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.bits import assert_same_bits

import reference as te
from reference.numbers import tensor_core

twin = torch.ops.twin
BF16 = torch.bfloat16
DTYPES = (torch.float32, BF16, torch.float16)
UNIT = {torch.float32: 2.0**-24, BF16: 2.0**-8, torch.float16: 2.0**-11}


def batch(shape: tuple[int, ...], classes: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(*shape, classes, generator=generator) * 3).to(dtype)
    target = torch.randint(0, classes, shape, generator=generator)
    return logits.requires_grad_(), torch.where(torch.rand(shape, generator=generator) < 0.2, -100, target)


def truth_of(logits: torch.Tensor, target: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's loss in float64, and the gradient of its sum."""
    wide = logits.detach().double().flatten(0, -2).requires_grad_()
    loss = torch.nn.functional.cross_entropy(wide, target.flatten().long(), **options)
    (gradient,) = torch.autograd.grad(loss.sum(), wide)
    return (loss.view(target.shape) if loss.dim() else loss).detach(), gradient.view(logits.shape)


@settings(max_examples=30, deadline=None)
@given(
    shape=st.sampled_from([(), (1,), (6,), (2, 3), (3, 1, 2)]),
    classes=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    reduction=st.sampled_from(("mean", "sum", "none")),
    smoothing=st.sampled_from((0.0, 0.2)),
    seed=st.integers(0, 2**30),
)
def test_cross_entropy_is_pytorchs(shape, classes, dtype, reduction, smoothing, seed) -> None:  # type: ignore[no-untyped-def]
    logits, target = batch((*shape,) or (1,), classes, dtype, seed)
    if not shape:
        logits, target = logits.detach()[0].requires_grad_(), target[0]
    target = target.int() if seed % 2 else target
    loss = te.cross_entropy(logits, target, reduction=reduction, label_smoothing=smoothing)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    expected, gradient = truth_of(logits.view(-1, classes), target.view(-1), **options)
    assert loss.dtype == torch.float32
    assert loss.shape == (target.shape if reduction == "none" else ())
    torch.testing.assert_close(loss.detach().double().view(-1), expected.view(-1), rtol=2e-6, atol=2e-6, equal_nan=True)
    loss.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == dtype
    # Of a gradient g (p - weight) with |p - weight| <= 1: errors of p and of the difference, and one rounding.
    bound = 1e-6 + UNIT[dtype] * gradient.abs() * 1.01
    assert bool(((logits.grad.double().view_as(gradient) - gradient).abs() <= bound).all())


def test_ignore_index_and_a_mean_of_nothing() -> None:
    logits, target = batch((4,), 9, BF16)
    for ignored in (3, -1):
        found = te.cross_entropy(logits, torch.tensor([3, 1, 3, 0]) if ignored == 3 else target.clamp(min=-1), ignored)
        assert found.isfinite()
    nothing = torch.full((4,), -100)
    loss = te.cross_entropy(logits, nothing)
    loss.backward()
    assert loss.isnan()  # as PyTorch's
    assert logits.grad is not None
    assert not logits.grad.any()
    assert te.parallel_cross_entropy(logits, nothing, reduce_loss=True) == 0  # as Transformer Engine's


def test_parallel_cross_entropy_is_cross_entropy() -> None:
    logits, target = batch((3, 2), 50, BF16)
    for smoothing in (0.0, 0.1):
        each = te.parallel_cross_entropy(logits, target, smoothing)
        assert_same_bits(each, te.cross_entropy(logits, target, reduction="none", label_smoothing=smoothing))
        mean = te.parallel_cross_entropy(inp=logits, target=target, label_smoothing=smoothing, reduce_loss=True)
        assert_same_bits(mean, te.cross_entropy(logits, target, label_smoothing=smoothing))
        grads = [
            torch.autograd.grad(loss, logits)[0]
            for loss in (mean, te.cross_entropy(logits, target, -100, "mean", smoothing))
        ]
        assert_same_bits(*grads)
    other = te.parallel_cross_entropy(logits, target.clamp(min=5), ignore_idx=5, is_cg_capturable=True)
    assert (other == 0).equal(target.clamp(min=5) == 5)


def test_a_group_is_one_of_this_process() -> None:
    sentence = r"^parallel_cross_entropy: dist_process_group='tp'; None and a process group of which this process is a"
    with pytest.raises(TypeError, match=sentence):
        te.parallel_cross_entropy(*batch((2, 2), 8, BF16), dist_process_group="tp")


def test_logits_are_never_overwritten() -> None:
    sentence = r"^parallel_cross_entropy: overwrite_input=True is not offered; False is accepted\.$"
    with pytest.raises(NotImplementedError, match=sentence):
        te.parallel_cross_entropy(*batch((2, 2), 8, BF16), overwrite_input=True)


def test_what_is_kept_for_backward() -> None:
    """The logits themselves and two numbers of each row; nothing of the logits' size, and nothing without gradients."""
    logits, target = batch((64,), 100, BF16)
    kept: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        te.cross_entropy(logits, target)
    (large,) = [x for x in kept if x.numel() > 64]
    assert large.data_ptr() == logits.data_ptr()
    with torch.no_grad():
        loss = te.cross_entropy(logits, target)
    assert not loss.requires_grad
    assert_same_bits(loss, te.cross_entropy(logits, target))


def test_backward_twice_and_after_a_change() -> None:
    logits, target = batch((5,), 30, BF16)
    loss = te.cross_entropy(logits, target)
    first, second = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for _ in range(2))
    assert_same_bits(first, second)
    hidden, weight = torch.randn(5, 8, dtype=BF16).requires_grad_(), torch.randn(30, 8, dtype=BF16).requires_grad_()
    loss = te.fused_linear_cross_entropy(hidden, weight, target)
    pairs = [torch.autograd.grad(loss, (hidden, weight), retain_graph=True) for _ in range(2)]
    for a, b in zip(*pairs, strict=True):
        assert_same_bits(a, b)
    x = logits * 1
    loss = te.cross_entropy(x, target)
    x.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_views_are_read_as_they_are() -> None:
    logits, target = batch((6, 4), 40, BF16)
    for view, classes in (
        (logits.transpose(0, 1), target.t()),
        (logits[..., :33], target % 33),
        (logits[1:], target[1:]),
    ):
        found = te.cross_entropy(view, classes)
        assert_same_bits(found, te.cross_entropy(view.detach().clone(), classes.clone()))


# --- the head and the loss in one ------------------------------------------------------------------


def head(tokens: int, classes: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 16, generator=generator).to(dtype)
    weight = (torch.randn(classes, 16, generator=generator) * 0.4).to(dtype)
    target = torch.randint(0, classes, (tokens,), generator=generator)
    target[::5] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), target


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_fused_loss_is_close_to_float64(dtype: torch.dtype, reduction: str, smoothing: float) -> None:
    hidden, weight, target = head(70, 90, dtype)
    loss = te.fused_linear_cross_entropy(hidden, weight, target, -100, reduction, smoothing, chunk_size=32)
    loss.backward()
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    truth = torch.nn.functional.cross_entropy(h @ w.t(), target, reduction=reduction, label_smoothing=smoothing)
    truth.backward()
    # Logits below 16 and probabilities are rounded to T.
    assert abs(loss.item() - truth.item()) <= (16 * UNIT[dtype] + 1e-5) * (70 if reduction == "sum" else 1)
    for x, y in ((hidden, h), (weight, w)):
        assert x.grad is not None
        assert y.grad is not None
        assert (x.grad.double() - y.grad).norm() <= (8 * UNIT[dtype] + 1e-5) * y.grad.norm()


@pytest.mark.parametrize("chunk", [1, 16, 24, 70, 2048])
def test_the_chunks_are_added_in_order(chunk: int) -> None:
    hidden, weight, target = head(70, 90, BF16)
    loss = te.fused_linear_cross_entropy(hidden, weight, target, chunk_size=chunk)
    (loss * 3).backward()
    losses, dh, dw = [], [], None
    for h, t in zip(hidden.detach().split(chunk), target.split(chunk), strict=True):
        logits = tensor_core.gemm(h, weight.detach()).to(BF16)
        each, *stats = twin.cross_entropy(logits, t, -100, 0.0)
        d = twin.cross_entropy_backward(torch.ones(()), None, logits, t, *stats, -100, 0.0)
        dh.append(tensor_core.gemm(d, weight.detach().t()))
        product = tensor_core.gemm(d.t(), h.t())
        dw = product if dw is None else dw + product
        losses.append(each)
    mean, divisor = twin.cross_entropy_mean(torch.cat(losses), target, -100, "mean")
    scale = torch.tensor(3.0) / divisor
    assert_same_bits(loss, mean)
    assert hidden.grad is not None
    assert weight.grad is not None
    assert dw is not None
    assert_same_bits(hidden.grad, (torch.cat(dh) * scale).to(BF16))
    assert_same_bits(weight.grad, (dw * scale).to(BF16))


def test_the_fused_loss_is_the_loss_of_the_layers_apart() -> None:
    """Forward in every bit, whatever the chunks."""
    hidden, weight, target = head(70, 90, BF16)
    linear = te.Linear(16, 90, bias=False, params_dtype=BF16)
    linear.weight = torch.nn.Parameter(weight.detach())
    apart = te.cross_entropy(linear(hidden), target)
    for chunk in (7, 2048):
        assert_same_bits(te.fused_linear_cross_entropy(hidden, weight, target, chunk_size=chunk), apart)


def test_a_gradient_in_fp16_does_not_underflow_before_the_loss_scale() -> None:
    hidden, weight, target = head(64, 4000, torch.float16)
    (te.fused_linear_cross_entropy(hidden, weight, target) * 2.0**16).backward()
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    (torch.nn.functional.cross_entropy(h @ w.t(), target) * 2.0**16).backward()
    assert weight.grad is not None
    assert w.grad is not None
    assert (weight.grad.double() - w.grad).norm() <= 0.01 * w.grad.norm()


@pytest.mark.parametrize("wanted", ["hidden", "weight", "nothing"])
def test_only_what_is_wanted_is_computed(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from reference.nn.layers import fused_linear_cross_entropy as module

    counted = {"products": 0}
    product = module._product

    def counting(*args: Any) -> torch.Tensor:
        counted["products"] += 1
        return product(*args)

    monkeypatch.setattr(module, "_product", counting)
    hidden, weight, target = head(40, 30, BF16)
    hidden.requires_grad_(wanted == "hidden")
    weight.requires_grad_(wanted == "weight")
    loss = te.fused_linear_cross_entropy(hidden, weight, target)
    assert counted["products"] == (1 if wanted == "nothing" else 2)
    assert loss.requires_grad == (wanted != "nothing")
    if wanted != "nothing":
        loss.backward()
    assert (hidden.grad is not None, weight.grad is not None) == (wanted == "hidden", wanted == "weight")


def test_no_tokens() -> None:
    hidden, weight, target = head(0, 30, BF16)
    loss = te.fused_linear_cross_entropy(hidden, weight, target, reduction="sum")
    loss.backward()
    assert loss == 0
    assert weight.grad is not None
    assert not weight.grad.any()
    assert te.cross_entropy(torch.zeros(0, 5, requires_grad=True), target, reduction="sum") == 0


def test_under_autocast_the_products_have_16_bits() -> None:
    hidden, weight, target = head(20, 30, torch.float32)
    with torch.autocast("cpu", BF16):
        loss = te.fused_linear_cross_entropy(hidden, weight, target)
    loss.backward()
    assert_same_bits(loss, te.fused_linear_cross_entropy(hidden.to(BF16), weight.to(BF16), target))
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.float32


# --- compilers, refusals ---------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
@pytest.mark.parametrize("which", ["plain", "parallel", "fused"])
def test_they_compile_whole(which: str, backend: str) -> None:
    logits, classes = batch((4, 3), 40, BF16)
    hidden, weight, target = head(20, 30, BF16)
    functions: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...], torch.Tensor]] = {
        "plain": (lambda x, t: te.cross_entropy(x, t, label_smoothing=0.1), (logits,), classes),
        "parallel": (lambda x, t: te.parallel_cross_entropy(x, t).sum(), (logits,), classes),
        "fused": (lambda h, w, t: te.fused_linear_cross_entropy(h, w, t, chunk_size=8), (hidden, weight), target),
    }
    function, inputs, t = functions[which]
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    results = []
    for one in (function, compiled):
        loss = one(*inputs, t)
        results.append((loss.detach(), *torch.autograd.grad(loss, inputs)))
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)
    torch._dynamo.reset()


X, T = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
W = torch.zeros(4, 3)


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda: te.cross_entropy([1.0], T), TypeError, "cross_entropy: logits=[1.0]; a tensor is accepted"),
        (lambda: te.cross_entropy(X.double(), T), TypeError, "logits has dtype torch.float64"),
        (lambda: te.cross_entropy(X[:, :0], T), ValueError, "the logits have shape [2, 0]; [..., classes]"),
        (lambda: te.cross_entropy(X[0, 0], T), ValueError, "the logits have shape []; [..., classes]"),
        (
            lambda: te.cross_entropy(X, X),
            TypeError,
            "target is a torch.float32 tensor; classes as a tensor of torch.int64",
        ),
        (lambda: te.cross_entropy(X, 1), TypeError, "target is a int"),
        (lambda: te.cross_entropy(X, T[:1]), ValueError, "target has shape [1]; [2], one a row"),
        (lambda: te.cross_entropy(X, T.to("meta")), RuntimeError, "target is on meta, the rows on cpu"),
        (lambda: te.cross_entropy(X, T + 3), IndexError, "target[0] is 3; 0 to 2 and ignore_index=-100"),
        (
            lambda: te.cross_entropy(X, T, reduction="max"),
            ValueError,
            "reduction='max'; one of ('mean', 'sum',",
        ),
        (lambda: te.cross_entropy(X, T, reduction=None), TypeError, "reduction=None; one of"),
        (
            lambda: te.cross_entropy(X, T, label_smoothing=-0.1),
            ValueError,
            "label_smoothing=-0.1; a number from",
        ),
        (lambda: te.cross_entropy(X, T, label_smoothing=math.nan), ValueError, "label_smoothing=nan"),
        (lambda: te.cross_entropy(X, T, label_smoothing="0"), TypeError, "label_smoothing='0'"),
        (lambda: te.cross_entropy(X, T, ignore_index=1.0), TypeError, "ignore_index=1.0; an int from"),
        (lambda: te.parallel_cross_entropy(X, T, _input=X), NotImplementedError, "_input is inp's older name"),
        (lambda: te.parallel_cross_entropy(X, T, reduce_loss=1), TypeError, "reduce_loss=1; True and False"),
        (lambda: te.parallel_cross_entropy(X, T, is_cg_capturable=None), TypeError, "is_cg_capturable=None"),
        (lambda: te.parallel_cross_entropy(X, T, 2.0), ValueError, "parallel_cross_entropy: label_smoothing=2.0"),
        (lambda: te.fused_linear_cross_entropy(X, W, T, reduction="none"), NotImplementedError, "'mean' and 'sum' are"),
        (lambda: te.fused_linear_cross_entropy(X, W, T, chunk_size=0), ValueError, "chunk_size=0; an int from 1"),
        (lambda: te.fused_linear_cross_entropy(X, W, T, chunk_size=None), TypeError, "chunk_size=None"),
        (lambda: te.fused_linear_cross_entropy(X, W.t(), T), ValueError, "hidden has shape [2, 3] and weight [3, 4]"),
        (lambda: te.fused_linear_cross_entropy(X, W[0], T), ValueError, "[classes, hidden] are accepted"),
        (lambda: te.fused_linear_cross_entropy(X, W[..., None], T), ValueError, "[2, 3] and weight [4, 3, 1]; [..., h"),
        (lambda: te.fused_linear_cross_entropy(X, W.to("meta"), T), RuntimeError, "weight is on meta, hidden on cpu"),
        (lambda: te.fused_linear_cross_entropy(X, 3, T), TypeError, "weight=3; a tensor is accepted"),
        (lambda: te.fused_linear_cross_entropy(X, W, T + 4), IndexError, "target[0] is 4; 0 to 3"),
    ],
)
def test_refusals(call: Callable[[], Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=re.escape(sentence)):
        call()


def test_a_weight_in_fp8_is_refused() -> None:
    with te.quantized_model_init():
        linear = te.Linear(16, 32, bias=False, params_dtype=BF16)
    with pytest.raises(TypeError, match="weight is kept in FP8; a plain tensor is accepted"):
        te.fused_linear_cross_entropy(torch.zeros(2, 16, dtype=BF16), linear.weight, T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss_grad", [1.0, -2.0, float("inf")])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_the_gradient_of_a_mean_of_nothing_is_zero(count: int, loss_grad: float, dtype: torch.dtype) -> None:
    """The head with its loss, and the loss of logits; the mean itself is NaN, as PyTorch's."""
    target = torch.full((count,), -100)
    hidden, weight = torch.randn(count, 16).to(dtype).requires_grad_(), torch.randn(32, 16).to(dtype).requires_grad_()
    logits = torch.randn(count, 32).to(dtype).requires_grad_()
    for loss in (
        te.fused_linear_cross_entropy(hidden, weight, target, chunk_size=2),
        te.cross_entropy(logits, target),
        te.cross_entropy(logits, target, label_smoothing=0.1),
    ):
        assert loss.isnan()
        loss.backward(torch.tensor(loss_grad))
    for x in (hidden, weight, logits):
        # In fp32 the head's products are PyTorch's, and one of +0 and a negative number may be -0.
        assert_same_bits(x.grad + 0 if dtype == torch.float32 else x.grad, torch.zeros_like(x))
