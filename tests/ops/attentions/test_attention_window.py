"""Sliding windows of attention: what a query sees, which blocks are visited, and the layers' `window_size`."""

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from shared.attention_cases import MASKS, Case, check_against_float64, hidden_pairs, inputs, run
from shared.bits import assert_same_bits

import reference as te
from reference.nn.attentions import multihead_attention, multihead_plan
from reference.nn.core.checks import MASK_NAMES, window_of
from reference.nn.transformer import halves
from reference.ops.attentions.attention import MASK_TYPES, limits, visited

WINDOWS = [(0, 0), (5, -1), (-1, 5), (127, 1), (128, 128), (0, 200), (200, 0), (10**6, 3), (2**31 - 1, 2**31 - 1)]


@pytest.mark.sample(6)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("mask_type", MASK_TYPES)
def test_against_float64(mask_type: str, window: tuple[int, int]) -> None:
    for number, (sq, skv) in enumerate(((300, 300), (140, 400), (400, 140))):
        dtype, dropout = (torch.bfloat16, 0.0) if number else (torch.float16, 0.1)
        check_against_float64(Case(1, 1, 2, sq, skv, 24, dtype, mask_type, MASKS[number], window, dropout))


def same_runs(one: Case, other: Case, mask: torch.Tensor | None = None) -> None:
    """Both cases have the same results, the second under an additional mask."""
    first, second = inputs(one), inputs(other)
    second["mask"] = second["mask"] if mask is None else mask
    expected = run(one, first)
    for name, value in run(other, second).items():
        assert_same_bits(expected[name], value, f"{name} of {one}")


@pytest.mark.sample(8)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("window", [(0, 0), (100, -1), (-1, 100), (130, 140)])
@pytest.mark.parametrize(("sq", "skv"), [(600, 600), (100, 600), (600, 100)])
@pytest.mark.parametrize("mask_type", ["none", "causal"])
def test_skipping_hidden_blocks_changes_no_bit(
    mask_type: str, sq: int, skv: int, window: tuple[int, int], dropout: float
) -> None:
    """The same window as a mask visits every block."""
    case = Case(hkv=1, group=2, sq=sq, skv=skv, d=16, mask_type=mask_type, window=window, dropout=dropout)
    whole = dataclasses.replace(case, mask_type="none", window=(-1, -1))
    same_runs(case, whole, hidden_pairs(case, None)[:1, :1])


@pytest.mark.parametrize("mask", ["none", "arbitrary"])
def test_windows_that_limit_nothing_change_no_bit(mask: str) -> None:
    for sq, skv in ((200, 200), (90, 300), (300, 90)):
        none = Case(sq=sq, skv=skv, d=16, mask=mask)
        same_runs(none, dataclasses.replace(none, window=(max(sq, skv), max(sq, skv))))
        same_runs(dataclasses.replace(none, mask_type="causal_bottom_right"), dataclasses.replace(none, window=(-1, 0)))
        for mask_type in ("causal", "causal_bottom_right"):
            causal = dataclasses.replace(none, mask_type=mask_type)
            for window in ((-1, 0), (-1, 7), (2 * sq + skv, -1)):
                same_runs(causal, dataclasses.replace(causal, window=window))
            same_runs(dataclasses.replace(causal, window=(40, -1)), dataclasses.replace(causal, window=(40, 30)))


def test_visited_are_the_blocks_of_which_some_query_sees_a_key() -> None:
    draw = np.random.default_rng(1)
    for mask_type, left, right in itertools.product(MASK_TYPES, (-1, 0, 3, 127, 128, 300), (-1, 0, 3, 128, 300)):
        sq, skv = draw.integers(1, 700, size=2).tolist()
        seen = ~hidden_pairs(Case(sq=sq, skv=skv, mask_type=mask_type, window=(left, right)), None)[0, 0]
        for first in range(0, sq, 128):
            found = visited(first, sq, skv, limits(mask_type, left, right, sq, skv))
            expected = [j for j in range(0, skv, 128) if bool(seen[first : first + 128, j : j + 128].any())]
            assert [keys.start for keys in found] == expected
            assert expected == list(range(expected[0], expected[-1] + 1, 128)) if expected else True


def test_what_is_not_visited_is_not_read() -> None:
    """Of keys, values and queries; a hidden pair of a visited block is: 0 · NaN is NaN."""
    case = Case(sq=640, skv=640, d=16, mask_type="causal", window=(100, 0))
    given = inputs(case)
    clean = run(case, given)
    for name in ("k", "v"):
        given[name][:, :, :128] = math.nan  # rows from 256 on visit the keys from 128 on
    given["q"][:, :, 512:] = given["grad"][:, :, 512:] = math.nan  # which visit the keys from 384 on
    found = run(case, given)
    # The keys 256 to 383 are visited by the rows 256 to 511, all of which are clean.
    for name, end in (("out", 512), ("dq", 512), ("dk", 384), ("dv", 384)):
        assert_same_bits(clean[name][:, :, 256:end], found[name][:, :, 256:end], name)
    assert bool(found["out"][:, :, 130].isnan().all())


def test_rows_and_keys_that_see_nothing() -> None:
    """Queries beyond every key's window, and keys that no query's window holds, without one block that is visited."""
    found = run(Case(sq=600, skv=100, d=16, mask_type="causal", window=(50, 0)), inputs(Case(sq=600, skv=100, d=16)))
    for name, value in (("out", 0.0), ("inv", 0.0), ("dq", 0.0), ("m", -(2.0**100))):
        assert bool((found[name][:, :, 150:] == value).all())
        assert not bool((found[name][:, :, 140] == value).any())
    found = run(Case(sq=100, skv=600, d=16, window=(50, 0)), inputs(Case(sq=100, skv=600, d=16)))
    for name in ("dk", "dv"):
        zeros = torch.zeros((), dtype=torch.bfloat16).expand(found[name][:, :, :450].shape)
        assert_same_bits(found[name][:, :, :450], zeros, name)
        assert bool(found[name][:, :, 450].any())


# Transformer Engine's check_set_window_size; None is refused.
TABLE = [
    ("causal", None, (-1, 0)), ("causal", (-1, -1), (-1, 0)), ("causal", (-1, 0), (-1, 0)), ("causal", (4, 0), (4, 0)),
    ("causal", (4, 7), (4, 0)), ("causal", (4, -1), (4, 0)), ("causal", (-1, 3), None),
    ("padding_causal_bottom_right", (0, 1), (0, 0)), ("no_mask", None, (-1, -1)), ("no_mask", (-1, -1), (-1, -1)),
    ("no_mask", (-1, 0), (-1, -1)), ("no_mask", (0, 0), (0, 0)), ("padding", (3, 9), (3, 9)),
    ("arbitrary", (4, -1), None), ("no_mask", (-1, 3), None),
]  # fmt: skip


@pytest.mark.parametrize(("attn_mask_type", "window", "expected"), TABLE)
def test_a_mask_type_and_a_window(attn_mask_type: str, window: Any, expected: Any) -> None:
    if expected is not None:
        assert window_of("Layer", MASK_NAMES, attn_mask_type, window) == expected
        return
    accepted = (
        r"\(-1, -1\), or a pair of ints from 0 on,"
        if "causal" not in attn_mask_type
        else r"\(-1, 0\), or a pair that starts"
    )
    with pytest.raises(
        ValueError, match=rf"^Layer: window_size=\(.*\) with attn_mask_type='{attn_mask_type}'; {accepted}"
    ):
        window_of("Layer", MASK_NAMES, attn_mask_type, window)


@pytest.mark.parametrize("window", [(4,), [4, 0], (4.0, 0), (True, 0), 4, "no", torch.ones(2), (torch.ones(2), 0)])
def test_a_window_is_a_pair_of_ints(window: Any) -> None:
    sentence = r"window_size=.*; None or a pair of ints from -1 on is accepted\.$"
    for make in (te.DotProductAttention, te.MultiheadAttention):
        with pytest.raises(TypeError, match=sentence):
            make(64, 16, window_size=window)
    for name in ("window_size", "enc_dec_window_size"):
        with pytest.raises(TypeError, match=f"TransformerLayer: (enc_dec_)?{sentence}"):
            te.TransformerLayer(64, 64, 4, **{name: window})
    with pytest.raises(ValueError, match=r"DotProductAttention: window_size=\(-2, 0\); None or a pair"):
        te.DotProductAttention(4, 16, window_size=(-2, 0))


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("attn_mask_type", "shift"), [("no_mask", 10), ("causal", 0), ("causal_bottom_right", 10), ("padding", 0)]
)
def test_a_window_is_a_mask(attn_mask_type: str, shift: int, dtype: torch.dtype) -> None:
    """In every bit, of the op; in fp32, PyTorch's, too, because it is given the same mask."""
    sq, skv = 20, 20 + shift
    q, k, v = (numbers(i, s, 2, 2, 16).to(dtype) for i, s in enumerate((sq, skv, skv)))
    i, j = torch.arange(sq)[:, None] + shift, torch.arange(skv)[None]
    padding = (
        (torch.arange(20) >= torch.tensor([[20], [13]])).view(2, 1, 1, 20) if attn_mask_type == "padding" else None
    )
    hidden = (j < i - 4) | (j > i + (2 if attn_mask_type in ("no_mask", "padding") else 0))
    hidden = hidden.view(1, 1, sq, skv) if padding is None else hidden | padding | padding.transpose(2, 3)
    layer = te.DotProductAttention(2, 16, attn_mask_type=attn_mask_type, window_size=(4, 2))
    found = layer(q, k, v, padding)
    assert_same_bits(found, te.DotProductAttention(2, 16)(q, k, v, hidden, attn_mask_type="arbitrary"), attn_mask_type)
    assert_same_bits(
        found, te.DotProductAttention(2, 16)(q, k, v, padding, attn_mask_type=attn_mask_type, window_size=(4, 2))
    )
    assert not torch.equal(found, te.DotProductAttention(2, 16)(q, k, v, padding, attn_mask_type=attn_mask_type))
    again = layer(q, k, v, padding, window_size=(-1, -1))
    assert_same_bits(
        again, te.DotProductAttention(2, 16)(q, k, v, padding, attn_mask_type=attn_mask_type), "forward's goes first"
    )


def test_cudnn_has_no_window() -> None:
    q = numbers(1, 4, 1, 2, 16).bfloat16()
    with pytest.raises(
        ValueError, match=r"attention_backend='cudnn' with a window of \(2, 0\); None is accepted, or att"
    ):
        te.DotProductAttention(2, 16, attention_backend="cudnn")(q, q, q, window_size=(2, 0))


def trained(layer: torch.nn.Module, x: torch.Tensor, **arguments: Any) -> list[torch.Tensor]:
    """Output and gradients of a step."""
    x = x.clone().requires_grad_()
    y = layer(x, **arguments)
    y.backward(torch.ones_like(y))
    return [y, x.grad, *(p.grad for p in layer.parameters())]


def layer_of(**settings: Any) -> te.TransformerLayer:
    torch.manual_seed(3)
    return te.TransformerLayer(64, 128, 4, params_dtype=torch.bfloat16, hidden_dropout=0.0, **settings)


@pytest.mark.sample(2)
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("way", ["one node", "two nodes", "module by module"])
def test_the_windows_of_a_layer_reach_attention(way: str, recomputes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The constructor's or forward's, of self-attention and of cross-attention; each is the same as a mask."""
    monkeypatch.setattr(halves, "SMALL", halves.SMALL if way == "one node" else 0)
    if way == "module by module":
        monkeypatch.setattr(halves, "is_attention_block", lambda *arguments: False)
        monkeypatch.setattr(multihead_attention, "is_block", lambda *arguments: False)
    x, other = numbers(4, 20, 2, 64).bfloat16(), numbers(5, 24, 2, 64).bfloat16()
    i, j = torch.arange(20)[:, None], torch.arange(24)[None]
    within, across = (((j[:, :20] < i - 3) | (j[:, :20] > i))[None, None], ((j < i + 1) | (j > i + 6))[None, None])
    for settings in ({}, {"layer_type": "decoder"}):
        more: dict[str, Any] = {"checkpoint_core_attention": recomputes}
        windows, masked, plain = (
            {"window_size": (3, 0)},
            {"attention_mask": within, "self_attn_mask_type": "arbitrary"},
            {},
        )
        if settings:
            more["encoder_output"] = other
            windows["enc_dec_window_size"] = (3, 2)
            masked |= {"enc_dec_attn_mask": across, "enc_dec_attn_mask_type": "arbitrary"}
            plain = {"window_size": (-1, 0), "enc_dec_window_size": (-1, -1)}
        expected = trained(layer_of(**settings), x, **masked, **more)
        for found in (
            trained(layer_of(**settings, **windows), x, **more),
            trained(layer_of(**settings), x, **windows, **more),
        ):
            for a, b in zip(expected, found, strict=True):
                assert_same_bits(a, b)
        without = trained(layer_of(**settings), x, **more)[0]
        assert not torch.equal(expected[0], without)
        if plain:
            assert_same_bits(trained(layer_of(**settings, **windows), x, **plain, **more)[0], without)


def test_multihead_attention_has_a_window() -> None:
    x = numbers(4, 20, 2, 64).bfloat16()

    def made(**settings: Any) -> te.MultiheadAttention:
        torch.manual_seed(3)
        return te.MultiheadAttention(64, 4, params_dtype=torch.bfloat16, attention_dropout=0.0, **settings)

    found = made(window_size=(4, 9))(x)
    assert_same_bits(found, made()(x, window_size=(4, 0)))
    assert not torch.equal(found, made()(x))
    # The pair is the constructor's, and each forward's mask type decides what of it counts.
    assert_same_bits(
        made(window_size=(4, 9))(x, attn_mask_type="no_mask"), made(attn_mask_type="no_mask", window_size=(4, 9))(x)
    )
    with pytest.raises(ValueError, match=r"MultiheadAttention: window_size=\(4, -1\) with attn_mask_type='no_mask'"):
        made(window_size=(4, -1))(x, attn_mask_type="no_mask")


def test_a_plan_holds_the_window() -> None:
    """As replay's key: one for all ways to say "no window", others for others."""
    module, x, seen = layer_of().self_attention, numbers(4, 20, 2, 64).bfloat16(), set()
    for window in (None, (-1, -1), (-1, 0), (6, 0), (6, 4), (7, 0)):
        plan, _, _ = multihead_plan.prepared(module, x.dtype, x, None, "causal", (0.0, None), None, window=window)
        seen.add(plan)
    assert sorted(plan.core.equation.window for plan in seen) == [(-1, 0), (6, 0), (7, 0)]
