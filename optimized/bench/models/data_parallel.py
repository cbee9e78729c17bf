"""A training step on several GPUs of one host: stacks of layers, in ms a step.

    python -m optimized.bench.models.data_parallel --output data_parallel.json

A step is forward, backward, the gradients' sum over ranks, and the optimizer. "Alone" nothing is sent: every GPU makes
its own step. "Written order" is `te.parallel.GradientOrder` with a group a rank. Contestants run one after the other,
since they do not fit side by side, on GPUs that are warm before the first; a step's time is from event to event on the
slowest GPU, while the host runs ahead.
PyTorch's layers have bf16 weights, its own attention, torch.compile and fused AdamW without fp32 masters; ours have the
masters, as has Transformer Engine's optimizer. It runs where it is installed.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from optimized import measure
from optimized.bench import Payload
from optimized.bench.layers.layer_models import Case, Plain
from optimized.bench.models import on_ranks
from optimized.bench.models.on_ranks import OURS, THEIRS, TORCH, Benchmark, Row, Turn, timed
from optimized.bench.models.tensor_parallel import Layer
from optimized.bench.table import Table, table
from reference.parallel import GradientOrder, copy_engine_all_gather, tree_hook, tree_reduce_scatter

WHAT = "ms of a training step of some layers on several GPUs"
KERNELS = (
    "adam",
    "attention",
    "attention_backward",
    "attention_backward_ends",
    "cast_transpose",
    "dropout",
    "gemm_fp8",
    "tree_mean",
)
BF16 = torch.bfloat16
CASE = Case("GPT 1.3B", 2048, 8192, 16, 2048, 2, BF16, True, 0.1)
LLAMA = Case("Llama 3 8B", 4096, 14336, 32, 8192, 1, BF16, True, 0.0, llama=True, kv_heads=8)


class Stack(NamedTuple):
    """How many layers, and of how many FSDP2 shards and gathers the weights together."""

    layers: int
    together: int = 1


# FSDP2's own Python takes longer than a small layer's kernels, so some of these are one of its units: 0.4 GB each.
STACKS = {LLAMA: Stack(8), CASE: Stack(24, 4)}
ALONE, DDP, FSDP = "alone", "DDP", "FSDP2"


class Way(NamedTuple):
    """Whose layers they are, how ranks share a step, whether in the written order, and whether weights are FP8."""

    who: str
    sharing: str
    ordered: bool = False
    kept: bool = False

    @property
    def name(self) -> str:
        """As in a table."""
        return ", ".join([self.who, self.sharing] + ["written order"] * self.ordered + ["FP8 weights"] * self.kept)


WAYS = (
    Way(OURS, ALONE),
    Way(OURS, DDP),
    Way(OURS, DDP, ordered=True),
    Way(OURS, FSDP),
    Way(OURS, FSDP, ordered=True),
    Way(OURS, FSDP, ordered=True, kept=True),
    Way(TORCH, ALONE),
    Way(TORCH, DDP),
    Way(TORCH, FSDP),
    Way(THEIRS, ALONE),
    Way(THEIRS, DDP),
    Way(THEIRS, FSDP),
)


def _normal(weight: torch.Tensor) -> None:
    torch.nn.init.normal_(weight, 0, 0.023)


def layers_of(way: Way, case: Case, count: int, recipe: Any, device: torch.device) -> torch.nn.Sequential:
    """The stack, on the device."""
    if way.who == TORCH:
        with device:
            if case.llama:
                return torch.nn.Sequential(*(Layer(case).to(case.dtype) for _ in range(count)))
            plain = [Plain(case.hidden, case.ffn, case.heads, p=case.dropout, causal=case.causal) for _ in range(count)]
            return torch.nn.Sequential(*plain).to(case.dtype)
    options: dict[str, Any] = {"hidden_dropout": case.dropout, "attention_dropout": case.dropout}
    if case.llama:
        options |= {"num_gqa_groups": case.kv_heads, "normalization": "RMSNorm", "activation": "swiglu", "bias": False}
    options |= {"params_dtype": case.dtype, "init_method": _normal, "output_layer_init_method": _normal}
    options |= {"self_attn_mask_type": case.mask_type, "fuse_qkv_params": True, "device": device}
    engine = on_ranks.library(way.who)
    with engine.quantized_model_init(enabled=way.kept, recipe=recipe):
        return torch.nn.Sequential(
            *(engine.TransformerLayer(case.hidden, case.ffn, case.heads, **options) for _ in range(count))
        )


def stepper(way: Way, case: Case, stack: Stack, device: torch.device) -> Callable[[], None]:
    """One training step of a way."""
    torch.manual_seed(0)
    engine, fp8 = on_ranks.library(way.who), way.who != TORCH
    recipe = on_ranks.delayed(way.who, way.sharing != ALONE)
    model: Any = layers_of(way, case, stack.layers, recipe, device)
    if not fp8:
        for layer in model:
            layer.compile()
    order = GradientOrder(dist.get_world_size()) if way.ordered else None
    if way.sharing == FSDP:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        units = [[*model[first : first + stack.together]] for first in range(0, len(model), stack.together)]
        for unit in units:  # backward begins with the last one, so its weights stay, as in torchtitan
            fully_shard(unit, mesh=mesh, reshard_after_forward=unit is not units[-1])
        fully_shard(model, mesh=mesh)
        if way.who == OURS:
            copy_engine_all_gather(model)
        if order is not None:
            tree_reduce_scatter(model, order)
    elif way.sharing == DDP:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=100)
        if order is not None:
            model.register_comm_hook(order, tree_hook)
    optimizer: Any
    if fp8:
        optimizer = engine.optimizers.FusedAdam(model.parameters(), lr=1e-4, master_weights=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    first = (case.sequence, case.batch) if fp8 or not case.llama else (case.batch, case.sequence)
    x = torch.randn(*first, case.hidden, dtype=case.dtype, device=device)
    target = torch.randn_like(x)

    def microbatch() -> None:
        with engine.autocast(enabled=fp8, recipe=recipe):
            y = model(x)
        torch.nn.functional.mse_loss(y, target).backward()

    def step() -> None:
        optimizer.zero_grad()
        if order is None:
            microbatch()
        else:
            for _ in order.microbatches(model, order.groups):
                microbatch()
        optimizer.step()

    return step


def measured(contestant: tuple[Way, Case, Stack], device: torch.device) -> Row:
    """Of a way with a stack of layers: ms of its steps."""
    return {"ms": measure.spread(timed(stepper(*contestant, device), device))}


def speedups(rows: Sequence[Row]) -> Iterator[tuple[Row, float, float | None]]:
    """Each row of one model, its share of one GPU's speed, and its speed over PyTorch's shared alike, if that ran."""
    found = {row["way"]: row["ms"]["median"] for row in rows if "ms" in row}
    for way in WAYS:
        if way.name in found:
            alone, theirs = (found.get(Way(who, how).name) for who, how in ((way.who, ALONE), (TORCH, way.sharing)))
            ms = found[way.name]
            row = next(row for row in rows if row["way"] == way.name)
            yield row, alone / ms if alone else float("nan"), theirs / ms if theirs and way.who != TORCH else None


def by_model(payload: Payload) -> dict[str, list[Row]]:
    """The rows of each model."""
    found: dict[str, list[Row]] = {}
    for row in payload["rows"]:
        found.setdefault(row["model"], []).append(row)
    return found


def tables(payload: Payload) -> list[Table]:
    """A table for each model."""
    found = []
    for model, rows in by_model(payload).items():
        first = rows[0]
        how = (
            f"Training steps of {first['layers']} layers of {model}'s shape, {first['tokens']:,} tokens on each of "
            f"{payload['ranks']} GPUs of one host, the optimizer included; of the slowest GPU."
            + (f" FSDP2 shards {first['together']} layers together." if first.get("together", 1) > 1 else "")
        )
        cells = [
            (
                row["way"],
                f"{row['ms']['median']:.1f}",
                f"{of_one:.2f}",
                f"{over:.2f}×" if over else "",
                f"{row['GiB']:.1f}",
            )
            for row, of_one, over in speedups(rows)
        ]
        columns = ("", "ms a step", "share of one GPU's speed", "speed over PyTorch, shared alike", "GiB")
        found.append(table(payload, f"Data parallel: {model}", columns, cells, how))
    return found


def summary(payload: Payload) -> list[tuple[str, str, str, str]]:
    """README's row: the written order under DDP and FSDP2, beside PyTorch's sums, for the first model."""
    model, rows = next(iter(by_model(payload).items()))
    ours = {how: Way(OURS, how, ordered=True).name for how in (DDP, FSDP)}
    theirs = {how: Way(TORCH, how).name for how in (DDP, FSDP)}
    ms = {row["way"]: row["ms"]["median"] for row in rows}
    both = [how for how in ours if {ours[how], theirs[how]} <= ms.keys()]
    tokens = 1e3 * rows[0]["tokens"]
    mine, other = (", ".join(f"{tokens / ms[name[how]]:,.0f}" for how in both) for name in (ours, theirs))
    what = f"{' and '.join(both)} on {payload['ranks']} H200s, the bits of one, {rows[0]['layers']} layers of {model}"
    faster = ", ".join(f"{ms[theirs[how]] / ms[ours[how]]:.2f}" for how in both)
    return [(what, f"{mine} tokens/s a GPU", f"PyTorch, compiled, bf16: {other}", f"{faster}×")]


def run(
    output: str,
    world: int = 2,
    kind: str = "cuda",
    stacks: Mapping[Case, Stack] = STACKS,
    ways: tuple[Way, ...] = WAYS,
    seconds: float = 120,
) -> None:
    """Measure on `world` ranks; no contestant begins later than `seconds`. Each stack in each way, in one JSON."""
    benchmark = Benchmark(WHAT, KERNELS, {}, measured)
    turns = [
        Turn({"model": case.name, **stack._asdict(), "tokens": case.tokens, "way": way.name}, (way, case, stack))
        for (case, stack), way in itertools.product(stacks.items(), ways)
        if on_ranks.runs(way.who)
    ]
    turns.sort(key=lambda turn: turn.contestant[0].who == THEIRS)  # an error of theirs ends the run
    on_ranks.start(output, benchmark, world)
    on_ranks.run(output, benchmark, turns, world, kind, time.time() + seconds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=WHAT)
    parser.add_argument("--output", default="data_parallel.json")
    parser.add_argument("--seconds", type=float, default=120, help="no contestant begins later")
    given = parser.parse_args()
    run(given.output, seconds=given.seconds)
