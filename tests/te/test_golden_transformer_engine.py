"""`reference` against training steps of Transformer Engine's own layers on an H200.

tests/golden/record_transformer_engine.py recorded them; docs/results/transformer_engine.json
says how many words differ.
"""

import pytest

from optimized import measure
from optimized.recordings import transformer_engine
from optimized.recordings.transformer_engine_cases import CASES

EXACT = {  # ops that compute Transformer Engine's words in every case: all parts of their results but a sum's order
    "cast": {"codes", "scale_inv", "amax"},
    "cast_dbias": {"codes", "scale_inv", "amax"},
    "gemm": {"out"},
    "add": {"out"},
    "scale_update": {"scale", "amax_history"},
}
EXACT_RECIPES = {  # the same of current and block scaling
    "current cast": {"codes", "scale_inv"},
    "current cast_dbias": {"codes", "scale_inv"},
    "block cast": {"codes", "scale_inv", "codes_t", "scale_inv_t"},
    "block gemm": {"out"},
}


@pytest.fixture(scope="module")
def summary() -> dict[str, list[dict]]:
    return transformer_engine.summary()


def test_as_many_words_differ_as_the_result_says(summary: dict[str, list[dict]]) -> None:
    result = measure.read_result("transformer_engine")
    assert summary["ops"] == result["ops"]
    assert summary["cases"] == result["cases"]


def test_every_difference_has_its_reason(summary: dict[str, list[dict]]) -> None:
    assert {row["case"] for row in summary["cases"]} == set(transformer_engine.names())
    assert all(row["compared"] > 0 for row in summary["ops"])
    assert [row for row in summary["ops"] if row.get("why") == "not explained"] == []
    assert [row for row in summary["cases"] if row["different"] and not row["ops"]] == []


def test_casts_products_and_scales_are_transformer_engines_in_every_word(summary: dict[str, list[dict]]) -> None:
    different = {(row["op"], row["part"]): row["different"] for row in summary["ops"]}
    assert {key: different[key] for key in ((op, part) for op, parts in EXACT.items() for part in parts)} == {
        (op, part): 0 for op, parts in EXACT.items() for part in parts
    }


def test_casts_and_products_of_the_other_recipes_are_transformer_engines_in_every_word(
    summary: dict[str, list[dict]],
) -> None:
    different = {(row["op"], row["part"]): row["different"] for row in summary["ops"]}
    expected = {(op, part): 0 for op, parts in EXACT_RECIPES.items() for part in parts}
    assert {key: different[key] for key in expected} == expected


LINEAR = [name for name, case in CASES.items() if case.layer == "Linear"]


@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_layer_is_transformer_engines_but_for_the_bias_gradient(name: str) -> None:
    for step in transformer_engine.steps(name):
        for key, (ours, recorded) in step.items():
            if key != "d bias":
                assert transformer_engine.Tally().add(ours, recorded) == 0, key
