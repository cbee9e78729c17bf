"""docs/transformer_engine_api.md says what the code does."""

import inspect
import re
from typing import Any

import pytest
from tools import write_api_page as writer

import reference as te


def test_the_page_is_what_the_script_writes() -> None:
    assert writer.PAGE.read_text("utf-8") == writer.page(), "PYTHONPATH=. python tests/tools/write_api_page.py"


def test_every_name_and_argument_is_on_the_page() -> None:
    text = writer.PAGE.read_text("utf-8")
    found = set(re.findall(r"`(\w+)`", text))
    for names in writer.API["names"].values():
        assert set(names) <= found
    for parameters in writer.API["callables"].values():
        assert {one.partition("=")[0].lstrip("*") for one in parameters} - {""} <= found


def rejected() -> list[Any]:
    """Arguments that the page says are not offered, of what can be called without tensors."""
    calls = {
        "DelayedScaling": te.DelayedScaling,
        "Linear": lambda **more: te.Linear(16, 16, **more),
        "LayerNormMLP": lambda **more: te.LayerNormMLP(16, 16, **more),
        "TransformerLayer": lambda **more: te.TransformerLayer(16, 16, 1, **more),
        "FusedAdam": lambda **more: te.optimizers.FusedAdam(te.Linear(16, 16).parameters(), **more),
        "FusedSGD": lambda **more: te.optimizers.FusedSGD(te.Linear(16, 16).parameters(), lr=0.1, **more),
        "get_cpu_offload_context": te.get_cpu_offload_context,
        "autocast": te.autocast,
        "checkpoint": lambda **more: te.checkpoint(len, (), **more),
        "make_graphed_callables": lambda **more: te.make_graphed_callables(te.Linear(16, 16), (), **more),
    }
    return [
        pytest.param(call, name, argument, id=f"{name}.{argument}")
        for name, call in calls.items()
        for argument in inspect.signature(writer.owner_of(name)).parameters
        if writer.accepted(name, argument).startswith("only ")
    ]


@pytest.mark.parametrize(("call", "name", "argument"), rejected())
def test_what_the_page_refuses_is_refused(call: Any, name: str, argument: str) -> None:
    with pytest.raises((NotImplementedError, TypeError, ValueError), match=rf"{argument}="):
        call(**{argument: object()})
