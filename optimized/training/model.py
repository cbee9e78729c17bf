"""A byte-level GPT of `TransformerLayer`s, trained in the same way on the CPU and, if there is one, on a GPU.

It predicts each byte of a text from the bytes before it. Activations are `[sequence, rows, hidden]` in bf16:

    h = onehot·Eᵀ                     the embeddings of byte and position, as one Linear of a one-hot vector
    h = TransformerLayer(h)           `layers` times, causal; only these layers run in FP8
    logits = LayerNorm(h)·wᵀ + b      [sequence, rows, 256]

The lookup is a GEMM so that its gradient is one, too: torch's embedding adds rows in an order that differs between
devices. The loss and its gradient are computed once, on the CPU, for both devices. Parameters are fp32 and the
optimizer is `FusedAdam`, so both devices must agree in every bit.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import reference as te
from optimized.compare import Tally, fp8_state
from optimized.training.corpus import Corpus
from reference import formats, philox
from reference.nn import init

VOCABULARY = 256
TENSORS = ("input", "weight", "grad_output")
# The linear maps of a TransformerLayer: the module; the columns of input and weight in its scaling_fwd; the column of
# the output's gradient in its scaling_bwd.
PRODUCTS = {
    "QKV": ("self_attention.layernorm_qkv", 0, 1, 0),
    "proj": ("self_attention.proj", 0, 1, 0),
    "fc1": ("layernorm_mlp", 0, 1, 0),
    "fc2": ("layernorm_mlp", 3, 4, 2),
}
Key = tuple[str, str]
"""(product, tensor), as ("layer 0 fc1", "weight")."""


@dataclass(frozen=True)
class Settings:
    """Sizes and the training schedule; the rate rises over `warmup` steps and falls to zero over the last half."""

    sequence: int = 64
    hidden: int = 128
    heads: int = 2
    layers: int = 2
    rows: int = 8
    steps: int = 80
    learning_rate: float = 0.002
    warmup: int = 10
    betas: tuple[float, float] = (0.9, 0.95)
    std: float = 0.02
    amax_history_len: int = 16
    seed: int = 2026

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        return self.learning_rate * min(1.0, (step + 1) / self.warmup, 2 * (self.steps - step) / self.steps)


class ByteModel(torch.nn.Module):
    """The model of the module's docstring, parameters fp32, drawn from `settings.seed`."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        common: dict[str, Any] = {"params_dtype": torch.float32, "device": "cpu"}

        def normal(weight: torch.Tensor) -> None:
            init.normal_(weight, std=settings.std)

        def smaller(weight: torch.Tensor) -> None:  # 2·layers sums meet in the residual stream
            init.normal_(weight, std=settings.std / math.sqrt(2 * settings.layers))

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            inputs, hidden = VOCABULARY + settings.sequence, settings.hidden
            self.embedding = te.Linear(inputs, hidden, bias=False, init_method=normal, **common)
            options = {"fuse_qkv_params": True, "init_method": normal, "output_layer_init_method": smaller, **common}
            options |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "self_attn_mask_type": "causal"}
            layers = (
                te.TransformerLayer(hidden, 4 * hidden, settings.heads, **options) for _ in range(settings.layers)
            )
            self.layers = torch.nn.ModuleList(layers)
            self.norm = te.LayerNorm(settings.hidden, **common)
            self.head = te.Linear(settings.hidden, VOCABULARY, init_method=normal, **common)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.head.get_parameter("weight").device

    def forward(self, text: torch.Tensor, recipe: te.DelayedScaling | None) -> torch.Tensor:
        """Bytes int64 [sequence, rows] to logits bf16 [sequence, rows, 256]; the layers in FP8 if there is a recipe."""
        length = len(text)
        onehot = torch.zeros(*text.shape, VOCABULARY + self.settings.sequence, dtype=torch.bfloat16)
        onehot.scatter_(2, text[:, :, None], 1.0)
        places = torch.arange(length)
        onehot[places, :, VOCABULARY + places] = 1.0
        h = self.embedding(onehot.to(self.device))
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            for layer in self.layers:
                h = layer(h)
        return self.head(self.norm(h))

    def products(self) -> Iterator[tuple[str, Any, tuple[int, int, int]]]:
        """Every linear map inside the layers: its name, its module and its columns in the FP8 state."""
        for index, layer in enumerate(self.layers):
            for name, (path, *columns) in PRODUCTS.items():
                yield f"layer {index} {name}", layer.get_submodule(path), (columns[0], columns[1], columns[2])


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> tuple[float, torch.Tensor]:
    """The mean loss in nats of logits [.., 256], and its gradient in bf16; both are computed on the CPU, in float64."""
    z = logits.detach().cpu().double().flatten(0, -2)
    targets = targets.flatten()
    logarithms = torch.log_softmax(z, 1)
    rows = torch.arange(len(targets))
    gradient = logarithms.exp()
    gradient[rows, targets] -= 1
    return float(-logarithms[rows, targets].mean()), (gradient / len(targets)).bfloat16().view(logits.shape)


@dataclass
class Run:
    """What one training recorded.

    `amax` and `scale` have a value of each step for each product's tensors. By moment and tensor of the last
    projection, `codes` [256] counts the FP8 codes, and `lost` is the share of nonzero elements that became zero.
    """

    precision: str
    model: ByteModel
    losses: list[float] = field(default_factory=list)
    amax: dict[Key, list[float]] = field(default_factory=dict)
    scale: dict[Key, list[float]] = field(default_factory=dict)
    codes: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    lost: dict[tuple[str, str], float] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)


class Side:
    """The model on one device with its optimizer."""

    def __init__(self, model: ByteModel, settings: Settings, fp8: bool) -> None:
        self.model, self.device, self.settings = model, model.device, settings
        self.optimizer = te.optimizers.FusedAdam(model.parameters(), betas=settings.betas)
        self.recipe = te.DelayedScaling(amax_history_len=settings.amax_history_len) if fp8 else None

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Logits of bytes int64 [sequence, rows], in bf16 or FP8."""
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.model(text, self.recipe)

    def backward(self, logits: torch.Tensor, gradient: torch.Tensor) -> None:
        """Gradients of the parameters."""
        self.model.zero_grad(set_to_none=True)
        logits.backward(gradient.to(self.device))

    def update(self, rate: float) -> None:
        """One step of Adam."""
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()

    def learn(self, logits: torch.Tensor, gradient: torch.Tensor, step: int) -> None:
        """Backward and Adam. The first step of an FP8 run, in which all scales are 1, only finds scales."""
        self.backward(logits, gradient)
        if self.recipe is None or step > 0:
            self.update(self.settings.rate(step))


@contextmanager
def _watched(layer: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Collect the input, weight and output gradient of a projection while the context is open.

    The projection also returns its bias (`return_bias`).
    """
    seen: dict[str, torch.Tensor] = {}

    def hook(module: torch.nn.Module, args: tuple[torch.Tensor], out: tuple[torch.Tensor, torch.Tensor]) -> None:
        weight = module.get_parameter("weight")
        seen["input"], seen["weight"] = args[0].detach(), weight.detach().clone()
        out[0].register_hook(lambda gradient: seen.update(grad_output=gradient.detach()))

    handle = layer.register_forward_hook(hook)
    try:
        yield seen
    finally:
        handle.remove()


def scales(model: ByteModel) -> dict[Key, tuple[float, float]]:
    """Scale and newest amax of each product's input, weight and output gradient, after an FP8 step."""
    found = {}
    for product, module, columns in model.products():
        for name, column in zip(TENSORS, columns, strict=True):
            meta = module.fp8_meta["scaling_bwd" if name == "grad_output" else "scaling_fwd"]
            found[product, name] = (float(meta.scale[column]), float(meta.amax_history[-1, column]))
    return found


def _count_codes(run: Run, moment: str, seen: dict[str, torch.Tensor], product: str, used: dict[Key, float]) -> None:
    """Count the FP8 codes of the watched tensors, under the scales of that step."""
    for name, tensor in seen.items():
        fmt = formats.E5M2 if name == "grad_output" else formats.E4M3
        codes = formats.cast(tensor, fmt, used.get((product, name), 1.0)).view(torch.uint8).flatten()
        run.codes[moment, name] = torch.bincount(codes.int(), minlength=256)
        alive = tensor.flatten() != 0
        run.lost[moment, name] = float(((codes & 0x7F) == 0)[alive].float().mean())


def _compare(run: Run, cpu: Side, gpu: Side, logits: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Compare logits, gradients, parameters and FP8 state of the two sides word for word."""
    run.tally.add(*logits)
    for one, other in zip(cpu.model.parameters(), gpu.model.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        run.tally.add(one.grad, other.grad)
        run.tally.add(one, other)
    for one_module, other_module in zip(cpu.model.layers.modules(), gpu.model.layers.modules(), strict=True):
        there = fp8_state(other_module)
        for key, here in fp8_state(one_module).items():
            run.tally.add(here, there[key])


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch and the tensor core's model on one thread: for such small tensors, waking other threads costs more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def lesson(corpus: Corpus, settings: Settings, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of a step and the byte after each: int64 [sequence, rows]."""
    windows, after = corpus.batch(settings.seed, step, settings.rows, settings.sequence)
    return windows.t(), torch.cat([windows[:, 1:], after[:, None]], 1).t()


@one_thread()
def train(
    corpus: Corpus, settings: Settings, fp8: bool, gpu: torch.device | None, progress: Callable[[], None] = lambda: None
) -> Run:
    """Train on the CPU and, if `gpu` is a device, also there from the same start, comparing the two after each step."""
    model = ByteModel(settings)
    run = Run("FP8" if fp8 else "bf16", model)
    sides = [Side(model, settings, fp8)]
    if gpu is not None:
        sides.append(Side(copy.deepcopy(model).to(gpu), settings, fp8))
    watched: Any = model.layers[-1]
    last = f"layer {settings.layers - 1} proj"
    used: dict[Key, float] = {}  # the scales that a step's casts use; 1 before the first update
    for step in range(settings.steps):
        text, targets = lesson(corpus, settings, step)
        moments = [name for name, at in (("first step", 0), ("last step", settings.steps - 1)) if at == step]
        with _watched(watched.self_attention.proj) as seen:
            outs = [side.forward(text) for side in sides]
            loss, gradient = cross_entropy(outs[0], targets)
            for side, out in zip(sides, outs, strict=True):
                side.learn(out, gradient, step)
        if fp8:
            for moment in moments:
                _count_codes(run, moment, seen, last, used)
            for key, (scale, amax) in scales(model).items():
                run.amax.setdefault(key, []).append(amax)
                run.scale.setdefault(key, []).append(used.get(key, 1.0))
                used[key] = scale
        if gpu is not None:
            _compare(run, sides[0], sides[1], (outs[0], outs[1]))
        run.losses.append(loss)
        progress()
    return run


@torch.no_grad()
def held_out_loss(side: Side, corpus: Corpus, batches: int = 8) -> float:
    """The mean loss in nats over batches of a text that the model was not trained on; the batches are always the same.

    In FP8 their amaxes enter the histories, as in every forward.
    """
    found = []
    for batch in range(batches):
        text, targets = lesson(corpus, side.settings, batch)
        found.append(cross_entropy(side.forward(text), targets)[0])
    return sum(found) / batches


@one_thread()
@torch.no_grad()
def write(
    run: Run,
    settings: Settings,
    prompt: bytes,
    length: int,
    progress: Callable[[], None] = lambda: None,
    temperature: float = 0.7,
) -> str:
    """Let the trained model continue `prompt` by `length` bytes, which it draws with `philox`."""
    side = Side(run.model, settings, run.precision == "FP8")
    text = prompt
    draws = philox.uniform((length,), seed=settings.seed)
    for place in range(length):
        window = torch.tensor(list(text[-settings.sequence :]))[:, None]
        heights = torch.softmax(side.forward(window)[-1, 0].double() / temperature, 0).cumsum(0)
        text += bytes([min(int((heights < draws[place]).sum()), 255)])
        progress()
    return text.decode("ascii", "replace")
