"""Who decodes in `twin bench generator`: `te.Generator`, a loop of plain PyTorch and transformers' Llama.

All have the same sizes, random weights, and a cache that is filled with random keys and values instead of a prompt's:
each holds `context - LEFT` tokens of every sequence, and a `block` of steps adds one to each in a step. The likeliest
token is taken, and every step's tokens are numbers on the host before the next step begins; `te.Generator` reads them
when it has launched the next one, so that a block of steps reads those from the last one before it on.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

import optimized as te
from optimized import measure
from optimized.bench.layers.layer_models import RECIPE, Case, angles, turned
from reference.nn.attentions.kv_cache import InferenceParams

LEFT = 96  # tokens of each sequence for which a contestant has room
FP8 = torch.float8_e4m3fn


def normal(x: torch.Tensor) -> torch.Tensor:
    """Draw on the GPU, which takes less time than on the CPU."""
    return torch.nn.init.normal_(x, 0, 0.023)


class Model(torch.nn.Module):
    """This library's Llama: tokens `[s, b]` to logits `[s, b, vocabulary]`; the layers in FP8, or all in 16 bits.

    `segment`: the layers' `key_segment`.
    """

    def __init__(
        self, case: Case, layers: int, vocabulary: int, fp8: bool, device: str = "cuda", segment: int | None = None
    ) -> None:
        super().__init__()
        common: dict[str, Any] = {"params_dtype": case.dtype, "device": device}
        options: dict[str, Any] = {"normalization": "RMSNorm", "bias": False, "activation": "swiglu", **common}
        options |= {"num_gqa_groups": case.kv_heads, "fuse_qkv_params": True, "key_segment": segment}
        options |= {"init_method": normal, "output_layer_init_method": normal}
        self.case, self.fp8 = case, fp8
        with te.quantized_model_init(enabled=fp8):
            self.layers = torch.nn.ModuleList(
                te.TransformerLayer(case.hidden, case.ffn, case.heads, layer_number=i + 1, **options)
                for i in range(layers)
            )
        self.table = te.Embedding(vocabulary, case.hidden, init_method=normal, **common)
        self.norm = te.RMSNorm(case.hidden, **common)
        self.head = te.Linear(case.hidden, vocabulary, bias=False, init_method=normal, **common)
        self.angles = angles(case.sequence, case.channels).to(device)
        self.eval()

    def forward(self, text: torch.Tensor, inference_params: te.InferenceParams) -> torch.Tensor:
        h = self.table(text)
        with te.autocast(enabled=self.fp8, recipe=RECIPE):
            for layer in self.layers:
                h = layer(h, rotary_pos_emb=self.angles, inference_params=inference_params)
        return self.head(self.norm(h))  # type: ignore[no-any-return]


def fill(cache: InferenceParams, layers: int, lengths: dict[Any, int]) -> None:
    """Let a cache have so many tokens of each sequence, with random keys and values, as if a forward had run."""
    for number in range(1, layers + 1):
        cache.allocate_memory(number)
        for one in cache.cache[number]:
            if one.element_size() > 1:  # FP8 codes stay 0
                one.normal_()
    cache.pre_step(lengths)
    cache.replayed()


class Engine:
    """`te.Generator` with CUDA graphs."""

    def __init__(self, model: Model, batch: int, context: int) -> None:
        options: dict[str, Any] = {"max_batch_size": batch, "max_sequence_length": context, "cuda_graphs": True}
        self.generator = te.Generator(model, **options)
        for i in range(batch):
            self.generator.add([i] * (context - LEFT), LEFT)
        self.generator.schedule.admit()
        running = self.generator.running.items()
        fill(self.generator.cache, len(model.layers), {name: len(one.text) - 1 for name, one in running})
        self.block(3)  # the first is launched op by op, the second is captured

    def block(self, steps: int) -> None:
        """So many steps."""
        for _ in range(steps):
            self.generator.step()


def product(x: torch.Tensor, weight: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
    """x · weightᵀ by cuBLAS, in the weight's dtype. In FP8 x is cast with the scale 1, without a look for its amax."""
    if weight.dtype != FP8:
        return linear(x, weight)
    return torch._scaled_mm(x.to(FP8), weight.t(), scale_a=one, scale_b=one, out_dtype=x.dtype, use_fast_accum=True)


def before_attention(
    x: torch.Tensor,
    norm: torch.Tensor,
    qkv: torch.Tensor,
    one: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    groups: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q `[b, groups, heads / groups, d]`, k and v `[b, groups, 1, d]` of x `[b, hidden]`."""
    found = product(rms_norm(x, x.shape[1:], norm, 1e-5), qkv, one).view(len(x), heads + 2 * groups, -1)
    q, k, v = found.split([heads, groups, groups], 1)
    q = turned(q, cos, sin).reshape(len(x), groups, heads // groups, -1)
    return q, turned(k, cos, sin)[:, :, None], v[:, :, None]


def after_attention(
    x: torch.Tensor,
    out: torch.Tensor,
    norm: torch.Tensor,
    projection: torch.Tensor,
    fc1: torch.Tensor,
    fc2: torch.Tensor,
    one: torch.Tensor,
) -> torch.Tensor:
    """The layer's result `[b, hidden]`."""
    h = x + product(out.reshape(x.shape), projection, one)
    first, second = product(rms_norm(h, h.shape[1:], norm, 1e-5), fc1, one).chunk(2, 1)
    return h + product(silu(first) * second, fc2, one)


@functools.cache
def compiled_parts() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What is before and after attention; layers and contexts share it."""
    return torch.compile(before_attention, dynamic=False), torch.compile(after_attention, dynamic=False)


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """PyTorch's attention of few queries with many keys, which are split: flash decoding. On a CPU what there is."""
    if not q.is_cuda:
        return scaled_dot_product_attention(q, k, v)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(q, k, v)


class Weights:
    """The plain loop's weights: of linear maps in bf16 or FP8, all else in bf16."""

    def __init__(self, case: Case, layers: int, vocabulary: int, fp8: bool, device: str = "cuda") -> None:
        def drawn(rows: int, columns: int) -> torch.Tensor:
            return normal(torch.empty(rows, columns, dtype=case.dtype, device=device))

        width = (case.heads + 2 * (case.kv_heads or case.heads)) * case.channels
        shapes = (
            (width, case.hidden),
            (case.hidden, case.hidden),
            (2 * case.ffn, case.hidden),
            (case.hidden, case.ffn),
        )
        made = [[drawn(*shape) for shape in shapes] for _ in range(layers)]
        self.layers = [[x.to(FP8) if fp8 else x for x in one] for one in made]
        self.case, self.one = case, torch.ones((), device=device)
        self.norm = torch.ones(case.hidden, dtype=case.dtype, device=device)
        self.table, self.head = (drawn(vocabulary, case.hidden) for _ in range(2))
        turns = angles(case.sequence, case.channels)[:, 0].to(device)
        self.cos, self.sin = turns.cos(), turns.sin()


class Loop:
    """Plain PyTorch in a CUDA graph: cuBLAS, compiled norms and activations, flash decoding of a preallocated cache.

    Attention has no mask: it reads all of the cache, as its kernel, which splits the keys, takes none.
    """

    def __init__(self, weights: Weights, batch: int, context: int, compiled: bool = True) -> None:
        case, device = weights.case, weights.norm.device
        groups = case.kv_heads or case.heads
        shape = (batch, groups, context, case.channels)
        options: dict[str, Any] = {"dtype": case.dtype, "device": device}
        self.weights = weights
        self.caches = [[torch.empty(shape, **options).normal_() for _ in range(2)] for _ in weights.layers]
        self.tokens = torch.arange(batch, device=device)
        self.at = torch.full((1,), context - LEFT, device=device)
        parts: tuple[Callable[..., Any], Callable[..., Any]] = (before_attention, after_attention)
        self.parts = compiled_parts() if compiled else parts
        self.forward()
        self.forward()
        self.step: Callable[[], object] = self.forward
        if device.type == "cuda":
            self.step = measure.graph(lambda _: self.forward(), 1)

    def forward(self) -> None:
        """The next token of each sequence."""
        weights, case = self.weights, self.weights.case
        before, after = self.parts
        x = embedding(self.tokens, weights.table)
        cos, sin = (one.index_select(0, self.at) for one in (weights.cos, weights.sin))
        for (qkv, *others), (keys, values) in zip(weights.layers, self.caches, strict=True):
            groups = case.kv_heads or case.heads
            q, k, v = before(x, weights.norm, qkv, weights.one, cos, sin, case.heads, groups)
            keys.index_copy_(2, self.at, k)
            values.index_copy_(2, self.at, v)
            x = after(x, flash(q, keys, values), weights.norm, *others, weights.one)
        logits = linear(rms_norm(x, x.shape[1:], weights.norm, 1e-5), weights.head)
        self.tokens.copy_(logits.argmax(1))
        self.at.add_(1)

    def block(self, steps: int) -> None:
        """So many steps."""
        for _ in range(steps):
            self.step()
            self.tokens.tolist()


def their_model(case: Case, layers: int, vocabulary: int, device: str = "cuda") -> Any:
    """transformers' Llama, bf16."""
    library: Any = importlib.import_module("transformers")
    sizes: dict[str, Any] = {"hidden_size": case.hidden, "intermediate_size": case.ffn, "vocab_size": vocabulary}
    sizes |= {"num_attention_heads": case.heads, "num_key_value_heads": case.kv_heads, "num_hidden_layers": layers}
    config = library.LlamaConfig(**sizes, max_position_embeddings=case.sequence, tie_word_embeddings=False)
    with torch.device(device):
        return library.LlamaForCausalLM._from_config(config, dtype=case.dtype).eval()


class HuggingFace:
    """transformers' Llama with its static cache, its forward compiled as its `generate` compiles it.

    Args:
        options: for `torch.compile`; `generate` has mode="reduce-overhead", which makes CUDA graphs.
    """

    def __init__(self, model: Any, case: Case, batch: int, context: int, **options: Any) -> None:
        library: Any = importlib.import_module("transformers")
        self.cache = library.StaticCache(config=model.config, max_cache_len=context)
        heads = case.kv_heads or case.heads
        self.cache.early_initialization(batch, heads, case.channels, case.dtype, model.device)
        for layer in self.cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
            layer.cumulative_length.fill_(context - LEFT)
        self.tokens = torch.arange(batch, device=model.device)[:, None].contiguous()
        self.compiled = torch.compile(model.__call__, **options)
        self.block(3)  # it compiles in the first and captures graphs in the next

    def block(self, steps: int) -> None:
        """So many steps."""
        for _ in range(steps):
            torch.compiler.cudagraph_mark_step_begin()
            given: dict[str, Any] = {"input_ids": self.tokens, "past_key_values": self.cache}
            found = self.compiled(**given, use_cache=True, logits_to_keep=1)
            self.tokens.copy_(found.logits[:, -1].argmax(-1)[:, None])
            self.tokens.tolist()
