"""Tapes that move with their tensors: each byte of the arguments is that of a recording at the other addresses."""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from dry_gpu import DryGpu

import optimized
import reference as te
from optimized import launch
from optimized.replay import calls
from optimized.replay.launches import Copy, Launches
from optimized.replay.relative import Fixed, Relative, _integers
from reference.nn import blocks

BF16 = torch.bfloat16
TransformerLayer = optimized.TransformerLayer


def transformer(hidden: int = 64, **options: Any) -> Callable[[], torch.nn.Module]:
    given = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": BF16, **options}
    return lambda: TransformerLayer(hidden, 4 * hidden, hidden // 16, **given)


LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "Linear": lambda: optimized.Linear(64, 48, params_dtype=BF16),
    "LayerNormLinear": lambda: optimized.LayerNormLinear(64, 48, params_dtype=BF16, normalization="RMSNorm"),
    "LayerNormMLP": lambda: optimized.LayerNormMLP(64, 128, params_dtype=BF16, activation="swiglu"),
    "layer": transformer(),
    "joined weights": transformer(fuse_qkv_params=True),
    "dropout": transformer(hidden_dropout=0.1, attention_dropout=0.1),
    "grouped queries": transformer(num_gqa_groups=2, fuse_qkv_params=True),
    "post-norm": transformer(apply_residual_connection_post_layernorm=True, output_layernorm=True),
    "normed queries": transformer(qk_norm_type="L2Normalization"),
    "sinks": transformer(softmax_type="learnable"),
    "decoder": transformer(layer_type="decoder"),
    "cudnn": transformer(attention_backend="cudnn"),
    "large": transformer(1024),
    "large with dropout": transformer(1024, hidden_dropout=0.1, fuse_qkv_params=True),
}
GIVEN: dict[str, Any] = {
    "plain": lambda x: {},
    "angles": lambda x: {"rotary_pos_emb": torch.ones(x.shape[0], 1, 1, 16, device="cuda")},
    "window": lambda x: {"window_size": (8, 0)},
    "mask": lambda x: {
        "self_attn_mask_type": "padding",
        "attention_mask": torch.zeros(2, 1, 1, x.shape[0], dtype=torch.bool, device="cuda"),
    },
}
MODES: dict[str, Any] = {
    "bf16": None,
    "delayed": te.DelayedScaling(amax_history_len=4),
    "attention in fp8": te.DelayedScaling(amax_history_len=4, fp8_dpa=True),
}


def arguments(tape: Launches, like: Launches, kernel_of: Callable[[int], Any]) -> list[Any]:
    """What a tape's launches hand to the driver, in bytes, and its other entries; `like` was recorded."""
    found: list[Any] = []
    for entry, recorded in zip(tape.entries, like.entries, strict=True):
        if not isinstance(entry, launch.Launch):
            found.append(entry._arguments if isinstance(entry, Copy) else entry)
            continue
        pointers = (ctypes.c_uint64 * len(recorded.args)).from_address(entry._pointers)
        sizes = [x.storage.nbytes if isinstance(x, launch.ByValue) else 8 for x in recorded.args]
        values = [ctypes.string_at(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)]
        handle, *grid = entry._head
        found.append((kernel_of(handle), grid, entry._early, values))
    return found


class Compared:
    """Records every call at new addresses although its tape could be moved, and compares the two."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.equal = self.fixed = 0
        self.kernel_of: Callable[[int], Any] = lambda handle: handle
        self.moved: Launches | None = None
        usual, record = calls.Kind.moved, calls.Kind.record

        def moved(kind: calls.Kind, addresses: Any, tensors: Any) -> None:
            self.moved = usual(kind, addresses, tensors)
            self.fixed += kind.relative is None and len(kind.tapes) > 0

        def recorded(kind: calls.Kind, run: Any, results: Any, sources: Any, tensors: Any, addresses: Any) -> Any:
            found = record(kind, run, results, sources, tensors, addresses)
            if self.moved is not None:
                tape = kind.tapes[addresses]
                assert arguments(self.moved, tape, self.kernel_of) == arguments(tape, tape, self.kernel_of)
                self.equal += 1
            return found

        monkeypatch.setattr(calls.Kind, "moved", moved)
        monkeypatch.setattr(calls.Kind, "record", recorded)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Compared:
    monkeypatch.setattr(calls, "_kinds", {})
    monkeypatch.setattr(calls, "counts", calls.Counts())
    return Compared(monkeypatch)


def train(layer: Any, recipe: Any, given: Any = GIVEN["plain"], steps: int = 4, first: Any = None) -> None:
    """Each step has tensors in memory of its own, as far as the layer does not keep them."""
    kept: list[Any] = []
    hidden = next(p.shape[-1] for p in layer.parameters() if p.dim() == 2)
    more = {"encoder_output": torch.ones(48, 2, hidden, dtype=BF16, device="cuda")}
    more = more if getattr(layer, "layer_type", None) == "decoder" else {}
    for step in range(steps):
        x = torch.ones(1024 if hidden > 64 else 48, 2, hidden, dtype=BF16, device="cuda").requires_grad_()
        its = more | given(x) | ({} if first is None else {"is_first_microbatch": step == 0})
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(x, **its)
        grad = torch.ones_like(y)
        y.backward(grad)
        kept += [x, its, y, grad, x.grad, [p.grad for p in layer.parameters()]]
        layer.zero_grad(set_to_none=True)


@pytest.mark.sample(8)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("small", [0, blocks.SMALL], ids=["two pairs", "one pair"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_moved_tape_is_the_one_that_would_be_recorded(
    name: str, small: int, mode: str, compared: Compared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "SMALL", small)
    recipe = MODES["delayed" if name in ("sinks", "cudnn") and mode != "bf16" else mode]
    with DryGpu() as gpu:
        gpu.tapes()
        compared.kernel_of = lambda handle: gpu.launches[handle].kernel
        train(LAYERS[name](), recipe)
    assert compared.equal >= 3
    assert compared.fixed == 0


@pytest.mark.sample(3)
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("weights", ["plain", "in fp8", "cast in the first microbatch"])
def test_what_else_a_moved_tape_reads(given: str, weights: str, compared: Compared) -> None:
    """Angles and masks lie elsewhere in each step, weights and their casts do not."""
    with DryGpu() as gpu:
        gpu.tapes()
        compared.kernel_of = lambda handle: gpu.launches[handle].kernel
        with te.quantized_model_init(enabled=weights == "in fp8"):
            layer = LAYERS["layer"]()
        train(layer, MODES["delayed"], GIVEN[given], 6, True if "microbatch" in weights else None)
    assert compared.equal >= 3
    assert compared.fixed == 0
