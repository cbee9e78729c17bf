"""Gradients of a step over gloo ranks, with and without DistributedDataParallel, against the written order."""

import datetime
import functools
import gc
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared.bits import assert_same_bits
from shared.processes import free_port, ranks
from torch.nn.parallel import DistributedDataParallel

import reference as te
from reference.parallel import GradientOrder, tree_hook

BF16, F32 = torch.bfloat16, torch.float32
GROUPS, STEPS = 8, 2
LIMIT = datetime.timedelta(seconds=60)
DDP: dict[str, dict[str, Any]] = {
    "plain": {},
    "views of buckets": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}

UNUSED = ("unused", "a module, unused")
CASES = [(name, dtype) for name in (*DDP, "a module", "a module, unused") for dtype in (F32, BF16)]
FAST = [one for i, one in enumerate(CASES) if i % 4 in (0, 3)]  # each name, in one dtype


class Model(torch.nn.Module):
    """Layers in FP8; weights that some microbatches do not use, one that none does, and one that is transposed."""

    def __init__(self, dtype: torch.dtype, unused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = (te.Linear(32, 32, params_dtype=dtype) for _ in range(2))
        self.factor = torch.nn.Parameter(torch.randn(7, 3).to(dtype).t())
        if unused:
            self.some = torch.nn.Parameter(torch.ones(5, dtype=dtype))
            self.never = torch.nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        h = self.last(torch.relu(self.first(x)))
        total = h.float().sum() + (x[:3, :7].float() * self.factor.float()).sum()
        if hasattr(self, "some") and number % 5 == 2:
            total = total - 0.0 * self.some.float().sum()
        return total


def inputs(step: int, number: int, dtype: torch.dtype) -> torch.Tensor:
    words = torch.Generator().manual_seed(100 * step + number)
    return torch.randn(16, 32, generator=words).to(dtype) * (1 + number)


def words(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The gradients, and the FP8 state; named as in a module without DDP."""
    found = {}
    for name, p in model.named_parameters():
        found[name.removeprefix("module.")] = torch.empty(0) if p.grad is None else p.grad.clone()
    for name, module in model.named_modules():
        for key, meta in getattr(module, "fp8_meta", {}).items():
            if hasattr(meta, "scale"):
                name = name.removeprefix("module.")
                found |= {f"{name} {key}": meta.scale.clone(), f"{name} {key} history": meta.amax_history.clone()}
    return found


def steps(model: torch.nn.Module, order: GradientOrder, dtype: torch.dtype, unused: bool) -> Iterator[Any]:
    """The words after each step, of two microbatches a group."""
    recipe = te.DelayedScaling(amax_history_len=4)
    for step in range(STEPS):
        model.zero_grad()
        for number in order.microbatches(model, 2 * order.groups, find_unused_parameters=unused):
            with te.autocast(recipe=recipe):
                total = model(inputs(step, number, dtype), number)
            (total / 2).backward()
        yield words(model)


@pytest.mark.parametrize("each", range(1, 7))
def test_a_group_has_the_microbatches_after_another_in_turn(each: int) -> None:
    """Any number of them: they are added one by one, and the sums of two groups once."""
    values = torch.randn(2 * each, 1000, generator=torch.Generator().manual_seed(each))
    model = torch.nn.ParameterList([torch.zeros(1000)])
    seen = []
    for number in GradientOrder(2).microbatches(model, 2 * each):
        (model[0] * values[number]).sum().backward()
        seen.append(number)
    assert seen == list(range(2 * each))
    sums = [functools.reduce(torch.add, values[first : first + each]) for first in (0, each)]
    assert_same_bits(model[0].grad, (sums[0] + sums[1]) / 2)


def expected(dtype: torch.dtype, unused: bool, groups: int = GROUPS) -> list[dict[str, torch.Tensor]]:
    return list(steps(Model(dtype, unused), GradientOrder(groups), dtype, unused))


def empty_bucket(order: GradientOrder) -> list[dict[str, torch.Tensor]]:
    """The words after a step of a model whose only parameter of one dtype has no number."""
    model = torch.nn.Module()
    model.empty, model.weight = torch.nn.Parameter(torch.zeros(0)), torch.nn.Parameter(torch.ones(5, dtype=BF16))
    for number in order.microbatches(model, order.groups):
        (model.empty.sum() + (1.1**number * model.weight.float()).sum()).backward()
    return [words(model)]


def refused(rank: int) -> None:
    """A parameter without a gradient on rank 1 is an error on every rank, at once."""
    model, order = torch.nn.ParameterList([torch.ones(2), torch.ones(3)]), GradientOrder(GROUPS)
    sentence = "parameter 1 of the model .* has no gradient on rank 1; find_unused_parameters=True is accepted"

    def step() -> None:
        for _ in order.microbatches(model, GROUPS):
            (model[0] if rank == 1 else torch.cat(list(model))).sum().backward()

    with pytest.raises(RuntimeError, match=sentence):
        step()


def worker(rank: int, world: int, port: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=LIMIT)
    failed, found = {}, {}
    for name, dtype in FAST if world == 3 else CASES:
        try:
            unused = name in UNUSED
            model, order = Model(dtype, unused), GradientOrder(GROUPS)
            if name in DDP:
                model = DistributedDataParallel(model, bucket_cap_mb=0.001, **DDP[name])
                model.register_comm_hook(order, tree_hook)
            found[name, dtype] = list(steps(model, order, dtype, unused))
        except Exception:
            failed[f"{name} {dtype}"] = traceback.format_exc()
        model = order = None
        gc.collect()  # a module that is alive has scales to update, on all ranks or on none
    order = GradientOrder(world)  # a group a rank: its own dtype travels
    found["a group a rank", BF16] = list(steps(Model(BF16, False), order, BF16, False))
    found["an empty bucket", BF16] = empty_bucket(GradientOrder(2 * world - 1))  # of which some ranks have two sums
    try:
        refused(rank)
    except BaseException:  # pytest.fail's, too
        failed["refused"] = traceback.format_exc()
    torch.save((failed, found), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [3, *(pytest.param(world, marks=pytest.mark.slow) for world in (2, 4, 8))])
def test_ranks_have_the_words_of_one_process(world: int, tmp_path: Path) -> None:
    ranks(worker, (world, free_port(), str(tmp_path)), world)
    once, empty = functools.cache(expected), empty_bucket(GradientOrder(2 * world - 1))
    for rank in range(world):
        failed, found = torch.load(tmp_path / f"{rank}.pt")
        assert not failed, "\n".join(failed.values())
        for (name, dtype), of_steps in found.items():
            if name == "an empty bucket":
                alone = empty
            else:
                alone = once(dtype, name in UNUSED, world if name == "a group a rank" else GROUPS)
            for step, (one, other) in enumerate(zip(of_steps, alone, strict=True)):
                assert one.keys() == other.keys()
                for key in one:
                    assert_same_bits(one[key], other[key], f"rank {rank}, {name}, {dtype}, step {step}, {key}")


@pytest.mark.parametrize(
    ("dtype", "error", "sentence"),
    [(F32, RuntimeError, "a backward outside of the loop"), (torch.float64, TypeError, "a bucket of torch.float64")],
)
def test_buckets_that_are_refused(dtype: torch.dtype, error: type[Exception], sentence: str) -> None:
    bucket: Any = SimpleNamespace(buffer=lambda: torch.zeros(3, dtype=dtype))
    with pytest.raises(error, match=f"^tree_hook: {sentence}"):
        tree_hook(GradientOrder(2), bucket)


@pytest.mark.parametrize("given", [0, 1, "yes", torch.ones(1)])
def test_peer_memory_is_yes_no_or_where_it_can(given: Any) -> None:
    with pytest.raises(TypeError, match="GradientOrder: peer_memory=") as found:
        GradientOrder(2, peer_memory=given)
    assert "True, False or None is accepted" in str(found.value)
