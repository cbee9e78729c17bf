"""A committed result was measured with the sizes, lists and repeats that its benchmark has today.

Where they differ, the tables show times under the sizes of something else. What a run's rows say is compared where
benchmarks run dry (`shared.asked`); here are the lists and sizes that those runs cut down.
"""

import inspect
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from unittest import mock

import pytest
from shared import training_text
from shared.asked import identity

from optimized import measure
from optimized.bench.kernels import gemm_shapes
from optimized.bench.layers import (
    decode,
    first_step,
    layer,
    layer_recipes,
    layer_sweep,
    rowwise_torchao,
    small_layers,
    stats,
)
from optimized.bench.layers.layer_models import Case
from optimized.bench.models import seeds, single_gpu, train, trainer, training
from optimized.commands import tables
from optimized.training.settings import Settings

Row = dict[str, Any]


def plain(value: Any) -> Any:
    """As it would be in a file."""
    return json.loads(json.dumps(value))


def case(one: Case) -> Row:
    return {**vars(one), "dtype": str(one.dtype).removeprefix("torch.")}


def settings(one: Settings, **others: int) -> Row:
    return {**asdict(one), **others}


def without_training(run: Callable[..., Row]) -> Any:
    """The settings that `twin bench train` writes of what it would train."""
    with mock.patch.multiple(train, together=mock.DEFAULT, alone=mock.DEFAULT), mock.patch.object(layer, "clear"):
        train.together.return_value = train.alone.return_value = []  # type: ignore[attr-defined]
        return run(text=training_text.corpus())["settings"]


SIZES: dict[str, Callable[[], Row]] = {
    "decode": lambda: {"sizes": {"layers": decode.LAYERS, "prompt": decode.PROMPT, "room": decode.ROOM,
                                 "hidden": decode.CASE.hidden, "ffn": decode.CASE.ffn}},
    "first_step": lambda: {"sizes": {"hidden": first_step.HIDDEN, "ffn": first_step.FFN, "heads": first_step.HEADS,
                                     "sequence": first_step.SEQUENCE, "batches": first_step.BATCHES}},
    "rowwise_torchao": lambda: {"sizes": {"tokens": rowwise_torchao.TOKENS, "hidden": rowwise_torchao.HIDDEN,
                                          "ffn": rowwise_torchao.FFN}},
    "seeds": lambda: {"settings": settings(seeds.SETTINGS)},
    "single_gpu": lambda: {"sizes": asdict(single_gpu.BERT_LARGE)},
    "stats": lambda: {"every": stats.EVERY},
    "train": lambda: {"settings": without_training(train.run)},
    "trainer": lambda: {"sizes": asdict(trainer.Sizes())},
    "training": lambda: {"settings": settings(Settings(), steps=training.STEPS)},
}  # fmt: skip


def differing(then: Any, now: Any, place: str = "") -> list[str]:
    """Where what was recorded is not what there is now; a setting that is newer than the result is left out."""
    if isinstance(then, dict) and isinstance(now, dict):
        shared = [differing(then[key], now[key], f"{place}.{key}") for key in then if key in now]
        return sum(shared, [f"{place}.{key} is gone" for key in then.keys() - now.keys()])
    return [] if then == now else [f"{place}: {then} was measured, {now} is in the source"]


@pytest.mark.parametrize("name", SIZES)
def test_a_result_has_the_sizes_of_its_benchmark(name: str) -> None:
    now, result = plain(SIZES[name]()), measure.read_result(name)
    assert now.keys() <= result.keys()
    assert not differing({key: result[key] for key in now}, now)


def test_a_result_has_the_repeats_of_its_benchmark() -> None:
    """Each number that `run` takes by its name, as `repeats`."""
    seen, wrong = set[str](), list[str]()
    for module in tables.BENCHMARKS:
        result = measure.read_result(module.NAME)
        given = {name: one.default for name, one in inspect.signature(module.run).parameters.items()}
        now = {name: value for name, value in given.items() if type(value) is int and name in result}
        seen |= now.keys()
        wrong += differing({name: result[name] for name in now}, now, module.NAME)
    assert {"repeats", "inner", "steps", "warm_up"} <= seen
    assert not wrong


def in_lists() -> dict[str, tuple[list[str], list[str]]]:
    """By benchmark, the rows of the result and those of its list, where a dry run has a part of the list only."""
    results = {name: measure.read_result(name) for name in ("gemm_shapes", "layer_recipes", "layer_sweep")}
    small, groups = measure.read_result("small_layers")["rows"], measure.read_result("single_gpu")["groups"]
    of = json.dumps
    missing = {(group["group"], name) for group in groups for name in group["not_installed"]}
    return {
        "gemm_shapes": (
            list(dict.fromkeys(of([row["m"], row["n"], row["k"]]) for row in results["gemm_shapes"]["rows"])),
            [of(one) for one in gemm_shapes.problems()],
        ),
        "layer_recipes": (
            [row["case"] for row in results["layer_recipes"]["rows"]], [one.name for one in layer_recipes.SIZES]),
        "layer_sweep": (
            [of([row["hidden"], row["tokens"]]) for row in results["layer_sweep"]["points"]],
            [of(one) for one in layer_sweep.SIZES],
        ),
        "small_layers": (
            [identity({"case": row["case"]}) for row in small],
            [identity({"case": plain(case(one))}) for one in small_layers.SIZES],
        ),
        "single_gpu": (
            [group["group"] + identity({"setting": row["setting"]}) for group in groups for row in group["rows"]],
            [group.name + identity({"setting": plain(asdict(one))}) for group in single_gpu.GROUPS
             for one in group.settings if (group.name, one.name) not in missing],
        ),
        "single_gpu, alone": (
            [group["measured"] for group in groups if "measured" in group],
            [f"each by itself, {single_gpu.ALONE} steps, of which the last {single_gpu.COUNTED} count"
             for group in single_gpu.GROUPS if group.alone],
        ),
    }  # fmt: skip


def test_a_result_has_the_list_of_its_benchmark() -> None:
    """In its order; of what is new in a list there is no result yet."""
    for name, (then, now) in in_lists().items():
        assert then, name
        assert then == [one for one in now if one in set(then)], (name, set(then) - set(now))
