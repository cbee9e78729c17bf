"""`make_graphed_callables` with `_order`: passes that are open at a time have the bits of eager mode."""

from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits
from shared.graph_cases import BF16, HIDDEN, RECIPE, pretended, state

import reference as te

__all__ = ["pretended"]  # a fixture

ORDER = [1, 2, 1, 2, -2, -1, 1, 2, -2, -1, -2, -1]


def test_a_schedule_on_a_cpu_gives_a_module_for_each_pass() -> None:
    layers = [te.Linear(16, 16) for _ in range(3)]
    samples = [(torch.randn(2, 16),)] * 9
    for per_chunk, chunks in (([1, 2], [0, 0, 0, 1, 2, 1, 2, 1, 2]), ((2, 1), [0, 1, 0, 1, 0, 1, 2, 2, 2])):
        found = te.make_graphed_callables(layers, samples, _order=ORDER, _num_layers_per_chunk=per_chunk)
        assert found == tuple(layers[i] for i in chunks)
        for one in found:
            one.reset()
    with pytest.raises(ValueError, match="_num_layers_per_chunk=1 for 2 chunks in _order and 3 modules"):
        te.make_graphed_callables(layers, samples, _order=ORDER)


def scheduled(package: Any, device: str, fp8: bool, graphed: bool, cached: bool) -> list[torch.Tensor]:
    """Two steps of a pipeline of two chunks and three microbatches, which are open at the same time."""
    torch.manual_seed(1)
    layers = [
        package.LayerNormMLP(HIDDEN, 64, params_dtype=BF16, device=device),
        package.TransformerLayer(HIDDEN, 64, 2, params_dtype=BF16, device=device),
    ]
    runs: list[Any] = [layers[i // 3] for i in range(6)]
    if graphed:
        samples = [(torch.ones(4, 2, HIDDEN, device=device, dtype=BF16, requires_grad=True),) for _ in range(6)]
        options = {"enabled": fp8, "recipe": RECIPE, "cache_quantized_params": cached}
        runs = te.make_graphed_callables(
            layers, samples, _order=ORDER, _reuse_graph_input_output_buffers=True, **options
        )
        assert "forward" not in vars(layers[0])
    numbers, seen = torch.Generator().manual_seed(3), []
    torch.manual_seed(4)
    for step in range(3):
        if graphed and step == 2:
            for run in runs:
                run.reset()
        done, outputs, inputs = {}, {}, {}
        with te.autocast(enabled=fp8, recipe=RECIPE):
            for entry in ORDER:
                chunk, microbatch = abs(entry) - 1, done.get(entry, 0)
                done[entry] = microbatch + 1
                key = 3 * chunk + microbatch
                if entry > 0:
                    inputs[key] = torch.randn(4, 2, HIDDEN, generator=numbers).to(device, BF16).requires_grad_()
                    more = {"is_first_microbatch": microbatch == 0} if cached else {}
                    outputs[key] = runs[key](inputs[key], **more)
                    seen.append(outputs[key].detach().clone())
                else:
                    outputs[key].backward(torch.full_like(outputs[key], 1.0 + microbatch))
                    seen.append(inputs[key].grad.clone())
        with torch.no_grad():
            for p in (p for layer in layers for p in layer.parameters()):
                seen.append(p.grad.clone())
                p.copy_(p - p.grad * 2**-7)
                p.grad = None
        seen += [t for layer in layers for t in state(layer)]
    return seen


def compare_schedules(package: Any, device: str, fp8: bool, cached: bool) -> None:
    found = [scheduled(package, device, fp8, graphed, cached) for graphed in (False, True)]
    for position, (a, b) in enumerate(zip(*found, strict=True)):
        assert_same_bits(a, b, f"tensor {position}")


@pytest.mark.sample(1)
@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("cached", [False, True])
def test_the_passes_of_a_schedule_have_the_bits_of_eager_mode(cached: bool) -> None:
    compare_schedules(te, "cpu", cached, cached)


@pytest.mark.gpu
@pytest.mark.parametrize(("fp8", "cached"), [(False, False), (True, False), (True, True)])
def test_the_graphs_of_a_schedule_have_the_bits_of_eager_mode(fp8: bool, cached: bool) -> None:
    import optimized

    compare_schedules(optimized, "cuda", fp8, cached)
