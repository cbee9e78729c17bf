"""Steps of one token in pages: two launches in place of nine have the words of the launches one by one."""

from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits
from shared.inference_cases import OPTIONS, Decoder, fp8, numbers

import reference as te
from reference.nn.attentions import multihead_pair, multihead_plan

STEPS = ({"a": 20, "b": 5}, {"a": 1, "b": 1}, {"b": 2, "a": 1}, {"a": 1, "b": 1}, {"b": 1})
AT_ONCE = 2 * 3  # the layers of the model and the steps of one token
MORE: dict[str, tuple[dict[str, Any], int]] = {
    **{
        name: (OPTIONS[name], AT_ONCE)
        for name in ("block", "pairs of channels", "batch first", "modules, batch first", "as many heads", "fp16")
    },
    "parts side by side": ({"qkv_weight_interleaved": False}, AT_ONCE),
    "thd": ({"attn_input_format": "thd"}, AT_ONCE),
    "window": (OPTIONS["window"], 0),
    "norms of heads": ({"qk_norm_type": "RMSNorm"}, 0),
    "sinks": ({"softmax_type": "learnable"}, 0),
}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """It has an element for each step of a layer at once."""
    found: list[int] = []
    at_once = multihead_pair.attended_at_once
    monkeypatch.setattr(multihead_pair, "attended_at_once", lambda *all: (found.append(1), at_once(*all))[1])
    return found


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("name", MORE)
def test_the_same_words(name: str, in_fp8: bool, taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    options, times = MORE[name]
    model = Decoder(**options)

    def written() -> list[torch.Tensor]:
        cache = model.params(2, is_paged=True, total_num_pages=40, page_size=8, qkv_format="thd")
        found = []
        with torch.no_grad(), fp8(in_fp8):
            for seed, step in enumerate(STEPS):
                cache.pre_step(step)
                x = numbers(seed, sum(step.values()), 64, dtype=model.dtype)
                thd = options.get("attn_input_format") == "thd"
                found.append(model(x if thd else x.unsqueeze(1 - model.dim), inference_params=cache))
        return [*found, *(one for both in cache.cache.values() for one in both)]

    found = written()
    assert len(taken) == times
    monkeypatch.setattr(multihead_plan, "takes_at_once", lambda *_: False)
    for i, (one, other) in enumerate(zip(found, written(), strict=True)):
        assert_same_bits(one, other, f"tensor {i} of {name}")
    assert len(taken) == times


def test_a_batch_that_is_not_packed(taken: list[int]) -> None:
    """Steps of one token of each sequence, [1, b, hidden]."""
    model = Decoder()
    x = model.numbers(3, 24, 3)
    with torch.no_grad():
        cache = model.params(3, is_paged=True, total_num_pages=60, page_size=16)
        found = model.stepped(x, (20, 1, 1, 2), cache)
        assert_same_bits(found, model(x))
    assert len(taken) == 4


@pytest.mark.parametrize("angles", ["two", "none", "one twice"])
def test_other_angles(angles: str, taken: list[int]) -> None:
    """q's and k's own, none, and a pair that is one."""
    layer = te.MultiheadAttention(64, 4, num_gqa_groups=2, layer_number=1, params_dtype=torch.bfloat16).eval()
    freqs = te.RotaryPositionEmbedding(16)(40)
    given = {"two": (freqs, 2 * freqs), "none": None, "one twice": (freqs, freqs)}[angles]
    cache = te.InferenceParams(1, 40, 2, 16, torch.bfloat16, qkv_format="thd")
    x, outs = numbers(1, 9, 1, 64), []
    with torch.no_grad():
        for first, last in ((0, 7), (7, 8), (8, 9)):
            cache.pre_step({"a": last - first})
            outs.append(layer(x[first:last], rotary_pos_emb=given, inference_params=cache))
        assert_same_bits(torch.cat(outs), layer(x, rotary_pos_emb=given, attn_mask_type="causal"))
    assert len(taken) == (2 if angles == "one twice" else 0)
