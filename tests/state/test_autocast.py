"""When FP8 is on, and when scales are updated."""

from typing import Any

import pytest
import torch

import reference as te
from reference.memory import recompute
from reference.nn.attentions import attention_fp8, dot_product_plan, multihead_attention
from reference.nn.transformer import halves, transformer_layer
from reference.recipes import delayed_scaling
from reference.state.scaling import FP8TensorMeta

RECIPE = te.DelayedScaling(amax_history_len=4)


def layer() -> te.Linear:
    return te.Linear(32, 16, params_dtype=torch.bfloat16)


def data(size: float = 1.0) -> torch.Tensor:
    return (torch.arange(8 * 32).reshape(8, 32).remainder(7) - 3).to(torch.bfloat16) * size


def scales(module: te.Linear) -> list[float]:
    return module.fp8_meta["scaling_fwd"].scale.tolist()


def staged(module: te.Linear) -> list[float]:
    return module.fp8_meta["scaling_fwd"].amax_history[0].tolist()


def test_step_t_uses_the_scales_of_step_t_minus_1() -> None:
    module, x = layer(), data()
    with te.autocast(recipe=RECIPE):
        module(x)
        assert scales(module) == [1, 1, 1]
        assert staged(module)[0] == 3
    assert scales(module)[0] == pytest.approx(448 / 3)
    assert scales(module)[2] == 1
    assert staged(module) == [0, 0, 0]
    assert module.fp8_meta["scaling_fwd"].amax_history[-1, 0] == 3


def test_nothing_is_updated_inside_an_outer_context() -> None:
    module = layer()
    with te.autocast(recipe=RECIPE):
        with te.autocast(recipe=RECIPE):
            module(data())
        assert scales(module) == [1, 1, 1]
    assert scales(module)[0] != 1


def test_disabled_inside_enabled_runs_in_16_bits() -> None:
    module, x = layer(), data()
    with te.autocast(recipe=RECIPE), te.autocast(enabled=False):
        y = module(x)
        assert not module.fp8
    assert module.fp8_meta == {}
    assert torch.equal(y, module(x))


def test_enabled_inside_disabled_never_updates() -> None:
    module = layer()
    with te.autocast(enabled=False):
        with te.autocast(recipe=RECIPE):
            module(data())
            assert module.fp8
        module(data())
        assert not module.fp8
    assert scales(module) == [1, 1, 1]
    assert staged(module)[0] == 3


@pytest.mark.parametrize("grad", [True, False])
def test_no_grad_collects_but_does_not_update(grad: bool) -> None:
    module = layer()
    with torch.set_grad_enabled(grad), te.autocast(recipe=RECIPE):
        module(data())
    assert (scales(module)[0] == 1) is not grad
    assert (staged(module)[0] == 3) is not grad


def test_eval_mode_updates_like_training() -> None:
    """Grad mode decides, not `train()`: as in Transformer Engine."""
    module = layer().eval()
    with te.autocast(recipe=RECIPE):
        module(data())
    assert scales(module)[0] != 1


def test_every_registered_module_is_updated_run_or_not() -> None:
    ran, idle = layer(), layer()
    with torch.no_grad(), te.autocast(recipe=RECIPE):
        ran(data())
        idle(data(2.0))
    with te.autocast(recipe=RECIPE):
        ran(data())
    assert scales(idle)[0] == pytest.approx(448 / 6)
    before = [h.clone() for h in (idle.fp8_meta["scaling_fwd"].amax_history,)]
    with te.autocast(recipe=RECIPE):
        ran(data())
    assert torch.equal(before[0], idle.fp8_meta["scaling_fwd"].amax_history), "nothing staged: nothing rolls"


def test_calibrating_collects_amaxes_and_leaves_the_output_alone() -> None:
    module, x = layer(), data()
    plain = module(x)
    with te.autocast(enabled=False, calibrating=True, recipe=RECIPE):
        y = module(x)
    assert torch.equal(plain, y)
    assert staged(module)[0] == 3
    assert staged(module)[1] == pytest.approx(module.weight.abs().max().item())
    with te.autocast(recipe=RECIPE):
        module(torch.zeros_like(x))
    assert scales(module)[0] == pytest.approx(448 / 3)


def test_several_recipes_in_one_context() -> None:
    a, b = layer(), layer()
    other = te.DelayedScaling(margin=2, fp8_format=te.Format.E4M3, amax_history_len=2, amax_compute_algo="most_recent")
    with te.autocast(enabled=False), te.autocast(recipe=RECIPE):
        a(data())
    with te.autocast(recipe=RECIPE):
        a(data())
        with te.autocast(recipe=other):
            y = b(data().requires_grad_())
    y.sum().backward()
    assert scales(a)[0] == pytest.approx(448 / 3)
    assert scales(b)[0] == pytest.approx(448 / 3 / 4)
    assert b.fp8_meta["scaling_fwd"].amax_history.shape == (2, 3)
    assert a.fp8_meta["scaling_fwd"].amax_history.shape == (4, 3)


def test_modules_on_several_devices_are_updated_apart() -> None:
    b, a = layer(), layer()
    with te.autocast(recipe=RECIPE):
        a(data())
        b(data())
    b.to("meta")
    with te.autocast(recipe=RECIPE):
        a(data(4.0))
    assert scales(a)[0] == pytest.approx(448 / 12)
    assert staged(a) == [0, 0, 0]
    assert b.fp8_meta["scaling_fwd"].scale.is_meta


def test_modules_under_several_recipes_are_updated_apart_in_one_step() -> None:
    """Each by its own margin, format, window and rule, whichever runs first."""
    recipes = [
        te.DelayedScaling(amax_history_len=2),
        te.DelayedScaling(amax_history_len=2, margin=3),
        te.DelayedScaling(amax_history_len=2, fp8_format=te.Format.E4M3),
        te.DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent"),
    ]
    modules = [layer() for _ in recipes]
    for size in (8.0, 1.0):
        with te.autocast(recipe=RECIPE):
            total = torch.zeros(())
            for module, recipe in zip(modules, recipes, strict=True):
                with te.autocast(recipe=recipe):
                    total = total + module(data(size).requires_grad_()).float().sum() * size
        total.backward()
    assert [scales(m)[0] for m in modules] == pytest.approx([448 / 24, 448 / 24 / 8, 448 / 24, 448 / 3])
    found = [m.fp8_meta["scaling_bwd"].scale[0].item() for m in modules]
    assert found == pytest.approx([57344 / 8, 57344 / 8 / 8, 448 / 8, 57344])


def test_a_module_follows_the_recipe_that_it_last_ran_under() -> None:
    module = layer()
    for recipe, expected in (
        (RECIPE, (448 / 3, 57344)),
        (te.DelayedScaling(amax_history_len=4, margin=1), (448 / 3 / 2, 57344 / 2)),
        (te.DelayedScaling(amax_history_len=4, fp8_format=te.Format.E4M3), (448 / 3, 448)),
    ):
        with te.autocast(recipe=recipe):
            y = module(data().requires_grad_())
        y.sum().backward()
        found = (scales(module)[0], module.fp8_meta["scaling_bwd"].scale[0].item())
        assert found == pytest.approx(expected)
        assert module.fp8_meta["recipe"] is recipe.fixed


def test_a_new_history_length_keeps_what_fits() -> None:
    module = layer()
    for size in (1.0, 2.0, 3.0):
        with te.autocast(recipe=RECIPE):
            module(data(size))
    full = module.fp8_meta["scaling_fwd"].amax_history.clone()
    with torch.no_grad(), te.autocast(recipe=te.DelayedScaling(amax_history_len=6)):
        module(torch.zeros_like(data()))
    longer = module.fp8_meta["scaling_fwd"].amax_history
    assert longer.shape == (6, 3)
    assert torch.equal(longer[1:4], full[1:])
    with torch.no_grad(), te.autocast(recipe=te.DelayedScaling(amax_history_len=2)):
        module(torch.zeros_like(data()))
    shorter = module.fp8_meta["scaling_fwd"].amax_history
    assert torch.equal(shorter[1], full[1])
    assert shorter.untyped_storage().nbytes() == 2 * 3 * 4, "the rows that were let go are"


def test_gradient_scales_follow_the_first_module_backward() -> None:
    first, second = te.Linear(32, 32, params_dtype=torch.bfloat16), layer()
    with te.autocast(recipe=RECIPE):
        y = second(first(data().requires_grad_()))
    y.backward(torch.full_like(y, 4.0))
    assert second.fp8_meta["scaling_bwd"].scale[0] == 57344 / 4
    assert first.fp8_meta["scaling_bwd"].scale[0] != 1
    assert first.fp8_meta["scaling_bwd"].amax_history[0, 0] == 0


def test_the_gradient_update_waits_for_the_first_module() -> None:
    """Modules that run backward before it still find the old scales: their amaxes are only staged."""
    first, second = te.Linear(32, 32, params_dtype=torch.bfloat16), layer()
    seen = []
    with te.autocast(recipe=RECIPE):
        hidden = first(data().requires_grad_())
        hidden.register_hook(lambda g: seen.append(second.fp8_meta["scaling_bwd"].scale[0].item()))
        y = second(hidden)
    y.sum().backward()
    assert seen == [1.0]
    assert second.fp8_meta["scaling_bwd"].scale[0] != 1


def test_a_run_without_gradients_is_not_the_first_module() -> None:
    """Only a forward that will have a backward can promise the update of the gradients' scales."""
    frozen, trained = layer(), layer()
    with te.autocast(recipe=RECIPE):
        with torch.no_grad():
            frozen(data())
        y = trained(data())
    y.sum().backward()
    assert trained.fp8_meta["scaling_bwd"].scale[0] == 57344


def test_no_transposed_copies_are_made_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    module = layer()

    def refuse(*_: object) -> None:
        raise AssertionError("a transposed copy nobody reads")

    monkeypatch.setattr(delayed_scaling.twin, "cast_transpose", refuse)
    with torch.no_grad(), te.autocast(recipe=RECIPE):
        module(data())


def test_fp8_autocast_is_the_same_context_under_older_names() -> None:
    a, b = layer(), layer()
    b.load_state_dict(a.state_dict())
    with te.autocast(True, False, RECIPE):
        ya = a(data())
    with te.fp8_autocast(enabled=True, calibrating=False, fp8_recipe=RECIPE, fp8_group=None):
        yb = b(data())
    assert torch.equal(ya, yb)
    assert scales(a) == scales(b)


def test_autocast_decorates_and_restores_after_an_error() -> None:
    module = layer()

    @te.autocast(recipe=RECIPE)
    def run() -> torch.Tensor:
        return module(data())

    run()
    run()
    assert module.fp8
    with pytest.raises(ZeroDivisionError), te.autocast(recipe=RECIPE):
        _ = 1 / 0
    module(data())
    assert not module.fp8


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"enabled": "no"}, "enabled='no'; True and False are accepted"),
        ({"enabled": None}, "enabled=None; True and False"),
        ({"calibrating": 1}, "calibrating=1; True and False"),
        ({"amax_reduction_group": "data"}, "amax_reduction_group='data'; a process group or None"),
    ],
)
def test_arguments_of_other_types_are_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TypeError, match=f"autocast: {sentence}"):
        te.autocast(**given)


def test_is_first_microbatch_is_true_false_or_none() -> None:
    """0 would be no False, and the cached weight would be cast anew."""
    with pytest.raises(TypeError, match=r"Linear.forward: is_first_microbatch=0; None, True and False are accepted"):
        layer()(data(), is_first_microbatch=0)  # type: ignore[arg-type]


def test_recipe_must_be_a_recipe() -> None:
    with pytest.raises(TypeError, match=r"recipe='hybrid'; a recipe of te.recipe or None"):
        te.autocast(recipe="hybrid")  # type: ignore[arg-type]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What layers were told of where they run, each time that they asked."""
    told: list[Any] = []
    usual = recompute.current_run
    for module in (recompute, attention_fp8, dot_product_plan, multihead_attention, transformer_layer):
        monkeypatch.setattr(module, "current_run", lambda: told.append(usual()) or told[-1])
    return told


@pytest.mark.parametrize("small", [0, halves.SMALL], ids=["two pairs", "one pair"])
@pytest.mark.parametrize("enabled", [False, True])
def test_a_transformer_layer_asks_once_where_it_runs(
    small: int, enabled: bool, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halves, "SMALL", small)
    whole = te.TransformerLayer(32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16)
    te.recipe.by_layer(whole, {"layernorm_mlp": te.recipe.Float8CurrentScaling()})
    for _ in range(2):
        with te.autocast(enabled=enabled, recipe=RECIPE):
            whole(torch.ones(4, 1, 32, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    assert [one.state.enabled for one in asked] == [enabled] * 2
    found = [one.fp8_meta.get("recipe") for one in (whole.self_attention.proj, whole.layernorm_mlp)]
    assert found == ([RECIPE, te.recipe.Float8CurrentScaling()] if enabled else [None, None])


@pytest.mark.parametrize("recipe", [None, RECIPE, te.recipe.DelayedScaling(fp8_dpa=True)], ids=["bf16", "fp8", "dpa"])
def test_attention_by_itself_asks_once_where_it_runs(recipe: Any, asked: list[Any]) -> None:
    settings: dict[str, Any] = {"attention_dropout": 0.0}
    core = te.DotProductAttention(2, 16, **settings)
    whole = te.MultiheadAttention(32, 2, params_dtype=torch.bfloat16, **settings)
    q = torch.ones(4, 1, 2, 16, dtype=torch.bfloat16)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        core(q, q, q)
        assert len(asked) == 1
        whole(torch.ones(4, 1, 32, dtype=torch.bfloat16))
    assert len(asked) == 2
    assert core.fp8 == whole.core_attention.fp8 == getattr(recipe, "fp8_dpa", False)


CHANGES: dict[str, Any] = {
    "nothing": lambda module: None,
    "own recipe": lambda module: te.recipe.by_layer(module, {"": te.recipe.Float8CurrentScaling()}),
    "16 bits": lambda module: te.recipe.by_layer(module, {"": None}),
    "state": lambda module: module.load_state_dict(layer().state_dict()),
    "another state": lambda module: module.fp8_meta.update(scaling_fwd=FP8TensorMeta(torch.ones(3), torch.zeros(4, 3))),
    "device": lambda module: module.to("cpu"),
    "reset": lambda module: module.reset_parameters(),
}


@pytest.mark.parametrize("settings", ["fp8", "16 bits", "calibrating", "checkpoint", "another recipe", "fp16"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_forward_found_serves_only_a_forward_like_it(change: str, settings: str) -> None:
    """Quantizers, and what a forward notes on its layer, are those of a layer that looks at everything again."""
    seen = []
    for forgets in (False, True):
        torch.manual_seed(1)
        module = layer()
        for _ in range(2):
            with te.autocast(recipe=RECIPE):
                module(data())
        CHANGES[change](module)
        if forgets:
            module.__dict__["_found"] = None
        recipe = te.recipe.Float8CurrentScaling() if settings == "another recipe" else RECIPE
        x = data().to(torch.float16 if settings == "fp16" else torch.bfloat16)
        with te.autocast(settings not in ("16 bits", "calibrating"), settings == "calibrating", recipe):
            y = te.checkpoint(module, x) if settings == "checkpoint" else module(x)
        noted = (
            module.fp8,
            module._fitted,
            module.fp8_meta.get("recipe"),
            module._membership and module._membership[:2],
        )
        forward = module.fp8_meta["scaling_fwd"]
        context = module.context(x.dtype, None)
        seen.append((noted, y.tolist(), forward.scale.tolist(), forward.amax_history.tolist(), context.key))
    assert seen[0] == seen[1]
