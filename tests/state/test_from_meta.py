"""Layers made on the meta device: a forward there, their way to a real device, Accelerate's `init_empty_weights`."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import reference as te
from reference.state.scaling import FP8TensorMeta

BF16 = torch.bfloat16
RECIPE = te.DelayedScaling(amax_history_len=2)
LAYERS: dict[str, Callable[..., Any]] = {
    "Linear": lambda **more: te.Linear(32, 32, **more),
    "Linear without bias": lambda **more: te.Linear(32, 32, bias=False, **more),
    "LayerNormLinear": lambda **more: te.LayerNormLinear(32, 32, **more),
    "LayerNormMLP": lambda **more: te.LayerNormMLP(32, 64, **more),
    "LayerNorm": lambda **more: te.LayerNorm(32, **more),
    "RMSNorm": lambda **more: te.RMSNorm(32, **more),
    "TransformerLayer": lambda **more: te.TransformerLayer(32, 64, 4, fuse_qkv_params=True, **more),
}
KEPT = [False, True]  # whether weights are kept in FP8


def make(name: str, kept: bool, **more: Any) -> Any:
    with te.quantized_model_init(enabled=kept, recipe=RECIPE):
        return LAYERS[name](params_dtype=BF16, **more)


def reset(model: torch.nn.Module, **more: Any) -> None:
    torch.manual_seed(5)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters(**more)


def step(layer: torch.nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(6)
    x = (torch.arange(4 * 2 * 32).reshape(4, 2, 32).remainder(17) - 8).to(BF16).requires_grad_()
    with te.autocast(recipe=RECIPE):
        y = layer(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("name", LAYERS)
def test_a_model_from_meta_trains_and_is_saved_like_any_other(
    name: str, kept: bool, tmp_path: Path, same_bits: Any
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    plain = make(name, kept)
    for module in plain.modules():  # the amaxes of the first draw
        for state in getattr(module, "fp8_meta", {}).values():
            if isinstance(state, FP8TensorMeta):
                state.reset()
    reset(plain)
    expected = step(plain)
    for empties in (True, False):
        with torch.device("meta"):
            layer = make(name, kept)
        of_attention = "core_attention._extra_state"  # says in numbers that there is no state yet
        assert all(t.is_meta for key, t in layer.state_dict().items() if not key.endswith(of_attention))
        copy.deepcopy(layer)
        if empties:
            layer.to_empty(device="cpu")
        reset(layer)
        for a, b in zip(step(layer), expected, strict=True):
            same_bits(a, b)
        state = layer.state_dict()
        assert state.keys() == plain.state_dict().keys()
        safetensors.save_file(state, tmp_path / "model.safetensors")
        for key, value in safetensors.load_file(tmp_path / "model.safetensors").items():
            same_bits(value, plain.state_dict()[key], key)


LOADED: dict[str, Callable[..., Any]] = {
    **LAYERS,
    "DotProductAttention": lambda **more: te.DotProductAttention(4, 8, attention_dropout=0.1),
    "MultiheadAttention": lambda **more: te.MultiheadAttention(32, 4, qk_norm_type="L2Normalization", **more),
    "stochastic depth": lambda **more: te.TransformerLayer(32, 64, 4, drop_path_rate=0.5, **more),
    "Embedding": lambda **more: te.Embedding(10, 32),
    "RotaryPositionEmbedding": lambda **more: te.RotaryPositionEmbedding(8),
    "ops": lambda **more: te.ops.Sequential(
        te.ops.Linear(32, 32), te.ops.Dropout(0.1), te.ops.Quantize(), te.ops.LayerNorm(32)
    ),
}


@pytest.mark.parametrize("name", LOADED)
def test_a_model_whose_parameters_are_loaded_moves_like_any_other(name: str) -> None:
    """What is neither parameter nor buffer is still on meta when `from_pretrained` returns."""
    with torch.device("meta"):
        layer = LOADED[name](params_dtype=BF16)
    before = torch.random.get_rng_state()
    for module in layer.modules():
        for key, value in module._parameters.items():
            if value is not None:
                module._parameters[key] = torch.nn.Parameter(torch.full(value.shape, 0.125, dtype=value.dtype))
    layer.to(torch.float16)
    assert torch.equal(before, torch.random.get_rng_state()), "a move on one device draws nothing"
    layer.to("cpu").to(BF16)
    for module in layer.modules():
        kept = [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
        values = [value for value in (*kept, *module._buffers.values()) if value is not None and value.numel()]
        assert not any(value.is_meta for value in values)
    if name in LAYERS:
        assert step(layer)[0].isfinite().all()


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("name", LAYERS)
def test_a_forward_on_meta_gives_shapes(name: str, kept: bool) -> None:
    layer = make(name, kept, device="meta")
    x = torch.empty(4, 2, 32, dtype=BF16, device="meta", requires_grad=True)
    for fp8 in (True, False):
        with te.autocast(enabled=fp8, recipe=RECIPE):
            y = layer(x)
        y.sum().backward()
        assert y.is_meta
        assert y.shape == x.shape == x.grad.shape  # type: ignore[union-attr]
        assert all(p.grad is not None and p.grad.is_meta for p in layer.parameters())
    reset(layer)
    assert step(layer)[0].isfinite().all(), "the state has become fresh, too"


@pytest.mark.parametrize("name", LAYERS)
def test_deferred_initialisation_draws_nothing(name: str) -> None:
    """Transformer Engine's `reset_parameters(defer_init=True)`."""
    layer = make(name, False, device="meta")
    reset(layer, defer_init=True)
    assert all(p.is_meta for p in layer.parameters())
    reset(layer, defer_init=False)
    assert not any(p.is_meta for p in layer.parameters())


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("name", LAYERS)
def test_where_registered_parameters_go_to_meta(name: str, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Accelerate's `init_empty_weights`, which rebuilds each parameter that is registered."""
    register = torch.nn.Module.register_parameter

    def to_meta(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None:
            options = {**vars(param), "requires_grad": param.requires_grad}
            module._parameters[name] = type(param)(param.to("meta"), **options)

    monkeypatch.setattr(torch.nn.Module, "register_parameter", to_meta)
    layer = make(name, kept)
    monkeypatch.undo()
    assert all(p.is_meta for p in layer.parameters())
    reset(layer)
    assert step(layer)[0].isfinite().all()


@pytest.mark.parametrize("scales_first", [False, True])
@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "LayerNormMLP", "TransformerLayer"])
def test_a_loader_that_sets_parameters_one_by_one(name: str, scales_first: bool, same_bits: Any) -> None:
    """As Hugging Face's `from_pretrained`: plain parameters of codes and of scale_inv, and `set_extra_state`."""
    plain = make(name, True)
    step(plain)
    loaded = make(name, True, device="meta")
    state = plain.state_dict()
    for key in sorted(state, key=lambda key: (key.endswith("scale_inv") != scales_first, key)):
        owner, _, last = key.rpartition(".")
        module = loaded.get_submodule(owner)
        if last == "_extra_state":
            module.set_extra_state(state[key])
            continue
        assert getattr(module, last).shape == state[key].shape
        value = torch.nn.Parameter(state[key].clone(), requires_grad=True)
        value._is_hf_initialized = True  # type: ignore[attr-defined]
        setattr(module, last, value)
    assert all(getattr(p, "_is_hf_initialized", False) for p in loaded.parameters())
    for key, value in loaded.state_dict().items():
        same_bits(value, state[key], key)
    for p in plain.parameters():
        p.grad = None
    for a, b in zip(step(loaded), step(plain), strict=True):
        same_bits(a, b)


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("kept", KEPT)
def test_hugging_face_saves_a_model_from_meta_and_loads_it(kept: bool, tmp_path: Path, same_bits: Any) -> None:
    transformers = pytest.importorskip("transformers")

    class Model(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.layer = make("TransformerLayer", kept)
            self.post_init()

        def _init_weights(self, module: torch.nn.Module) -> None:
            """Nothing: the layers draw their own."""

    with torch.device("meta"):
        model = Model(transformers.PretrainedConfig())
    reset(model)
    step(model.layer)
    model.save_pretrained(tmp_path)
    loaded = Model.from_pretrained(tmp_path)
    state = model.state_dict()
    for key, value in loaded.state_dict().items():
        same_bits(value, state[key], key)
    for p in model.parameters():
        p.grad = None
    for a, b in zip(step(loaded.layer.train()), step(model.layer), strict=True):
        same_bits(a, b)
