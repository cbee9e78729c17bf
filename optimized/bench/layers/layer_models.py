"""The contestants of `twin bench layer`: a GPT layer and a Llama-like layer by this library, by PyTorch and by
Transformer Engine.

    h = x + dropout(projection(attention(norm(x))))        y = h + mlp(norm(h))

The GPT layer comes in the steps of Transformer Engine's quickstart (`tutorial_layers`); the plain Llama-like layer is
`Llama`. Activations are `[sequence, batch, hidden]`.
"""

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention, silu

import optimized as te
from optimized import measure
from optimized.bench.kernels.gemm import shapes
from optimized.bench.layers.tutorial_layers import BasicTransformerLayer, FusedLayer, ModulesLayer
from reference.nn.core.module import TransformerEngineBaseModule

RECIPE = te.DelayedScaling(amax_history_len=16, amax_compute_algo="max")


@dataclass(frozen=True)
class Case:
    """A layer's sizes, dtype, mask and dropout.

    A Llama-like layer has RMSNorm, SwiGLU with ffn columns in each half, no biases, and `kv_heads` heads of keys and
    values.
    """

    name: str
    hidden: int
    ffn: int
    heads: int
    sequence: int
    batch: int
    dtype: torch.dtype
    causal: bool
    dropout: float
    llama: bool = False
    kv_heads: int | None = None  # None: as many as heads
    rotary: bool = False

    @property
    def channels(self) -> int:
        """Channels of a head."""
        return self.hidden // self.heads

    @property
    def tokens(self) -> int:
        """Rows of every activation."""
        return self.sequence * self.batch

    @property
    def mask_type(self) -> str:
        """Transformer Engine's name of the mask."""
        return "causal" if self.causal else "no_mask"

    def products(self) -> dict[str, tuple[int, int, int, str]]:
        """M, N, K and accumulation of the twelve GEMMs: forward, gradient of the input, of the weight."""
        linears = {
            "qkv": (self.hidden, self.hidden + 2 * self.channels * (self.kv_heads or self.heads)),
            "proj": (self.hidden, self.hidden),
            "fc1": (self.hidden, self.ffn * (2 if self.llama else 1)),
            "fc2": (self.ffn, self.hidden),
        }
        found = shapes(self.tokens, linears)
        return {name: (*shape, "fast" if name.endswith("fprop") else "split") for name, shape in found.items()}


CASES = (
    Case("bf16, causal, batch 4", 4096, 16384, 32, 2048, 4, torch.bfloat16, True, 0.0),
    Case("fp16, no mask, dropout 0.1, batch 4", 4096, 16384, 32, 2048, 4, torch.float16, False, 0.1),
    Case("small: hidden 1024, 256 tokens", 1024, 4096, 16, 256, 1, torch.bfloat16, True, 0.0),
    Case("Llama-like: hidden 4096, 8192 tokens", 4096, 14336, 32, 4096, 2, torch.bfloat16, True, 0.0, True, 8, True),
    Case("Llama-like, without rotary embedding", 4096, 14336, 32, 4096, 2, torch.bfloat16, True, 0.0, True, 8),
    Case("Llama-like: hidden 1024, 256 tokens", 1024, 3584, 16, 256, 1, torch.bfloat16, True, 0.0, True, 4, True),
)


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, p: float) -> torch.Tensor:
    """cuDNN's attention of `[b, h, s, d]`; k and v may have fewer heads."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        groups = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=causal, enable_gqa=groups)


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """PyTorch's flash attention of `[b, h, s, d]`, which splits the keys of few queries."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


class Plain(BasicTransformerLayer):
    """Plain PyTorch with cuDNN's attention."""

    def attend_heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return cudnn(q, k, v, self.causal, self.p)


def angles(sequence: int, channels: int) -> torch.Tensor:
    """Llama's rotary angles, fp32 `[sequence, 1, 1, channels]`; both halves are position · 10000^(-2j / channels)."""
    rates = 10000.0 ** (-torch.arange(0, channels, 2) / channels)
    return torch.outer(torch.arange(sequence), rates).repeat(1, 2)[:, None, None]


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`twin::rotary` of x `[s, b, h, d]` in plain PyTorch: computed in fp32 and rounded once."""
    first, second = x.float().chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


class Llama(torch.nn.Module):
    """A Llama-like layer in plain PyTorch, with cuDNN's attention.

    h = x + projection(attention(q, k, v)) with q, k, v from qkv(norm(x)), q and k turned by their positions' angles;
    y = h + fc2(silu(a) · b) with a and b from fc1(norm(h)).
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        groups = case.kv_heads or case.heads
        self.case, self.heads = case, (case.heads, groups, groups)
        linear = functools.partial(torch.nn.Linear, bias=False)
        self.ln1, self.ln2 = (torch.nn.RMSNorm(case.hidden, eps=1e-5) for _ in range(2))
        self.qkv = linear(case.hidden, sum(self.heads) * case.channels)
        self.projection = linear(case.hidden, case.hidden)
        self.fc1, self.fc2 = linear(case.hidden, 2 * case.ffn), linear(case.ffn, case.hidden)
        turns = angles(case.sequence, case.channels)
        self.turns = (turns.cos(), turns.sin())  # not buffers, so that they stay fp32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x and the result are `[sequence, batch, hidden]`."""
        q, k, v = self.qkv(self.ln1(x)).unflatten(2, (-1, self.case.channels)).split(self.heads, dim=2)
        if self.case.rotary:
            q, k = turned(q, *self.turns), turned(k, *self.turns)
        out = self.attend_heads(*(t.permute(1, 2, 0, 3) for t in (q, k, v)))
        h = x + self.projection(out.permute(2, 0, 1, 3).flatten(2))
        first, second = self.fc1(self.ln2(h)).chunk(2, dim=2)
        return h + self.fc2(silu(first) * second)

    def attend_heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of `[b, heads, s, channels]`."""
        return cudnn(q, k, v, self.case.causal, self.case.dropout)


def _normal(weight: torch.Tensor) -> None:
    """Draw on the GPU: the layers' own initialisation draws on the CPU, which takes seconds at these sizes."""
    torch.nn.init.normal_(weight, 0, 0.023)


def _transformer_layer(library: Any, case: Case, **options: Any) -> torch.nn.Module:
    options |= {"hidden_dropout": case.dropout, "attention_dropout": case.dropout, "params_dtype": case.dtype}
    options |= {"init_method": _normal, "output_layer_init_method": _normal, "self_attn_mask_type": case.mask_type}
    if case.llama:
        options |= {"normalization": "RMSNorm", "bias": False, "activation": "swiglu", "num_gqa_groups": case.kv_heads}
    return library.TransformerLayer(case.hidden, case.ffn, case.heads, fuse_qkv_params=True, **options)


class Contestant:
    """One layer and its training step.

    Args:
        name: the step of the tutorial, or whose layer it is.
        attention: "exact", "cuDNN", or who else computes it.
        module: the layer, on the GPU.
        context: opened around each forward.
        in_contract: whether `reference` defines every bit of it.
        keywords: what each forward is given besides x.
    """

    def __init__(
        self,
        name: str,
        attention: str,
        module: Callable[..., Any],
        case: Case,
        context: Callable[[], Any] = contextlib.nullcontext,
        in_contract: bool = False,
        **keywords: Any,
    ) -> None:
        self.name, self.attention, self.in_contract = name, attention, in_contract
        self.title = f"{name} / {attention}"
        self.case, self.module, self.context, self.keywords = case, module, context, keywords
        shape = (case.sequence, case.batch, case.hidden)
        self.x = torch.randn(shape, device="cuda", dtype=case.dtype, requires_grad=True)
        self.grad = torch.randn(shape, device="cuda", dtype=case.dtype)
        self.threads = True  # PyTorch's default: backward runs on a thread of its own
        self.run: Callable[[], object] = self.step  # or a replay of it
        self.parameters = [self.x, *self.module.parameters()]  # type: ignore[attr-defined]

    def step(self, **keywords: Any) -> None:
        """Forward and backward; gradients are reset to None before."""
        self.forget()
        with self.context():
            out = self.module(self.x, **{**self.keywords, **keywords})
        with torch.autograd.set_multithreading_enabled(self.threads):
            out.backward(self.grad)

    def forget(self) -> None:
        """Set the gradients to None."""
        for parameter in self.parameters:
            parameter.grad = None

    def described(self) -> dict[str, Any]:
        """Its part of a row of the result."""
        return {"step": self.name, "attention": self.attention, "in_contract": self.in_contract}

    def block(self, steps: int) -> None:
        """Run some steps. Afterwards the end of other contestants' steps does not update this layer's scales."""
        for _ in range(steps):
            self.run()
        for module in self.module.modules():  # type: ignore[attr-defined]
            if isinstance(module, TransformerEngineBaseModule):
                module._membership = None


Build = Callable[[], Contestant]


def _plain(case: Case, cls: type[BasicTransformerLayer] = Plain) -> torch.nn.Module:
    with torch.device("cuda"):
        if case.llama:
            return Llama(case).to(case.dtype)
        return cls(case.hidden, case.ffn, case.heads, p=case.dropout, causal=case.causal).to(case.dtype)


_MODULES = {"te.Linear, te.LayerNorm": ModulesLayer, "LayerNormLinear, LayerNormMLP": FusedLayer}


def _of_modules(name: str, case: Case, cls: type[ModulesLayer]) -> Contestant:
    with torch.device("cuda"):
        layer = cls(case.hidden, case.ffn, case.heads, case.dropout, case.causal, _normal, case.dtype)
    context = functools.partial(te.autocast, recipe=RECIPE) if name.endswith("FP8") else contextlib.nullcontext
    # The dropout after the projection is PyTorch's.
    return Contestant(name, "exact", layer, case, context, in_contract=case.dropout == 0)


def few(case: Case) -> Iterator[Build]:
    """PyTorch with cuDNN's attention, our layer in 16 bits and FP8, and Transformer Engine's in FP8.

    A Llama-like layer also comes by compiled PyTorch, and by Transformer Engine in 16 bits.
    """
    theirs = _transformer_engine(case)
    yield lambda: Contestant("PyTorch", "cuDNN", _plain(case), case)
    if case.llama:
        yield lambda: Contestant("PyTorch, compiled", "cuDNN", torch.compile(_plain(case)), case)
    for layers in _ours(case):
        yield from layers[:2]
    yield from theirs[0 if case.llama else 1 : 2]


def stages(case: Case) -> Iterator[Build]:
    """Plain PyTorch; in FP8 te's modules, fused modules and one layer, with exact attention; Transformer Engine's."""
    theirs = _transformer_engine(case)
    yield lambda: Contestant("PyTorch", "its matmuls", _plain(case, BasicTransformerLayer), case)
    yield lambda: Contestant("PyTorch", "cuDNN", _plain(case), case)
    for name, cls in _MODULES.items():
        yield functools.partial(_of_modules, f"{name}, FP8", case, cls)
    for layers in (next(_ours(case)), theirs):
        yield from layers[1:2]


def contestants(case: Case) -> Iterator[Build]:
    """Each contestant, as a call that builds it."""
    if case.llama:
        yield from few(case)
        return
    theirs = _transformer_engine(case)
    yield lambda: Contestant("PyTorch", "its matmuls", _plain(case, BasicTransformerLayer), case)
    yield lambda: Contestant("PyTorch", "cuDNN", _plain(case), case)
    if case == CASES[0]:  # a compilation takes ten seconds
        yield lambda: Contestant("PyTorch, compiled", "cuDNN", torch.compile(_plain(case)), case)
    if case.tokens <= 1024:
        yield functools.partial(_one_thread, lambda: Contestant("PyTorch", "cuDNN", _plain(case), case))
    for name, cls in _MODULES.items():
        yield functools.partial(_of_modules, name, case, cls)
    for layers in _ours(case):
        yield from layers
    yield from theirs


def _one_thread(build: Build) -> Contestant:
    """A contestant whose backward runs on the calling thread: waking another thread costs time in a small layer."""
    made = build()
    made.name += ", autograd on one thread"
    made.title = f"{made.name} / {made.attention}"
    made.threads = False
    return made


def _layers(library: Any, name: str, attention: str, case: Case, recipe: Any, **options: Any) -> list[Build]:
    """The `TransformerLayer`s of a library, ours or Transformer Engine's."""

    def one(what: str = ", FP8", **keywords: Any) -> Contestant:
        layer, inside = _transformer_layer(library, case, **options), attention == "exact"
        context = functools.partial(library.autocast, recipe=recipe) if what else contextlib.nullcontext
        if case.rotary:
            keywords["rotary_pos_emb"] = angles(case.sequence, case.channels).cuda()
        return Contestant(f"{name}{what}", attention, layer, case, context, inside, **keywords)

    def cached() -> Contestant:
        made = one(", FP8, cached weights", is_first_microbatch=False)
        made.step(is_first_microbatch=True)
        return made

    def kept() -> Contestant:
        with library.quantized_model_init(recipe=recipe):
            return one(", FP8 weights")

    def graphed() -> Contestant:
        made = one(", FP8, CUDA graph")
        # Gradients are reset to None before each step, so nothing is added to them and ours need not be copied.
        keep = {"clone_param_grads_on_return": False} if library is te else {}
        graphs = library.make_graphed_callables
        made.module = graphs(made.module, (made.x,), enabled=True, recipe=recipe, **keep)
        return made

    def whole_step() -> Contestant:
        made = one(", FP8, whole step in a CUDA graph")
        made.step()
        made.run = measure.graph(lambda _: made.step(), 1)
        return made

    ours = name == "TransformerLayer"
    on_one_thread = [functools.partial(_one_thread, one)] if case.tokens <= 1024 else []
    more = [cached, kept, graphed, whole_step] if ours else [cached, graphed]
    return [lambda: one(""), one, *on_one_thread, *more]


def _ours(case: Case) -> Iterator[list[Build]]:
    for attention in ("exact", "cuDNN"):
        yield _layers(te, "TransformerLayer", attention, case, RECIPE, attention_backend=attention.lower())


def _transformer_engine(case: Case) -> list[Build]:
    """Transformer Engine's layers, with the attention that it chooses; none if it is not installed."""
    theirs = engine()
    return [] if theirs is None else _layers(theirs, "Transformer Engine", "its own", case, their_recipe())


LINEAR = Case("Linear(4096, 4096), 8192 tokens", 4096, 4096, 1, 2048, 4, torch.bfloat16, False, 0.0)


def linears(case: Case = LINEAR) -> Iterator[Build]:
    """One square linear map, in which the casts to FP8 take the largest share."""
    sizes, theirs = (case.hidden, case.hidden), engine()
    yield lambda: Contestant("torch.nn.Linear", "", torch.nn.Linear(*sizes, device="cuda", dtype=case.dtype), case)

    def one(name: str, library: Any, recipe: Any) -> Contestant:
        linear = library.Linear(*sizes, init_method=_normal, params_dtype=case.dtype)
        fp8 = functools.partial(library.autocast, recipe=recipe)
        context = fp8 if name.endswith("FP8") else contextlib.nullcontext
        return Contestant(name, "", linear, case, context, in_contract=name.startswith("te."))

    for what in ("", ", FP8"):
        yield functools.partial(one, f"te.Linear{what}", te, RECIPE)
    for what in ("", ", FP8") if theirs is not None else ():
        yield functools.partial(one, f"Transformer Engine{what}", theirs, their_recipe())


def engine() -> Any:
    """NVIDIA's Transformer Engine, or None if it is not installed.

    It must be imported before cuDNN is first used. At that moment PyTorch loads parts of its own cuDNN, and Transformer
    Engine, which loads the system's cuDNN if there is one, would find them in place of those that it needs.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return None
    return importlib.import_module("transformer_engine.pytorch")


def their_recipe(recipe: te.DelayedScaling = RECIPE) -> Any:
    """Transformer Engine's form of a recipe."""
    options = {name: getattr(recipe, name) for name in ("amax_history_len", "amax_compute_algo", "reduce_amax")}
    return importlib.import_module("transformer_engine.common.recipe").DelayedScaling(**options)
