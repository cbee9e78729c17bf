"""A training that is watched: scales, amaxes and FP8 codes, and, with a GPU, both sides compared after each step.

The walkthrough shows what `train` records.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from optimized.compare import Tally
from optimized.training.corpus import Corpus
from optimized.training.model import GPT
from optimized.training.settings import Settings
from optimized.training.trainer import Trainer
from reference.numbers import formats

TENSORS = ("input", "weight", "grad_output")
Key = tuple[str, str]
"""(product, tensor), as ("layer 0 fc1", "weight")."""


@dataclass
class Run:
    """What one training recorded.

    `amax` and `scale` have a value of each step for each product's tensors. By moment and tensor of the last
    projection, `codes` [256] counts the FP8 codes, and `lost` is the share of nonzero elements that became zero.
    """

    precision: str
    trainer: Trainer
    losses: list[float] = field(default_factory=list)
    amax: dict[Key, list[float]] = field(default_factory=dict)
    scale: dict[Key, list[float]] = field(default_factory=dict)
    codes: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    lost: dict[tuple[str, str], float] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)


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


def scales(model: GPT) -> dict[Key, tuple[float, float]]:
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
        lost = ((codes & 0x7F) == 0) & alive
        run.lost[moment, name] = float(lost.sum()) / max(1, int(alive.sum()))


def compare(tally: Tally, cpu: Trainer, gpu: Trainer) -> None:
    """Compare gradients, parameters, moments, FP8 state and random states of two trainers word for word."""
    for one, other in zip(cpu.model.parameters(), gpu.model.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        tally.add(one.grad, other.grad)
    there = gpu.tensors()
    for name, here in cpu.tensors().items():
        tally.add(here, there[name])


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch and the tensor core's model on one thread: for such small tensors, waking other threads costs more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def train(
    corpus: Corpus, settings: Settings, fp8: bool, gpu: torch.device | None, progress: Callable[[], None] = lambda: None
) -> Run:
    """Train on the CPU and, if `gpu` is a device, also there from the same start, comparing the two after each step."""
    settings = replace(settings, precision="delayed" if fp8 else "bf16")
    sides = [Trainer(settings, corpus, where) for where in ("cpu", gpu) if where is not None]
    run = Run("FP8" if fp8 else "bf16", sides[0])
    watched: Any = sides[0].model.layers[-1]
    last = f"layer {settings.layers - 1} proj"
    used: dict[Key, float] = {}  # the scales that a step's casts use; 1 before the first update
    for step in range(settings.steps):
        moments = [name for name, at in (("first step", 0), ("last step", settings.steps - 1)) if at == step]
        with _watched(watched.self_attention.proj) as seen:
            losses = [side.train() for side in sides]
        if fp8:
            for moment in moments:
                _count_codes(run, moment, seen, last, used)
            for key, (scale, amax) in scales(sides[0].model).items():
                run.amax.setdefault(key, []).append(amax)
                run.scale.setdefault(key, []).append(used.get(key, 1.0))
                used[key] = scale
        if gpu is not None:
            run.tally.add(losses[0], losses[1])
            compare(run.tally, sides[0], sides[1])
        run.losses.append(float(losses[0].mean()))
        progress()
    return run


@one_thread()
def write(run: Run, prompt: bytes, length: int, progress: Callable[[], None] = lambda: None) -> str:
    """Let the trained model continue `prompt` by `length` bytes."""
    return run.trainer.sample(prompt, length, progress).decode("ascii", "replace")
