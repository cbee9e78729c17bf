"""Recipes: defaults, formats, and every refusal."""

import dataclasses
from typing import Any

import pytest
import torch

import reference as te
from reference import recipe


def test_defaults_are_transformer_engines() -> None:
    r = te.DelayedScaling()
    assert (r.margin, r.fp8_format, r.amax_history_len, r.amax_compute_algo, r.reduce_amax) == (
        0,
        te.Format.HYBRID,
        1024,
        "max",
        True,
    )
    assert recipe.DelayedScaling is te.DelayedScaling
    assert recipe.Format is te.Format
    assert r.delayed()


@pytest.mark.parametrize(
    ("fmt", "forward", "backward"),
    [
        (te.Format.HYBRID, torch.float8_e4m3fn, torch.float8_e5m2),
        (te.Format.E4M3, torch.float8_e4m3fn, torch.float8_e4m3fn),
        (te.Format.E5M2, torch.float8_e5m2, torch.float8_e5m2),
    ],
)
def test_formats(fmt: te.Format, forward: torch.dtype, backward: torch.dtype) -> None:
    assert (fmt.dtype(True), fmt.dtype(False)) == (forward, backward)
    assert fmt.fp8_max(True) == torch.finfo(forward).max == fmt.value.max_fwd
    assert fmt.fp8_max(False) == torch.finfo(backward).max == fmt.value.max_bwd


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"margin": -1}, r"margin=-1; an int from 0 to 18 is accepted .*rounds a tensor's largest number to 0"),
        ({"margin": 0.5}, r"margin=0.5; an int from 0 to 18 is accepted"),
        ({"fp8_format": te.Format.E5M2}, r"fp8_format=Format.E5M2; Format.HYBRID and Format.E4M3 are accepted"),
        ({"fp8_format": "hybrid"}, r"fp8_format=hybrid; Format.HYBRID and Format.E4M3 are accepted"),
        ({"amax_history_len": 0}, r"amax_history_len=0; an int from 1 to 1048576 is accepted"),
        ({"amax_compute_algo": "mean"}, r"amax_compute_algo='mean'; 'max' and 'most_recent' are accepted"),
        ({"amax_compute_algo": torch.amax}, r"'max' and 'most_recent' are accepted"),
        ({"scaling_factor_compute_algo": max}, r"scaling_factor_compute_algo=.*only None is accepted"),
        ({"fp8_dpa": True}, r"fp8_dpa=True, fp8_mha=False; only False is accepted"),
    ],
)
def test_refusals(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        te.DelayedScaling(**arguments)


def test_recipes_are_values() -> None:
    assert te.DelayedScaling(margin=1) == te.DelayedScaling(margin=1) != te.DelayedScaling()
    assert len({te.DelayedScaling(), te.DelayedScaling()}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        te.DelayedScaling().margin = 2  # type: ignore[misc]


def test_other_recipes_are_named_when_asked_for() -> None:
    with pytest.raises(AttributeError, match=r"recipe.Float8CurrentScaling is not offered"):
        _ = recipe.Float8CurrentScaling
    with pytest.raises(AttributeError, match="no attribute"):
        _ = recipe.NoSuchThing
