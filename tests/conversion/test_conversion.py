"""`convert`: what is replaced, what stays and why, and that nothing of the module replaced is lost."""

import copy
import inspect
import pickle
import weakref
from typing import Any

import pytest
import torch
from shared.conversion_models import BF16, Block, block

import optimized
import reference as te
from reference import conversion
from reference.float8.float8_tensor import Float8Tensor

RECIPE = te.DelayedScaling(amax_history_len=4)


IDS = torch.arange(24).reshape(2, 12)
CONVERTED = {
    "norm": "te.LayerNorm",
    "layers.0": "te.Linear",
    "layers.1": "te.Linear",
    "layers.2": "te.Linear",
    "rms": "te.RMSNorm",
    "head": "te.Linear",
}


def test_parameters_names_and_classes_stay() -> None:
    model = block()
    before, names = dict(model.named_parameters(remove_duplicate=False)), list(model.state_dict())
    classes = {name: type(module) for name, module in model.named_modules()}
    model.layers[1].eval().weight.requires_grad_(False)
    model.layers[1].mark = "kept"  # type: ignore[assignment]
    random = torch.get_rng_state()
    report = te.convert(model)
    assert torch.equal(torch.get_rng_state(), random)
    assert report.converted == CONVERTED
    after = dict(model.named_parameters(remove_duplicate=False))
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert [name for name in model.state_dict() if not name.endswith("_extra_state")] == names
    assert all(isinstance(module, classes[name]) for name, module in model.named_modules())
    assert isinstance(model.layers[0], te.Linear)
    assert isinstance(model.norm, te.LayerNorm)
    assert isinstance(model.rms, te.RMSNorm)
    assert (model.rms.eps, model.rms.zero_centered_gamma, model.norm.eps) == (1e-6, True, 1e-12)
    assert model.norm.normalized_shape == (32,)
    assert model.layers[1].bias is None
    copy.deepcopy(model.layers[1]).reset_parameters()  # has no bias to reset
    assert (model.layers[1].training, model.layers[1].mark, model.layers[1].weight.requires_grad) == (
        False,
        "kept",
        False,
    )


def test_it_computes_what_layers_of_ours_compute(same_bits: Any) -> None:
    model = block()
    te.convert(model)
    x = torch.randn(24, 32, generator=torch.Generator().manual_seed(1)).to(BF16)
    with te.autocast(recipe=RECIPE):
        for name, ours in (
            ("layers.0", te.Linear(32, 32, params_dtype=BF16)),
            ("layers.1", te.Linear(32, 32, bias=False, params_dtype=BF16)),
            ("norm", te.LayerNorm(32, eps=1e-12, params_dtype=BF16)),
            ("rms", te.RMSNorm(32, eps=1e-6, zero_centered_gamma=True, params_dtype=BF16)),
        ):
            module = model.get_submodule(name)
            ours.load_state_dict(module.state_dict())
            same_bits(ours(x), module(x), name)


def test_the_report_says_why() -> None:
    report = te.convert(block(), filter={"layers.1": False})
    assert report.skipped == {
        "embedding": "it is neither a linear layer nor a norm that te has",
        "layers.1": "filter leaves it out",
        "small": "in_features=32, out_features=10: multiples of 16 are accepted in FP8",
    }
    assert str(te.convert(block())).splitlines() == [
        "module     count  was           is now        why",
        "embedding  1      Embedding     as it was     it is neither a linear layer nor a norm that te has",
        "norm       1      LayerNorm     te.LayerNorm",
        "layers.*   3      Linear        te.Linear",
        "rms        1      ZeroCentered  te.RMSNorm",
        "small      1      Linear        as it was     in_features=32, out_features=10: multiples of 16 are accepted "
        "in FP8",
        "head       1      Linear        te.Linear",
    ]


def test_a_second_call_changes_nothing() -> None:
    model = block()
    te.convert(model)
    modules = dict(model.named_modules())
    again = te.convert(model)
    assert not again.converted
    assert again.skipped["layers.0"] == "it is a layer of Twin Engine"
    assert dict(model.named_modules()) == modules


def test_layers_of_ours_stay() -> None:
    model = torch.nn.Sequential(te.TransformerLayer(32, 64, 2), torch.nn.Linear(32, 32))
    report = te.convert(model)
    assert report.converted == {"1": "te.Linear"}
    assert set(report.skipped.values()) == {"it is a layer of Twin Engine"}


# --- filter ----------------------------------------------------------------------------------------------

FILTERS: list[tuple[Any, set[str]]] = [
    ("layers", {"layers.0", "layers.1", "layers.2"}),
    ("layers.[01]", {"layers.0", "layers.1"}),
    (["head", "*.2"], {"head", "layers.2"}),
    ({"head": False, "layers.*": False, "layers.1": True}, {"norm", "rms", "layers.1"}),
    ({"*": False, "head": True}, {"head"}),
    (lambda module, name: isinstance(module, torch.nn.Linear) and name != "head", {"layers.0", "layers.1", "layers.2"}),
]


@pytest.mark.parametrize(("chosen", "expected"), FILTERS)
def test_filter_chooses(chosen: Any, expected: set[str]) -> None:
    report = te.convert(block(), filter=chosen)
    assert report.converted.keys() == expected
    assert {name for name, why in report.skipped.items() if "filter" in why} == CONVERTED.keys() - expected


def test_filter_takes_modules() -> None:
    model = block()
    assert te.convert(model, filter=model.layers).converted.keys() == {"layers.0", "layers.1", "layers.2"}


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"filter": "nowhere"},
            ValueError,
            "filter has 'nowhere', which is or holds nothing that convert replaces; he",
        ),
        ({"filter": {"small": False}}, ValueError, "filter has 'small', which is or holds nothing"),
        ({"filter": {"head": None}}, TypeError, "filter has None for 'head'; True and False are accepted"),
        ({"filter": [["head"]]}, TypeError, r"filter has \['head'\]; names, patterns and modules are accepted"),
        ({"filter": [3]}, TypeError, "filter has 3; names, patterns and modules are accepted"),
        ({"filter": 3}, TypeError, "filter=3; names, patterns, modules, a mapping"),
        ({"filter": lambda module, name: None}, TypeError, "filter returned None for 'head'; True and False are"),
        ({"recipe": "fp8"}, TypeError, "recipe='fp8'; a recipe of te.recipe or None is accepted"),
    ],
)
def test_bad_arguments_change_nothing(arguments: Any, error: Any, text: str) -> None:
    model = block()
    modules = dict(model.named_modules())
    with pytest.raises(error, match=f"^convert: {text}"):
        te.convert(model, **arguments)
    assert dict(model.named_modules()) == modules
    assert "forward" not in vars(model)


def test_a_model_that_is_one_layer_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^convert: model is itself a Linear, which cannot be replaced in place; a mod"
    ):
        te.convert(torch.nn.Linear(32, 32))
    with pytest.raises(TypeError, match=r"^convert: model=3; a torch.nn.Module is accepted"):
        te.convert(3)  # type: ignore[arg-type]


# --- shared, copied, on the meta device, kept in FP8 -----------------------------------------------------


def test_a_module_in_two_places_is_replaced_in_both() -> None:
    one = torch.nn.Linear(32, 32)
    model = torch.nn.ModuleDict({"a": one, "b": torch.nn.Sequential(one)})
    te.convert(model)
    assert model["a"] is model["b"][0]  # type: ignore[index]
    assert isinstance(model["a"], te.Linear)


@pytest.mark.parametrize("kept", [False, True])
def test_copies_and_pickles(kept: bool, same_bits: Any) -> None:
    model = block()
    with te.quantized_model_init(enabled=kept, recipe=RECIPE):
        te.convert(model, recipe=RECIPE)
    model(IDS).float().square().mean().backward()
    with torch.no_grad():
        expected = model(IDS)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other.layers[0]) is type(model.layers[0])
        assert vars(other)["forward"].model is other
        assert other.head.weight is other.embedding.weight
        with torch.no_grad():
            same_bits(other(IDS), expected)
        assert other.layers[0].fp8_meta["scaling_fwd"] is not model.layers[0].fp8_meta["scaling_fwd"]
        assert other.layers[0].weight is not model.layers[0].weight


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Block()
        report = te.convert(model)
    assert report.converted == CONVERTED
    assert all(p.is_meta for p in model.parameters())
    assert model(IDS.to("meta")).shape == (2, 12, 48)
    model.to_empty(device="cpu").load_state_dict(block().state_dict(), strict=False)
    assert model.to(BF16)(IDS).isfinite().all()


def test_each_weight_is_freed_before_the_next_is_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the memory of a whole model in both forms is never needed."""
    model = block()
    replaced, alive = [weakref.ref(layer) for layer in model.layers], []
    fill = conversion.fill

    def counted(layer: Any, module: Any) -> None:
        alive.append(sum(one() is not None for one in replaced))
        fill(layer, module)

    monkeypatch.setattr(conversion, "fill", counted)
    with te.quantized_model_init(recipe=RECIPE):
        te.convert(model, filter="layers")
    assert alive == [3, 2, 1]


@pytest.mark.parametrize("meta", [False, True])
def test_in_quantized_model_init_weights_are_kept_in_fp8(meta: bool, same_bits: Any) -> None:
    model = block()
    model.layers[2].weight.requires_grad_(False)
    weights = [layer.weight.detach().clone() for layer in model.layers]
    if meta:
        model.to("meta")
        model.head.weight = model.embedding.weight
    with te.quantized_model_init(recipe=RECIPE, preserve_high_precision_init_val=True):
        report = te.convert(model)
    assert report.entries["head"].why == "not kept in FP8: its weight is tied to embedding.weight"
    assert model.head.weight is model.embedding.weight
    for layer, weight in zip(model.layers, weights, strict=True):
        found: Any = layer.weight
        assert isinstance(found, Float8Tensor)
        assert (found.dtype, found.is_meta) == (BF16, meta)
        if not meta:
            same_bits(found.get_high_precision_init_val(), weight)
            # by hand: the scale of its own amax, not 1
            scale = torch.tensor([448.0]) / weight.float().abs().max()
            codes = (weight.float() * scale).to(torch.float8_e4m3fn)
            same_bits(found._scale_inv, 1 / scale)
            same_bits(found.codes.float(), codes.float())
            same_bits(layer.fp8_meta["scaling_fwd"].scale[1:2], scale)
    assert [layer.weight.requires_grad for layer in model.layers] == [True, True, False]


# --- recipe ----------------------------------------------------------------------------------------------


def test_recipe_opens_autocast_around_forward_unless_one_is_open(same_bits: Any) -> None:
    model, plain = block(), block()
    te.convert(model, recipe=RECIPE)
    te.convert(plain)
    assert list(inspect.signature(model.forward).parameters) == ["ids", "scale"]
    with te.autocast(recipe=RECIPE):
        expected = plain(IDS, scale=2.0)
    same_bits(model(IDS, scale=2.0), expected)
    same_bits(model.layers[0].fp8_meta["scaling_fwd"].scale, plain.layers[0].fp8_meta["scaling_fwd"].scale)
    assert bool((model.layers[0].fp8_meta["scaling_fwd"].scale[:2] != 1).all())
    for fp8 in (False, True):
        with te.autocast(enabled=fp8, recipe=te.recipe.Float8CurrentScaling()):
            same_bits(model(IDS), plain(IDS))
        assert model.layers[0].fp8 is fp8
    with pytest.raises(TypeError, match="ids"):
        model()
    model(IDS)
    assert model.layers[0].fp8_meta["recipe"] is RECIPE.fixed
    te.convert(model, recipe=te.recipe.Float8CurrentScaling())
    model(IDS)
    assert type(model.layers[0].fp8_meta["recipe"]) is te.recipe.Float8CurrentScaling


@pytest.mark.parametrize(
    "recipe", [te.recipe.Float8BlockScaling(), pytest.param(te.recipe.Float8RowwiseScaling(), marks=pytest.mark.slow)]
)
def test_recipes_with_scales_of_parts(recipe: te.recipe.Recipe, same_bits: Any) -> None:
    """Forward and backward of a model that opens its autocast have the bits of one in an autocast, and no others."""
    model, plain = block(), block()
    te.convert(model, recipe=recipe)
    te.convert(plain)
    in_16_bits, y = plain(IDS), model(IDS)
    with te.autocast(recipe=recipe):
        expected = plain(IDS)
    same_bits(y, expected)
    assert not torch.equal(y, in_16_bits)
    for out in (y, expected):
        out.float().square().sum().backward()
    for layer, other in zip(model.layers, plain.layers, strict=True):
        same_bits(layer.weight.grad, other.weight.grad)
        assert layer.fp8_meta["recipe"] == recipe


def test_a_forward_that_somebody_replaced_runs_inside() -> None:
    model, seen = block(), []
    forward = model.forward

    def wrapped(*args: Any) -> torch.Tensor:
        seen.append(1)
        return forward(*args)

    model.forward = wrapped  # type: ignore[method-assign]
    te.convert(model, recipe=RECIPE)
    model(IDS)
    assert seen == [1]
    assert model.layers[0].fp8


# --- both sides ------------------------------------------------------------------------------------------


def test_each_side_makes_its_own_layers() -> None:
    model = block()
    report = optimized.convert(model)
    assert report.converted == CONVERTED
    assert isinstance(model.layers[0], optimized.Linear)
    assert isinstance(model.norm, optimized.LayerNorm)
    assert isinstance(model.rms, optimized.RMSNorm)
    assert model.layers[0].weight.device.type == "cpu"
