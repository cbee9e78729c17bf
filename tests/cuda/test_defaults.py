"""What layers launch at their defaults is what `twin compile` compiles."""

from typing import Any

import pytest
import torch
from shared.dry_gpu import DryGpu

import optimized
import reference as te
from optimized import defaults

DEFAULTS = {(kernel, tuple(sorted(macros.items()))) for kernel, macros in defaults.configurations()}


def test_each_default_is_listed_once() -> None:
    assert len(DEFAULTS) == len(defaults.configurations())


@pytest.mark.sample(13)
@pytest.mark.parametrize("dtype", defaults.WIDE, ids=str)
@pytest.mark.parametrize("fp8", [False, True], ids=["16 bits", "fp8"])
@pytest.mark.parametrize("llama", [False, True], ids=["gpt", "llama"])
@pytest.mark.parametrize(("hidden", "tokens"), [(256, 16), (768, 8192), (2048, 2048), (4096, 8192), (5120, 300)])
def test_layers_launch_what_twin_compile_compiles(
    hidden: int, tokens: int, llama: bool, fp8: bool, dtype: torch.dtype
) -> None:
    options: Any = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False} if llama else {}
    with DryGpu() as gpu:
        layer = optimized.TransformerLayer(
            *(hidden, 4 * hidden, hidden // 64),
            params_dtype=dtype,
            init_method=lambda w: w,
            output_layer_init_method=lambda w: w,
            **options,
        )
        x = torch.empty(tokens, 1, hidden, dtype=dtype, device="cuda").requires_grad_()
        with te.autocast(enabled=fp8):
            y = layer(x)
        y.backward(torch.empty_like(y))
        used = {(one.kernel.kernel, tuple(sorted(one.kernel.defines.items()))) for one in gpu.launches}
    assert not used - DEFAULTS
