"""Arguments drawn at random: a call is taken, and then works to its gradients, or refused in one sentence.

The sentence begins with the layer's name and names an argument that was drawn; a refused call has changed nothing.
"""

import inspect
import math
import warnings
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from shared.constructor_cases import LAYERS as CONSTRUCTORS
from shared.forward_cases import LAYERS as FORWARDS
from shared.forward_cases import RECIPE, assert_unchanged, describe, not_dense, state

import reference as te

REFUSALS = (TypeError, ValueError, NotImplementedError, RuntimeError)
SETTINGS = hypothesis.settings(
    max_examples=1500, deadline=None, suppress_health_check=list(hypothesis.HealthCheck), print_blob=True
)
WORDS = """sbhd bshd thd causal no_mask padding arbitrary padding_causal causal,padding causal_bottom_right LayerNorm
    RMSNorm gelu swiglu self cross encoder decoder exact cudnn row column no_bias alibi vanilla p2p auto cpu meta q"""
PLAIN = [
    None, True, False, 0, 1, 2, 3, 4, 8, 16, 24, 32, 64, -1, -8, 2**31, 10**30, 0.0, 0.1, 0.5, 1.0, -0.5, 1e-5, 1e-6,
    math.nan, math.inf, 1j, b"causal", object(), torch.float16, torch.bfloat16, torch.int8, torch.device("cpu"),
    np.float32(0.5), np.float64(0.1), np.int64(16), np.int8(-1), np.bool_(True), np.ones(2), np.ones((2, 2), bool),
    torch.nn.init.ones_, print, {}, [], (), {"q": 16, "k": 16}, {"q": 8}, set(), range(3), te.Format.HYBRID, "",
    *WORDS.split(),
]  # fmt: skip


def tensors() -> list[torch.Tensor]:
    """Of the shapes that the forwards' own have, and others, in every dtype that has zeros."""
    shapes = (
        (),
        (0,),
        (2,),
        (6, 2, 32),
        (5, 2, 32),
        (6, 0, 32),
        (0, 2, 32),
        (6, 2, 2, 16),
        (5, 2, 2, 16),
        (6, 2, 1, 16),
    )
    shapes += (
        (2, 1, 1, 6),
        (1, 1, 1, 6),
        (2, 1, 1, 5),
        (1, 1, 6, 6),
        (2, 2, 6, 5),
        (6, 1, 1, 16),
        (9, 1, 1, 8),
        (6, 16),
    )
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.int32, torch.complex64)
    made = [torch.zeros(shape, dtype=dtype) for shape in shapes for dtype in dtypes]
    generator = torch.Generator().manual_seed(1)
    made += [
        torch.randn(6, 2, 32, generator=generator).bfloat16(),
        torch.randn(6, 2, 2, 16, generator=generator).half(),
    ]
    return [*made, torch.zeros(6, 2, 32, device="meta"), *not_dense(made[-2])]


TENSORS = tensors()
VALUE = st.sampled_from(PLAIN) | st.sampled_from(TENSORS)
ANY = VALUE | st.tuples(VALUE) | st.tuples(VALUE, VALUE) | st.lists(VALUE, max_size=3) | st.integers() | st.floats()


def drawn(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(names), ANY, min_size=1, max_size=3)


def call(layer: str, function: Any, given: dict[str, Any]) -> Any:
    """What `function` gives; None where it refuses, in a sentence."""
    shown = ", ".join(f"{name}={describe(value)}" for name, value in given.items())[:300]
    hypothesis.note(f"{layer}({shown})")
    try:
        return function()
    except REFUSALS as error:
        text = str(error)
    assert text.startswith(layer), f"{shown}: {text}"
    assert text.endswith("."), f"{shown}: {text}"
    assert any(name in text for name in given), f"{shown}: {text}"
    return None


@pytest.mark.slow
@pytest.mark.parametrize("layer", CONSTRUCTORS)
def test_constructors(layer: str) -> None:
    make, good = CONSTRUCTORS[layer]

    @SETTINGS
    @hypothesis.given(drawn(list(inspect.signature(make).parameters)))
    def check(more: dict[str, Any]) -> None:
        random = torch.get_rng_state()
        given = {**good, **more}
        if "num_attention_heads" in given and "kv_channels" not in given:
            given["kv_channels"] = 16  # hidden / heads would name another argument than the one that was drawn
        made = call(layer, lambda: make(**given), given)
        assert made is not None or torch.equal(random, torch.get_rng_state())

    check()


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", FORWARDS)
def test_forwards(name: str, fp8: bool) -> None:
    make, good, _ = FORWARDS[name]
    layer = make()
    title = type(layer).__name__

    @SETTINGS
    @hypothesis.given(drawn(list(inspect.signature(layer.forward).parameters)))
    def check(more: dict[str, Any]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of what it is asked to show
            with te.autocast(enabled=fp8, recipe=RECIPE):
                before = state(layer)
                out = call(title, lambda: layer(**{**good, **more}), more)
                if out is None:
                    assert_unchanged(before, state(layer), str(more.keys()))
            if out is not None and out.requires_grad:
                out.float().sum().backward()

    check()


@pytest.mark.slow
def test_recipes() -> None:
    @SETTINGS
    @hypothesis.given(drawn(list(inspect.signature(te.DelayedScaling).parameters)))
    def check(given: dict[str, Any]) -> None:
        recipe = call("DelayedScaling", lambda: te.DelayedScaling(**given), given)
        if recipe is not None:
            assert hash(recipe) == hash(te.DelayedScaling(**given))

    check()
