"""The FP8 state of attention under `fp8_dpa=True` in checkpoints, and where it lies."""

import copy
import io
import re

import pytest
import torch
from shared.attention_fp8_layer_cases import PLAIN, RECIPE, assert_same, core_of, layer, numbers, train
from shared.bits import assert_same_bits

import reference as te

KEY = "self_attention.core_attention._extra_state"


def test_checkpoint_round_trip() -> None:
    module, x = layer(), numbers(0, 40, 2, 64)
    assert not module.state_dict()[KEY][1:].any()
    assert not core_of(module).fp8_meta
    for step in range(2):
        train(module, x * (step + 1))
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert (state[KEY].dtype, state[KEY].shape) == (torch.float32, (5, 10))
    other = layer(seed=1)
    other.load_state_dict(state, strict=True)
    assert_same(train(module, x), train(other, x))
    assert_same_bits(module.state_dict()[KEY], other.state_dict()[KEY])


@pytest.mark.parametrize("entry", [True, False], ids=["fresh", "none, as of earlier versions"])
def test_a_checkpoint_without_the_state_starts_anew(entry: bool) -> None:
    module, x = layer(), numbers(0, 40, 2, 64)
    before = {name: value for name, value in module.state_dict().items() if entry or name != KEY}
    fresh = copy.deepcopy(module)
    train(module, x)
    module.load_state_dict(before, strict=True)
    assert_same(train(module, x), train(fresh, x))


def test_broken_state_is_refused_before_anything_changes() -> None:
    module, x = layer(), numbers(0, 40, 2, 64)
    train(module, x)
    before = copy.deepcopy(module.state_dict())
    good = before[KEY]
    for bad, sentence in (
        (good[:, :5], r"is torch.float32 \[5, 5\]; float32 \[1 \+ amax_history_len, 10\] is accepted"),
        (-good, r"finite scales > 0"),
        ("state", "is a str; a tensor is accepted"),
    ):
        broken = {**{k: v if "_extra" in k else torch.zeros_like(v) for k, v in before.items()}, KEY: bad}
        with pytest.raises((ValueError, TypeError), match=f"^checkpoint: {re.escape(KEY)}.*{sentence}"):
            module.load_state_dict(broken)
    for name, value in module.state_dict().items():
        assert_same_bits(value, before[name], name)


def test_state_alone_and_state_before_the_first_run() -> None:
    module, x = layer(), numbers(0, 40, 2, 64)
    train(module, x)
    other = layer()
    te.init_fp8_state(other, RECIPE)
    assert other.state_dict()[KEY].shape == (5, 10)
    te.init_fp8_state(plain := layer(), PLAIN)
    te.load_fp8_state(other, module.state_dict())
    assert_same_bits(other.state_dict()[KEY], module.state_dict()[KEY])
    te.load_fp8_state(plain, {k: v for k, v in module.state_dict().items() if k != KEY})
    te.load_fp8_state(plain, layer().state_dict())
    assert not core_of(plain).fp8_meta


def test_for_transformer_engine_the_state_is_left_out() -> None:
    module = layer()
    train(module, numbers(0, 40, 2, 64))
    written = te.transformer_engine_state_dict(module)
    assert written[KEY].numel() == 0
    other = layer()
    other.load_state_dict(written, strict=True)
    assert not core_of(other).fp8_meta


def test_the_state_moves_with_the_layer() -> None:
    core = te.DotProductAttention(2, 16)
    with te.autocast(recipe=RECIPE):
        core(*(numbers(n, 10, 2, 2, 16) for n in range(3)))
    core.to(torch.float16)
    assert core.fp8_meta["scaling_fwd"].scale.dtype == torch.float32
    core.to("meta")
    assert core.fp8_meta["scaling_fwd"].scale.is_meta
    core.to_empty(device="cpu")
    with te.autocast(recipe=RECIPE):
        core(*(numbers(n, 10, 2, 2, 16) for n in range(3)))


def test_a_loader_of_single_entries_fills_a_layer_from_the_meta_device() -> None:
    """Nothing tells attention that it has left the meta device: it has no parameters."""
    there, x = layer(), numbers(0, 40, 2, 64)
    train(there, x)
    with torch.device("meta"):
        here = layer()
    assert not here.state_dict()[KEY].is_meta
    for name, value in there.state_dict().items():
        of, _, last = name.rpartition(".")
        part: torch.nn.Module = here.get_submodule(of)
        if last == "_extra_state":
            part.set_extra_state(value)
        else:
            part.register_parameter(last, torch.nn.Parameter(value.clone()))
    te.init_fp8_state(here, RECIPE)
    assert_same_bits(here.state_dict()[KEY], there.state_dict()[KEY])
    assert_same(train(here, x), train(there, x))
