"""FSDP2 of weights kept in FP8, over gloo ranks: codes, scales, masters and FP8 state are those of one process."""

import contextlib
import datetime
import functools
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from shared.bits import assert_same_bits
from shared.device_ranks import start
from shared.processes import free_port, ranks
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import reference as te
from reference.float8.float8_shard import ShardedWeight
from reference.parallel import GradientOrder, tree_reduce_scatter
from reference.recipe import Float8BlockScaling, Float8CurrentScaling

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
GROUPS, EACH = 5, 1
LIMIT = datetime.timedelta(seconds=60)
RECIPES: dict[str, Any] = {
    "delayed": lambda: te.DelayedScaling(amax_history_len=2),
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
}


class Model(torch.nn.Module):
    """Weights whose rows are shared unequally, and cut inside of squares of 128 × 128; of the last one's 16 rows the
    fifth of five ranks has none."""

    def __init__(self, recipe: str, device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(0)
        # Of an initial value that was preserved a master starts; not from meta, where nothing was drawn.
        with te.quantized_model_init(recipe=RECIPES[recipe](), preserve_high_precision_init_val=True):
            self.first = te.LayerNormMLP(160, 336, params_dtype=BF16, device=device)
            self.last = te.Linear(160, 272, params_dtype=BF16, device=device)
            self.small = te.Linear(272, 16, params_dtype=BF16, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small(self.last(self.first(x))).float().square().mean()


def sharded(recipe: str, first: str, shape: tuple[int, ...] = (), device: str = "cpu") -> torch.nn.Module:
    """`first`: the device, or "meta"; `shape`: of the mesh, [ranks] if it is not given."""
    model = Model(recipe, first)
    names = ("replicate", "shard")[-len(shape or (1,)) :]
    mesh = init_device_mesh(device, shape or (dist.get_world_size(),), mesh_dim_names=names)
    for module in (model.first, model.last, model):  # `small` is the root's
        fully_shard(module, mesh=mesh)
    if first == "meta":
        model.to_empty(device=device)
        torch.manual_seed(0)
        model.first.reset_parameters()
        model.last.reset_parameters()
        model.small.reset_parameters()
    return model


def whole(x: torch.Tensor) -> torch.Tensor:
    """All of a DTensor, as bytes: gloo sends no FP8. Of replicas the first one's."""
    local = (x.to_local() if isinstance(x, DTensor) else x).detach().cpu().contiguous()
    local = local.view(torch.uint8) if local.dtype.itemsize == 1 else local
    if not isinstance(x, DTensor):
        return local.clone()
    mesh = x.device_mesh
    group = mesh.get_group(mesh.ndim - 1)
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, local, group=group)
    return torch.cat([one for one in found if one.numel()])


def words(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Codes, scales, packed FP8 state, gradients and the optimizer's state."""
    found = {name: whole(x) for name, x in model.state_dict().items()}
    for name, p in model.named_parameters():
        found[f"{name} grad"] = whole(p.grad)
        found |= {f"{name} {part}": whole(x) for part, x in optimizer.state[p].items() if isinstance(x, torch.Tensor)}
    return found


def steps(
    model: Any, recipe: str, numbers: range, start: Any = None, end: Any = None, copied: bool = False
) -> list[dict[str, torch.Tensor]]:
    """The words after each step; from the distributed checkpoint `start` on, to one at `end`.

    `copied`: backward reads copies of what forward has saved, made by a hook when it was.
    """
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x)
    order = GradientOrder(GROUPS)
    alone, device = order.ranks == 1, model.small.bias.device
    if not alone:
        tree_reduce_scatter(model, order)
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=0.01, weight_decay=0.1, master_weights=True)
    if start is not None:
        room = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(room, checkpoint_id=start, no_dist=alone)
        set_state_dict(model, optimizer, model_state_dict=room["model"], optim_state_dict=room["optimizer"])
    found = []
    for step in numbers:
        optimizer.zero_grad()
        for number in order.microbatches(model, EACH * GROUPS):
            seeds = torch.Generator().manual_seed(100 * step + number)
            x = torch.randn(16, 160, generator=seeds).to(device, BF16) * (1 + number)
            with te.autocast(recipe=RECIPES[recipe]()), hooks if copied else contextlib.nullcontext():
                total = model(x)
            (total / EACH).backward()
        optimizer.step()
        found.append(words(model, optimizer))
    if end is not None:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(state, checkpoint_id=end, no_dist=alone)
    return found


def looked_at() -> None:
    """What a rank has, what it sends, and what is refused."""
    world, rank = dist.get_world_size(), dist.get_rank()
    model = sharded("current", "cpu")
    rows = model.last.weight.to_local()
    assert isinstance(rows, ShardedWeight)
    with pytest.raises(RuntimeError, match="is written before its ranks are known"), torch.no_grad():
        rows.copy_(torch.ones(rows.shape, dtype=BF16))
    with pytest.raises(RuntimeError, match="a layer runs with the rows that one rank has of a weight kept in FP8"):
        rows.operand(False)
    own = -(-272 // world)
    (sent,), _ = rows.fsdp_pre_all_gather(model.last.weight.device_mesh, torch.Size(), (), model.last, None)
    assert sent.nbytes == own * 160  # one byte a number
    assert len(rows) == max(0, min(own, 272 - rank * own))
    before = Model("current").last.weight.numbers()
    assert_same_bits(rows.numbers(), before[rank * own : rank * own + len(rows)])
    model.last.weight.grad = torch.zeros_like(model.last.weight)
    for kind in (te.optimizers.FusedSGD, te.optimizers.Adafactor):
        with pytest.raises(ValueError, match="is kept in FP8"):
            kind([model.last.weight], 0.1).step()


def worker(
    rank: int, world: int, starts: dict[str, str], shape: tuple[int, ...], device: str, port: int, folder: str
) -> None:
    start(rank, world, port, device, LIMIT)
    failed, found = [], {}
    for recipe in RECIPES:
        for first in (device, "meta") if not shape else (device,):
            try:
                end = str(Path(folder, "ranks", recipe)) if first == device else None
                numbers, model = range(1, 3) if starts else range(2), sharded(recipe, first, shape, device)
                found[recipe, first] = steps(model, recipe, numbers, starts.get(recipe), end)
            except Exception:
                failed.append(f"{recipe} from {first}: {traceback.format_exc()}")
    if not shape and device == "cpu":
        try:
            for recipe in RECIPES if world == 2 else ():
                found[recipe, "copied"] = steps(sharded(recipe, "cpu"), recipe, range(2), copied=True)
            looked_at()
        except Exception:
            failed.append(traceback.format_exc())
    torch.save((failed, found), Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@functools.cache
def of_one(recipe: str, device: str) -> list[dict[str, torch.Tensor]]:
    """The words of one process after each of four steps."""
    return steps(Model(recipe, device), recipe, range(4))


def check(world: int, folder: Path, resumed: bool, shape: tuple[int, ...] = (), device: str = "cpu") -> None:
    """Two steps on ranks, of one process's run of four; `resumed`: after its first. A process goes on after them.

    `shape`: of the mesh; `device`: "cpu", over gloo, or "cuda", over NCCL.
    """
    starts = {}
    for recipe in RECIPES:
        if resumed:
            starts[recipe] = str(folder / "alone" / recipe)
            steps(Model(recipe, device), recipe, range(1), None, starts[recipe])
    ranks(worker, (world, starts, shape, device, free_port(), str(folder)), world)
    first = 1 if resumed else 0
    for rank in range(world):
        failed, found = torch.load(folder / f"{rank}.pt", map_location="cpu")
        assert not failed, "\n".join(failed)
        for recipe, start_at in found:
            for step, one in enumerate(found[recipe, start_at], 0 if start_at == "copied" else first):
                same(
                    one, of_one(recipe, device)[step], f"rank {rank} of {world}, {recipe} from {start_at}, step {step}"
                )
    for recipe in RECIPES:
        (one,) = steps(Model(recipe, device), recipe, range(first + 2, first + 3), str(folder / "ranks" / recipe))
        same(one, of_one(recipe, device)[first + 2], f"one process after {world}, {recipe}")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], where: str) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert_same_bits(other[name], one[name], f"{where}, {name}")


def test_two_ranks_go_on_with_the_words_of_one_process_and_it_with_theirs(tmp_path: Path) -> None:
    check(2, tmp_path, resumed=True)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3, 5])
def test_ranks_have_the_words_of_one_process(world: int, tmp_path: Path) -> None:
    check(world, tmp_path, resumed=world > 1)


@pytest.mark.slow
def test_replicas_of_shards_go_on_with_the_words_of_one_process_and_it_with_theirs(tmp_path: Path) -> None:
    check(4, tmp_path, resumed=True, shape=(2, 2))


@pytest.mark.gpu
@pytest.mark.gpus(2)
def test_two_gpus_go_on_with_the_words_of_one_and_it_with_theirs(tmp_path: Path) -> None:
    import optimized  # noqa: F401  (registers the CUDA implementations)

    check(2, tmp_path, resumed=True, device="cuda")
