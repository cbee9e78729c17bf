"""LoRA over converted Hugging Face models, by unmodified PEFT."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from shared.hugging_face_models import (
    BF16,
    FORMS,
    base_weights,
    converted,
    kind_of,
    logits,
    quiet,  # noqa: F401  (a fixture)
    train,
)

import reference as te

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]  # of the libraries
TARGETS = [("llama", "all-linear"), ("llama", ["q_proj", "v_proj"]), ("gpt2", ["c_attn", "c_fc"])]


def adapted(model: Any, target: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=target, lora_dropout=0.0))


@pytest.mark.parametrize("kept", FORMS)
@pytest.mark.parametrize(("name", "target"), TARGETS)
def test_lora_trains_over_frozen_weights(name: str, target: Any, kept: bool, tmp_path: Path, same_bits: Any) -> None:
    peft = pytest.importorskip("peft")
    base = converted(name, kept, BF16)
    model = adapted(copy.deepcopy(base), target)
    before = base_weights(model)
    losses = train(model, 4, name)
    assert losses[-1] < losses[0]
    assert all(layer.fp8 for layer in model.modules() if isinstance(layer, te.Linear))
    for key, value in base_weights(model).items():
        same_bits(value, before[key], key)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    with te.autocast(enabled=False):  # the scales of the base have moved
        same_bits(logits(loaded, name), logits(model, name))


def test_lora_is_merged_into_a_converted_model(tmp_path: Path) -> None:
    model = adapted(converted("gpt2"), ["c_attn"])
    train(model, 2, "gpt2")
    with te.autocast(enabled=False):
        expected = logits(model, "gpt2")
        merged = model.merge_and_unload()
        torch.testing.assert_close(logits(merged, "gpt2"), expected)  # one product instead of three
    assert isinstance(merged.transformer.h[0].attn.c_attn, te.Linear)
    merged.save_pretrained(tmp_path)
    with te.autocast(enabled=False):
        again = kind_of("gpt2").from_pretrained(tmp_path)
        torch.testing.assert_close(logits(again, "gpt2"), expected)
