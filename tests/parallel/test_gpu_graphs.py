"""On two GPUs, under DDP with the written order: layers are played from tapes, and captured ones have their words."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from shared.device_ranks import start
from shared.processes import free_port, ranks
from torch.nn.parallel import DistributedDataParallel

import optimized as te
from optimized.tapes import call_groups

STEPS, HIDDEN = 6, 256
RECIPES = {"delayed": te.DelayedScaling(amax_history_len=4), "block": te.recipe.Float8BlockScaling()}


def trained(recipe: te.recipe.Recipe, captured: bool) -> list[torch.Tensor]:
    """A model's parameters and gradients after some steps of two microbatches, one on each rank."""
    torch.manual_seed(0)
    layers = tuple(te.LayerNormMLP(HIDDEN, 2 * HIDDEN, params_dtype=torch.bfloat16).cuda() for _ in range(2))
    numbers = torch.Generator().manual_seed(dist.get_rank())
    xs = [torch.randn(64, HIDDEN, generator=numbers).bfloat16().cuda().requires_grad_() for _ in range(STEPS)]
    if captured:  # as PyTorch says: before DDP
        samples = tuple((xs[0].detach().clone().requires_grad_(),) for _ in layers)
        layers = te.make_graphed_callables(layers, samples, enabled=True, recipe=recipe)
    model = torch.nn.Sequential(*layers)
    parallel, order = DistributedDataParallel(model), te.parallel.GradientOrder(2)
    parallel.register_comm_hook(order, te.parallel.tree_hook)
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-2)
    for x in xs:
        misses = call_groups.counts.misses
        optimizer.zero_grad()
        for _ in order.microbatches(parallel, 2):
            with te.autocast(enabled=True, recipe=recipe):
                y = parallel(x)
            y.float().square().mean().backward()
        optimizer.step()
    assert captured or call_groups.counts.misses == misses, "the last step measured or recorded a call"
    return [x.detach().clone() for p in model.parameters() for x in (p, p.grad) if x is not None]


def worker(rank: int, port: int, path: str) -> None:
    start(rank, 2, port, "cuda")
    found = {}
    for name, recipe in RECIPES.items():
        eager, captured = trained(recipe, False), trained(recipe, True)
        found[name] = [torch.equal(a, b) for a, b in zip(eager, captured, strict=True)]
        assert all(x.isfinite().all() and x.any() for x in captured)
    torch.save(found, f"{path}.{rank}")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.gpus(2)
def test_captured_layers_have_their_words_under_ddp(tmp_path: Path) -> None:
    ranks(worker, (free_port(), str(tmp_path / "found")), 2)
    for rank in range(2):
        for name, equal in torch.load(f"{tmp_path}/found.{rank}").items():
            assert all(equal), (rank, name, equal)
