"""Hugging Face's Trainer, four layers of Llama 3 8B's shape: converted to FP8, and compiled in bf16
(docs/results/trainer.json).

The model is transformers' own `LlamaForCausalLM`, with bf16 weights, on random tokens. `te.convert` puts this library's
layers into it (docs/hugging_face.md); the Trainer is told nothing. Beside it the unchanged model trains in bf16, as it
is and with the Trainer's `torch_compile=True`. All else is the Trainer's default: fused AdamW, gradients clipped to
norm 1. A callback synchronises at the end of each step, and the host's clock measures from one end to the next: batch,
forward, backward, clipping and optimizer. Two models do not share the GPU's memory well, so each trains by itself; its
memory is the most that torch's allocator held in the timed steps: weights, gradients, AdamW's two states, activations.
"""

import importlib
import itertools
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

import optimized as te
from optimized import measure
from optimized.bench import Payload, Progress, each, result, silent
from optimized.bench.layers import layer
from optimized.bench.table import Table, table

NAME = "trainer"
WHAT = "transformers' Trainer: FP8 and compiled bf16"
KERNELS = ("cast_transpose", "gemm_fp8", "norm", "norm_backward", "norm_total", "scale_update")
STEPS, WARM_UP = 20, 5  # timed steps, and steps before them


@dataclass(frozen=True)
class Sizes:
    """A Llama's sizes, by transformers' names, and those of a batch."""

    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    num_hidden_layers: int = 4
    vocab_size: int = 128256
    sequence: int = 2048
    batch: int = 4

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.sequence * self.batch

    def config(self, library: Any) -> Any:
        """transformers' configuration."""
        names = {name: value for name, value in vars(self).items() if name not in ("sequence", "batch")}
        return library.LlamaConfig(**names, max_position_embeddings=self.sequence, use_cache=False)


@dataclass(frozen=True)
class Way:
    """One way to train the model.

    Args:
        name: in the table.
        fp8: whether `te.convert` converts it.
        head: whether its last linear map is converted, too.
        compiled: the Trainer's `torch_compile`.
    """

    name: str
    fp8: bool = False
    head: bool = False
    compiled: bool = False

    def model(self, sizes: Sizes, device: str) -> Any:
        """The model, made on `device`."""
        library: Any = importlib.import_module("transformers")
        torch.manual_seed(0)
        with torch.device(device):
            model = library.LlamaForCausalLM._from_config(sizes.config(library), dtype=torch.bfloat16)
        if self.fp8:
            te.convert(model, recipe=te.DelayedScaling(), filter=None if self.head else {"lm_head": False})
        return model


COMPILED = "bf16, torch_compile"
WAYS = (
    Way("te.convert, FP8", fp8=True, head=True),
    Way("te.convert, FP8, head in bf16", fp8=True),
    Way("bf16"),
    Way(COMPILED, compiled=True),
)


def _clock(library: Any, skipped: int) -> Any:
    """A callback that notes when each step ends; memory is counted anew after `skipped` steps."""

    class Clock(library.TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            torch.cuda.synchronize()
            self.ends.append(time.perf_counter())
            if len(self.ends) == skipped:
                torch.cuda.reset_peak_memory_stats()

    return Clock()


def trained(way: Way, sizes: Sizes, steps: int, warm_up: int, device: str = "cuda", **options: Any) -> dict[str, Any]:
    """Train a new model.

    Args:
        way: what is done to it.
        sizes: of the model and a batch.
        steps: timed ones.
        warm_up: how many come before.
        device: where the model is made.
        options: more arguments of the Trainer's.

    Returns:
        Milliseconds of each timed step (`samples`), the mean loss of all steps, and the most bytes that were held.
    """
    library: Any = importlib.import_module("transformers")
    model, count = way.model(sizes, device), (steps + warm_up) * sizes.batch
    ids = torch.randint(sizes.vocab_size, (count, sizes.sequence), generator=torch.Generator().manual_seed(1))
    clock = _clock(library, warm_up)
    with tempfile.TemporaryDirectory() as folder:
        arguments = library.TrainingArguments(
            folder,
            per_device_train_batch_size=sizes.batch,
            max_steps=steps + warm_up,
            optim="adamw_torch_fused",
            torch_compile=way.compiled,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            log_level="error",
            **options,
        )
        data = [{"input_ids": row, "labels": row} for row in ids]
        trainer = library.Trainer(model, arguments, train_dataset=data, callbacks=[clock])
        trainer.remove_callback(library.PrinterCallback)
        loss = trainer.train().training_loss
    ends = clock.ends[-steps - 1 :]
    return {
        "samples": [(end - start) * 1e3 for start, end in itertools.pairwise(ends)],
        "loss": loss,
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def _row(way: Way, sizes: Sizes, found: Mapping[str, Any]) -> dict[str, Any]:
    ms = measure.spread(found["samples"])
    speed = sizes.tokens / ms["median"] * 1e3
    return {
        **asdict(way),
        "ms": ms,
        "tokens_per_second": speed,
        "loss": found["loss"],
        "peak_bytes": found["peak_bytes"],
    }


def run(progress: Progress = silent, steps: int = STEPS, warm_up: int = WARM_UP, sizes: Sizes | None = None) -> Payload:
    sizes = Sizes() if sizes is None else sizes
    rows = []
    for way in each(WAYS, progress):
        rows.append(_row(way, sizes, trained(way, sizes, steps, warm_up)))
        layer.clear()
    versions = {name: measure.version(name) for name in ("transformers", "accelerate")}
    what = "steps of transformers' Trainer; host clock from the end of one to the end of the next, synchronised"
    return result(what, KERNELS, steps=steps, warm_up=warm_up, sizes=asdict(sizes), versions=versions, rows=rows)


def tables(payload: Payload) -> list[Table]:
    """Speed and memory of each way, and its speed over that of the compiled model."""
    sizes = Sizes(**payload["sizes"])
    theirs = next(row["ms"]["median"] for row in payload["rows"] if row["name"] == COMPILED)
    rows = [
        (
            row["name"],
            f"{row['ms']['median']:.1f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{theirs / row['ms']['median']:.2f}×",
            f"{row['peak_bytes'] / 2**30:.1f}",
        )
        for row in payload["rows"]
    ]
    how = (
        f"Median time of {payload['steps']} steps of transformers' Trainer with fused AdamW: Llama 3 8B's shape with "
        f"{sizes.num_hidden_layers} of its 32 layers, bf16 weights, {sizes.tokens:,} tokens a step. GiB: the most that "
        "tensors had."
    )
    versions = " and ".join(f"{name} {version}" for name, version in payload["versions"].items())
    columns = ("", "ms a step", "tokens/s", f"speed over {COMPILED}", "GiB")
    return [table(payload, "Hugging Face's Trainer", columns, rows, how, f"With {versions}.")]


def summary(payload: Payload) -> list[tuple[str, str, str, str]]:
    """README's row: the Trainer after `te.convert`, with its memory, beside the unchanged model."""
    rows = {row["name"]: row for row in payload["rows"]}

    def cell(row: dict[str, Any]) -> str:
        return f"{row['tokens_per_second']:,.0f} tokens/s, {row['peak_bytes'] / 2**30:.1f} GiB"

    mine, others = rows[WAYS[0].name], [rows[name] for name in (COMPILED, "bf16")]
    what = f"Hugging Face's Trainer after `te.convert`, {payload['sizes']['num_hidden_layers']} layers of Llama 3 8B"
    beside = "; ".join(f"{row['name']}: {cell(row)}" for row in others)
    faster = "; ".join(f"{mine['tokens_per_second'] / row['tokens_per_second']:.2f}×" for row in others)
    return [(what, cell(mine), beside, faster)]
