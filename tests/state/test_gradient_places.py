"""Gradients that backward writes to their places in DDP's buckets: the words of one process, whoever else has them.

Each case has a rank's words from DDP compared with those of the same model without it. What would go wrong in most
of them is that a gradient is added to itself, or that it is changed where somebody has kept it.
"""

import functools
import gc
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared.bits import assert_same_bits
from shared.device_ranks import start
from shared.processes import free_port, ranks
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

import reference as te
from reference.parallel import GradientOrder, tree_hook
from reference.state import gradient_places

WORLD, STEPS, HIDDEN = 2, 6, 256
BF16, F32 = torch.bfloat16, torch.float32


class Model(torch.nn.Module):
    """A layer with two weights, one of its own, and a loss; every weight lies at a multiple of 512 bytes."""

    def __init__(self, dtype: torch.dtype = BF16, tied: bool = False, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mlp = te.LayerNormMLP(HIDDEN, HIDDEN, params_dtype=dtype, bias=bias)
        self.first, self.last = (te.Linear(HIDDEN, HIDDEN, params_dtype=dtype, bias=bias) for _ in range(2))
        if tied:
            self.last.weight = self.first.weight
        self.calls: Callable[[Any, torch.Tensor], torch.Tensor] = lambda layer, x: layer(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.calls(self.first, self.mlp(x)))).float().square().mean()


def twice(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer(torch.tanh(layer(x)))


def recomputed(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(layer, x, use_reentrant=False)


def recomputed_twice(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return recomputed(layer, torch.tanh(recomputed(layer, x)))


def with_torchs(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer(x) + torch.nn.functional.linear(x, layer.weight)


def with_its_numbers(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer(x) + (layer.weight * layer.weight).sum(0)


Case = dict[str, Any]  # of the model, of DDP, of the order, and which calls its middle layer gets
CASES: dict[str, Case] = {
    "plain": {},
    "several microbatches a group": {"each": 3},
    "several groups a rank": {"groups": 2 * WORLD, "each": 2},
    "a weight used twice": {"calls": twice},
    "tied weights": {"model": {"tied": True}},
    "tied weights, several groups": {"model": {"tied": True}, "groups": 3, "each": 2},
    "computed again": {"calls": recomputed},
    "computed again, twice": {"calls": recomputed_twice},
    "computed again inside of a backward": {"calls": functools.partial(te.checkpoint, use_reentrant=True)},
    "used by torch, too": {"calls": with_torchs},
    "used by torch alone, too": {"calls": with_its_numbers},
    "fp32": {"model": {"dtype": F32}},
    "without biases": {"model": {"bias": False}},
    "no views": {"ddp": {"gradient_as_bucket_view": False}},
    "unused": {"ddp": {"gradient_as_bucket_view": True, "find_unused_parameters": True}},
    "static": {"ddp": {"gradient_as_bucket_view": True, "static_graph": True}},
    "small buckets": {"ddp": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.3}},
    "hooks of weights": {"kept": "hook"},
    "hooks after accumulation": {"kept": "after"},
    "torch.autograd.grad before": {"kept": "grad"},
    "a backward of some inputs": {"kept": "inputs"},
    "a frozen weight": {"kept": "frozen"},
}


class Kept:
    """Gradients that somebody besides DDP gets in a backward, and their words at that time."""

    def __init__(self, model: Model, how: str | None) -> None:
        self.model, self.how = model, how
        self.found: list[tuple[torch.Tensor, torch.Tensor]] = []
        weight = model.first.weight
        if how == "hook":
            weight.register_hook(self.keep)
        elif how == "after":
            weight.register_post_accumulate_grad_hook(lambda p: self.keep(p.grad.clone()))
        elif how == "frozen":
            model.mlp.fc1_weight.requires_grad_(False)

    def keep(self, grad: torch.Tensor) -> None:
        self.found.append((grad, grad.clone()))

    def backward(self, loss: torch.Tensor) -> None:
        weight = self.model.first.weight
        if self.how == "grad":
            self.keep(torch.autograd.grad(loss, weight, retain_graph=True)[0])
        if self.how == "inputs":
            loss.backward(inputs=[p for p in self.model.parameters() if p.requires_grad])
        else:
            loss.backward()

    def check(self) -> None:
        for grad, then in self.found:
            assert_same_bits(grad, then, "a gradient that was kept")
        self.found = []


def words(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, p in model.named_parameters():
        found[name] = p.detach().cpu().clone()
        found[f"{name}.grad"] = torch.empty(0) if p.grad is None else p.grad.cpu().clone()
    return found


def steps(case: Case, device: str, group: Any, ddp: bool) -> Iterator[Any]:
    """The words after each step; with `ddp` of this rank's share, else of all microbatches, in `group`."""
    model = Model(**case.get("model", {}))
    model.calls = case.get("calls", model.calls)
    model.to(device)
    kept = Kept(model, case.get("kept"))
    order = GradientOrder(case.get("groups", WORLD), group)
    parallel: Any = model
    if ddp:
        parallel = DistributedDataParallel(model, **case.get("ddp", {"gradient_as_bucket_view": True}))
        parallel.register_comm_hook(order, tree_hook)
    optimizer = te.optimizers.FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    recipe, each = te.DelayedScaling(amax_history_len=2), case.get("each", 1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in order.microbatches(parallel, each * order.groups):
            numbers = torch.Generator().manual_seed(100 * step + number)
            x = torch.randn(32, HIDDEN, generator=numbers).to(device, case.get("model", {}).get("dtype", BF16))
            with te.autocast(recipe=recipe, amax_reduction_group=group):
                loss = parallel(x * (1 + number))
            kept.backward(loss / each)
        kept.check()
        assert not gradient_places.offered
        optimizer.step()
        yield words(model)


def copies_of_ddp(device: str) -> list[int]:
    """How many gradients DDP copies to its buckets in each step of a model with three weights and some vectors."""
    found = []
    run = steps({}, device, dist.group.WORLD, ddp=True)
    for _ in range(STEPS):
        with profile() as seen:
            next(run)
        events = seen.profiler.kineto_results.events()  # names alone: the profiler's own tables take seconds
        found.append(sum(one.name() == "torch::distributed::reducer::copy_" for one in events))
    return found


def left_early(device: str) -> None:
    """A loop that ends in its last microbatch leaves no place behind."""
    model = DistributedDataParallel(Model().to(device), gradient_as_bucket_view=True)
    order = GradientOrder(WORLD)
    model.register_comm_hook(order, tree_hook)
    for step in range(4):
        model.zero_grad()
        for _ in order.microbatches(model, WORLD):
            assert bool(gradient_places.offered) == (step >= 2)
            if step == 3:
                break
            model(torch.ones(16, HIDDEN, dtype=BF16, device=device)).backward()
    assert not gradient_places.offered


def worker(rank: int, port: int, folder: str, device: str, names: list[str]) -> None:
    start(rank, WORLD, port, device)
    own = [dist.new_group([one]) for one in range(WORLD)][rank]
    failed = {}
    for name in names:
        try:
            pairs = (steps(CASES[name], device, group, ddp) for group, ddp in ((dist.group.WORLD, True), (own, False)))
            for step, (found, alone) in enumerate(zip(*pairs, strict=True)):
                assert found.keys() == alone.keys()
                for key in found:
                    assert_same_bits(found[key], alone[key], f"rank {rank}, step {step}, {key}")
        except BaseException:
            failed[name] = traceback.format_exc()
            break  # the other rank may wait
        gc.collect()  # a module that is alive has scales to update
    found_copies: list[int] = []
    if not failed:
        found_copies = copies_of_ddp(device)
        left_early(device)
    torch.save((failed, found_copies), Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def check(folder: Path, device: str, names: list[str]) -> None:
    ranks(worker, (free_port(), str(folder), device, names), WORLD)
    for rank in range(WORLD):
        failed, copies = torch.load(folder / f"{rank}.pt")
        assert not failed, "\n".join(failed.values())
        # Norm's weight and bias, four biases and four weights; of these the buckets are known after the second step.
        assert copies[:2] == [10, 10], copies
        assert copies[-1] == 6, copies
        assert device == "cuda" or copies[2:] == [6] * (STEPS - 2), copies  # a GPU measures and records a step each


FAST = [*list(CASES)[::3], "tied weights"]


@pytest.mark.parametrize("names", [FAST, pytest.param(sorted({*CASES} - {*FAST}), marks=pytest.mark.slow)], ids=len)
def test_ranks_have_the_words_of_one_process(names: list[str], tmp_path: Path) -> None:
    check(tmp_path, "cpu", names)


@pytest.mark.gpu
@pytest.mark.gpus(2)
def test_two_gpus_have_the_words_of_one(tmp_path: Path) -> None:
    check(tmp_path, "cuda", list(CASES))
