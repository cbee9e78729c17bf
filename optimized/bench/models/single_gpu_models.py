"""What `twin bench single_gpu` trains: a BERT of any size, and one training loop in which each technique is a setting.

    h = words[t] + positions        h = layer(h), `layers` times        logits = norm(gelu(h[masked]·wᵀ + b))·wordsᵀ + c

The loss is BERT's masked one: some words of each sequence are hidden, and the model guesses them. Layers have their
norms in front, as `TransformerLayer` has, and no dropout. Activations are `[sequence, batch, hidden]`. Everything runs
on a CPU, too, except kernels of attention, compilers and optimizers that need a GPU: tests do so.
"""

import contextlib
import functools
import importlib
import importlib.util
import itertools
import os
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.data import DataLoader, Dataset

import optimized as te
from optimized.bench.layers import layer_models
from optimized.bench.layers.tutorial_layers import BasicTransformerLayer
from optimized.training import corpus

RECIPE = layer_models.RECIPE
KERNELS = {
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
SIXTEEN = {"fp16": torch.float16, "bf16": torch.bfloat16}
BITSANDBYTES = "AdamW, 8 bits"
BATCHES = 4  # of steps, kept on the device where no loader is asked for
WORD = re.compile(rb"\w+|[^\w\s]")


@dataclass(frozen=True)
class Sizes:
    """A model's sizes; `masked` words of each sequence are guessed."""

    hidden: int
    ffn: int
    heads: int
    layers: int
    sequence: int
    vocabulary: int
    masked: int


BERT_LARGE = Sizes(1024, 4096, 16, 24, 512, 30522, 80)


@dataclass(frozen=True)
class Setting:
    """One way to train.

    Args:
        name: of a row.
        batch: sequences of one forward pass.
        parts: forward passes of a step, whose gradients are added up.
        precision: "fp32"; "tf32"; "fp16" and "bf16", by torch.autocast where the weights are fp32; "fp8".
        weights: "fp32", "bf16" or "fp8": what the parameters are kept in.
        layers: "torch", "te" (this project's) or "Transformer Engine".
        attention: "matmuls" (written out), a name of `KERNELS`, or "exact"; Transformer Engine chooses its own.
        optimizer: a name of `optimizer`.
        vocabulary: rows of the table of words; None is BERT's own number.
        recompute: keep each layer's input only, and compute the rest again in backward.
        compiled: each layer by torch.compile.
        cached: FP8 weights are cast in the first part of a step only.
        data: "resident" batches on the device; "main", a loader in this process; "workers"; "workers, pinned".
        side: a row beside the ladder, on which the next rung does not stand.
    """

    name: str
    batch: int
    parts: int = 1
    precision: str = "fp32"
    weights: str = "fp32"
    layers: str = "torch"
    attention: str = "matmuls"
    optimizer: str = "AdamW"
    vocabulary: int | None = None
    recompute: bool = False
    compiled: bool = False
    cached: bool = False
    data: str = "resident"
    side: bool = False

    @property
    def samples(self) -> int:
        """Sequences of a step."""
        return self.batch * self.parts

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters that are not in FP8."""
        return torch.float32 if self.weights == "fp32" else torch.bfloat16


def missing(setting: Setting) -> str | None:
    """The package that a setting needs and that is not installed."""
    needed = "bitsandbytes" if setting.optimizer == BITSANDBYTES else None
    needed = "transformer_engine" if setting.layers == "Transformer Engine" else needed
    return needed if needed is not None and importlib.util.find_spec(needed) is None else None


# --- the model -------------------------------------------------------------------------------------------


def normal(weight: torch.Tensor) -> None:
    """Every linear map's start, drawn where the weight is."""
    torch.nn.init.normal_(weight, 0, 0.02)


class Layer(BasicTransformerLayer):
    """Plain PyTorch with a kernel of attention of one's choice; `attention` as in `Setting`."""

    def __init__(self, sizes: Sizes, attention: str) -> None:
        super().__init__(sizes.hidden, sizes.ffn, sizes.heads, causal=False)
        self.kernel = attention
        for linear in (self.qkv, self.projection, self.fc1, self.fc2):
            normal(linear.weight)

    def attend_heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of `[b, heads, s, channels]`."""
        if self.kernel == "matmuls":
            return super().attend_heads(q, k, v)
        with sdpa_kernel(KERNELS[self.kernel]):
            return scaled_dot_product_attention(q, k, v)


def _transformer_layer(library: Any, setting: Setting, sizes: Sizes, device: str) -> torch.nn.Module:
    options: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "self_attn_mask_type": "no_mask"}
    options |= {"init_method": normal, "output_layer_init_method": normal, "params_dtype": setting.dtype}
    if setting.layers == "te":
        options["attention_backend"] = setting.attention.lower()
    fp8 = library.quantized_model_init(enabled=setting.weights == "fp8", recipe=recipe_of(setting))
    with fp8:
        return library.TransformerLayer(
            sizes.hidden, sizes.ffn, sizes.heads, fuse_qkv_params=True, device=device, **options
        )


def library_of(setting: Setting) -> Any:
    """This project, or Transformer Engine."""
    return layer_models.engine() if setting.layers == "Transformer Engine" else te


def recipe_of(setting: Setting) -> Any:
    """Delayed scaling in the form that the setting's library takes."""
    return layer_models.their_recipe() if setting.layers == "Transformer Engine" else RECIPE


class Bert(torch.nn.Module):
    """See the module; `setting` says of what the layers are made."""

    def __init__(self, setting: Setting, sizes: Sizes, device: str) -> None:
        super().__init__()
        self.setting, self.sizes = setting, sizes
        vocabulary = setting.vocabulary or sizes.vocabulary
        with torch.device(device):
            self.words = torch.nn.Embedding(vocabulary, sizes.hidden)
            self.positions = torch.nn.Embedding(sizes.sequence, sizes.hidden)
            self.dense = torch.nn.Linear(sizes.hidden, sizes.hidden)
            self.norm = torch.nn.LayerNorm(sizes.hidden)
            self.head = torch.nn.Linear(sizes.hidden, vocabulary)
            for part in (self.words, self.positions, self.dense):
                normal(part.weight)
            self.head.weight = self.words.weight  # one table of words, as in BERT
            self.to(setting.dtype)
            self.layers = torch.nn.ModuleList(self._layer(device) for _ in range(sizes.layers))

    def _layer(self, device: str) -> torch.nn.Module:
        if self.setting.layers != "torch":
            return _transformer_layer(library_of(self.setting), self.setting, self.sizes, device)
        made = Layer(self.sizes, self.setting.attention).to(self.setting.dtype)
        compiled: Any = torch.compile(made) if self.setting.compiled else made
        return compiled

    def forward(self, text: torch.Tensor, masked: torch.Tensor, first: bool | None = None) -> torch.Tensor:
        """Words int64 [sequence, batch] and hidden places int64 [masked, batch] to logits [masked, batch, vocabulary].

        first: `is_first_microbatch` of the layers.
        """
        h = self.words(text) + self.positions.weight[: len(text), None]
        keywords: dict[str, Any] = {} if first is None else {"is_first_microbatch": first}
        with self._fp8():
            for layer in self.layers:
                if self.setting.recompute:
                    h = te.checkpoint(layer, h, **keywords)
                else:
                    h = layer(h, **keywords)
        chosen = h[masked, torch.arange(h.shape[1], device=h.device)]
        return self.head(self.norm(gelu(self.dense(chosen))))

    def _fp8(self) -> Any:
        if self.setting.precision != "fp8":
            return contextlib.nullcontext()
        return library_of(self.setting).autocast(recipe=recipe_of(self.setting))


PATHS = {  # of a `Layer`'s parts in a `TransformerLayer`
    "ln1": "self_attention.layernorm_qkv.layer_norm_",
    "qkv": "self_attention.layernorm_qkv.",
    "projection": "self_attention.proj.",
    "ln2": "layernorm_mlp.layer_norm_",
    "fc1": "layernorm_mlp.fc1_",
    "fc2": "layernorm_mlp.fc2_",
}


@torch.no_grad()
def copy_weights(model: Bert, source: Bert) -> None:
    """Write the numbers of a model of "torch" layers into another one, of "torch" or "te" layers."""
    numbers = dict(source.named_parameters())
    for name, parameter in model.named_parameters():
        _, index, rest = name.split(".", 2) if name.startswith("layers.") else ("", "", "")
        parts = {path: part for part, path in PATHS.items() if rest.startswith(path)}
        path = max(parts, key=len, default=None)  # "layer_norm_" before what it is a part of
        theirs = name if path is None else f"layers.{index}.{parts[path]}.{rest.removeprefix(path)}"
        parameter.copy_(numbers[theirs])


# --- the data --------------------------------------------------------------------------------------------


@functools.cache
def _text(files: int = 200) -> bytes:
    return corpus.read(files).data.tobytes()


class Text(Dataset[tuple[torch.Tensor, ...]]):
    """Words of Python's standard library, some of them hidden.

    Sample i is drawn by i: words int64 [sequence] (0 hides one), the hidden places, ascending, and what stands there.
    A word's number is a hash of it, so that no vocabulary has to be made.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self.text = sizes, _text()

    def __len__(self) -> int:
        return 1 << 24

    def __getitem__(self, i: int) -> tuple[torch.Tensor, ...]:
        draw = torch.Generator().manual_seed(i)
        length = self.sizes.sequence
        window = 16 * length  # bytes, which hold enough words
        start = int(torch.randint(len(self.text) - window, (), generator=draw))
        found = itertools.islice(WORD.finditer(self.text, start, start + window), length)
        numbers = [1 + zlib.crc32(word[0]) % (self.sizes.vocabulary - 1) for word in found]
        words = torch.tensor(numbers + [1] * (length - len(numbers)))
        masked = torch.randperm(length, generator=draw)[: self.sizes.masked].sort().values
        answers = words[masked]
        words[masked] = 0
        return words, masked, answers


Batch = tuple[torch.Tensor, ...]


def loader(setting: Setting, sizes: Sizes) -> "DataLoader[Batch]":
    """The loader of a setting's `data`."""
    workers = min(4, os.cpu_count() or 1) if setting.data.startswith("workers") else 0
    return DataLoader(Text(sizes), setting.batch, num_workers=workers, pin_memory=setting.data.endswith("pinned"))


def _resident(setting: Setting, sizes: Sizes, device: str) -> Iterator[Batch]:
    text = Text(sizes)
    samples = [[text[i * setting.batch + j] for j in range(setting.batch)] for i in range(BATCHES * setting.parts)]
    made = [tuple(torch.stack(parts).to(device) for parts in zip(*batch, strict=True)) for batch in samples]
    return itertools.cycle(made)


def batches(setting: Setting, sizes: Sizes, device: str) -> Iterator[Batch]:
    """Batches on the device, without an end: words, hidden places and answers, each `[batch, ..]`."""
    if setting.data == "resident":
        return _resident(setting, sizes, device)
    later = setting.data.endswith("pinned")
    return (tuple(one.to(device, non_blocking=later) for one in batch) for batch in loader(setting, sizes))


# --- the training ----------------------------------------------------------------------------------------


def optimizer(name: str, parameters: list[Any], rate: float = 1e-4) -> torch.optim.Optimizer:
    """An optimizer by its name in a `Setting`."""
    if name == BITSANDBYTES:
        return importlib.import_module("bitsandbytes").optim.AdamW8bit(parameters, lr=rate)
    fused = te.optimizers.FusedAdam
    known: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "AdamW": lambda: torch.optim.AdamW(parameters, lr=rate),
        "AdamW, fused": lambda: torch.optim.AdamW(parameters, lr=rate, fused=True),
        "Adafactor": lambda: torch.optim.Adafactor(parameters, lr=rate),
        "FusedAdam": lambda: fused(parameters, lr=rate, weight_decay=0.01),
        "FusedAdam, fp32 masters": lambda: fused(parameters, lr=rate, weight_decay=0.01, master_weights=True),
    }
    if name not in known:
        raise ValueError(f"optimizer: name={name!r}; {', '.join(known)} and {BITSANDBYTES} are accepted.")
    return known[name]()


@contextlib.contextmanager
def matmuls(precision: str) -> Iterator[None]:
    """fp32 products by tensor cores in tf32, or, for every other precision, in fp32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Training:
    """A model, its optimizer and its batches; `run` makes steps."""

    def __init__(self, setting: Setting, sizes: Sizes, device: str, rate: float = 1e-4) -> None:
        self.setting, self.device = setting, device
        self.model = Bert(setting, sizes, device)
        self.parameters = list(self.model.parameters())
        self.optimizer = optimizer(setting.optimizer, self.parameters, rate)
        self.scaler = torch.amp.GradScaler(device) if setting.precision == "fp16" else None
        self.batches = batches(setting, sizes, device)
        half = SIXTEEN.get(setting.precision) if setting.weights == "fp32" else None
        self.context = functools.partial(torch.autocast, device, half) if half else contextlib.nullcontext

    def forward(self, part: int = 0) -> torch.Tensor:
        """The loss of the next batch, its share of the step's."""
        words, masked, answers = next(self.batches)
        first = part == 0 if self.setting.cached else None
        with self.context():
            logits = self.model(words.t(), masked.t(), first)
        return cross_entropy(logits.float().flatten(0, 1), answers.t().flatten()) / self.setting.parts

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients, added to those that are there."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def update(self) -> None:
        """The optimizer's step."""
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def step(self) -> torch.Tensor:
        """One step; the loss, still on the device."""
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        for part in range(self.setting.parts):
            loss = self.forward(part)
            self.backward(loss)
            total += loss.detach()
        self.update()
        return total

    def run(self, steps: int) -> list[torch.Tensor]:
        """Some steps, and their losses."""
        with matmuls(self.setting.precision):
            return [self.step() for _ in range(steps)]
