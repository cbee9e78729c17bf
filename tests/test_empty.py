"""Every op and every loss of nothing: no rows, no columns, nothing that counts. What comes out holds no NaN.

A mean of nothing is the only exception: the loss is NaN, as PyTorch's, and its gradient +0.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import assert_same_bits

import reference as te
from reference.ops import library

twin = torch.ops.twin
E4M3, FP32 = torch.float8_e4m3fn, torch.float32
SIZES = ((0, 16), (16, 0), (1, 0), (0, 0))


class Calls:
    """Makes tensors on one device, and calls ops on them."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def x(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.ones(shape, device=self.device).to(self.dtype if dtype is None else dtype)

    def state(self) -> tuple[Any, ...]:
        return self.x(3, dtype=FP32), self.x(4, 3, dtype=FP32), 1, E4M3

    def one(self) -> torch.Tensor:
        return self.x(1, dtype=FP32)

    def ids(self, count: int, value: int = 0) -> torch.Tensor:
        return torch.full((count,), value, device=self.device)


def casts(c: Calls, rows: int, cols: int) -> Iterator[Any]:
    x, (scale, history, column, dtype) = c.x(rows, cols), c.state()
    yield twin.amax, (x, history, 0)
    yield twin.cast, (x, scale, history, column, dtype)
    yield twin.cast_transpose, (x, scale, history, column, dtype)
    yield twin.cast_transpose_dbias, (x, scale, history, column, dtype)
    yield twin.cat_cast_transpose_dbias, ([x, x], 1, scale, history, column, dtype)
    yield twin.cast_stats, (x, x.to(E4M3), c.one())
    yield twin.cast_stats, (x, None, None)
    yield twin.dbias, (x,)
    out = c.x(rows, cols, dtype=E4M3), c.x(cols, -(-rows // 16) * 16, dtype=E4M3), c.one()
    yield twin.multi_cast_transpose, ([x], [scale], [history], [1], *([one] for one in out))
    for algorithm in ("max", "most_recent"):
        yield twin.scale_update, ([c.x(cols, dtype=FP32)], [c.x(4, cols, dtype=FP32)], 448.0, 0, algorithm)
    yield twin.normal, (c.x(rows, cols, dtype=FP32), 0.0, 1.0, 1)


def rows_of_numbers(c: Calls, rows: int, cols: int) -> Iterator[Any]:
    x, y, seed = c.x(rows, cols), c.x(rows, 2 * cols), torch.zeros(2, dtype=torch.int64, device=c.device)
    for kind in ("gelu", "swiglu"):
        wide = y if kind == "swiglu" else x
        yield twin.activation, (wide, kind)
        yield twin.activation_backward, (x, wide, kind)
        yield twin.activation_cast_transpose, (wide, kind, *c.state())
        yield twin.activation_backward_cast_transpose_dbias, (x, wide, kind, *c.state())
    for p in (0.0, 0.5, 1.0):
        yield twin.bias_dropout_add, (x, c.x(cols), x, p, seed if p else None)
        yield twin.dropout_backward, (x, p, seed if p else None)
    for kind in ("layernorm", "rmsnorm"):
        weight = c.x(cols)
        bias = weight if kind == "layernorm" else None
        mean, rstd = c.x(rows if bias is not None else 0, dtype=FP32), c.x(rows, dtype=FP32)
        yield twin.norm, (x, weight, bias, 1e-5, False, kind, c.dtype)
        yield twin.norm_cast_transpose, (x, weight, bias, 1e-5, False, kind, *c.state())
        yield twin.norm_backward, (x, x, weight, mean, rstd, False, kind, None)
    count = 2 * rows
    yield twin.embedding, (x, c.ids(count if rows else 0))
    yield twin.embedding_backward, (c.x(count, cols), c.ids(count), rows, -1)
    yield twin.embedding_backward, (c.x(0, cols), c.ids(0), rows, -1)


def losses(c: Calls, rows: int, cols: int) -> Iterator[Any]:
    x = c.x(rows, cols)
    loss, scale = c.x(rows, dtype=FP32), c.x(dtype=FP32)
    for target, smoothing in itertools.product((c.ids(rows, -100), c.ids(rows)), (0.0, 0.5, 1.0)):
        yield twin.cross_entropy, (x, target, -100, smoothing)
        for kind in ("sum", "mean_or_zero"):
            yield twin.cross_entropy_mean, (loss * (target != -100), target, -100, kind)
    # All of them are ignored, so the divisor of their mean is 0.
    for divisor, grad in ((scale - 1, scale), (scale - 1, -scale), (scale, -scale)):
        yield twin.cross_entropy_backward, (grad, divisor, x, c.ids(rows, -100), loss, loss, -100, 0.0)


def products(c: Calls, rows: int, cols: int) -> Iterator[Any]:
    half = torch.bfloat16 if c.dtype == FP32 else c.dtype
    seed = torch.zeros(2, dtype=torch.int64, device=c.device)
    for k in (0, 32):
        a, b, bias = c.x(rows, k, dtype=half), c.x(cols, k, dtype=half), c.x(cols, dtype=half)
        yield twin.gemm, (a, b, bias, half)
        yield twin.gemm_accumulate, (a, b, c.x(rows, cols, dtype=FP32))
        codes = a.to(E4M3), b.to(E4M3), c.one(), c.one()
        yield twin.gemm_fp8, (*codes, bias, half, "split")
        yield twin.gemm_fp8_accumulate, (*codes, c.x(rows, cols, dtype=FP32))
        yield twin.gemm_fp8_activation, (*codes, bias, half, "gelu", *c.state())
        yield twin.gemm_fp8_activation_backward, (*codes, c.x(rows, cols, dtype=half), "gelu", *c.state())
        yield twin.gemm_fp8_bias_dropout_add, (*codes, bias, c.x(rows, cols, dtype=half), half, 0.5, seed)


def attentions(c: Calls, rows: int, cols: int) -> Iterator[Any]:
    half = torch.bfloat16 if c.dtype == FP32 else c.dtype
    q, k = c.x(1, 2, rows, 16, dtype=half), c.x(1, 2, cols, 16, dtype=half)
    stat, ones = c.x(1, 2, rows, dtype=FP32), (c.one(), c.one(), c.one())
    rest: tuple[Any, ...] = (0.25, "none", -1, -1, None, 0.0, None)
    bias = c.x(1, 2, rows, cols, dtype=half)
    yield twin.attention, (q, k, k, *rest)
    yield twin.attention, (q, k, k, *rest, bias)
    yield twin.attention, (q, k, k, *rest, None, None, c.x(2, dtype=FP32))
    yield twin.attention_backward, (q, q, k, k, q, stat, stat, *rest)
    yield twin.attention_bias_backward, (q, q, k, k, q, stat, stat, *rest, bias)
    yield twin.attention_sink_backward, (q, q, stat, stat, c.x(2, dtype=FP32))
    codes = q.to(E4M3), k.to(E4M3)
    yield twin.attention_fp8, (*codes, codes[1].mT.contiguous(), *ones, *rest, half)
    yield twin.attention_fp8_backward, (q, codes[0], codes[1], codes[1], *ones, q, stat, stat, *rest)
    scores = c.x(1, 2, rows, cols)
    yield twin.softmax, (scores, 0.5, "none", None)
    yield twin.softmax, (scores, 0.5, "none", torch.ones(1, 1, rows, cols, dtype=torch.bool, device=c.device))
    yield twin.softmax_backward, (scores, scores, 0.5)
    yield twin.rotary, (c.x(rows, 1, 2, cols), c.x(rows, cols, dtype=FP32), False, False)


def steps(c: Calls, rows: int, cols: int) -> Iterator[Any]:
    for shape in ((), (rows, cols), (2, rows, cols)):
        x, wide = c.x(*shape), c.x(*shape, dtype=FP32)
        numbers = (0.1, 0.9, 0.99, 1e-8, 0.1, 0.1, 0.1, True)
        yield twin.adam, ([x], [wide], [wide + 0], [wide + 1], [x + 0], *numbers)
        codes = wide.to(E4M3).view(torch.uint8)
        yield twin.adam_states, ([x], [x + 0], [codes], [codes + 0], [], [], [c.one()], [c.one()], *numbers)
        count, rate = torch.zeros(1, dtype=torch.int32, device=c.device), c.one()
        yield twin.adam_control, (count, rate, c.one(), c.one() - 1, 0.9, 0.99, True)
        control = torch.tensor([0.1, 0.1, 0.1, 1, 0], device=c.device)
        yield twin.adam_capturable, ([x], [wide + 2], [wide + 0], [wide + 1], [], control, *numbers[1:5], True, False)
        yield twin.sgd, ([x], [x + 0], [x + 1], 0.1, 0.9, 0.0, 0.1, False, False, False)
        sizes = (*shape[:-1], 1), (*shape[:-2], 1, shape[-1]) if shape else ()
        state = (wide + 1, None) if not shape else tuple(c.x(*size, dtype=FP32) for size in sizes)
        yield twin.adafactor, (x, x + 0, *state, 0.1, 0.1, 0.9, 1e-6, 1e-12, 1e-3, 1.0, False)
        for kind in ("l2", "max"):
            yield twin.grad_norm, ([x, x], kind)
        for norm, most in itertools.product((0.0, 1.0), (0.0, 1.0)):
            yield twin.clip_grads, ([x + 0], torch.tensor(norm, device=c.device), most)
    yield twin.clip_grads, ([], torch.tensor(0.0, device=c.device), 1.0)


CALLS: list[Callable[[Calls, int, int], Iterator[Any]]] = [casts, rows_of_numbers, losses, products, attentions, steps]


def _tensors(found: Any) -> list[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        return [found]
    return [x for one in found or () for x in _tensors(one)] if isinstance(found, (list, tuple)) else []


def check(make: Any, device: str, dtype: torch.dtype) -> set[str]:
    """Call what `make` yields for each pair of sizes; the names of the ops that answered, where not in a sentence."""
    seen = set()
    for rows, cols in (*SIZES, (5, 16)) if make is losses else SIZES:
        for op, args in make(Calls(device, dtype), rows, cols):
            try:
                found = op(*args)
            except (TypeError, ValueError, NotImplementedError) as error:
                refused = str(error)
                assert re.match(r"twin::\w+: .*(1 to \d+ c|1 to \d+ columns;)", refused), refused
                continue
            seen.add(op.__name__)
            for x in _tensors([found, list(args)]):
                wide = x.float() if x.is_floating_point() else x
                assert not bool(wide.isnan().any()), f"{op.__name__} of {rows}, {cols}: {x}"
    return seen


@pytest.mark.parametrize("dtype", [FP32, torch.bfloat16])
@pytest.mark.parametrize("make", CALLS)
def test_nothing_gives_no_nan(make: Any, dtype: torch.dtype) -> None:
    assert check(make, "cpu", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, torch.bfloat16])
@pytest.mark.parametrize("make", CALLS)
def test_nothing_gives_no_nan_on_a_gpu(make: Any, dtype: torch.dtype) -> None:
    assert check(make, "cuda", dtype)


def test_every_op_is_asked() -> None:
    made = {op.__name__ for make in CALLS for op, _ in make(Calls("cpu", torch.bfloat16), 0, 16)}
    assert made == set(library._IMPLEMENTATIONS["CPU"])


@pytest.mark.parametrize("dtype", [FP32, torch.bfloat16, torch.float16])
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
        assert_same_bits(x.grad + 0 if dtype == FP32 else x.grad, torch.zeros_like(x))
