"""Training on one GPU, one technique after the other (docs/results/single_gpu.json).

    python -m optimized.bench.models.single_gpu_plot draws docs/single_gpu.png from it; it needs no GPU.

The techniques are those of Hugging Face's guide "Methods and tools for efficient training on a single GPU", and this
project's: whole steps (forward, backward, optimizer) of a model of BERT-large's size at sequence 512. The first group
is a ladder, in which each rung keeps what the rungs before it added; the other groups look beside it. The settings of
a group run in turn, in blocks of steps between two synchronisations on the host's clock, so each group compares within
itself. Memory is what torch's allocator held at most in one step, less what others held.

`EXPECTED` was written before the first measurement. It expects little of FP8: at hidden 1024 a layer of 8,192 tokens
was 1.26 times faster in FP8 than here in bf16 (docs/results/layer_sweep.json), a step has an optimizer and a head
besides, and with 2,048 tokens the host's time for launches is longer than the GPU's, in which FP8 launches more.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from optimized import measure
from optimized.bench import Payload, Progress, silent
from optimized.bench.layers import layer, layer_models
from optimized.bench.models import single_gpu_tables
from optimized.bench.models.single_gpu_memory import anatomy
from optimized.bench.models.single_gpu_models import BERT_LARGE, BITSANDBYTES, Setting, Sizes, Training, loader, missing
from optimized.tapes import call_groups
from reference.nn.core.module import TransformerEngineBaseModule

NAME = "single_gpu"
WHAT = "a BERT's whole step, technique after technique"
tables = single_gpu_tables.tables
KERNELS = tuple(sorted({*layer.KERNELS, "adam"} - {"rotary"}))
WARM_UP = 3  # steps, in which caches fill and FP8 finds its scales
ALONE, COUNTED = 10, 4  # steps of a setting that is measured by itself, of which the last count


@dataclass(frozen=True)
class Group:
    """Settings that are compared with the first of them; in the ladder, with the rung before.

    Those of a group that is `alone` do not take turns: each makes `ALONE` steps by itself.
    """

    name: str
    settings: tuple[Setting, ...]
    alone: bool = False


@dataclass(frozen=True)
class Expected:
    """What was expected of a setting before anything was measured: `low` to `high` times the `base`'s `quantity`."""

    group: str
    name: str
    base: str
    quantity: str  # "speed": samples a second; "memory": the peak
    low: float
    high: float
    why: str


LADDER = "one after the other"
START = Setting("fp32, batch 4", 4)
LARGER = replace(START, name="batch 16", batch=16)
TF32 = replace(LARGER, name="tf32", precision="tf32")
FP16 = replace(LARGER, name="fp16 autocast, loss scaling", precision="fp16", side=True)
BF16 = replace(LARGER, name="bf16 autocast", precision="bf16")
PADDED = replace(BF16, name="vocabulary 30528", vocabulary=30528)
FLASH = replace(PADDED, name="flash attention", attention="flash")
FUSED = replace(FLASH, name="fused AdamW", optimizer="AdamW, fused")
HALF = replace(FUSED, name="bf16 weights, FusedAdam", weights="bf16", optimizer="FusedAdam, fp32 masters")
TE = replace(HALF, name="te.TransformerLayer, bf16", layers="te", attention="cuDNN")
FP8 = replace(TE, name="te.TransformerLayer, FP8", precision="fp8")
FP8_64 = replace(FP8, name="FP8, batch 64", batch=64)
THEIRS = replace(TE, layers="Transformer Engine", attention="its own")


def _with(one: Setting, changes: dict[str, dict[str, Any]]) -> tuple[Setting, ...]:
    """A setting, and others that differ from it, by their names."""
    return (one, *(replace(one, name=name, **changed) for name, changed in changes.items()))


GROUPS = (
    Group(LADDER, (START, LARGER, TF32, FP16, BF16, PADDED, FLASH, FUSED, HALF, TE, FP8, FP8_64)),
    Group(
        "batch size",
        tuple(replace(FUSED, name=f"batch {n}", batch=n) for n in (16, 1, 4, 7, 8, 9, 15, 17, 32)),
    ),
    Group(
        "accumulation, checkpointing",
        _with(
            FUSED,
            {
                "4 parts of batch 4": {"batch": 4, "parts": 4},
                "gradient checkpointing": {"recompute": True},
                "checkpointing, batch 64": {"recompute": True, "batch": 64},
            },
        ),
    ),
    Group(
        "attention",
        _with(PADDED, {f"{kernel} attention": {"attention": kernel} for kernel in ("efficient", "flash", "cuDNN")}),
    ),
    Group(
        "optimizer",
        _with(
            FLASH,
            {
                "fused AdamW": {"optimizer": "AdamW, fused"},
                "Adafactor": {"optimizer": "Adafactor"},
                "AdamW of 8 bits": {"optimizer": BITSANDBYTES},
                "FusedAdam": {"optimizer": "FusedAdam"},
                "bf16 weights, fused AdamW": {"optimizer": "AdamW, fused", "weights": "bf16"},
                "bf16 weights, FusedAdam": {"optimizer": "FusedAdam, fp32 masters", "weights": "bf16"},
            },
        ),
    ),
    Group(
        "data",
        _with(
            HALF,
            {
                "a loader in the main process": {"data": "main"},
                "4 workers": {"data": "workers"},
                "4 workers, pinned memory": {"data": "workers, pinned"},
            },
        ),
    ),
    Group(
        "layers",
        (
            *_with(HALF, {"torch.compile": {"compiled": True}}),
            TE,
            FP8,
            replace(TE, name="te, bf16, exact attention", attention="exact"),
            replace(FP8, name="te, FP8, exact attention", attention="exact"),
            replace(FP8, name="te, FP8 weights", weights="fp8"),
            replace(FP8, name="te, FP8, checkpointing", recompute=True),
            replace(THEIRS, name="Transformer Engine, bf16"),
            replace(THEIRS, name="Transformer Engine, FP8", precision="fp8"),
        ),
    ),
    Group("batch 4", tuple(replace(one, batch=4) for one in (HALF, TE, FP8))),
    Group("batch 64", tuple(replace(one, batch=64) for one in (HALF, TE, FP8))),
    Group(
        "FP8 in 4 parts of batch 4",
        _with(replace(FP8, batch=4, parts=4), {"weights cast in the first part only": {"cached": True}}),
        alone=True,
    ),
)
EXPECTED = (
    Expected(LADDER, LARGER.name, START.name, "speed", 1.0, 1.2, "2,048 tokens already fill the GPU in fp32"),
    Expected(LADDER, TF32.name, LARGER.name, "speed", 2.5, 5.0, "tensor cores; the guide says up to 3"),
    Expected(LADDER, BF16.name, TF32.name, "speed", 1.2, 1.8, "half the bytes; casts of weights cost"),
    Expected(LADDER, BF16.name, TF32.name, "memory", 0.6, 0.9, "activations halve, the rest stays"),
    Expected(LADDER, FP16.name, BF16.name, "speed", 0.9, 1.0, "the same GEMMs, and a look for infinities"),
    Expected(LADDER, PADDED.name, BF16.name, "speed", 1.0, 1.05, "only the head's GEMMs are misaligned"),
    Expected(LADDER, FLASH.name, PADDED.name, "speed", 1.15, 1.5, "512 × 512 scores no longer move"),
    Expected(LADDER, FLASH.name, PADDED.name, "memory", 0.4, 0.8, "no scores are kept"),
    Expected(LADDER, FUSED.name, FLASH.name, "speed", 1.0, 1.1, "one pass over memory instead of several"),
    Expected(LADDER, HALF.name, FUSED.name, "speed", 1.1, 1.4, "no casts of weights, residuals in 16 bits"),
    Expected(LADDER, TE.name, HALF.name, "speed", 1.0, 1.2, "norms and biases fused; GEMMs are the same"),
    Expected(LADDER, FP8.name, TE.name, "speed", 1.05, 1.25, "GEMMs of hidden 1024 are short, casts are not"),
    Expected(LADDER, FP8.name, TE.name, "memory", 0.85, 1.0, "inputs of GEMMs are kept in 8 bits"),
    Expected("batch 4", FP8.name, TE.name, "speed", 0.6, 0.95, "the host's launches decide: FP8 does not pay"),
    Expected("batch 64", FP8.name, TE.name, "speed", 1.1, 1.35, "more tokens for the same casts of weights"),
    Expected("batch size", "batch 17", "batch 16", "speed", 0.93, 1.0, "one more wave of tiles for 6 % more work"),
    Expected("batch size", "batch 7", "batch 8", "speed", 0.9, 1.0, "512 · 7 tokens are a multiple of 128, too"),
    Expected("accumulation, checkpointing", "4 parts of batch 4", FUSED.name, "speed", 0.75, 1.0, "smaller GEMMs"),
    Expected(
        "accumulation, checkpointing", "gradient checkpointing", FUSED.name, "speed", 0.72, 0.82, "a forward more"
    ),
    Expected("accumulation, checkpointing", "gradient checkpointing", FUSED.name, "memory", 0.4, 0.7, "24 inputs"),
    Expected("optimizer", "Adafactor", "fused AdamW", "speed", 0.85, 1.0, "many small launches"),
    Expected("optimizer", "AdamW of 8 bits", "fused AdamW", "speed", 0.9, 1.05, "fewer bytes, more arithmetic"),
    Expected("optimizer", "AdamW of 8 bits", "fused AdamW", "memory", 0.7, 0.95, "6 of 16 bytes a parameter"),
    Expected("data", "a loader in the main process", HALF.name, "speed", 0.85, 1.0, "queued while the GPU works"),
    Expected("data", "4 workers, pinned memory", HALF.name, "speed", 0.98, 1.01, "the GPU never waits"),
    Expected("layers", "torch.compile", HALF.name, "speed", 1.1, 1.3, "norms and gelu fused"),
    Expected("layers", "te, FP8 weights", FP8.name, "speed", 1.0, 1.1, "no casts of weights in forward"),
    Expected("layers", "te, FP8 weights", FP8.name, "memory", 0.95, 1.0, "codes and transposed codes: 2 bytes again"),
    Expected(
        "FP8 in 4 parts of batch 4",
        "weights cast in the first part only",
        FP8.name,
        "speed",
        1.0,
        1.1,
        "three casts of four are saved",
    ),
)


def steps_of(setting: Setting) -> int:
    """How many steps a block has, which takes about 0.2 s."""
    if setting.samples > 32:
        return 2
    return {"fp32": 1, "tf32": 2}.get(setting.precision, 4)


def made(setting: Setting, sizes: Sizes) -> tuple[Training, dict[str, Any]]:
    """A training, warmed up, and what is known of its memory and its first losses."""
    torch.manual_seed(0)
    training = Training(setting, sizes, "cuda")
    losses = [float(loss) for loss in training.run(WARM_UP)]
    memory = anatomy(training)
    _forget(training)
    return training, {"losses": losses, "memory": memory}


def _forget(training: Training) -> None:
    """Let go the gradients; and its scales are not to be updated at the end of others' steps."""
    training.optimizer.zero_grad(set_to_none=True)
    for module in training.model.modules():
        if isinstance(module, TransformerEngineBaseModule):
            module._membership = None


def _block(training: Training) -> Callable[[int], None]:
    def block(count: int) -> None:
        training.run(count * steps_of(training.setting))
        _forget(training)

    return block


def measured(group: Group, sizes: Sizes, repeats: int) -> dict[str, Any]:
    """A group's settings, each with samples a second, memory and first losses."""
    lacking = {one.name: package for one in group.settings if (package := missing(one)) is not None}
    entrants = [made(one, sizes) for one in group.settings if one.name not in lacking]
    samples = layer.timed({training.setting.name: _block(training) for training, _ in entrants}, repeats, 1)
    rows = []
    for training, found in entrants:
        one = training.setting
        ms = [value / steps_of(one) for value in samples[one.name]]
        rate = measure.spread([1000 * one.samples / value for value in ms])
        rows.append({"setting": asdict(one), "samples_per_second": rate, "ms": measure.spread(ms), **found})
    return {"group": group.name, "rows": rows, "not_installed": lacking}


def by_itself(group: Group, sizes: Sizes) -> dict[str, Any]:
    """As `measured`, for a group that is `alone`; with the time of each step.

    Layers played from tapes (docs/tapes.md) need some steps until their memory lies where it lay before. A step's parts
    have four times the addresses, and find them again late, or in turns with others never.
    """
    rows = []
    for one in group.settings:
        call_groups._groups.clear()
        call_groups.counts = call_groups.Counts()  # as in a new process
        torch.manual_seed(0)
        training = Training(one, sizes, "cuda")
        steps, losses = [], []
        for _ in range(ALONE):
            torch.cuda.synchronize()
            start = time.perf_counter()
            losses += training.run(1)
            torch.cuda.synchronize()
            steps.append((time.perf_counter() - start) * 1e3)
        rate = measure.spread([1000 * one.samples / value for value in steps[-COUNTED:]])
        row = {"setting": asdict(one), "samples_per_second": rate, "ms": measure.spread(steps[-COUNTED:])}
        found = {"losses": [float(loss) for loss in losses[:WARM_UP]], "memory": anatomy(training)}
        rows.append({**row, **found, "steps_ms": steps})
        del training
        layer.clear()
    how = f"each by itself, {ALONE} steps, of which the last {COUNTED} count"
    return {"group": group.name, "rows": rows, "not_installed": {}, "measured": how}


def gemms(repeats: int) -> list[dict[str, Any]]:
    """bf16 products x·wᵀ, as torch calls them, of sizes that fit tiles and of sizes that do not."""
    problems = [("vocabulary", 16 * 80, n, 1024) for n in (30520, 30521, 30522, 30524, 30528, 30592, 30720)]
    problems += [("hidden", 8192, n, n) for n in (1016, 1020, 1022, 1023, 1024, 1025, 1032, 1152)]
    problems += [("batch", 512 * batch, 1024, 1024) for batch in range(1, 41)]
    inner = 8  # calls of a sample

    def product(m: int, n: int, k: int) -> Callable[[], object]:
        x, w = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
        return measure.graph(lambda _: torch.nn.functional.linear(x, w), inner)

    samples = measure.interleave({f"{problem}": product(*problem[1:]) for problem in problems}, repeats)
    rows = []
    for problem in problems:
        what, m, n, k = problem
        ms = measure.spread([value / inner for value in samples[f"{problem}"]])
        rows.append({"what": what, "m": m, "n": n, "k": k, "ms": ms, "tflops": 2e-9 * m * n * k / ms["median"]})
    return rows


def batch_ms(sizes: Sizes, count: int = 10) -> float:
    """Milliseconds in which one process makes a batch of 16."""
    found = iter(loader(replace(HALF, data="main"), sizes))
    next(found)
    start = time.perf_counter()
    for _ in range(count):
        next(found)
    return (time.perf_counter() - start) * 1e3 / count


def run(
    progress: Progress = silent,
    repeats: int = 5,
    sizes: Sizes = BERT_LARGE,
    keep: Callable[[Payload], object] = lambda payload: None,
) -> Payload:
    """Measure; after each group `keep` is given what there is so far."""
    layer_models.engine()  # before cuDNN is used
    payload: Payload = {
        "what": "whole training steps of a masked-language model; host clock, blocks of steps in turn",
        "sizes": asdict(sizes),
        "repeats": repeats,
        "groups": [],
        "expected": [asdict(one) for one in EXPECTED],
    }
    for done, group in enumerate(GROUPS, 1):
        payload["groups"].append(by_itself(group, sizes) if group.alone else measured(group, sizes, repeats))
        layer.clear()
        progress(done / (len(GROUPS) + 1))
        keep({**payload, "provenance": measure.provenance(KERNELS)})
    payload["gemms"] = gemms(2 * repeats)
    payload["batch_ms"] = batch_ms(sizes)
    progress(1.0)
    return {**payload, "provenance": measure.provenance(KERNELS)}
