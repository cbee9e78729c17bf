"""The file of a precision plan: a flipped bit is refused, or changes nothing."""

import json
from pathlib import Path

import pytest

import reference as te
from reference.inspect import precision
from reference.support import files


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_flipped_bit_in_a_plan_is_refused_or_harmless(every: int, tmp_path: Path) -> None:
    """Every bit, or one in seven; a plan without a checksum, as older versions and people write them, is read, too."""
    path = tmp_path / "plan.json"
    plan = precision.PrecisionPlan(
        {"a": precision.Choice(te.DelayedScaling(margin=2), "why"), "b": precision.Choice(None, "")}
    )
    plan.save(path)
    good = path.read_bytes()
    refused = 0
    for at in range(0, 8 * len(good), every):
        bent = bytearray(good)
        bent[at // 8] ^= 1 << at % 8
        path.write_bytes(bent)
        try:
            assert precision.PrecisionPlan.load(path) == plan
        except files.Damaged:
            refused += 1
    assert refused > 7 * len(good) / every
    older = json.loads(good)
    older.pop("sha256")
    older["layers"]["a"]["choice"]["margin"] = 3
    path.write_text(json.dumps(older))
    assert precision.PrecisionPlan.load(path).layers["a"].recipe == te.DelayedScaling(margin=3)
    path.write_text(json.dumps({**older, "sha256": json.loads(good)["sha256"]}))
    with pytest.raises(
        files.Damaged, match=r"is damaged, at 'layers': .* edited by hand, take the line with sha256 out"
    ):
        precision.PrecisionPlan.load(path)


def test_every_recipe_is_read_again_and_nothing_else(tmp_path: Path) -> None:
    """te.recipe has other classes, too, which are no choice of a layer."""
    path = tmp_path / "plan.json"
    kinds = [one for one in vars(te.recipe).values() if isinstance(one, type) and issubclass(one, te.recipe.Recipe)]
    choices = {one.__name__: precision.Choice(one(), "") for one in kinds if one is not te.recipe.Recipe}
    precision.PrecisionPlan(choices).save(path)
    assert precision.PrecisionPlan.load(path).layers == choices
    for name in ("QParams", "MMParams", "Recipe", "Format", "by_layer"):
        layers = {"a": {"choice": {"recipe": name}, "why": ""}}
        path.write_text(json.dumps({"format": "twin-engine precision", "version": 1, "layers": layers}))
        with pytest.raises(files.Damaged, match="layer 'a' has the choice"):
            precision.PrecisionPlan.load(path)
