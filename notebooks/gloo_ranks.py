"""Deep dive 17's programs. A rank is a process of its own; ranks speak to each other over gloo, on this computer.

`start(3, train, "tree", 10)` runs `train(rank, 3, "tree", 10)` on three ranks and returns what each of them returns.
In the notebook's own process `train(0, 1, "tree", 10)` is the same without ranks.
"""

import datetime
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing

import reference as te
from reference.parallel import gradient_order
from reference.support import files

SECONDS = 60  # after which ranks that still run are ended, so that nothing hangs
METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
MICROBATCHES, WIDTH = 8, 64
RECIPE = te.recipe.Float8CurrentScaling()  # a scale is that of one microbatch: nothing else is shared by ranks
twin = torch.ops.twin


# ---- starting ranks ----


def _work(rank: int, count: int, folder: str, program: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    log = os.open(f"{folder}/{rank}.log", os.O_CREAT | os.O_WRONLY)
    for stream in (1, 2):  # gloo speaks of each connection
        os.dup2(log, stream)
    torch.set_num_threads(1)
    if sys.platform != "win32":  # a laptop's own name may lead nowhere
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    store = Path(folder, "store").as_uri()
    limit = datetime.timedelta(seconds=SECONDS / 2)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count, timeout=limit)
    try:
        found = program(rank, count, *arguments)
        with files.replacing(Path(folder, f"{rank}.pt")) as file:
            torch.save(found, file)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def start(count: int, program: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `program(rank, count, *arguments)` returns on each of `count` ranks, tensors or tuples of tensors.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank had an error; the others are ended.
        TimeoutError: after `SECONDS`; all are ended.
    """
    multiprocessing.set_forkserver_preload(["torch", "reference"])  # a rank is then a fork, without the import
    with tempfile.TemporaryDirectory() as folder:
        ranks: Any = torch.multiprocessing.start_processes(  # type: ignore[no-untyped-call]
            _work, (count, folder, program, arguments), nprocs=count, join=False, start_method=METHOD
        )
        try:
            end = time.monotonic() + SECONDS
            while not ranks.join(max(0.1, end - time.monotonic())):
                if time.monotonic() > end:
                    raise TimeoutError(f"{count} ranks have not ended after {SECONDS} s, and were stopped.")
        finally:
            for process in ranks.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [torch.load(f"{folder}/{rank}.pt") for rank in range(count)]


# ---- what they run ----


def backward(model: torch.nn.Module, step: int, number: int, divisor: float) -> None:
    """Add the gradients of a microbatch; its data follow from its number, whoever computes it."""
    x, target = torch.randn(2, 32, WIDTH, generator=torch.Generator().manual_seed(1000 * step + number))
    with te.autocast(recipe=RECIPE):
        y = model(x)
    ((y - target).square().mean() / divisor).backward()


def add_and_all_reduce(model: torch.nn.Module, step: int, rank: int, ranks: int, dtype: torch.dtype) -> None:
    """The usual way: a rank adds its own microbatches; then the library adds the ranks' sums. All in `dtype`."""
    sums = [torch.zeros(p.shape, dtype=dtype) for p in model.parameters()]
    for number in range(rank * MICROBATCHES // ranks, (rank + 1) * MICROBATCHES // ranks):
        backward(model, step, number, MICROBATCHES)
        for p, total in zip(model.parameters(), sums, strict=True):
            total += p.grad
            p.grad = None
    for p, total in zip(model.parameters(), sums, strict=True):
        if ranks > 1:
            dist.all_reduce(total)
        p.grad = total.to(p.dtype)


def add_in_the_tree(model: torch.nn.Module, step: int, order: te.parallel.GradientOrder) -> None:
    """The written order: the same loop on one process and on many."""
    for number in order.microbatches(model, MICROBATCHES):
        backward(model, step, number, MICROBATCHES / order.groups)


def train(rank: int, ranks: int, how: str, steps: int, choice: Any) -> torch.Tensor:
    """All weights after each step, `[steps, words]` fp32; `choice` is all-reduce's dtype, or the tree's groups."""
    torch.manual_seed(0)
    model = te.LayerNormMLP(WIDTH, 2 * WIDTH)
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-3)
    order = te.parallel.GradientOrder(choice) if how == "tree" else None
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        if order is None:
            add_and_all_reduce(model, step, rank, ranks, choice)
        else:
            add_in_the_tree(model, step, order)
        optimizer.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return torch.stack(found)


def product(rank: int, ranks: int, how: str, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x [m, K] · wᵀ, w [n, K], FP8 codes, of which this rank uses its part of K; the last rank has the result."""
    part = slice(rank * x.shape[1] // ranks, (rank + 1) * x.shape[1] // ranks)
    x, w, sums = x[:, part].contiguous(), w[:, part].contiguous(), None
    if how == "chain" and rank > 0:
        sums = torch.empty(len(x), len(w))
        dist.recv(sums, rank - 1)
    sums = twin.gemm_fp8_part(x, w, sums, "fast")  # from these sums on, or from zero
    if how == "chain" and rank + 1 < ranks:
        dist.send(sums, rank + 1)
    if how == "all-reduce" and ranks > 1:
        dist.all_reduce(sums)
    return sums


def bytes_sent(rank: int, ranks: int, groups: int, dtype: torch.dtype, words: int) -> torch.Tensor:
    """What a rank hands to other ranks for one parameter's gradient, counted where the bytes are handed over."""
    model, order = torch.nn.ParameterList([torch.ones(words, dtype=dtype)]), te.parallel.GradientOrder(groups)
    to_owners, to_all = dist.all_to_all_single, gradient_order.all_gather
    sent = 0

    def all_to_all(out: Any, given: Any, received: list[int], sizes: list[int], group: Any) -> None:
        nonlocal sent
        sent += sum(sizes) - sizes[rank]
        to_owners(out, given, received, sizes, group=group)

    def all_gather(out: Any, piece: Any, group: Any) -> None:
        nonlocal sent
        sent += (ranks - 1) * piece.nbytes
        to_all(out, piece, group=group)

    with patch.object(dist, "all_to_all_single", all_to_all), patch.object(gradient_order, "all_gather", all_gather):
        for _ in order.microbatches(model, groups):
            model[0].float().sum().backward()
    return torch.tensor(sent)
