"""FSDP2 over gloo ranks: gradients, norms, optimizers' steps and FP8 state are those of one process, in every word."""

import datetime
import gc
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from shared.bits import assert_same_bits
from shared.device_ranks import start
from shared.processes import free_port, ranks
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import reference as te
from reference.parallel import GradientOrder, tree_reduce_scatter
from reference.recipe import Float8BlockScaling, Float8CurrentScaling

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
GROUPS, STEPS, EACH = 3, 2, 2  # two microbatches a group
CLIP = 0.5
LIMIT = datetime.timedelta(seconds=60)
RECIPES: dict[str, Any] = {
    "none": lambda: None,
    "delayed": lambda: te.DelayedScaling(amax_history_len=2),
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
}


class Model(torch.nn.Module):
    """Layers whose weights have rows that so many ranks do not divide, and a vector."""

    def __init__(self, dtype: torch.dtype, device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = te.LayerNormMLP(32, 80, params_dtype=dtype, device=device)
        self.last = te.Linear(32, 48, params_dtype=dtype, device=device)
        self.odd = torch.nn.Parameter(torch.randn(1, 48).to(device, dtype))  # of which one rank has all
        self.large = torch.nn.Parameter(torch.randn(71, 1500).to(device, dtype))  # several chunks of `twin::grad_norm`

    def forward(self, x: torch.Tensor, unused: bool = False, twice: bool = False) -> torch.Tensor:
        h = self.first(self.first(x)) if twice else self.first(x)
        y = self.last(h).float()
        total = (y[:, None] * self.odd.float()).sum()
        return total if unused else total + (y.mean() * self.large.float()).sum()


def sharded(model: torch.nn.Module, shape: tuple[int, ...] = (), **options: Any) -> torch.nn.Module:
    """`shape`: of the mesh; [ranks] if it is not given."""
    names = ("replicate", "shard")[-len(shape or (1,)) :]
    mesh = init_device_mesh(model.odd.device.type, shape or (dist.get_world_size(),), mesh_dim_names=names)
    for module in (model.first, model.last, model):
        fully_shard(module, mesh=mesh, **options)
    return model


def inputs(step: int, number: int, dtype: torch.dtype) -> torch.Tensor:
    words = torch.Generator().manual_seed(100 * step + number)
    return torch.randn(16, 32, generator=words).to(dtype) * (1 + number)


def whole(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def words(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scales: bool) -> dict[str, torch.Tensor]:
    """Parameters, gradients, the optimizer's state and, where a recipe has one, FP8 state."""
    found = {}
    for name, p in model.named_parameters():
        found |= {name: whole(p), f"{name} grad": whole(p.grad)}
        for part, x in optimizer.state[p].items():
            if isinstance(x, torch.Tensor):
                found[f"{name} {part}"] = whole(x)
    for name, module in model.named_modules():
        for key, meta in getattr(module, "fp8_meta", {}).items():
            if scales and hasattr(meta, "scale"):
                found |= {f"{name} {key}": meta.scale.clone(), f"{name} {key} history": meta.amax_history.clone()}
    return found


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return te.optimizers.FusedAdam(model.parameters(), lr=0.01, weight_decay=0.1, master_weights=True)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return te.optimizers.FusedSGD(model.parameters(), 0.01, momentum=0.9)


def adafactor(model: torch.nn.Module) -> torch.optim.Optimizer:
    return te.optimizers.Adafactor(model.parameters(), 0.01)


SAVED, SAVED_GROUPS = ("delayed", "adafactor", "current"), 3


class Case(NamedTuple):
    dtype: torch.dtype
    recipe: str
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer]
    computes: torch.dtype | None = None  # in which weights are gathered


CASES = {
    "delayed": Case(BF16, "delayed", adam),
    "adafactor": Case(BF16, "current", adafactor),
    "mixed": Case(F32, "none", adam, BF16),
    "fp16": Case(F16, "none", adam),
    "fp32": Case(F32, "block", sgd),
    "current": Case(BF16, "current", sgd),
    "blocks": Case(BF16, "block", adam),
}


def steps(
    model: torch.nn.Module,
    order: GradientOrder,
    case: Case,
    numbers: range = range(STEPS),
    start: Any = None,
    end: Any = None,
) -> Iterator[dict[str, torch.Tensor]]:
    """The words after each step; from the distributed checkpoint `start` on, to one at `end`."""
    optimizer, recipe = case.optimizer(model), RECIPES[case.recipe]()
    alone, device = order.ranks == 1, model.odd.device
    if start is not None:
        room = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(room, checkpoint_id=start, no_dist=alone)
        set_state_dict(model, optimizer, model_state_dict=room["model"], optim_state_dict=room["optimizer"])
    for step in numbers:
        optimizer.zero_grad()
        for number in order.microbatches(model, EACH * order.groups):
            x = inputs(step, number, case.computes or case.dtype).to(device)
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                if case.computes and not isinstance(model, FSDPModule):
                    cast = {name: p.to(case.computes) for name, p in model.named_parameters()}
                    total = torch.func.functional_call(model, cast, (x,))
                else:
                    total = model(x)
            (total / EACH).backward()
        largest = te.optimizers.get_total_norm([p.grad for p in model.parameters()], float("inf"))
        norm = te.optimizers.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        assert CLIP < norm < torch.inf  # so that there is something to clip
        yield {**words(model, optimizer, case.recipe == "delayed"), "norm": norm, "largest": largest}
    if end is not None:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(state, checkpoint_id=end, no_dist=alone)


def alone(name: str, groups: int, *more: Any, device: str = "cpu") -> list[dict[str, torch.Tensor]]:
    return list(steps(Model(CASES[name].dtype, device), GradientOrder(groups), CASES[name], *more))


# --- what ranks do ---------------------------------------------------------------------------------------


def trained(
    name: str, groups: int, *more: Any, shape: tuple[int, ...] = (), device: str = "cpu"
) -> list[dict[str, torch.Tensor]]:
    case, order = CASES[name], GradientOrder(groups)
    policy = MixedPrecisionPolicy(param_dtype=case.computes, reduce_dtype=case.computes and case.dtype)
    model = sharded(Model(case.dtype, device), shape, mp_policy=policy)
    tree_reduce_scatter(model, order)
    return list(steps(model, order, case, *more))


def one_step(model: torch.nn.Module, dtype: torch.dtype = BF16, forward: Any = None, attach: bool = True) -> None:
    order = GradientOrder(GROUPS)
    if attach:
        tree_reduce_scatter(model, order)
    for number in order.microbatches(model, EACH * GROUPS):
        x = inputs(0, number, dtype)
        (forward(model, x) if forward else model(x)).backward()


def outside(model: torch.nn.Module) -> None:
    tree_reduce_scatter(model, GradientOrder(GROUPS))
    model(inputs(0, 0, BF16)).backward()


def left_inside_a_group(model: torch.nn.Module) -> None:
    order = GradientOrder(GROUPS)
    tree_reduce_scatter(model, order)
    for number in order.microbatches(model, EACH * GROUPS):
        model(inputs(0, number, BF16)).backward()
        break
    model.zero_grad()
    one_step(model)


def trained_later() -> None:
    """A parameter that fully_shard leaves alone, and that trains after the order was given."""
    model, order = Model(BF16), GradientOrder(GROUPS)
    model.odd.requires_grad_(False)
    fully_shard(model, ignored_params={model.odd})
    tree_reduce_scatter(model, order)
    model.odd.requires_grad_(True)
    next(order.microbatches(model, GROUPS))


def not_a_number() -> None:
    """A norm that is NaN is the one word that `twin::grad_norm` has for it, whatever the sign of a NaN."""
    x = torch.tensor([[1.0], [-torch.nan], [2.0]])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    norm = te.optimizers.get_total_norm([distribute_tensor(x, mesh, [Shard(0)])])
    assert norm.view(torch.int32) == te.optimizers.get_total_norm([x]).view(torch.int32)


def on_two_dimensions() -> torch.nn.Module:
    model = Model(BF16)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("a", "b")))
    return model


def with_one_left_out() -> torch.nn.Module:
    model = Model(BF16)
    fully_shard(model, ignored_params={model.odd})
    return model


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "not attached": (
        lambda: one_step(sharded(Model(BF16)), attach=False),
        RuntimeError,
        "modules of fully_shard reduce gradients in an order of their own; te.parallel.tree_reduce_scatter",
    ),
    "not sharded": (lambda: one_step(Model(BF16)), ValueError, "no module of the model was given to fully_shard"),
    "another dtype": (
        lambda: one_step(sharded(Model(F32), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))),
        TypeError,
        "are reduced in torch.bfloat16, and .grad is torch.float32, in which groups are added",
    ),
    "an unused parameter": (
        lambda: one_step(sharded(Model(BF16)), forward=lambda model, x: model(x, unused=True)),
        RuntimeError,
        "one has no gradient in a group. Under fully_shard each parameter that trains must have one.",
    ),
    "twice": (
        lambda: one_step(sharded(Model(BF16)), forward=lambda model, x: model(x, twice=True)),
        RuntimeError,
        "are reduced 2 times in 1 groups of microbatches; once in each is accepted.",
    ),
    "outside": (lambda: outside(sharded(Model(BF16))), RuntimeError, "a backward outside of the loop of"),
    "two dimensions": (
        lambda: one_step(on_two_dimensions()),
        NotImplementedError,
        ", which divides nothing; several ranks in the second dimension, or DistributedDataParallel, are accepted.",
    ),
    "left out": (lambda: one_step(with_one_left_out()), ValueError, "odd is not sharded, so that its gradient is that"),
    "left out, and trained later": (trained_later, ValueError, "GradientOrder: odd is not sharded, so that"),
    "left inside a group": (
        lambda: left_inside_a_group(sharded(Model(BF16))),
        RuntimeError,
        "the loop of an earlier step was left inside a group of microbatches, and fully_shard keeps its gradients",
    ),
}


def refusals() -> dict[str, str]:
    """What is wrong about each."""
    found = {}
    for name, (work, error, sentence) in REFUSED.items():
        try:
            work()
            found[name] = "nothing was refused"
        except error as one:
            if sentence not in str(one):
                found[name] = str(one)
        except Exception:
            found[name] = traceback.format_exc()
    return found


def worker(
    rank: int,
    world: int,
    runs: list[tuple[str, int]],
    refused: bool,
    shape: tuple[int, ...],
    device: str,
    port: int,
    folder: str,
) -> None:
    start(rank, world, port, device, LIMIT)
    failed, found = {}, {}
    gc.freeze()  # what imports have left: collections below need not look at it
    for run in runs:
        try:
            found[run] = trained(*run, shape=shape, device=device)
        except Exception:
            failed[str(run)] = traceback.format_exc()
        gc.collect()  # a module that is alive has scales to update, on all ranks or on none
    for name in SAVED:
        if Path(folder, "first", name).exists():
            try:
                names = [str(Path(folder, one, name)) for one in ("first", "second")]
                found[name, "second"] = trained(name, SAVED_GROUPS, range(1, 2), *names, shape=shape, device=device)
            except Exception:
                failed[f"saved {name}"] = traceback.format_exc()
            gc.collect()
    if refused:
        failed |= refusals()
        not_a_number()
    torch.save((failed, found), Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def check(
    world: int,
    runs: list[tuple[str, int]],
    folder: Path,
    saved: Sequence[str] = (),
    refused: bool = False,
    shape: tuple[int, ...] = (),
    device: str = "cpu",
) -> None:
    """Each run, a case and its groups, on so many ranks; `saved`: their second step on ranks, the others in one.

    `shape`: of the mesh; `device`: "cpu", over gloo, or "cuda", over NCCL.
    """
    expected: dict[Any, Any] = {run: alone(*run, device=device) for run in runs}
    for name in saved:
        of_steps = alone(name, SAVED_GROUPS, range(3), device=device)
        alone(name, SAVED_GROUPS, range(1), None, str(folder / "first" / name), device=device)
        expected[name, "second"] = of_steps[1:2]
        expected[name, "third"] = of_steps[2:]
    ranks(worker, (world, runs, refused, shape, device, free_port(), str(folder)), world)
    third = {
        (name, "third"): alone(name, SAVED_GROUPS, range(2, 3), str(folder / "second" / name), device=device)
        for name in saved
    }
    for rank in range(world):
        failed, found = torch.load(folder / f"{rank}.pt", map_location="cpu")
        assert not failed, "\n".join(f"{name}: {what}" for name, what in failed.items())
        found |= third
        assert found.keys() == expected.keys()
        for key, of_steps in found.items():
            for step, (one, other) in enumerate(zip(of_steps, expected[key], strict=True)):
                assert one.keys() == other.keys()
                for name in one:
                    assert_same_bits(other[name], one[name], f"rank {rank} of {world}, {key}, step {step}, {name}")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_two_ranks_have_the_words_of_one_process(tmp_path: Path) -> None:
    """Of which one has a group, and runs another's beside it."""
    check(2, [("mixed", 2)], tmp_path, ["delayed"], refused=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_ranks_have_the_words_of_one_process(world: int, tmp_path: Path) -> None:
    check(
        world, [(name, groups) for name in CASES for groups in sorted({8, world})], tmp_path, SAVED if world < 4 else ()
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_replicas_of_shards_have_the_words_of_one_process(tmp_path: Path) -> None:
    """Two replicas of two shards; four ranks have six groups, so that two of them have two."""
    check(4, [("adafactor", 4), ("mixed", 6)], tmp_path, shape=(2, 2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (2, 3)])
def test_any_replicas_of_shards_have_the_words_of_one_process(shape: tuple[int, int], tmp_path: Path) -> None:
    world = shape[0] * shape[1]
    check(world, [(name, groups) for name in CASES for groups in sorted({8, world})], tmp_path, shape=shape)


@pytest.mark.gpu
@pytest.mark.gpus(2)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_two_gpus_have_the_words_of_one(tmp_path: Path) -> None:
    import optimized  # noqa: F401  (registers the CUDA implementations)

    runs = [("delayed", 2), ("current", 3), ("blocks", 2), ("fp32", 2), ("mixed", 3), ("adafactor", 2), ("fp16", 3)]
    check(2, runs, tmp_path, ["delayed"], device="cuda")
