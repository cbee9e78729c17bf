"""Layers whose parameters are elsewhere: flattened by FSDP, or parametrized."""

import copy
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.utils import parametrizations, parametrize

import reference as te

BF16 = torch.bfloat16
RECIPE = te.DelayedScaling(amax_history_len=4)
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "Linear": lambda: te.Linear(64, 64, params_dtype=BF16),
    "Linear without a bias": lambda: te.Linear(64, 64, bias=False, params_dtype=BF16),
    "LayerNormLinear": lambda: te.LayerNormLinear(64, 64, params_dtype=BF16),
    "LayerNormMLP": lambda: te.LayerNormMLP(64, 64, params_dtype=BF16),
    "LayerNorm": lambda: te.LayerNorm(64, params_dtype=BF16),
    "RMSNorm": lambda: te.RMSNorm(64, params_dtype=BF16),
    "TransformerLayer": lambda: te.TransformerLayer(64, 96, 4, params_dtype=BF16),
    "MultiheadAttention": lambda: te.MultiheadAttention(64, 4, qk_norm_type="RMSNorm", params_dtype=BF16),
    "operations": lambda: te.ops.Sequential(te.ops.RMSNorm(64, dtype=BF16), te.ops.Linear(64, 64, dtype=BF16)),
    "two": lambda: torch.nn.Sequential(te.Linear(64, 64, params_dtype=BF16), te.LayerNormLinear(64, 64).to(BF16)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_each_parameter_has_memory_of_its_own(name: str) -> None:
    """Programs that save a model drop what shares a storage with another parameter, or refuse it."""
    parameters = list(LAYERS[name]().parameters())
    assert len({x.untyped_storage().data_ptr() for x in parameters}) == len(parameters)
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in parameters)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def steps(model: torch.nn.Module, fp8: bool) -> list[torch.Tensor]:
    """The results of two steps, and x's gradients."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.125), []
    for i in range(2):
        torch.manual_seed(i)
        x = torch.randn(8, 2, 64).to(BF16).requires_grad_()
        optimizer.zero_grad()
        with te.autocast(enabled=fp8, recipe=RECIPE):
            y = model(x)
        y.float().square().mean().backward()
        optimizer.step()
        found += [y.detach(), x.grad]
    return found


def compare(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert_same_bits(a, b, f"tensor {i}")


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore:.*FSDP.*:UserWarning", "ignore:.*NO_SHARD.*", "ignore::FutureWarning")
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_fsdp_may_flatten_them(name: str, fp8: bool, group: None) -> None:
    """With `use_orig_params=False` no layer below the wrapped one has a parameter; the bits are those without FSDP."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(LAYERS[name]())
    device = torch.device("cpu")
    flat = FullyShardedDataParallel(copy.deepcopy(plain), use_orig_params=False, device_id=device)
    compare(steps(flat, fp8), steps(plain, fp8))
    assert set(flat.state_dict()) == set(plain.state_dict())
    del flat
    gc.collect()  # FSDP's hooks are in cycles; torch 2.11's compiler trips over a flattened model that is alive


class Same(torch.nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w * 1


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("operations", "two")])
def test_they_may_be_parametrized(name: str, fp8: bool) -> None:
    torch.manual_seed(0)
    plain = LAYERS[name]()
    module = copy.deepcopy(plain)
    for part in list(module.modules()):
        for parameter in list(part._parameters):
            if part._parameters[parameter] is not None:
                parametrize.register_parametrization(part, parameter, Same())
    assert not any(
        p is not None
        for part in module.modules()
        if hasattr(part, "parametrizations")
        for p in part._parameters.values()
    )
    compare(steps(module, fp8), steps(plain, fp8))
    module.load_state_dict(module.state_dict())
    module.to("meta")


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    "of", [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal]
)
def test_torch_s_parametrizations_train(of: Any, fp8: bool) -> None:
    torch.manual_seed(0)
    layer = of(te.Linear(64, 64, bias=False))
    before = [p.detach().clone() for p in layer.parameters()]
    with te.autocast(enabled=fp8, recipe=RECIPE):
        y = layer(torch.randn(16, 64))
    y.square().mean().backward()
    torch.optim.SGD(layer.parameters(), lr=1.0).step()
    assert not all(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))


def test_what_needs_a_parameter_is_refused() -> None:
    x = torch.randn(16, 64)
    layer = parametrizations.weight_norm(te.Linear(64, 64, delay_wgrad_compute=True))
    with pytest.raises(NotImplementedError, match="delay_wgrad_compute=True with a weight that is computed"):
        layer(x)
    layer = parametrizations.weight_norm(te.Linear(64, 64, fuse_wgrad_accumulation=True))
    with pytest.raises(RuntimeError, match="weight has no main_grad"):
        layer(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"weight is no parameter of the layer any more \(parametrized, or"):
        layer.reset_parameters()
    with te.quantized_model_init():
        kept = te.Linear(64, 64)
    del kept.weight
    kept.weight = x
    with pytest.raises(RuntimeError, match=r"weight is a plain torch.float32 tensor in a layer that was made in"):
        kept(x)
    gone = te.Linear(64, 64, bias=False)
    del gone.weight
    with pytest.raises(RuntimeError, match="Linear: its parameters are gone, and no tensors are in their place"):
        gone.get_extra_state()
