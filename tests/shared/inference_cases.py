"""Models and schedules of the tests of `InferenceParams`, on either side."""

from contextlib import AbstractContextManager
from typing import Any

import torch

import reference as te

BF16 = torch.bfloat16
HIDDEN, HEADS, CHANNELS, ROOM = 64, 4, 16, 160
RECIPE = te.DelayedScaling(amax_history_len=2)
# Tokens of each step: the prompt ends before the first block of 128 keys does, what follows crosses its end.
STEPS = (120, *[1] * 12, 3, 1, 5)

OPTIONS: dict[str, dict[str, Any]] = {
    "block": {},
    "pairs of channels": {"rotary_pos_interleaved": True, "normalization": "RMSNorm", "activation": "swiglu"},
    "batch first": {"attn_input_format": "bshd", "bias": False},
    "window": {"window_size": (7, 0)},
    "modules": {"output_layernorm": True, "window_size": (70, 0)},
    "modules, batch first": {"output_layernorm": True, "attn_input_format": "bshd", "fuse_qkv_params": False},
    "as many heads": {"num_gqa_groups": None},
    "fp16": {"params_dtype": torch.float16, "self_attn_mask_type": "padding_causal"},
}


def numbers(seed: int, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fp8(enabled: bool = True) -> AbstractContextManager[None]:
    return te.autocast(enabled=enabled, recipe=RECIPE)


class Decoder(torch.nn.Module):
    """Layers, and what they need to run with and without a cache."""

    angles: torch.Tensor

    def __init__(self, layers: int = 2, **options: Any) -> None:
        super().__init__()
        common: dict[str, Any] = {"num_gqa_groups": 2, "params_dtype": BF16, "fuse_qkv_params": True, **options}
        torch.manual_seed(len(options))
        self.layers = torch.nn.ModuleList(
            te.TransformerLayer(HIDDEN, 128, HEADS, layer_number=i + 1, **common) for i in range(layers)
        )
        self.dtype = common["params_dtype"]
        self.dim = 0 if common.get("attn_input_format", "sbhd") == "sbhd" else 1  # of the tokens
        self.register_buffer("angles", te.RotaryPositionEmbedding(CHANNELS)(ROOM))
        self.eval()

    @property
    def device(self) -> torch.device:
        """Where the layers are."""
        return self.angles.device

    def forward(self, x: torch.Tensor, **more: Any) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=self.angles, **more)
        return x

    def numbers(self, seed: int, tokens: int, batch: int = 2) -> torch.Tensor:
        """Activations in this model's order."""
        x = numbers(seed, tokens, batch, HIDDEN, dtype=self.dtype)
        return (x if self.dim == 0 else x.transpose(0, 1).contiguous()).to(self.device)

    def params(self, batch: int = 3, **more: Any) -> te.InferenceParams:
        """A cache."""
        groups = self.layers[0].self_attention.num_gqa_groups
        return te.InferenceParams(batch, ROOM, groups, CHANNELS, self.dtype, device=self.device, **more)

    def trained(self) -> "Decoder":
        """This model with the scales that three steps have found."""
        self.train()
        for seed in range(3):
            with fp8():
                y = self(self.numbers(seed, 24))
            y.float().square().mean().backward()
        return self.eval()

    def stepped(
        self, x: torch.Tensor, steps: tuple[int, ...] = STEPS, cache: te.InferenceParams | None = None
    ) -> torch.Tensor:
        """All sequences of x in steps of so many tokens."""
        cache = self.params() if cache is None else cache
        outs, at = [], 0
        for n in steps:
            cache.pre_step(dict.fromkeys(range(x.shape[1 - self.dim]), n))
            outs.append(self(x.narrow(self.dim, at, n), inference_params=cache))
            at += n
        return torch.cat(outs, self.dim)


# Sequences begin, end and change places; each has tokens of its own.
MIXED: list[dict[str, int]] = [
    {"a": 5, "b": 130, "c": 2},
    {"a": 1, "b": 1, "c": 1},
    {"a": 1, "c": 1},
    {"a": 1, "d": 6, "c": 1},
    {"c": 2, "a": 3, "d": 1},
    {"d": 1, "c": 1, "a": 1},
    {"d": 2, "c": 2, "a": 2},
    {"e": 4},
    {"e": 1, "f": 1},
]


def mixed(model: Decoder, cache: te.InferenceParams, poison: bool = True) -> dict[str, torch.Tensor]:
    """What each sequence of `MIXED` gives, [tokens, hidden], step by step; with NaN wherever nothing should be read."""
    texts = {name: model.numbers(ord(name), 140, 1).squeeze(1 - model.dim) for name in "abcdef"}
    outs: dict[str, list[torch.Tensor]] = {name: [] for name in texts}
    for step in MIXED:
        before = dict(cache.sequences)
        if poison:
            for _, values in cache.cache.values():
                values[len(before) :] = torch.nan
        cache.pre_step(step)
        longest = max(step.values())
        x = torch.full((len(step), longest, HIDDEN), torch.nan, dtype=model.dtype, device=model.device)
        for row, (name, n) in enumerate(step.items()):
            at = cache.sequences[name] - n
            x[row, :n] = texts[name][at : at + n]
        y = model(x if model.dim else x.transpose(0, 1).contiguous(), inference_params=cache)
        y = y if model.dim else y.transpose(0, 1)
        for row, (name, n) in enumerate(step.items()):
            outs[name].append(y[row, :n])
    return {name: torch.cat(parts) for name, parts in outs.items()}


def alone(model: Decoder, name: str, tokens: int) -> torch.Tensor:
    """What a sequence of `MIXED` gives without a cache, [tokens, hidden]."""
    x = model.numbers(ord(name), 140, 1).narrow(model.dim, 0, tokens)
    found: torch.Tensor = model(x).squeeze(1 - model.dim)
    return found
