"""Parameters with gradients for the tests of `FusedAdam`, and all that a step may change."""

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import reference as te
from reference.float8.float8_tensor import Float8Tensor
from reference.numbers.formats import E4M3, cast

BF16 = torch.bfloat16
RECIPE = te.DelayedScaling(amax_history_len=4)
FusedAdam = te.optimizers.FusedAdam
SHAPES = ((4, 3), (5,), (2, 2))


def numbers(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


SPECIAL = torch.tensor([0.0, -0.0, 1e-45, 1e-38, 3e38, -65504.0, float("nan"), float("inf"), -float("inf")])


def awkward(seed: int, size: int, dtype: torch.dtype, special: bool, finite: bool = False) -> torch.Tensor:
    """Numbers of many magnitudes; with `special`, one in ten is zero, tiny, huge, or unless `finite` not finite."""
    draw = np.random.default_rng(seed)
    x = torch.from_numpy((draw.normal(size=size) * np.exp2(draw.integers(-20, 10, size=size))).astype(np.float32))
    if special and size:
        at = torch.from_numpy(draw.random(size) < 0.1)
        x[at] = SPECIAL[torch.from_numpy(draw.integers(0, 6 if finite else len(SPECIAL), size=int(at.sum())))]
    return x.to(dtype)


def parameter(shape: tuple[int, ...] = (4, 3), dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Parameter:
    p = torch.nn.Parameter(numbers(seed, shape, dtype))
    p.grad = numbers(seed + 100, shape, dtype)
    return p


def everything(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Copies of all that a step may change."""
    found: list[Any] = []
    for group in optimizer.param_groups:
        found.append({name: copy.deepcopy(value) for name, value in group.items() if name != "params"})
        for p in group["params"]:
            data = p._data.view(torch.uint8) if isinstance(p, Float8Tensor) else p.detach()
            state = optimizer.state.get(p, {})
            found += [
                data if data.is_meta or data.is_sparse else data.clone(),
                {k: v.clone() for k, v in state.items()},
            ]
    return found


def assert_unchanged(before: list[Any], optimizer: torch.optim.Optimizer) -> None:
    for a, b in zip(before, everything(optimizer), strict=True):
        pairs = [(a, b)] if isinstance(a, torch.Tensor) else [(a[k], b[k]) for k in a.keys() | b.keys()]
        for one, other in pairs:
            if isinstance(one, torch.Tensor):
                assert one.is_meta or torch.equal(one, other)
            else:
                assert one == other


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(numbers(i, shape, dtype)) for i, shape in enumerate(SHAPES)]


def train(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for i, p in enumerate(params):
            p.grad = numbers(10 * step + i, tuple(p.shape), p.dtype)
        optimizer.step()


def groups(params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "betas": (0.8, 0.9)}]


def through_a_file(state: dict[str, Any]) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


RANGE = {torch.float16: np.float32(32752), torch.uint8: np.float32(448)}


def encoded(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The docstring of reference/ops/optimizers/adam_states.py, with NumPy and the definition of the cast to FP8."""
    if dtype not in RANGE:
        return x.to(dtype), None
    most = np.float32(np.nanmax(np.abs(x.numpy()), initial=0))
    scale = max(min(most, np.finfo(np.float32).max) / RANGE[dtype], np.float32(2.0**-100))
    inverse = np.float32(1) / scale
    if dtype == torch.float16:
        return torch.from_numpy(x.numpy() * inverse).to(torch.float16), torch.tensor([scale])
    return cast(x, E4M3, float(inverse)).view(torch.uint8), torch.tensor([scale])


def decoded(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    wide = x.view(torch.float8_e4m3fn).float() if x.dtype == torch.uint8 else x.float()
    return wide if scale is None else torch.from_numpy(wide.numpy() * scale.numpy())


def fp8_weight() -> torch.nn.Parameter:
    with te.quantized_model_init(recipe=RECIPE):
        weight: Any = te.Linear(16, 16, params_dtype=BF16).weight
    weight.grad = numbers(3, (16, 16), BF16)
    return weight  # type: ignore[no-any-return]


def sparse() -> torch.nn.Parameter:
    p = parameter()
    p.grad = p.grad.to_sparse()
    return p


# Made, refused by every optimizer's step with this error and sentence.
BAD_PARAMETERS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (sparse, TypeError, "its gradient is sparse; dense gradients are accepted"),
    (fp8_weight, ValueError, "is kept in FP8; a weight in fp32 or 16 bits is accepted"),
    (lambda: parameter(dtype=torch.float64), TypeError, "is torch.float64; float32, bfloat16 and float16"),
]
