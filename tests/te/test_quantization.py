"""What is available and what is open: Transformer Engine's queries."""

import importlib
import threading
from typing import Any

import pytest
import torch

import optimized
import reference as te
from optimized.cuda import device
from reference.quantization import FP8GlobalStateManager as Manager

CURRENT = te.recipe.Float8CurrentScaling()


@pytest.mark.parametrize("side", [te, optimized])
def test_what_is_available(side: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert side.is_bf16_available() is True
    assert side.is_bf16_available(return_reason=True) == (True, "")
    for name, sentence in (
        ("is_mxfp8_available", "te.recipe.MXFP8BlockScaling runs on a CPU alone: MXFP8 and NVFP4 need Blackwell"),
        ("is_nvfp4_available", "te.recipe.NVFP4BlockScaling runs on a CPU alone: MXFP8 and NVFP4 need Blackwell"),
    ):
        assert getattr(side, name)() is False
        available, reason = getattr(side, name)(return_reason=True)
        assert not available
        assert reason.startswith(sentence)
        with pytest.raises(TypeError, match=f"^{name}: return_reason=1; True and False are accepted"):
            getattr(side, name)(1)


def test_fp8_runs_on_every_cpu_and_on_some_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert te.is_fp8_available() is te.is_fp8_block_scaling_available() is True
    assert te.is_fp8_available(return_reason=True) == (True, "")
    for problems in ([], ["no GPU.", "no CuPy."]):
        monkeypatch.setattr(device, "problems", lambda found=problems: found)
        assert optimized.is_fp8_available() is optimized.is_fp8_block_scaling_available() is (not problems)
        assert optimized.is_fp8_available(True) == (not problems, " ".join(problems))
    with pytest.raises(TypeError, match=r"^is_fp8_available: return_reason='yes'; True and False are accepted\.$"):
        optimized.is_fp8_available("yes")  # type: ignore[arg-type]


def test_older_names_are_the_same_module() -> None:
    for side in (te, optimized):
        for name in ("fp8", "quantization"):
            assert getattr(side, name) is te.quantization
            assert importlib.import_module(f"{side.__name__}.{name}") is te.quantization
    assert all(hasattr(te.quantization, name) for name in te.quantization.__all__)
    with pytest.raises(AttributeError, match=r"^quantization\.split_and_copy is not offered by Twin Engine: it is a "):
        te.fp8.split_and_copy  # noqa: B018


def test_recipes() -> None:
    assert te.get_default_recipe() == te.quantization.get_default_fp8_recipe() == te.DelayedScaling()
    e4m3 = te.DelayedScaling(fp8_format=te.Format.E4M3)
    for recipe, grad, largest in ((e4m3, torch.float8_e4m3fn, 448.0), (CURRENT, torch.float8_e5m2, 57344.0)):
        assert te.quantization.get_fp8_torch_dtype(recipe) is torch.float8_e4m3fn
        assert te.quantization.get_fp8_torch_dtype(recipe, fprop_tensor=False) is grad
        assert te.quantization.get_fp8_te_dtype(recipe) is te.DType.kFloat8E4M3
        kinds = {torch.float8_e4m3fn: te.DType.kFloat8E4M3, torch.float8_e5m2: te.DType.kFloat8E5M2}
        assert te.quantization.get_fp8_te_dtype(recipe, fprop_tensor=False) is kinds[grad]
        assert te.quantization.get_fp8_max(recipe) == 448.0
        assert te.quantization.get_fp8_max(recipe, fprop_tensor=False) == largest
        assert te.quantization.get_align_size_for_quantization(recipe) == 16
        te.quantization.check_recipe_support(recipe)
    names = ("check_recipe_support", "get_fp8_max", "get_fp8_te_dtype", "get_fp8_torch_dtype")
    for name in (*names, "get_align_size_for_quantization"):
        with pytest.raises(TypeError, match=rf"^{name}: recipe='delayed'; a recipe of te\.recipe is accepted\.$"):
            getattr(te.quantization, name)("delayed")


def test_padding_is_that_of_transformer_engine() -> None:
    """Programs ask how many tokens to pad to; layers here take any number."""
    of = te.quantization.get_align_size_for_quantization
    assert (of(te.recipe.MXFP8BlockScaling()), of(te.recipe.NVFP4BlockScaling())) == (32, 128)


def test_the_kinds_of_recipes() -> None:
    kinds = ("delayed", "float8_current_scaling", "float8_per_tensor_scaling", "mxfp8", "nvfp4", "custom")
    for recipe, own in ((te.DelayedScaling(), "delayed"), (CURRENT, "float8_current_scaling")):
        for kind in (*kinds, "float8_block_scaling"):
            assert getattr(recipe, kind)() is (kind in (own, "float8_per_tensor_scaling"))
    for recipe, own in ((te.recipe.MXFP8BlockScaling(), "mxfp8"), (te.recipe.NVFP4BlockScaling(), "nvfp4")):
        for kind in (*kinds, "float8_block_scaling"):
            assert getattr(recipe, kind)() is (kind == own)


def test_what_is_open_in_this_thread() -> None:
    def found() -> list[Any]:
        return [
            Manager.is_fp8_enabled(),
            Manager.is_fp8_calibration(),
            Manager.get_fp8_recipe(),
            Manager.get_fp8_group(),
        ]

    outside = [False, False, te.DelayedScaling(), None]
    assert found() == outside
    with te.autocast(recipe=CURRENT):
        assert found() == [True, False, CURRENT, None]
        with te.autocast(enabled=False, calibrating=True):
            assert found() == [False, True, te.DelayedScaling(), None]
        elsewhere: list[Any] = []
        thread = threading.Thread(target=lambda: elsewhere.extend(found()))
        thread.start()
        thread.join()
        assert elsewhere == outside
        with pytest.raises(RuntimeError, match=r"FP8GlobalStateManager\.reset: an autocast is open in this thread"):
            Manager.reset()
    assert found() == outside
    Manager.reset()
    assert (Manager.with_fp8_parameters(), Manager.with_high_precision_init_val()) == (False, False)
    for preserve in (True, False):
        with te.quantized_model_init(preserve_high_precision_init_val=preserve):
            assert (Manager.with_fp8_parameters(), Manager.with_high_precision_init_val()) == (True, preserve)
    assert Manager.fp8_graph_capturing() is False
    assert Manager.is_fp8_available() == (True, "")
    assert Manager.is_mxfp8_available()[0] is Manager.is_nvfp4_available()[0] is False
    assert Manager.is_fp8_block_scaling_available() == (True, "")


@pytest.mark.parametrize("name", ["autocast_enter", "quantization_state", "reduce_and_update_fp8_tensors"])
def test_parts_of_the_global_state_say_that_there_is_none(name: str) -> None:
    sentence = rf"^FP8GlobalStateManager\.{name} is not offered by Twin Engine: scales belong to a layer"
    with pytest.raises(AttributeError, match=sentence) as error:
        getattr(Manager, name)
    assert "is_fp8_enabled" in str(error.value)
    assert str(error.value).endswith(".")
    assert not hasattr(Manager, name)
