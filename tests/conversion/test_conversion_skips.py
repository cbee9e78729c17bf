"""`convert`: what stays as it is, and why; which modules compute an RMSNorm."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from shared.conversion_models import BF16, ZeroCentered

import reference as te
from reference.conversion.norms import rms_norm_of


class Subclass(torch.nn.Linear):
    """As a library's, for its own purposes."""

    mark = "of the class"


class Scaled(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * 2


class Reads(torch.nn.Module):
    """Computes with one module's weight, asks another's dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.called = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.called.weight.dtype) if isinstance(self.called.weight, torch.Tensor) else x
        return torch.nn.functional.linear(self.called(x), self.read.weight)


class Called(torch.nn.Linear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) * 2


def hooked() -> torch.nn.Module:
    module = torch.nn.Linear(32, 32)
    module.register_forward_pre_hook(lambda module, args: None)
    return module


def with_forward() -> torch.nn.Module:
    module = torch.nn.Linear(32, 32)
    module.forward = lambda x: x  # type: ignore[method-assign]
    return module


def with_fp8_weight() -> torch.nn.Module:
    module = torch.nn.Linear(32, 32)
    module.weight = torch.nn.Parameter(module.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    return module


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Scaled(32, 32), "its class has a forward of its own"),
        (lambda: Called(32, 32), "its class has a forward of its own"),
        (lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(32, 32)), "it has no parameter weight"),
        (hooked, "hooks are registered on it"),
        (with_forward, "its forward was replaced"),
        (lambda: torch.nn.Linear(32, 24), "in_features=32, out_features=24: multiples of 16 are accepted in FP8"),
        (lambda: torch.nn.Linear(32, 32).double(), "its weight is torch.float64: float32, bfloat16 and float16 are"),
        (with_fp8_weight, "its weight is torch.float8_e4m3fn: float32, bfloat16 and float16 are accepted"),
        (lambda: torch.nn.LayerNorm((4, 8)), "te.LayerNorm has one dimension, a weight and a bias"),
        (lambda: torch.nn.LayerNorm(32, bias=False), "te.LayerNorm has one dimension, a weight and a bias"),
        (lambda: torch.nn.LayerNorm(32, eps=0.0), "LayerNorm: eps=0.0; a positive finite number of fp32 is accepted."),
        (
            lambda: torch.nn.RMSNorm(32),
            "it is neither a linear layer nor a norm that te has",
        ),  # its eps depends on the dtype
    ],
)
def test_a_module_that_stays(make: Callable[[], torch.nn.Module], why: str) -> None:
    model = torch.nn.Sequential(make())
    module = model[0]
    assert te.convert(model).skipped["0"].startswith(why)
    assert model[0] is module


def test_a_subclass_with_the_same_forward_is_replaced() -> None:
    model: Any = torch.nn.Sequential(Subclass(32, 32))
    assert te.convert(model).converted == {"0": "te.Linear"}
    assert isinstance(model[0], Subclass)
    assert model[0].mark == "of the class"
    with te.autocast():
        model(torch.ones(2, 32))
    assert model[0].fp8


def test_a_module_whose_weight_its_owner_reads_stays() -> None:
    report = te.convert(Reads())
    assert report.skipped == {"read": "Reads.forward computes with its parameters itself"}
    assert report.converted == {"called": "te.Linear"}
    # torch's own: its fast path takes the weights and calls nothing
    skipped = te.convert(torch.nn.TransformerEncoderLayer(32, 2, 64)).skipped
    assert skipped["linear1"] == "TransformerEncoderLayer.forward computes with its parameters itself"
    assert {"self_attn", "self_attn.out_proj", "linear2", "norm1"} <= skipped.keys()


class Gated(ZeroCentered):
    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)


class Wide(ZeroCentered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).float()


class Nearly(ZeroCentered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 1.01


class DoubledInHalf(ZeroCentered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if x.dtype == BF16 else 1)


class EpsilonOutside(ZeroCentered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x / (x.float().square().mean(-1, keepdim=True).sqrt() + self.eps) * (1 + self.weight)).type_as(x)


def test_norms_are_known_by_what_they_compute() -> None:
    assert rms_norm_of(torch.nn.RMSNorm(48, eps=1e-5)) == (1e-5, False)
    for dtype in (torch.float32, BF16):
        assert rms_norm_of(ZeroCentered(33, 1e-3).to(dtype)) == (1e-3, True)
    with torch.device("meta"), torch.autocast("cpu", BF16):
        assert rms_norm_of(ZeroCentered(33)) == (1e-6, True)
    for other in (
        Gated(32),
        Wide(32),
        Nearly(32),
        DoubledInHalf(32),
        EpsilonOutside(32),
        torch.nn.LayerNorm(32, bias=False),
        torch.nn.PReLU(32),
    ):
        assert rms_norm_of(other) is None


class _Odd(torch.nn.Module):
    """An RMSNorm but for one thing."""

    def __init__(self, odd: str) -> None:
        super().__init__()
        self.weight, self.eps, self.odd = torch.nn.Parameter(torch.ones(32)), 1e-6, odd

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        limit = {"clamps x at 1e3": 1e3, "clamps x at fp16's largest": 65504.0, "clamps x at 1e9": 1e9}.get(self.odd)
        x = x if limit is None else x.clamp(-limit, limit)
        wide = x.float()
        if self.odd == "has 1.001 times the gradient of large x" and wide.requires_grad:
            factors = 1 + 1e-3 * (wide.detach().abs() > 1)
            wide = wide.clone()
            wide.register_hook(lambda grad: grad * factors)
        rstd = (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        rstd = rstd.detach() if self.odd == "detaches rstd" else rstd
        gamma = self.weight.detach() if self.odd == "detaches gamma" else self.weight
        y = gamma * (wide * rstd).to(x.dtype)
        if self.odd == "clips its gradient" and y.requires_grad:
            y.register_hook(lambda grad: grad.clamp(-1, 1))
        if self.odd == "is another one in training" and self.training:
            return y * 2
        if self.odd == "is another one in evaluation" and not self.training:
            return y * 2
        return y * 2 if self.odd == "is another one of three dimensions" and x.dim() == 3 else y


@pytest.mark.parametrize(
    ("odd", "replaced"),
    [
        ("nothing", True),
        ("clamps x at 1e3", False),
        ("clamps x at fp16's largest", False),
        ("clamps x at 1e9", False),
        ("detaches rstd", False),
        ("detaches gamma", False),
        ("clips its gradient", False),
        ("has 1.001 times the gradient of large x", False),
        ("is another one in training", False),
        ("is another one in evaluation", False),
        ("is another one of three dimensions", False),
    ],
)
def test_a_norm_is_its_gradients_too(odd: str, replaced: bool) -> None:
    model = torch.nn.Sequential(_Odd(odd))
    found = te.convert(model)
    assert bool(found.converted) is replaced


def test_a_layer_without_sizes_yet_is_skipped_with_a_reason() -> None:
    model = torch.nn.Sequential(torch.nn.LazyLinear(32), torch.nn.Linear(32, 32))
    assert te.convert(model).skipped == {"0": "its parameters have no sizes yet: call the model once, then convert"}
    model(torch.ones(2, 16))
    assert te.convert(model).converted == {"0": "te.Linear"}
