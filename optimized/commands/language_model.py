"""A byte-level language model of `Linear` layers, trained the same way on the CPU and, where there is one, on a GPU.

The model guesses the next byte from the `context` bytes before it. Each byte is looked up in a fixed table of
`code` signs (±1: exact in every format), the signs of the context lie side by side, and `Linear` layers with
ReLU between them turn them into 256 logits:

    h_0 = signs[bytes]                            bf16 [rows, context · code]
    h_i = max(h_{i-1}·wᵀ + b, 0)                  bf16 [rows, width]
    logits = h·wᵀ + b                             bf16 [rows, 256]

Everything that is not a `Linear` is exact (lookup, ReLU), or happens once on the CPU for both devices (softmax
and the gradient of the cross-entropy), or is spelled out in single roundings (the optimizer), so that both
devices must agree in every bit:

    velocity = fp32(fp32(momentum · velocity) + gradient)        parameter = fp32(parameter - fp32(lr · velocity))
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import reference as te
from optimized.commands.corpus import Corpus
from optimized.commands.sides import Tally
from reference import formats, philox

VOCABULARY = 256
TENSORS = ("input", "weight", "grad_output")


@dataclass(frozen=True)
class Settings:
    """Sizes and the training schedule; the learning rate falls to zero over the last half of the steps."""

    context: int = 8
    code: int = 32
    width: int = 256
    layers: int = 3
    rows: int = 256
    steps: int = 1000
    learning_rate: float = 0.1
    momentum: float = 0.9
    amax_history_len: int = 16
    seed: int = 2026

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        return self.learning_rate * min(1.0, 2 * (self.steps - step) / self.steps)


class ByteModel(torch.nn.Module):
    """The model of the module's docstring, parameters fp32, drawn from `settings.seed`."""

    signs: torch.Tensor

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        bits = philox.element_words(settings.seed, 0, VOCABULARY * settings.code)[0] & 1
        signs = torch.from_numpy(bits.astype("float32")) * 2 - 1
        self.register_buffer("signs", signs.view(VOCABULARY, settings.code).bfloat16())
        sizes = [settings.context * settings.code] + [settings.width] * (settings.layers - 1) + [VOCABULARY]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.layers = torch.nn.ModuleList(
                te.Linear(a, b, params_dtype=torch.float32, device="cpu") for a, b in itertools.pairwise(sizes)
            )
        # Transformer Engine's normal(0, 0.023) suits wide layers; before a ReLU of 256 inputs it is 4 times too small.
        with torch.no_grad():
            for parameter in self.layers[:-1].parameters():
                parameter.mul_(4)  # the biases are 0

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Bytes int64 [rows, context] to logits bf16 [rows, 256]."""
        h = self.signs[windows].flatten(1)
        for layer in self.layers[:-1]:
            h = torch.relu(layer(h))
        return self.layers[-1](h)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> tuple[float, torch.Tensor]:
    """The mean loss in nats, and its gradient bf16 [rows, 256], computed on the CPU.

    In float64, of which the gradient keeps eight bits: it is computed once and given to both devices.
    """
    z = logits.detach().cpu().double()
    logarithms = torch.log_softmax(z, 1)
    rows = torch.arange(len(targets))
    gradient = logarithms.exp()
    gradient[rows, targets] -= 1
    return float(-logarithms[rows, targets].mean()), (gradient / len(targets)).bfloat16()


@dataclass
class Run:
    """What one training left behind.

    `amax` and `scale` hold a value per step for each (layer, tensor). `codes` [256] counts the FP8 codes of the middle
    layer's tensors at a (moment, tensor), and `lost` is the share of their nonzero elements that the cast made zero.
    """

    precision: str
    model: ByteModel
    losses: list[float] = field(default_factory=list)
    amax: dict[tuple[int, str], list[float]] = field(default_factory=dict)
    scale: dict[tuple[int, str], list[float]] = field(default_factory=dict)
    codes: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    lost: dict[tuple[str, str], float] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)


class Side:
    """The model on one device with its optimizer."""

    def __init__(self, model: ByteModel, settings: Settings, fp8: bool) -> None:
        self.model, self.settings, self.fp8 = model, settings, fp8
        self.device = model.signs.device
        self.velocity = [torch.zeros_like(p) for p in model.parameters()]
        self.recipe = te.DelayedScaling(amax_history_len=settings.amax_history_len)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Logits, in bf16 or FP8."""
        with (
            torch.autocast(self.device.type, torch.bfloat16),
            te.autocast(enabled=self.fp8, recipe=self.recipe),
        ):
            return self.model(windows.to(self.device))

    def backward(self, logits: torch.Tensor, gradient: torch.Tensor) -> None:
        """Gradients of the parameters."""
        self.model.zero_grad(set_to_none=True)
        logits.backward(gradient.to(self.device))

    @torch.no_grad()
    def update(self, rate: float) -> None:
        """One step of the optimizer: four operations, each rounded once."""
        for parameter, velocity in zip(self.model.parameters(), self.velocity, strict=True):
            assert parameter.grad is not None
            velocity.mul_(self.settings.momentum).add_(parameter.grad)
            parameter.sub_(velocity * rate)


@contextmanager
def _watched(layer: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Collect the layer's input, weight and output gradient while the context is open."""
    seen: dict[str, torch.Tensor] = {}

    def hook(module: torch.nn.Module, args: tuple[torch.Tensor], out: torch.Tensor) -> None:
        weight = module.get_parameter("weight")
        seen["input"], seen["weight"] = args[0].detach(), weight.detach().clone()
        out.register_hook(lambda gradient: seen.update(grad_output=gradient.detach()))

    handle = layer.register_forward_hook(hook)
    try:
        yield seen
    finally:
        handle.remove()


def scales(model: ByteModel) -> dict[tuple[int, str], tuple[float, float]]:
    """(scale, newest amax) of each layer's input, weight and output gradient, after an FP8 step."""
    found = {}
    layers: Any = model.layers
    for index, layer in enumerate(layers):
        for name, key, column in (
            ("input", "scaling_fwd", 0),
            ("weight", "scaling_fwd", 1),
            ("grad_output", "scaling_bwd", 0),
        ):
            meta = layer.fp8_meta[key]
            found[index, name] = (float(meta.scale[column]), float(meta.amax_history[-1, column]))
    return found


def _count_codes(
    run: Run, moment: str, seen: dict[str, torch.Tensor], layer: int, used: dict[tuple[int, str], float]
) -> None:
    """Count the FP8 codes of the watched tensors, under the scales of that step."""
    for name, tensor in seen.items():
        fmt = formats.E5M2 if name == "grad_output" else formats.E4M3
        codes = formats.cast(tensor, fmt, used.get((layer, name), 1.0)).view(torch.uint8).flatten()
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
    if cpu.fp8:
        layers: Any = zip(cpu.model.layers, gpu.model.layers, strict=True)
        for here, there in layers:
            for key in ("scaling_fwd", "scaling_bwd"):
                run.tally.add(here.fp8_meta[key].scale, there.fp8_meta[key].scale)
                run.tally.add(here.fp8_meta[key].amax_history, there.fp8_meta[key].amax_history)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch and the tensor core on one thread: for tensors as small as these, waking others costs more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def train(
    corpus: Corpus,
    settings: Settings,
    fp8: bool,
    gpu: torch.device | None,
    progress: Callable[[], None] = lambda: None,
) -> Run:
    """Train from the same start on the CPU and, if `gpu` is a device, side by side there, comparing each step."""
    model = ByteModel(settings)
    run = Run("FP8" if fp8 else "bf16", model)
    sides = [Side(model, settings, fp8)]
    if gpu is not None:
        sides.append(Side(copy.deepcopy(model).to(gpu), settings, fp8))
    middle = settings.layers // 2
    used: dict[tuple[int, str], float] = {}  # the scales a step's casts use; 1 before the first update
    for step in range(settings.steps):
        windows, targets = corpus.batch(settings.seed, step, settings.rows, settings.context)
        moments = [name for name, at in (("first step", 0), ("last step", settings.steps - 1)) if at == step]
        with _watched(model.layers[middle]) as seen:
            outs = [side.forward(windows) for side in sides]
            loss, gradient = cross_entropy(outs[0], targets)
            for side, out in zip(sides, outs, strict=True):
                side.backward(out, gradient)
                side.update(settings.rate(step))
        if fp8:
            for moment in moments:
                _count_codes(run, moment, seen, middle, used)
            for key, (scale, amax) in scales(model).items():
                run.amax.setdefault(key, []).append(amax)
                run.scale.setdefault(key, []).append(used.get(key, 1.0))
                used[key] = scale
        if gpu is not None:
            _compare(run, sides[0], sides[1], (outs[0], outs[1]))
        run.losses.append(loss)
        progress()
    return run


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
    """Let the trained model continue `prompt` by `length` bytes, drawn with the project's own random numbers."""
    side = Side(run.model, settings, run.precision == "FP8")
    text = prompt
    draws = philox.uniform((length,), seed=settings.seed)
    for place in range(length):
        window = torch.tensor([list(text[-settings.context :].rjust(settings.context, b"\n"))])
        heights = torch.softmax(side.forward(window).double() / temperature, 1)[0].cumsum(0)
        text += bytes([min(int((heights < draws[place]).sum()), 255)])
        progress()
    return text.decode("ascii", "replace")
