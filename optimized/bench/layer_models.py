"""The contestants of `twin bench layer`: one layer in the steps of Transformer Engine's quickstart, and by others.

    h = x + dropout(projection(attention(norm(x))))        y = h + mlp(norm(h))

The plain layer is the quickstart's: dropout on attention's weights and behind the projection. A `TransformerLayer`
drops behind the MLP too. Activations are `[sequence, batch, hidden]`.
"""

import contextlib
import functools
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import optimized as te
from optimized import measure
from optimized.bench.tutorial_layers import BasicTransformerLayer, FusedLayer, ModulesLayer
from reference.nn.module import TransformerEngineBaseModule

RECIPE = te.DelayedScaling(amax_history_len=16, amax_compute_algo="max")


@dataclass(frozen=True)
class Case:
    """A layer's sizes, dtype, mask and dropout."""

    name: str
    hidden: int
    ffn: int
    heads: int
    sequence: int
    batch: int
    dtype: torch.dtype
    causal: bool
    dropout: float

    @property
    def tokens(self) -> int:
        """Rows of every product."""
        return self.sequence * self.batch

    @property
    def mask_type(self) -> str:
        """Transformer Engine's name of the mask."""
        return "causal" if self.causal else "no_mask"

    def products(self) -> dict[str, tuple[int, int, int, str]]:
        """M, N, K and accumulation of the twelve products: forward, gradient of the input, of the weight."""
        linears = {
            "qkv": (self.hidden, 3 * self.hidden),
            "proj": (self.hidden, self.hidden),
            "fc1": (self.hidden, self.ffn),
            "fc2": (self.ffn, self.hidden),
        }
        found = {}
        for name, (inner, outer) in linears.items():
            found[f"{name}.fprop"] = (self.tokens, outer, inner, "fast")
            found[f"{name}.dgrad"] = (self.tokens, inner, outer, "split")
            found[f"{name}.wgrad"] = (outer, inner, self.tokens, "split")
        return found


CASES = (
    Case("bf16, causal, batch 4", 4096, 16384, 32, 2048, 4, torch.bfloat16, True, 0.0),
    Case("fp16, no mask, dropout 0.1, batch 4", 4096, 16384, 32, 2048, 4, torch.float16, False, 0.1),
    Case("small: hidden 1024, 256 tokens", 1024, 4096, 16, 256, 1, torch.bfloat16, True, 0.0),
)


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, p: float) -> torch.Tensor:
    """cuDNN's attention of `[b, h, s, d]`."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=causal)


class Plain(BasicTransformerLayer):
    """Plain PyTorch with cuDNN's attention."""

    def attend_heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of `[b, heads, s, channels]`."""
        return cudnn(q, k, v, self.causal, self.p)


def _normal(weight: torch.Tensor) -> None:
    """On the GPU: the layers' own initialisation is drawn on the CPU, which takes seconds at these sizes."""
    torch.nn.init.normal_(weight, 0, 0.023)


def _transformer_layer(library: Any, case: Case, **options: Any) -> torch.nn.Module:
    return library.TransformerLayer(
        case.hidden,
        case.ffn,
        case.heads,
        hidden_dropout=case.dropout,
        attention_dropout=case.dropout,
        self_attn_mask_type=case.mask_type,
        fuse_qkv_params=True,
        params_dtype=case.dtype,
        init_method=_normal,
        output_layer_init_method=_normal,
        **options,
    )


class Contestant:
    """One layer and its training step.

    Args:
        name: the step of the tutorial, or whose layer it is.
        attention: "exact", "cuDNN", or who else computes it.
        module: the layer, on the GPU.
        context: opened around each forward.
        in_contract: whether every bit of it is defined by `reference`.
        keywords: of each forward.
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
        """Forward and backward, into gradients that were None."""
        self.forget()
        with self.context():
            out = self.module(self.x, **{**self.keywords, **keywords})
        with torch.autograd.set_multithreading_enabled(self.threads):
            out.backward(self.grad)

    def forget(self) -> None:
        """Set the gradients to None."""
        for parameter in self.parameters:
            parameter.grad = None

    def block(self, steps: int) -> None:
        """Some steps; then no longer a layer whose scales are updated at the end of other contestants' steps."""
        for _ in range(steps):
            self.run()
        for module in self.module.modules():  # type: ignore[attr-defined]
            if isinstance(module, TransformerEngineBaseModule):
                module._membership = None


def _fp8() -> te.autocast:
    return te.autocast(recipe=RECIPE)


def _plain(case: Case, kind: type[BasicTransformerLayer] = Plain) -> torch.nn.Module:
    with torch.device("cuda"):
        return kind(case.hidden, case.ffn, case.heads, p=case.dropout, causal=case.causal).to(case.dtype)


def _modules(case: Case, kind: type[ModulesLayer]) -> torch.nn.Module:
    with torch.device("cuda"):
        return kind(case.hidden, case.ffn, case.heads, case.dropout, case.causal, _normal, case.dtype)


def few(case: Case) -> Iterator[Callable[[], Contestant]]:
    """PyTorch with cuDNN's attention, our layer in 16 bits and FP8, and Transformer Engine's in FP8."""
    theirs = _engine()
    yield lambda: Contestant("PyTorch", "cuDNN", _plain(case), case)
    for attention in ("exact", "cuDNN"):
        yield from itertools.islice(_ours(case, attention), 2)
    if theirs is not None:
        yield from itertools.islice(_transformer_engine(theirs, case), 1, 2)


def contestants(case: Case) -> Iterator[Callable[[], Contestant]]:
    """Each contestant, as a call that builds it."""
    theirs = _engine()
    yield lambda: Contestant("PyTorch", "its matmuls", _plain(case, BasicTransformerLayer), case)
    yield lambda: Contestant("PyTorch", "cuDNN", _plain(case), case)
    if case == CASES[0]:  # a compilation takes ten seconds
        yield lambda: Contestant("PyTorch, compiled", "cuDNN", torch.compile(_plain(case)), case)
    if case.tokens <= 1024:
        yield functools.partial(_one_thread, lambda: Contestant("PyTorch", "cuDNN", _plain(case), case))
    exact = case.dropout == 0  # after the projection these two use PyTorch's dropout
    for name, kind in (("te.Linear, te.LayerNorm", ModulesLayer), ("LayerNormLinear, LayerNormMLP", FusedLayer)):
        yield lambda name=name, kind=kind: Contestant(name, "exact", _modules(case, kind), case, in_contract=exact)
    for attention in ("exact", "cuDNN"):
        yield from _ours(case, attention)
    if theirs is not None:
        yield from _transformer_engine(theirs, case)


def _one_thread(build: Callable[[], Contestant]) -> Contestant:
    """A contestant whose backward runs on the thread that calls it: where the host decides, its wake-ups count."""
    made = build()
    made.name += ", autograd on one thread"
    made.title = f"{made.name} / {made.attention}"
    made.threads = False
    return made


def _ours(case: Case, attention: str) -> Iterator[Callable[[], Contestant]]:
    def one(name: str, context: Callable[[], Any], **keywords: Any) -> Contestant:
        layer = _transformer_layer(te, case, attention_backend=attention.lower())
        return Contestant(name, attention, layer, case, context, attention == "exact", **keywords)

    def cached() -> Contestant:
        made = one("TransformerLayer, FP8, cached weights", _fp8, is_first_microbatch=False)
        made.step(is_first_microbatch=True)
        return made

    def kept() -> Contestant:
        with te.quantized_model_init(recipe=RECIPE):
            return one("TransformerLayer, FP8 weights", _fp8)

    def graphed() -> Contestant:
        made = one("TransformerLayer, FP8, CUDA graph", _fp8)
        # Gradients are None at each step: nobody adds to those of the step before, so they need not be copied out.
        te.make_graphed_callables(
            made.module, (made.x,), enabled=True, recipe=RECIPE, clone_param_grads_on_return=False
        )
        return made

    def whole_step() -> Contestant:
        made = one("TransformerLayer, FP8, step as one CUDA graph", _fp8)
        made.step()
        made.run = measure.graph(lambda _: made.step(), 1)
        return made

    yield lambda: one("TransformerLayer", contextlib.nullcontext)
    yield lambda: one("TransformerLayer, FP8", _fp8)
    if case.tokens <= 1024:
        yield functools.partial(_one_thread, lambda: one("TransformerLayer, FP8", _fp8))
    yield cached
    yield kept
    yield graphed
    yield whole_step


LINEAR = Case("Linear(4096, 4096), 8192 tokens", 4096, 4096, 1, 2048, 4, torch.bfloat16, False, 0.0)


def linears(case: Case = LINEAR) -> Iterator[Callable[[], Contestant]]:
    """One square linear map, where the casts to FP8 weigh most."""
    sizes = (case.hidden, case.hidden)
    yield lambda: Contestant("torch.nn.Linear", "", torch.nn.Linear(*sizes, device="cuda", dtype=case.dtype), case)

    def one(name: str, library: Any, context: Callable[[], Any], ours: bool) -> Contestant:
        linear = library.Linear(*sizes, init_method=_normal, params_dtype=case.dtype)
        return Contestant(name, "", linear, case, context, in_contract=ours)

    yield lambda: one("te.Linear", te, contextlib.nullcontext, True)
    yield lambda: one("te.Linear, FP8", te, _fp8, True)
    theirs = _engine()
    if theirs is not None:
        yield lambda: one("Transformer Engine", theirs, contextlib.nullcontext, False)
        yield lambda: one("Transformer Engine, FP8", theirs, _their_fp8(theirs)[1], False)


def _engine() -> Any:
    """NVIDIA's Transformer Engine, where it is installed, or None.

    Asked for before cuDNN is first used: PyTorch loads parts of its own cuDNN then, and Transformer Engine, which loads
    the system's where there is one, finds them in the place of those that it needs.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return None
    return importlib.import_module("transformer_engine.pytorch")


def _transformer_engine(theirs: Any, case: Case) -> Iterator[Callable[[], Contestant]]:
    """Transformer Engine's layer through the same harness; its own choice of attention."""
    recipe, fp8 = _their_fp8(theirs)

    def one(name: str, context: Callable[[], Any] = contextlib.nullcontext, **keywords: Any) -> Contestant:
        layer = _transformer_layer(theirs, case)
        return Contestant(f"Transformer Engine{name}", "its own", layer, case, context, **keywords)

    def cached() -> Contestant:
        made = one(", FP8, cached weights", fp8, is_first_microbatch=False)
        made.step(is_first_microbatch=True)
        return made

    def graphed() -> Contestant:
        made = one(", FP8, CUDA graph", fp8)
        made.module = theirs.make_graphed_callables(made.module, (made.x,), enabled=True, recipe=recipe)
        return made

    yield lambda: one("")
    yield lambda: one(", FP8", fp8)
    yield cached
    yield graphed
    if case.tokens <= 1024:
        yield functools.partial(_one_thread, lambda: one(", FP8", fp8))


def _their_fp8(theirs: Any) -> tuple[Any, Callable[[], Any]]:
    """Transformer Engine's form of `RECIPE`, and of the context around a forward."""
    recipe = importlib.import_module("transformer_engine.common.recipe").DelayedScaling(
        amax_history_len=RECIPE.amax_history_len, amax_compute_algo=RECIPE.amax_compute_algo
    )
    return recipe, lambda: theirs.autocast(enabled=True, recipe=recipe)
