"""Training steps of a GPT: FP8, bf16, and the same model in compiled PyTorch, in one run (docs/results/train.json).

The 124m model trains on Python's standard library: all contestants read the same bytes at the same rates, and take
turns, a step each, in drawn order. A step is forward, backward, clipping and AdamW; the host's time is in it. PyTorch's
model has the same sizes, fp32 weights under torch.autocast, cuDNN's attention, torch.compile and fused AdamW; its first
weights are drawn by PyTorch. Of the 1.3b model, which does not fit several times, each contestant runs by itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from optimized import measure
from optimized.bench import Payload, Progress, bits, last_tenth, result, silent
from optimized.bench.layers import layer
from optimized.bench.layers.layer_models import Plain
from optimized.bench.plots import BLUE, GREEN, GREY, ORANGE, drawing
from optimized.bench.table import Table, table
from optimized.training import corpus
from optimized.training.settings import SIZES, Settings
from optimized.training.trainer import Trainer
from reference.nn.core.module import TransformerEngineBaseModule

NAME = "train"
WHAT = "training a GPT: tokens/s, loss, memory"
KERNELS = (
    "activation",
    "activation_amax",
    "activation_cast_transpose",
    "adam",
    "amax",
    "attention",
    "attention_backward",
    "attention_backward_ends",
    "cast_transpose",
    "cat_cast_transpose",
    "clip_grads",
    "cross_entropy",
    "current_scale",
    "dbias",
    "dropout",
    "embedding",
    "gemm",
    "gemm_fp8",
    "gemm_fp8_fused",
    "gemm_fp8_split_k",
    "grad_norm",
    "multi_cast_transpose",
    "multi_current_scale",
    "norm",
    "norm_backward",
    "norm_cast_transpose",
    "norm_total",
    "scale_update",
)
STEPS, WARM_UP = 2000, 10  # of the 124m model: timed ones, and ones before them, whose losses count too
LARGE_STEPS, LARGE_WARM_UP = 5, 5
OURS = {"Twin Engine, FP8, delayed": "delayed", "Twin Engine, FP8, current": "current", "Twin Engine, bf16": "bf16"}
THEIRS = "PyTorch, compiled, bf16"
COLOURS = dict(zip((*OURS, THEIRS), (ORANGE, GREEN, BLUE, GREY), strict=True))


class Contestant:
    """One way to train; `step` appends the loss, a tensor, to `losses`."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        """One optimizer step."""
        self.losses.append(self.train().mean())

    def train(self) -> torch.Tensor:
        """One optimizer step, and its losses."""
        raise NotImplementedError


class Ours(Contestant):
    """This project's trainer."""

    def __init__(self, settings: Settings, text: corpus.Corpus) -> None:
        super().__init__()
        self.trainer = Trainer(settings, text, "cuda")

    def train(self) -> torch.Tensor:
        losses = self.trainer.train()
        for module in self.trainer.model.modules():  # another contestant's step is not to update these scales
            if isinstance(module, TransformerEngineBaseModule):
                module._membership = None
        return losses


class PlainGPT(torch.nn.Module):
    """The model in plain PyTorch: windows uint8 [sequence + 1, rows] to the mean loss."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        hidden = settings.hidden
        self.bytes = torch.nn.Embedding(settings.vocabulary, hidden)
        self.places = torch.nn.Embedding(settings.sequence, hidden)
        self.layers = torch.nn.ModuleList(Plain(hidden, 4 * hidden, settings.heads) for _ in range(settings.layers))
        self.norm = torch.nn.LayerNorm(hidden)
        self.head = torch.nn.Linear(hidden, settings.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                last = name.endswith(("projection.weight", "fc2.weight"))
                torch.nn.init.normal_(parameter, std=settings.std / ((2 * settings.layers) ** 0.5 if last else 1))
        self.head.weight = self.bytes.weight

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        text = windows.long()
        h = self.bytes(text[:-1]) + self.places.weight[:, None]
        for one in self.layers:
            h = one(h)
        return cross_entropy(self.head(self.norm(h)).flatten(0, 1).float(), text[1:].flatten())


class Theirs(Contestant):
    """Plain PyTorch, compiled."""

    def __init__(self, settings: Settings, text: corpus.Corpus) -> None:
        super().__init__()
        torch.manual_seed(settings.seed)
        self.settings, self.text, self.done = settings, text.split()[0], 0
        with torch.device("cuda"):
            self.model = PlainGPT(settings)
        self.forward: Any = torch.compile(self.model)
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, fused=True)

    def train(self) -> torch.Tensor:
        one = self.settings
        windows = self.text.batch(one.seed, self.done, one.rows, one.sequence).to("cuda")
        self.optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.forward(windows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), one.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = one.rate(self.done)
        self.optimizer.step()
        self.done += 1
        return loss.detach()  # type: ignore[no-any-return]


def contestants(settings: Settings, text: corpus.Corpus) -> dict[str, Callable[[], Contestant]]:
    """What makes each contestant, by name."""

    def ours(precision: str) -> Callable[[], Contestant]:
        return lambda: Ours(replace(settings, precision=precision), text)

    return {**{name: ours(precision) for name, precision in OURS.items()}, THEIRS: lambda: Theirs(settings, text)}


def _speed(settings: Settings, samples: list[float]) -> dict[str, Any]:
    ms = measure.summary(samples)
    seconds = ms["median"] / 1e3
    return {"ms": ms, "tokens_per_second": settings.tokens / seconds, "tflops": settings.flops / seconds / 1e12}


def together(settings: Settings, text: corpus.Corpus, steps: int, warm_up: int) -> list[dict[str, Any]]:
    """All contestants in turn: their speed and losses."""
    entrants = {name: make() for name, make in contestants(settings, text).items()}
    samples = measure.interleave({name: one.step for name, one in entrants.items()}, steps, warm_up)
    return [
        {"name": name, **_speed(settings, samples[name]), "losses": [round(float(loss), 4) for loss in one.losses]}
        for name, one in entrants.items()
    ]


def alone(settings: Settings, text: corpus.Corpus, steps: int, warm_up: int, tick: Callable[[], object]) -> list[Any]:
    """Each contestant by itself: its speed, and the most memory that tensors had."""
    rows = []
    for name, make in contestants(settings, text).items():
        torch.cuda.reset_peak_memory_stats()  # before the warm-up: a CUDA graph's memory is allocated by its capture
        entrant = make()
        for _ in range(warm_up):
            entrant.step()
        torch.cuda.synchronize()
        samples = measure.interleave({name: entrant.step}, steps, 0)[name]
        rows.append({"name": name, **_speed(settings, samples), "peak_bytes": torch.cuda.max_memory_allocated()})
        del entrant
        layer.clear()
        tick()
    return rows


def run(
    progress: Progress = silent,
    sizes: Mapping[str, Settings] = SIZES,
    steps: int = STEPS,
    warm_up: int = WARM_UP,
    text: corpus.Corpus | None = None,
) -> Payload:
    text = corpus.read() if text is None else text
    small = replace(sizes["124m"], steps=steps + warm_up, warmup=max(1, (steps + warm_up) // 10))
    large = sizes["1.3b"]
    rows = together(small, text, steps, warm_up)
    layer.clear()
    done = [0.6]
    progress(done[0])

    def tick() -> None:
        done[0] += 0.1
        progress(done[0])

    memory = alone(large, text, LARGE_STEPS, LARGE_WARM_UP, tick)
    return result(
        "training steps of a GPT on one GPU: CUDA events around each, the host's time included",
        KERNELS,
        settings={"124m": asdict(small), "1.3b": asdict(large)},
        warm_up=warm_up,
        text={"bytes": len(text.data), "sha256": text.digest},
        rows=rows,
        large=memory,
    )


def tables(payload: Payload) -> list[Table]:
    """Speed and loss of the 124m model; speed and memory of the 1.3b one."""
    columns = ("", "ms a step", "tokens/s", "TFLOP/s")
    small, large = payload["settings"]["124m"], payload["settings"]["1.3b"]

    def speed(row: dict[str, Any]) -> tuple[str, ...]:
        return f"{row['ms']['median']:.1f}", f"{row['tokens_per_second']:,.0f}", f"{row['tflops']:.0f}"

    first = [(row["name"], *speed(row), f"{bits(last_tenth(row['losses'])):.3f}") for row in payload["rows"]]
    second = [(row["name"], *speed(row), f"{row['peak_bytes'] / 2**30:.1f}") for row in payload["large"]]
    how = "Median time of whole training steps of one run, contestants in turn; the loss, in bits per byte, is the mean"
    how += " of the last tenth of the steps."
    note = f"{small['steps']} steps of {small['rows'] * small['sequence']:,} tokens."
    other = f"Steps of {large['rows'] * large['sequence']:,} tokens; each contestant by itself."
    return [
        table(payload, "Training GPT, 124 million parameters", (*columns, "loss"), first, how, note),
        table(
            payload,
            "Training GPT, 1.3 billion parameters",
            (*columns, "GiB at most"),
            second,
            "Median time of whole training steps, and the most memory that tensors had.",
            other,
        ),
    ]


def summary(payload: Payload) -> list[tuple[str, str, str, str]]:
    """README's rows: whole training steps in FP8, beside compiled PyTorch's and our own in bf16."""
    mine, others = next(iter(OURS)), {THEIRS: "PyTorch, compiled, bf16", "Twin Engine, bf16": "here in bf16"}
    found = []
    for size, rows in (("124 million", payload["rows"]), ("1.3 billion", payload["large"])):
        speeds = {row["name"]: row["tokens_per_second"] for row in rows}
        found.append(
            (
                f"training a GPT of {size} parameters",
                f"{speeds[mine]:,.0f} tokens/s",
                "; ".join(f"{label}: {speeds[name]:,.0f}" for name, label in others.items()),
                "; ".join(f"{speeds[mine] / speeds[name]:.2f}×" for name in others),
            )
        )
    return found


def plot(payload: Payload) -> None:
    """Draw docs/train.png: the losses, a mean of each few steps, and the speed beside compiled PyTorch's."""
    with drawing("train", 1, 2, (10, 3.6)) as (_, (curves, bars)):
        for row in payload["rows"]:
            losses = row["losses"]
            few = max(1, len(losses) // 100)
            means = [bits(sum(losses[i : i + few]) / few) for i in range(0, len(losses) - few + 1, few)]
            steps = [i * few + few / 2 for i in range(len(means))]
            curves.plot(steps, means, color=COLOURS[row["name"]], label=row["name"], linewidth=1.2)
        curves.set(xlabel="step", ylabel="bits per byte", title="Loss, 124 million parameters", yscale="log")
        curves.yaxis.set_major_formatter("{x:g}")
        curves.yaxis.set_minor_formatter("{x:g}")
        curves.legend()
        names = [row["name"] for row in payload["rows"]]
        for at, (size, rows) in enumerate((("124m", payload["rows"]), ("1.3b", payload["large"]))):
            speeds = [row["tokens_per_second"] for row in rows]
            places = [place + (at - 0.5) * 0.4 for place in range(len(names))]
            colours = [COLOURS[name] for name in names]
            bars.barh(places, [x / speeds[-1] for x in speeds], 0.36, color=colours, alpha=1 - 0.4 * at)
            for place, x in zip(places, speeds, strict=True):
                bars.text(0.03, place, f"{size}: {x:,.0f} tokens/s", va="center", fontsize=8, color="black")
        bars.set_yticks(range(len(names)), names)
        bars.invert_yaxis()
        bars.set(xlabel="tokens per second, times compiled PyTorch's", title="Speed on one GPU")


if __name__ == "__main__":
    plot(measure.read_result(NAME))
