"""A training step on several GPUs of one host: stacks of GPT layers, in ms a step.

    python -m optimized.bench.models.data_parallel --output data_parallel.json

Each GPU has 4096 tokens a step: forward, backward, the gradients' sum over ranks, and the optimizer. "Alone" nothing is
sent: every GPU makes its own step. "Written order" is `te.parallel.GradientOrder` with a group a rank. Contestants run
one after the other, since they do not fit side by side; a step's time is from event to event on rank 0's GPU, while
the host runs ahead. PyTorch's layers have bf16 weights, cuDNN's attention, torch.compile and fused AdamW without fp32
masters; ours have the masters.
"""

import argparse
import datetime
import gc
import itertools
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import optimized as te
from optimized import measure
from optimized.bench import Payload, result
from optimized.bench.layers.layer_models import Case, Plain
from reference.parallel import GradientOrder, tree_hook, tree_reduce_scatter

WHAT = "ms of a training step of GPT layers on several GPUs"
KERNELS = (
    "adam",
    "attention",
    "attention_backward",
    "attention_backward_ends",
    "cast_transpose",
    "dropout",
    "gemm_fp8",
)
CASE = Case("GPT", 2048, 8192, 16, 2048, 2, torch.bfloat16, True, 0.1)
LAYERS = (4, 24)  # 24: as the 1.3b GPT
STEPS, WARM_UP = 8, 4
ALONE, DDP, FSDP = "alone", "DDP", "FSDP2"


class Way(NamedTuple):
    """Who computes the layers, how ranks share a step, whether in the written order, and whether weights are FP8."""

    ours: bool
    sharing: str
    ordered: bool = False
    kept: bool = False

    @property
    def name(self) -> str:
        """As in a table."""
        who = "Twin Engine, FP8" if self.ours else "PyTorch, compiled, bf16"
        return ", ".join([who, self.sharing] + ["written order"] * self.ordered + ["FP8 weights"] * self.kept)


WAYS = (
    Way(True, ALONE),
    Way(True, DDP),
    Way(True, DDP, ordered=True),
    Way(True, FSDP),
    Way(True, FSDP, ordered=True),
    Way(True, FSDP, ordered=True, kept=True),
    Way(False, ALONE),
    Way(False, DDP),
    Way(False, FSDP),
)


def _normal(weight: torch.Tensor) -> None:
    torch.nn.init.normal_(weight, 0, 0.023)


def layers_of(way: Way, case: Case, count: int, recipe: Any, device: torch.device) -> torch.nn.Sequential:
    """The stack, on the device."""
    if not way.ours:
        plain = [Plain(case.hidden, case.ffn, case.heads, p=case.dropout, causal=case.causal) for _ in range(count)]
        return torch.nn.Sequential(*plain).to(device, case.dtype)
    options: dict[str, Any] = {"hidden_dropout": case.dropout, "attention_dropout": case.dropout}
    options |= {"params_dtype": case.dtype, "init_method": _normal, "output_layer_init_method": _normal}
    options |= {"self_attn_mask_type": case.mask_type, "fuse_qkv_params": True, "device": device}
    with te.quantized_model_init(enabled=way.kept, recipe=recipe):
        return torch.nn.Sequential(
            *(te.TransformerLayer(case.hidden, case.ffn, case.heads, **options) for _ in range(count))
        )


def stepper(way: Way, case: Case, count: int, device: torch.device) -> Callable[[], None]:
    """One training step of a way."""
    torch.manual_seed(0)
    recipe = te.DelayedScaling(amax_history_len=16, amax_compute_algo="max", reduce_amax=way.sharing != ALONE)
    model: Any = layers_of(way, case, count, recipe, device)
    if not way.ours:
        for layer in model:
            layer.compile()
    order = GradientOrder(dist.get_world_size()) if way.ordered else None
    if way.sharing == FSDP:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        if order is not None:
            tree_reduce_scatter(model, order)
    elif way.sharing == DDP:
        model = DistributedDataParallel(model, gradient_as_bucket_view=order is None)
        if order is not None:
            model.register_comm_hook(order, tree_hook)
    optimizer: Any
    if way.ours:
        optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-4, master_weights=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    x = torch.randn(case.sequence, case.batch, case.hidden, dtype=case.dtype, device=device)
    target = torch.randn_like(x)

    def microbatch() -> None:
        with te.autocast(enabled=way.ours, recipe=recipe):
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


def timed(step: Callable[[], None], steps: int, warm_up: int, device: torch.device) -> list[float]:
    """Milliseconds of each step."""
    for _ in range(warm_up):
        step()
    dist.barrier()
    if device.type != "cuda":
        moments = [time.perf_counter()]
        for _ in range(steps):
            step()
            moments.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in itertools.pairwise(moments)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def measured(way: Way, case: Case, count: int, steps: int, warm_up: int, device: torch.device) -> dict[str, Any]:
    """A row of the result; an error is one, too, of which all ranks hear."""
    row: dict[str, Any] = {"way": way.name, "layers": count}
    try:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        row["ms"] = measure.spread(timed(stepper(way, case, count, device), steps, warm_up, device))
        if device.type == "cuda":
            row["GiB"] = torch.cuda.max_memory_allocated() / 2**30
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:500]
    gc.collect()  # a model that is alive has scales to update
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def work(
    rank: int,
    world: int,
    port: int,
    kind: str,
    case: Case,
    layers: tuple[int, ...],
    ways: tuple[Way, ...],
    seconds: float,
    output: str,
) -> None:
    """One rank; rank 0 writes the result."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=90),
    )
    begun, rows = time.monotonic(), []
    steps, warm_up = (STEPS, WARM_UP) if kind == "cuda" else (2, 1)
    for count, way in itertools.product(layers, ways):
        over = torch.tensor([int(time.monotonic() - begun > seconds)], device=device)
        dist.broadcast(over, 0)
        if int(over):
            break
        row = measured(way, case, count, steps, warm_up, device)
        rows.append(row)
        if rank == 0:
            ms = row.get("ms", {}).get("median")
            print(f"{count:3} layers  {way.name:50} " + (row["error"] if ms is None else f"{ms:8.2f} ms"), flush=True)
        if "error" in row:  # others may wait in a collective: the rest is not to be trusted
            break
    if rank == 0:
        found = {"ranks": world, "tokens": case.tokens, "hidden": case.hidden, "rows": rows}
        payload: Payload = result(WHAT, KERNELS, **found) if kind == "cuda" else {"what": WHAT, **found}
        Path(output).write_text(json.dumps(payload, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def run(
    output: str,
    world: int = 2,
    kind: str = "cuda",
    case: Case = CASE,
    layers: tuple[int, ...] = LAYERS,
    ways: tuple[Way, ...] = WAYS,
    seconds: float = 120,
) -> None:
    """Measure on `world` ranks; no contestant begins later than `seconds`. Each stack in each way, in one JSON."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = (world, port, kind, case, layers, ways, seconds, output)
    torch.multiprocessing.spawn(work, arguments, nprocs=world)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=WHAT)
    parser.add_argument("--output", default="data_parallel.json")
    parser.add_argument("--layers", type=int, nargs="+", default=list(LAYERS))
    parser.add_argument("--seconds", type=float, default=120, help="no contestant begins later")
    given = parser.parse_args()
    run(given.output, layers=tuple(given.layers), seconds=given.seconds)
