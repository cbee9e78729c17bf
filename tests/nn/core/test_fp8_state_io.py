"""FP8 state through other loaders: torch.distributed.checkpoint, Hugging Face's way of loading, and by hand."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from shared.bits import assert_same_bits
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

import reference as te
from reference.float8.float8_tensor import Float8Tensor

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")
BF16 = torch.bfloat16
RECIPE = te.DelayedScaling(amax_history_len=1024)


def model(seed: int = 0, quantized: bool = False) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    with te.quantized_model_init(enabled=quantized):
        return torch.nn.Sequential(
            te.Linear(32, 32, params_dtype=BF16),
            te.LayerNormMLP(32, 64, params_dtype=BF16),
            te.LayerNorm(32, params_dtype=BF16),
            te.TransformerLayer(32, 64, 2, fuse_qkv_params=True, params_dtype=BF16),
        )


def step(module: torch.nn.Module, i: int, recipe: te.DelayedScaling = RECIPE) -> list[torch.Tensor]:
    x = (torch.randn(8, 2, 32, generator=torch.Generator().manual_seed(i)) * 3).to(BF16).requires_grad_()
    module.zero_grad(set_to_none=True)
    torch.manual_seed(i)
    with te.autocast(recipe=recipe):
        y = module(x)
    y.backward(torch.full_like(y, 2.0**-i))
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def trained(quantized: bool = False, recipe: te.DelayedScaling = RECIPE) -> torch.nn.Sequential:
    module = model(quantized=quantized)
    for i in range(3):
        step(module, i, recipe)
    return module


def goes_on(expected: torch.nn.Module, module: torch.nn.Module, recipe: te.DelayedScaling = RECIPE) -> None:
    """The same bits in the next steps."""
    expected = copy.deepcopy(expected)
    for i in range(3, 6):
        for a, b in zip(step(expected, i, recipe), step(module, i, recipe), strict=True):
            assert_same_bits(a, b, f"step {i}")


def load(module: torch.nn.Module, folder: Path) -> None:
    state = module.state_dict()
    dcp.load(state, checkpoint_id=folder)
    module.load_state_dict(state)


def load_by_api(module: torch.nn.Module, folder: Path) -> None:
    state = get_model_state_dict(module)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(module, state)


@pytest.mark.sample(2)
@pytest.mark.parametrize("quantized", [False, True], ids=["16-bit weights", "FP8 weights"])
@pytest.mark.parametrize("how", [load, load_by_api])
def test_a_distributed_checkpoint_goes_on_with_the_same_bits(
    how: Callable[..., None], quantized: bool, tmp_path: Path
) -> None:
    """Into a fresh model, which has the keys, and into one from the meta device."""
    module = trained(quantized)
    dcp.save(get_model_state_dict(module), checkpoint_id=tmp_path)
    fresh = model(1, quantized)
    how(fresh, tmp_path)
    goes_on(module, fresh)
    with torch.device("meta"):
        empty = model(1, quantized)
    empty.to_empty(device="cpu")
    how(empty, tmp_path)
    goes_on(module, empty)


@pytest.mark.parametrize("with_state", [True, False])
def test_a_full_state_dict_is_set_whose_parts_have_no_state(with_state: bool) -> None:
    """PyTorch puts a mark of its own where a module can have an `_extra_state` and the dictionary has none."""
    module, fresh = trained(quantized=False), model(1, False)
    given = {k: v.clone() for k, v in module.state_dict().items() if with_state or not k.endswith("_extra_state")}
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        set_model_state_dict(fresh, given, options=StateDictOptions(full_state_dict=True))
    finally:
        torch.distributed.destroy_process_group()
    for name, parameter in fresh.named_parameters():
        assert torch.equal(parameter, given[name]), name
    if with_state:
        goes_on(module, fresh)


def kept_far_from_1(seed: int = 0) -> torch.nn.Sequential:
    """A model that keeps weights in FP8 with scales other than 1: a step has updated them, and weights were written."""
    module = trained(quantized=True)
    with torch.no_grad():
        for weight in module.parameters():
            if isinstance(weight, Float8Tensor):
                weight.mul_(1)
                assert weight._scale_inv != 1
    return module


def test_codes_in_a_distributed_checkpoint_are_not_read_as_numbers(tmp_path: Path) -> None:
    """torch.distributed.checkpoint copies them into 16-bit tensors, and drops the scale_inv."""
    module, plain = kept_far_from_1(), model(1)
    dcp.save(module.state_dict(), checkpoint_id=tmp_path)
    state = plain.state_dict()
    dcp.load(state, checkpoint_id=tmp_path)
    before = copy.deepcopy(plain.state_dict())
    with pytest.raises(ValueError, match=r"0.weight is torch.bfloat16, and 0._extra_state says .* kept in FP8 with"):
        plain.load_state_dict(state)
    for name, value in plain.state_dict().items():
        assert_same_bits(value, before[name], name)


def test_a_loader_of_single_entries_does_not_read_codes_as_numbers(tmp_path: Path) -> None:
    module, plain = kept_far_from_1(), model(1)
    for name, layer in module.named_modules():
        if getattr(layer, "fp8_weights", None):
            with pytest.raises(
                ValueError, match=r"keeps (fc1_)?weight in FP8 \(scale_inv=0.0\d+\) and in the model it"
            ):
                plain.get_submodule(name).set_extra_state(layer.get_extra_state())
    with pytest.raises(ValueError, match=r"^load_fp8_state: in the checkpoint 0 keeps weight in FP8"):
        te.load_fp8_state(plain, module.state_dict())


def test_a_load_of_other_modules_says_nothing_of_fp8_state(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As PEFT loads adapters: the layers keep their state, and nothing is said of scales that start at 1."""
    monkeypatch.setattr("reference.support.notice._said", set())
    module = trained()
    before = copy.deepcopy(module.state_dict())
    module.load_state_dict({"2.weight": before["2.weight"]}, strict=False)
    for name, value in module.state_dict().items():
        assert_same_bits(value, before[name], name)
    assert not caplog.records
    module.load_state_dict({"0.weight": before["0.weight"]}, strict=False)
    assert "no FP8 state for '0': scales start at 1" in caplog.text


def test_what_a_state_says_of_codes_changes_no_scale(same_bits: Any) -> None:
    """Neither in a layer that keeps weights in FP8, nor in one that dequantizes them."""
    module = kept_far_from_1()
    for fresh in (model(1, quantized=True), model(1)):
        fresh.load_state_dict(module.state_dict())
        for name, layer in module.named_modules():
            if getattr(layer, "fp8_weights", None):
                other: Any = fresh.get_submodule(name)
                same_bits(other.fp8_meta["scaling_fwd"].scale, layer.fp8_meta["scaling_fwd"].scale, name)
                assert bool((other.fp8_meta["scaling_fwd"].scale[2::3] == 1).all())
                for weight in layer.fp8_weights:
                    same_bits(getattr(other, weight).detach() * 1, getattr(layer, weight).dequantize(), name)


def test_another_history_length_is_made_before_a_distributed_checkpoint_is_loaded(tmp_path: Path) -> None:
    recipe = te.DelayedScaling(amax_history_len=5)
    module = trained(recipe=recipe)
    dcp.save(module.state_dict(), checkpoint_id=tmp_path)
    fresh = model(1)
    te.init_fp8_state(fresh, recipe)
    load(fresh, tmp_path)
    goes_on(module, fresh, recipe)
    te.init_fp8_state(fresh)
    assert fresh.state_dict()["0._extra_state"].shape == (1025, 5)


class Loader:
    """As `transformers` loads: a model on the meta device, then one entry after the other by `setattr`."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.expected = list(module.state_dict())

    def load(self, state: dict[str, torch.Tensor]) -> list[str]:
        unexpected = []
        for key, value in state.items():
            path, _, name = key.rpartition(".")
            part = self.module.get_submodule(path)
            if key not in self.expected:
                unexpected.append(key)
            elif name == "_extra_state":
                part.set_extra_state(value)
            else:
                setattr(part, name, torch.nn.Parameter(value, requires_grad=value.is_floating_point()))
        for key in set(self.expected) - state.keys():
            path, _, name = key.rpartition(".")
            part = self.module.get_submodule(path)
            value = part.get_extra_state() if name == "_extra_state" else getattr(part, name)
            setattr(part, name, torch.empty_like(value, device="cpu"))
        return unexpected


def test_a_loader_of_single_entries_brings_the_state() -> None:
    module = trained()
    with torch.device("meta"):
        empty = model(1)
    assert Loader(empty).load(module.state_dict()) == []
    goes_on(module, empty)


def test_a_loader_of_single_entries_without_state_starts_fresh() -> None:
    module = model()
    with torch.device("meta"):
        empty = model(1)
    plain = {name: value for name, value in module.state_dict().items() if not name.endswith("_extra_state")}
    assert Loader(empty).load(plain) == []
    goes_on(module, empty)


def write_torch(state: dict[str, Any], folder: Path) -> Path:
    torch.save(state, folder / "model.pt")
    return folder / "model.pt"


def write_safetensors(state: dict[str, Any], folder: Path) -> Path:
    halves = [dict(list(state.items())[i::2]) for i in range(2)]
    for i, half in enumerate(halves):
        safetensors.torch.save_file(half, folder / f"model-{i + 1}-of-2.safetensors")
    return folder


def write_distributed(state: dict[str, Any], folder: Path) -> Path:
    dcp.save(state, checkpoint_id=folder)
    return folder


def older(state: dict[str, Any]) -> dict[str, Any]:
    """With the state of each layer as four tensors."""
    found = {name: value for name, value in state.items() if not name.endswith("_extra_state")}
    for name in state.keys() - found.keys():
        prefix, packed = name.removesuffix("_extra_state"), state[name]
        columns = packed.shape[1] * 3 // 5
        for key, half in (("scaling_fwd", packed[:, :columns]), ("scaling_bwd", packed[:, columns:])):
            found |= {f"{prefix}{key}.scale": half[0].clone(), f"{prefix}{key}.amax_history": half[1:].clone()}
    return found


@pytest.mark.sample(4)
@pytest.mark.parametrize("form", [dict, older], ids=["one tensor", "four tensors"])
@pytest.mark.parametrize("write", [write_torch, write_safetensors, write_distributed, lambda state, folder: state])
def test_state_is_loaded_by_hand_from_every_source(
    write: Callable[..., Any], form: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    recipe = te.DelayedScaling(amax_history_len=6)
    module = trained(recipe=recipe)
    source = write(form(module.state_dict()), tmp_path)
    fresh = model()
    te.load_fp8_state(fresh, source)
    goes_on(module, fresh, recipe)


def test_state_by_hand_is_refused_before_anything_changes(tmp_path: Path) -> None:
    module, fresh = trained(), trained()
    before = copy.deepcopy(fresh.state_dict())
    state = module.state_dict()
    del state["1._extra_state"], state["3.layernorm_mlp._extra_state"]
    with pytest.raises(ValueError, match=r"source has no FP8 state for 1, 3.layernorm_mlp; every layer needs it"):
        te.load_fp8_state(fresh, state)
    state = module.state_dict()
    state["3.layernorm_mlp._extra_state"] = -state["3.layernorm_mlp._extra_state"]
    with pytest.raises(ValueError, match=r"3.layernorm_mlp._extra_state\[0\]=.*; finite scales > 0"):
        te.load_fp8_state(fresh, state)
    with pytest.raises(ValueError, match=r"is no checkpoint; a file of torch.save or safetensors, or a folder"):
        te.load_fp8_state(fresh, tmp_path)
    with pytest.raises(TypeError, match=r"load_fp8_state: model=3; a torch.nn.Module is accepted"):
        te.load_fp8_state(3, {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"init_fp8_state: recipe='x'; a recipe.DelayedScaling or None"):
        te.init_fp8_state(fresh, "x")  # type: ignore[arg-type]
    assert all(torch.equal(value, before[name]) for name, value in fresh.state_dict().items())


@pytest.mark.parametrize("with_state", [False, True])
def test_plain_weights_are_cast_where_they_are_assigned(with_state: bool) -> None:
    """A layer that keeps its weights in FP8 keeps doing so, from the meta device, too."""
    plain = trained()
    state = plain.state_dict()
    if not with_state:
        state = {name: value for name, value in state.items() if not name.endswith("_extra_state")}
    with te.quantized_model_init(), torch.device("meta"):
        kept = model(1, quantized=True)
    kept.load_state_dict(state, assign=True)
    copied = model(1, quantized=True)
    copied.load_state_dict(state)
    assert sum(isinstance(p, Float8Tensor) for p in kept.parameters()) == 7
    goes_on(copied, kept)


def test_assigned_fp8_weights_of_another_layer_stay_its_own() -> None:
    a, b = trained(quantized=True), model(1, quantized=True)
    b.load_state_dict(a.state_dict(keep_vars=True), assign=True)
    for x, y in zip(a.modules(), b.modules(), strict=True):
        for name in getattr(x, "fp8_weights", {}):
            assert getattr(x, name)._kept.scales is x.fp8_meta["scaling_fwd"]
            assert getattr(y, name)._kept.scales is y.fp8_meta["scaling_fwd"]


@pytest.mark.parametrize("how", ["assigned", "from meta", "fully_shard"])
def test_a_weight_in_fp8_that_became_plain_is_refused(how: str) -> None:
    with te.quantized_model_init():
        layer = te.Linear(32, 16, params_dtype=BF16, device="meta" if how == "from meta" else "cpu")
    if how == "from meta":
        layer.to_empty(device="cpu")
        assert isinstance(layer.weight, Float8Tensor)
    layer.weight = torch.nn.Parameter(torch.zeros(16, 32, dtype=BF16))
    layer.bias = torch.nn.Parameter(torch.zeros(16, dtype=BF16))
    with pytest.raises(RuntimeError, match=r"Linear: weight is a plain torch.bfloat16 tensor in a layer that was"):
        layer(torch.ones(3, 32, dtype=BF16))
