"""What the optimizers have in common: copies, torch's gradient scaler, and a step that one parameter refuses."""

import copy
import inspect
import pickle
import sys
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import pytest
import torch
from shared.adam_parameters import BAD_PARAMETERS, assert_unchanged, everything, parameter
from shared.bits import assert_same_bits

import reference as te

Make = Callable[[Any], Any]
OPTIMIZERS: dict[str, Make] = {
    "FusedSGD": partial(te.optimizers.FusedSGD, lr=0.1, momentum=0.9, weight_decay=0.5, wd_after_momentum=True),
    "Adafactor": partial(te.optimizers.Adafactor, lr=0.1),
    "FusedAdam": partial(te.optimizers.FusedAdam, lr=0.1),
}
WITHOUT_MASTERS = ("FusedSGD", "Adafactor")  # FusedAdam's masters belong to a copy and to what is refused


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("name", WITHOUT_MASTERS)
def test_a_copy_steps_as_the_original(name: str, copied: Callable[[Any], Any]) -> None:
    optimizer = OPTIMIZERS[name]([parameter()])
    optimizer.step()
    other = copied(optimizer)
    p, q = (one.param_groups[0]["params"][0] for one in (optimizer, other))
    q.grad = p.grad.clone()
    for one in (optimizer, other):
        one.step()
    assert_same_bits(p, q)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_scaler_unscales_and_leaves_out_a_step_that_overflows(name: str) -> None:
    scaled, plain = parameter(), parameter()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = OPTIMIZERS[name]([scaled])
    for overflow in (False, True):
        scaled.grad = plain.grad * 4
        scaler.scale(torch.ones(()))
        if overflow:
            scaled.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
    once = OPTIMIZERS[name]([plain])
    once.step()
    assert_same_bits(scaled, plain)
    assert optimizer.param_groups[0].get("step") == once.param_groups[0].get("step")


@pytest.mark.parametrize(("bad", "error", "sentence"), BAD_PARAMETERS)
@pytest.mark.parametrize("name", WITHOUT_MASTERS)
def test_one_bad_parameter_refuses_the_step_and_nothing_moves(
    name: str, bad: Callable[[], Any], error: type[Exception], sentence: str
) -> None:
    optimizer = OPTIMIZERS[name]([{"params": [parameter(seed=0)]}, {"params": [parameter(seed=1)]}])
    for _ in range(2):
        optimizer.param_groups[1]["params"].append(bad())
        before = everything(optimizer)
        with pytest.raises(error, match=f"{name}: .*parameter 1 of group 1.*{sentence}"):
            optimizer.step()
        assert_unchanged(before, optimizer)
        optimizer.param_groups[1]["params"].pop()
        optimizer.step()


def _fused(**options: Any) -> Make:
    return partial(te.optimizers.FusedAdam, lr=0.1, **options)


KINDS: dict[str, Make] = {
    **OPTIMIZERS,
    "masters": _fused(master_weights=True),
    "remainders": _fused(master_weights=True, store_param_remainders=True),
    "capturable": _fused(capturable=True, master_weights=True),
    "few bits": _fused(
        exp_avg_dtype=torch.uint8,
        exp_avg_sq_dtype=torch.float16,
        master_weights=True,
        master_weight_dtype=torch.float16,
    ),
    "SGD without momentum": partial(te.optimizers.FusedSGD, lr=0.1),
}
SHAPES: dict[str, Callable[[], torch.Tensor]] = {
    **{
        str(shape): partial(torch.full, shape, 0.75)
        for shape in ((), (0,), (3, 0), (1,), (1, 1), (5,), (2, 3, 4), (1, 7))
    },
    "transposed": lambda: torch.full((4, 6), 0.75).t(),
    "strided": lambda: torch.full((4, 12), 0.75)[:, ::2],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_of_any_shape_steps_or_is_refused_before_anything_moves(kind: str, dtype: torch.dtype) -> None:
    """Beside another parameter: both step, and their state is saved and loaded; or neither moves and nothing counts."""
    for shape, numbers in SHAPES.items():
        odd = torch.nn.Parameter(numbers().to(dtype))
        other = torch.nn.Parameter(torch.full((8,), 0.5, dtype=dtype))
        optimizer = KINDS[kind]([other, odd])
        before = everything(optimizer)
        for step in range(2):
            for p in (other, odd):
                p.grad = torch.full(p.shape, 1.0 + step, dtype=dtype)
            if not odd.is_contiguous():
                with pytest.raises(ValueError, match="parameter 1 of group 0 is not contiguous; contiguous param"):
                    optimizer.step()
                assert_unchanged(before, optimizer)
                continue
            optimizer.step()
        assert odd.isfinite().all(), shape
        if odd.is_contiguous():
            assert (odd < 0.75).all(), shape
            assert (other < 0.5).all(), shape
            again = KINDS[kind]([other, odd])
            again.load_state_dict(optimizer.state_dict())
            for name, x in optimizer.state[odd].items():
                if isinstance(x, torch.Tensor):
                    assert_same_bits(x, again.state[odd][name], f"{shape} {name}")
        te.optimizers.clip_grad_norm_([other, odd], 1.0)


@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD"])
def test_no_optimizer_loads_the_compiler(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """torch's wrapper of these methods imports torch._dynamo: seconds in every process that trains."""
    used = []
    for method in ("add_param_group", "zero_grad"):
        plain = inspect.unwrap(getattr(torch.optim.Optimizer, method))

        def wrapper(*args: Any, plain: Any = plain) -> None:
            used.append(plain)
            plain(*args)

        monkeypatch.setattr(torch.optim.Optimizer, method, update_wrapper(wrapper, plain))
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    weight = parameter()
    optimizer = OPTIMIZERS[name]([weight])
    optimizer.zero_grad()
    assert weight.grad is None
    assert not used
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # it is there, and may be tracing
    optimizer.zero_grad()
    assert len(used) == 1
