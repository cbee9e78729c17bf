"""What statistics cost where nothing is measured: nothing. The hook before the runner, and observed quantizers."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from shared.bits import assert_same_bits
from shared.dry_gpu import DryGpu

import optimized
import reference as te
from optimized.tapes import TapeRunner, runner
from reference.inspect import statistics
from reference.nn.core import autograd, hook
from reference.nn.core.observed_quantizer import Observed

BF16 = torch.bfloat16
pytestmark = pytest.mark.usefixtures("same_runner")


def made() -> Any:
    torch.manual_seed(3)
    return te.Linear(32, 48, params_dtype=BF16)


def step(model: Any) -> list[torch.Tensor]:
    x = torch.arange(512).view(16, 32).remainder(7).to(BF16).requires_grad_()
    model.zero_grad(set_to_none=True)
    with te.autocast():
        y = model(x)
    y.backward(torch.ones_like(y))
    return [y.detach(), x.grad, model.weight.grad]


def test_launches_are_the_same_with_statistics_off_and_replayed_between_samples() -> None:
    """On a pretended GPU: a closed `with`, and an open one between two samples, launch what they always launch."""

    def lines(every: int | None) -> list[list[str]]:
        found = []
        with DryGpu() as gpu:
            gpu.tapes()
            pretends = gpu._pretends
            usual = statistics._Observer.backward

            def backward(*args: Any) -> Any:
                with pretends:
                    return usual(*args)

            gpu.enter_context(mock.patch.object(statistics._Observer, "backward", backward))
            layer = optimized.TransformerLayer(64, 128, 4, params_dtype=BF16)
            x = torch.empty(40, 2, 64, dtype=BF16, device="cuda").requires_grad_()
            grad = torch.empty_like(x)

            def run() -> None:
                gpu.lines.clear()
                with te.autocast():
                    y = layer(x)
                y.backward(grad)
                layer.zero_grad(set_to_none=True)
                x.grad = None
                found.append([line for line in gpu.lines if " [" in line])

            for _ in range(4):
                run()
            if every is not None:
                with te.collect_stats(layer, every=every):
                    for _ in range(3):
                        run()
            else:
                for _ in range(3):
                    run()
            for _ in range(2):
                run()
            assert type(autograd.runner) is TapeRunner
        return found

    plain, measured = lines(None), lines(2)
    again = [{line.split()[0] for line in one} for one in plain[4:]]
    assert again == [{"again"}] * 5
    replayed = [0, 1, 2, 3, 5, 7, 8]  # 4 and 6 are measured
    for i in replayed:
        assert measured[i] == plain[i], i
    for i in (4, 6):
        kept = [line for line in measured[i] if not line.startswith("cast_stats.")]
        assert len(measured[i]) - len(kept) == 2 * 12, "two launches for each tensor"
        names = [{line.removeprefix("again ").split(" (")[0] for line in one} for one in (plain[i], kept)]
        assert names[0] <= names[1]


def test_kernels_of_a_measured_forward_are_compiled_side_by_side() -> None:
    """A dry pass would measure numbers that do not exist: it runs with the quantizers that nobody observes."""
    with DryGpu() as gpu:
        gpu.tapes()
        layer = optimized.Linear(64, 64, params_dtype=BF16)
        compile_plain = gpu.enter_context(mock.patch.object(runner.precompile, "compile_plain"))
        with te.collect_stats(layer, every=1), te.autocast():
            layer(torch.empty(32, 64, dtype=BF16, device="cuda"))
        ((_, _, _, context, _),) = (call.args for call in compile_plain.call_args_list)
    assert context.modules[0].module is layer
    assert not isinstance(context.quantizers["input"], Observed)


def test_a_hook_that_is_not_installed_is_nowhere() -> None:
    model = made()
    one, two = hook.Hook(model), hook.Hook(model)
    usual = autograd.runner
    for order in ((one, two), (two, one)):
        one.install()
        two.install()
        expected = step(copy.deepcopy(model))
        for which in order:
            which.remove()
            assert not which.installed
        assert autograd.runner is usual
        for a, b in zip(step(copy.deepcopy(model)), expected, strict=True):
            assert_same_bits(a, b)


def test_an_observed_quantizer_is_its_inner_one_to_everybody_else() -> None:
    layer: Any = made()
    step(layer)
    inner = next(iter(layer._precision.quantizers.values()))
    observed = Observed(inner, lambda *args: None)
    assert (observed.key, observed.dtype, observed.fp8) == (inner.key, inner.dtype, inner.fp8)
    assert [*map(id, observed.tensors())] == [*map(id, inner.tensors())]
    assert [*map(id, observed.changes())] == [*map(id, inner.changes())]
    assert observed.scale(torch.ones(4, 32, dtype=BF16)).item() == inner.scale(torch.ones(4, 32, dtype=BF16)).item()
