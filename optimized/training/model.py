"""A byte-level GPT of `TransformerLayer`s, whose every number is defined, on a CPU and on a GPU.

It predicts each byte of a text from the bytes before it. Activations are `[sequence, rows, hidden]` in bf16:

    h = E[byte] + P[place]            two `Embedding`s in fp32, one rounding of each sum
    h = TransformerLayer(h)           `layers` times, causal; only these layers run in FP8
    logits = LayerNorm(h)·Eᵀ          [sequence, rows, vocabulary]; E is the table of bytes

Parameters are fp32, so they are their own masters, and gradients of microbatches are added in fp32. What is torch's
own here is one addition and conversions, which are the same on every device (IEEE 754).
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import reference as te
from optimized.training.settings import BYTES, Settings
from reference.nn.core import init
from reference.numbers import elementary, philox

# The linear maps of a TransformerLayer: the module; the columns of input and weight in its scaling_fwd; the column of
# the output's gradient in its scaling_bwd.
PRODUCTS = {
    "QKV": ("self_attention.layernorm_qkv", 0, 1, 0),
    "proj": ("self_attention.proj", 0, 1, 0),
    "fc1": ("layernorm_mlp", 0, 1, 0),
    "fc2": ("layernorm_mlp", 3, 4, 2),
}


class GPT(torch.nn.Module):
    """The model of the module's docstring on `device`; parameters are fp32, drawn from `settings.seed`.

    Ranks of `tp_group` have parts of the layers' weights, those of `cp_group` some of the bytes each.
    """

    def __init__(
        self, settings: Settings, device: torch.device | str = "cpu", tp_group: Any = None, cp_group: Any = None
    ) -> None:
        super().__init__()
        self._cp_group = cp_group
        self.settings = settings
        hidden = settings.hidden
        common: dict[str, Any] = {"params_dtype": torch.float32, "device": device}

        def normal(weight: torch.Tensor) -> None:
            init.normal_(weight, std=settings.std)

        def smaller(weight: torch.Tensor) -> None:  # 2·layers sums meet in the residual stream
            init.normal_(weight, std=settings.std / math.sqrt(2 * settings.layers))

        options: dict[str, Any] = {"init_method": normal, "output_layer_init_method": smaller, **common}
        options |= {"hidden_dropout": settings.dropout, "attention_dropout": settings.dropout}
        options |= {"fuse_qkv_params": True, "self_attn_mask_type": "causal"}
        options |= {"tp_group": tp_group, "set_parallel_mode": tp_group is not None}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.bytes = te.Embedding(settings.vocabulary, hidden, init_method=normal, **common)
            self.places = te.Embedding(settings.sequence, hidden, init_method=normal, **common)
            self.layers = torch.nn.ModuleList(
                te.TransformerLayer(hidden, 4 * hidden, settings.heads, layer_number=i + 1, **options)
                for i in range(settings.layers)
            )
            self.norm = te.LayerNorm(hidden, **common)
            self.head = te.Linear(hidden, settings.vocabulary, bias=False, init_method=torch.zero_, **common)
        self.head.weight = self.bytes.weight
        te.parallel.share_tokens(self, cp_group)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.bytes.weight.device

    def cache(self) -> te.InferenceParams:
        """Room for the keys and values of one text of `settings.sequence` bytes."""
        one, channels = self.settings, self.settings.hidden // self.settings.heads
        return te.InferenceParams(1, one.sequence, one.heads, channels, torch.bfloat16, device=self.device)

    def forward(
        self,
        text: torch.Tensor,
        recipe: te.recipe.Recipe | None,
        is_first_microbatch: bool | None = None,
        cache: te.InferenceParams | None = None,
    ) -> torch.Tensor:
        """Bytes int64 [sequence, rows] to logits bf16 [sequence, rows, vocabulary]; the layers in FP8 with a recipe.

        Where ranks share the bytes, they are this rank's of a sequence, and so are the logits.

        With a cache, after its `pre_step`, these are the bytes that follow on those in it, of one row.
        """
        share = 1 if self._cp_group is None else self._cp_group.size()
        places = te.parallel.tokens_of_rank(torch.arange(len(text) * share, device=text.device), self._cp_group)
        places = places[:, None].expand(text.shape)
        if cache is not None:
            places = places + cache.get_seqlens_pre_step()[0]
        options: dict[str, Any] = {"is_first_microbatch": is_first_microbatch, "inference_params": cache}
        with torch.autocast(self.device.type, torch.bfloat16):
            h = (self.bytes(text) + self.places(places)).to(torch.bfloat16)
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                for layer in self.layers:
                    if self.settings.recompute and self.training:
                        h = te.checkpoint(layer, h, **options)
                    else:
                        h = layer(h, **options)
            return self.head(self.norm(h))  # type: ignore[no-any-return]

    def loss(
        self,
        windows: torch.Tensor,
        recipe: te.recipe.Recipe | None,
        is_first_microbatch: bool | None = None,
    ) -> torch.Tensor:
        """The mean loss, fp32 [], in nats per byte, of windows uint8 [sequence + 1, rows] on any device."""
        text = windows.to(self.device).long()
        given, wanted = (te.parallel.tokens_of_rank(one, self._cp_group) for one in (text[:-1], text[1:]))
        logits = self(given, recipe, is_first_microbatch)
        return te.cross_entropy(logits, wanted, cp_group=self._cp_group)

    def products(self) -> Iterator[tuple[str, Any, tuple[int, int, int]]]:
        """Every linear map inside the layers: its name, its module and its columns in the FP8 state."""
        for index, layer in enumerate(self.layers):
            for name, (path, *columns) in PRODUCTS.items():
                yield f"layer {index} {name}", layer.get_submodule(path), (columns[0], columns[1], columns[2])


def drawn(logits: torch.Tensor, u: float, temperature: float) -> int:
    """The byte at height `u` (0 <= u < 1) of the softmax of logits [vocabulary] / temperature; the same everywhere."""
    x = logits[:BYTES].float().cpu()
    weights = elementary.exp(torch.from_numpy((x - x.max()).numpy() / np.float32(temperature)))
    heights = np.cumsum(weights.double().numpy())
    return int(np.searchsorted(heights[:-1], u * heights[-1], side="right"))


@torch.no_grad()
def sample(
    model: GPT,
    recipe: te.recipe.Recipe | None,
    prompt: bytes,
    length: int,
    progress: Callable[[], object],
    temperature: float = 0.7,
) -> bytes:
    """`prompt`, continued by `length` bytes, which `philox` draws. In FP8, amaxes enter histories as in any forward.

    As long as the model sees the whole text, it reads only what is new; keys and values of the rest are in a cache. The
    logits are the same. A longer text moves on by a place with each byte, so then the model reads all that it can see;
    so it does in a recipe that `sees_other_tokens`, as current scaling, where a byte's numbers depend on the others of
    its forward.
    """
    text, limit = prompt, model.settings.sequence
    cache = model.cache() if recipe is None or not recipe.sees_other_tokens else None
    draws = philox.uniform((length,), seed=model.settings.seed)
    for u in draws.tolist():
        new = text[-limit:]
        if len(text) > limit:
            cache = None
        if cache is not None:
            new = text[cache.sequences.get("text", 0) :]
            cache.pre_step({"text": len(new)})
        window = torch.tensor(list(new), device=model.device)[:, None]
        text += bytes([drawn(model(window, recipe, cache=cache)[-1, 0], u, temperature)])
        progress()
    return text
