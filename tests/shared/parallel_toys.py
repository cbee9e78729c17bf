"""Toys that use what a parallel layer will need. Importing them declares ops, so only processes of their own do."""

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

import optimized
import reference as te
from optimized.cuda import launch
from optimized.tapes import collective
from reference.nn.core.autograd import differentiable, wanted
from reference.nn.core.context import BlockContext, ModuleContext
from reference.nn.layers import linear
from reference.ops.library import define, on_cuda, twin
from reference.recipes.quantized import rows_of
from reference.support import groups

BF16 = torch.bfloat16
CALLS: list[str] = []  # collectives that ran
DRY = False  # whether the GPU only takes notes


# --- a collective, and a plan that names a group -----------------------------------------------------


def _sum_outputs(x: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(x)


def _sum(x: torch.Tensor, out: torch.Tensor, group: str) -> bool:
    """out = x of rank 0 + x of rank 1 + ..., in fp32, rounded at the end."""
    CALLS.append(group)
    if DRY:
        return False
    process_group = groups.group_of(group)
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(parts, x, group=process_group)
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    out.copy_(total)
    return True


@define(_sum_outputs)
def toy_sum(x: torch.Tensor, group: str) -> torch.Tensor:
    out = _sum_outputs(x, group)
    _sum(x, out, group)
    return out


@on_cuda
def toy_sum(x: torch.Tensor, group: str) -> torch.Tensor:  # noqa: F811
    out = _sum_outputs(x, group)
    collective(_sum, [x, out, group])
    return out


class RowPlan(NamedTuple):
    needs: tuple[bool, ...]
    linear: linear.Plan
    group: str


def row_forward(plan: RowPlan, context: ModuleContext, x: torch.Tensor, weight: Any) -> Any:
    y, saved = linear.forward(plan.linear, context, x, weight, None)
    return twin.toy_sum(y, plan.group), saved


def row_backward(plan: RowPlan, context: ModuleContext, saved: linear.Saved, grad: torch.Tensor) -> Any:
    return linear.backward(plan.linear, context, saved, grad)[:2]


def parallel_rows(side: Any) -> Any:
    """A linear layer each rank of which has some of the features."""

    class RowParallel(side.Linear):  # type: ignore[misc, name-defined]
        def forward(self, x: torch.Tensor, group: str) -> torch.Tensor:
            context, tensors = self.context(x.dtype, None), (rows_of(x), self.weight)
            needs = wanted(*tensors)
            plan = RowPlan(needs, linear.Plan(x.dtype, (*needs, False), context.key), group)
            return differentiable(row_forward, row_backward, plan, context, *tensors)

    return RowParallel


# --- an op that is told its sizes by a tensor on the device ------------------------------------------


def _scaled_outputs(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@define(_scaled_outputs)
def toy_scaled(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """x times the number of its expert; the first sizes[0] rows are expert 0's, the next sizes[1] expert 1's."""
    out = _scaled_outputs(x, sizes)
    experts = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    return out.copy_(x * experts.to(x.dtype)[:, None])


_kernel = launch.function("toy", "scaled", {})


@on_cuda
def toy_scaled(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:  # noqa: F811
    out = _scaled_outputs(x, sizes)
    args = [x.data_ptr(), sizes.data_ptr(), out.data_ptr(), np.int32(len(sizes)), np.int32(len(x))]
    launch.launch(_kernel, (len(x),), (128,), args, device=x.device.index)
    return out


class ScaledPlan(NamedTuple):
    needs: tuple[bool, ...]
    linear: linear.Plan


def scaled_forward(plan: ScaledPlan, context: BlockContext, x: torch.Tensor, weight: Any) -> Any:
    (sizes,) = context.reads
    y, saved = linear.forward(plan.linear, context.modules[0], x, weight, None)
    return twin.toy_scaled(y, sizes), saved


def scaled_backward(plan: ScaledPlan, context: BlockContext, saved: linear.Saved, grad: torch.Tensor) -> Any:
    (sizes,) = context.reads
    return linear.backward(plan.linear, context.modules[0], saved, twin.toy_scaled(grad, sizes))[:2]


def by_experts(side: Any) -> Any:
    """A linear layer whose results are scaled by expert."""

    class ByExperts(side.Linear):  # type: ignore[misc, name-defined]
        def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
            context, tensors = self.context(x.dtype, None), (rows_of(x), self.weight)
            needs = wanted(*tensors)
            plan = ScaledPlan(needs, linear.Plan(x.dtype, (*needs, False), context.key))
            both = BlockContext((context,), reads=(sizes,))
            return differentiable(scaled_forward, scaled_backward, plan, both, *tensors)

    return ByExperts


# --- what processes do with them ---------------------------------------------------------------------


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def train(rank: int, port: int, world: int, backend: str, folder: str, compiled: bool) -> None:
    """Three steps of a row-parallel layer in FP8; results to a file."""
    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    try:
        layer = parallel_rows(optimized if backend == "nccl" else te)(32, 16, bias=False, params_dtype=BF16)
        with torch.no_grad():
            layer.weight.copy_(drawn(rank, 16, 32))
        run = torch.compile(layer, backend="eager", fullgraph=True) if compiled else layer
        group, found = groups.name_of(None), []
        for step in range(8 if backend == "nccl" else 3):
            x = drawn(100 * step + rank, 24, 32).to(device).requires_grad_()
            with te.autocast(recipe=te.DelayedScaling(amax_history_len=3, reduce_amax=False)):
                y = run(x, group)
            y.backward(drawn(7 + step, 24, 16).to(device))
            found += [y.detach().cpu(), x.grad.cpu(), layer.weight.grad.cpu().clone()]
        torch.save(found, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def alone(world: int, steps: int = 3) -> list[list[torch.Tensor]]:
    """What each rank should find, by plain layers in one process."""
    layers = [te.Linear(32, 16, bias=False, params_dtype=BF16, device="cpu") for _ in range(world)]
    found: list[list[torch.Tensor]] = [[] for _ in layers]
    for rank, layer in enumerate(layers):
        with torch.no_grad():
            layer.weight.copy_(drawn(rank, 16, 32))
    for step in range(steps):
        xs = [drawn(100 * step + rank, 24, 32).requires_grad_() for rank in range(world)]
        ys = []
        for layer, x in zip(layers, xs, strict=True):
            with te.autocast(recipe=te.DelayedScaling(amax_history_len=3, reduce_amax=False)):
                ys.append(layer(x))
            ys[-1].backward(drawn(7 + step, 24, 16))
        total = ys[0].detach().float()
        for y in ys[1:]:
            total = total + y.detach().float()
        for rank, x in enumerate(xs):
            found[rank] += [total.to(BF16), x.grad, layers[rank].weight.grad.clone()]  # type: ignore[union-attr]
    return found
