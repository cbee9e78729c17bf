"""DTensors, on two gloo processes: first values, `FusedAdam` and checkpoints have the bits of what is not sharded."""

import functools
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from shared.bits import assert_same_bits
from shared.processes import free_port, ranks
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import reference as te
from reference.nn.core import init
from reference.support.dtensor import distributed

BF16 = torch.bfloat16
FusedAdam = te.optimizers.FusedAdam
RECIPE = te.DelayedScaling(amax_history_len=4)
# Whole, uneven over two ranks, empty on the second.
SHAPES = ((8, 4), (5, 3), (1, 6), (7,))
CASES: dict[str, Callable[[Any, Path], None]] = {}


def case(function: Callable[[Any, Path], None]) -> Callable[[Any, Path], None]:
    """Run by both ranks, which assert."""
    CASES[function.__name__] = function
    return function


def worker(rank: int, port: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    failed = {}
    for name, function in CASES.items():
        try:
            function(mesh, Path(folder) / name)
        except Exception:
            failed[name] = traceback.format_exc()
    torch.save(failed, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("sharded")
    ranks(worker, (free_port(), str(folder)), 2)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def numbers(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def placed(values: torch.Tensor, mesh: Any, placement: Any) -> Any:
    return distribute_tensor(values, mesh, [placement], src_data_rank=None)


def assert_same(found: Any, expected: torch.Tensor, what: str) -> None:
    assert isinstance(found, DTensor), what
    assert_same_bits(found.full_tensor(), expected, what)


# --- first values ----------------------------------------------------------------------------------------

LAYERS: dict[str, Callable[..., torch.nn.Module]] = {
    "Linear": functools.partial(te.Linear, 32, 48),
    "Linear in parts": functools.partial(te.Linear, 32, 48, parameters_split=("a", "b", "c")),
    "LayerNormLinear": functools.partial(te.LayerNormLinear, 32, 48, zero_centered_gamma=True),
    "LayerNormMLP": functools.partial(te.LayerNormMLP, 32, 64, normalization="RMSNorm", activation="swiglu"),
    "TransformerLayer": functools.partial(te.TransformerLayer, 32, 64, 4),
    "LayerNorm": functools.partial(te.LayerNorm, 33),
    "odd": functools.partial(te.Linear, 3, 5),
}


def reset(model: torch.nn.Module) -> None:
    torch.manual_seed(5)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


@case
def layers_from_meta(mesh: Any, folder: Path) -> None:
    for name, make in LAYERS.items():
        plain = make(params_dtype=BF16, device="cpu")
        reset(plain)
        for empties in (True, False):
            sharded = make(params_dtype=BF16, device="meta")
            fully_shard(sharded, mesh=mesh)
            if empties:
                sharded.to_empty(device="cpu")
            reset(sharded)
            found = dict(sharded.named_parameters())
            assert found.keys() == dict(plain.named_parameters()).keys()
            for key, p in plain.named_parameters():
                assert_same(found[key].detach(), p.detach(), f"{name}.{key}")


@case
def numbers_in_place_of_weights_kept_in_fp8_are_refused(mesh: Any, folder: Path) -> None:
    with te.quantized_model_init():
        layer = te.Linear(32, 48, params_dtype=BF16, device="cpu")
    layer.weight = torch.nn.Parameter(placed(torch.zeros(48, 32, dtype=BF16), mesh, Shard(0)))
    with pytest.raises(NotImplementedError, match=r"weight is a DTensor of numbers in a layer that was made in"):
        layer.reset_parameters()


@case
def tensors_of_any_placement(mesh: Any, folder: Path) -> None:
    for shape in SHAPES:
        for placement in (Shard(0), Shard(len(shape) - 1), Replicate()):
            for dtype in (torch.float32, BF16):
                torch.manual_seed(9)
                expected = init.normal_(torch.empty(shape, dtype=dtype))
                torch.manual_seed(9)
                p = torch.nn.Parameter(placed(torch.zeros(shape, dtype=dtype), mesh, placement))
                assert init.normal_(p) is p
                assert_same(p.detach(), expected, f"{shape} {placement}")


# --- FusedAdam -------------------------------------------------------------------------------------------


def pairs(mesh: Any, dtype: torch.dtype, placement: Any = None) -> tuple[list[torch.nn.Parameter], list[Any]]:
    """The same parameters whole and sharded."""
    plain = [torch.nn.Parameter(numbers(i, shape, dtype)) for i, shape in enumerate(SHAPES)]
    sharded = [torch.nn.Parameter(placed(p.detach().clone(), mesh, placement or Shard(0))) for p in plain]
    return plain, sharded


def train(params: list[Any], optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps with gradients that are drawn whole."""
    for step in steps:
        for i, p in enumerate(params):
            grad = numbers(10 * step + i, tuple(p.shape), p.dtype)
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad
        optimizer.step()


def assert_same_training(plain: Any, sharded: Any) -> None:
    for (p, q), i in zip(zip(plain[0], sharded[0], strict=True), range(9), strict=False):
        assert_same(q.detach(), p.detach(), f"parameter {i}")
        assert plain[1].state[p].keys() == sharded[1].state[q].keys()
        for name, value in plain[1].state[p].items():
            found = sharded[1].state[q][name]
            assert found.placements == q.placements
            if value.dtype == torch.int16:  # which gloo does not gather
                assert_same_bits(found.to_local(), distributed(value, q).to_local(), f"{name} {i}")
            else:
                assert_same(found, value, f"{name} {i}")


@case
def adam_has_the_bits_of_what_is_not_sharded(mesh: Any, folder: Path) -> None:
    halves = {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}
    layouts: list[dict[str, Any]] = [
        *({"master_weights": master} for master in (True, False)),
        {"master_weights": True, "store_param_remainders": True, **halves},
        {"master_weights": True, "capturable": True, **halves},
    ]
    for dtype, layout in ((torch.float32, {}), *((BF16, layout) for layout in layouts)):
        for placement in (Shard(0), Replicate()):
            plain, sharded = pairs(mesh, dtype, placement)
            options = {"lr": 0.1, "weight_decay": 0.1, **layout}
            both = [(params, FusedAdam(params, **options)) for params in (plain, sharded)]
            for params, optimizer in both:
                train(params, optimizer, range(3))
            assert_same_training(*both)


@case
def sgd_has_the_bits_of_what_is_not_sharded(mesh: Any, folder: Path) -> None:
    plain, sharded = pairs(mesh, BF16)
    both = [(params, te.optimizers.FusedSGD(params, 0.1, momentum=0.9)) for params in (plain, sharded)]
    for params, optimizer in both:
        train(params, optimizer, range(3))
    assert_same_training(*both)
    _, again = pairs(mesh, BF16)
    other = te.optimizers.FusedSGD(again, 7.0)
    other.load_state_dict(both[1][1].state_dict())
    for p, q in zip(sharded, again, strict=True):
        buffers = [optimizer.state[x]["momentum_buffer"] for optimizer, x in ((both[1][1], p), (other, q))]
        assert_same_bits(*(x.to_local() for x in buffers))


@case
def what_needs_all_ranks_is_refused(mesh: Any, folder: Path) -> None:
    for kind, options, sentence in (
        (FusedAdam, {"exp_avg_dtype": torch.uint8}, "exp_avg in torch.uint8 of a DTensor is not offered"),
    ):
        _, sharded = pairs(mesh, BF16)
        optimizer = kind(sharded, lr=0.1, **options)
        before = [p.to_local().detach().clone() for p in sharded]
        with pytest.raises(NotImplementedError, match=sentence):
            train(sharded, optimizer, range(1))
        assert not optimizer.state
        for p, expected in zip(sharded, before, strict=True):
            assert torch.equal(p.to_local(), expected)
    plain, sharded = pairs(mesh, BF16)
    columns = placed(numbers(0, SHAPES[0]), mesh, Shard(1))
    for tensors, sentence in (
        ([sharded[0], plain[0]], r"some tensors are DTensors, and some are not \(tensor 1\)"),
        (
            [columns],
            r"tensor 0 is a DTensor \[Shard\(dim=1\)\]; \[Shard\(dim=0\)\], as of fully_shard, or .*, is accepted",
        ),
    ):
        with pytest.raises(NotImplementedError, match=sentence):
            te.optimizers.get_total_norm(tensors)


@case
def state_goes_through_a_distributed_checkpoint(mesh: Any, folder: Path) -> None:
    for flatten in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        plain, sharded = pairs(mesh, BF16)
        _, again = pairs(mesh, BF16)
        models = [torch.nn.ParameterList(params) for params in (plain, sharded, again)]
        optimizers = [FusedAdam(model.parameters(), lr=0.1, master_weights=True) for model in models]
        for params, optimizer in zip((plain, sharded), optimizers, strict=False):
            train(params, optimizer, range(3))
        place = folder / str(flatten)
        saved = get_optimizer_state_dict(models[1], optimizers[1], options=options)
        dcp.save({"optimizer": saved, "model": models[1].state_dict()}, checkpoint_id=place)
        room = {
            "optimizer": get_optimizer_state_dict(models[2], optimizers[2], options=options),
            "model": models[2].state_dict(),
        }
        dcp.load(room, checkpoint_id=place)
        models[2].load_state_dict(room["model"])
        set_optimizer_state_dict(models[2], optimizers[2], room["optimizer"], options=options)
        for params, optimizer in ((plain, optimizers[0]), (again, optimizers[2])):
            train(params, optimizer, range(3, 6))
        assert_same_training((plain, optimizers[0]), (again, optimizers[2]))


@case
def state_goes_through_transformer_engines_example(mesh: Any, folder: Path) -> None:
    """`optimizer.state_dict()` saved, loaded into one's like, and given to `load_state_dict`."""
    plain, sharded = pairs(mesh, BF16)
    _, again = pairs(mesh, BF16)
    optimizers = [FusedAdam(params, lr=0.1, master_weights=True) for params in (plain, sharded, again)]
    for params, optimizer in zip((plain, sharded, again), optimizers, strict=True):
        train(params, optimizer, range(3 if params is not again else 1))
    dcp.save({"optimizer": optimizers[1].state_dict()}, checkpoint_id=folder)
    room = {"optimizer": optimizers[2].state_dict()}
    dcp.load(room, checkpoint_id=folder)
    optimizers[2].load_state_dict(room["optimizer"])
    with torch.no_grad():
        for p, q in zip(sharded, again, strict=True):
            q.copy_(p)
    for params, optimizer in ((plain, optimizers[0]), (again, optimizers[2])):
        train(params, optimizer, range(3, 5))
    assert_same_training((plain, optimizers[0]), (again, optimizers[2]))


@case
def a_full_state_is_distributed(mesh: Any, folder: Path) -> None:
    """By torch, with full_state_dict; FusedAdam itself wants DTensors for DTensors."""
    plain, sharded = pairs(mesh, BF16)
    models = [torch.nn.ParameterList(params) for params in (plain, sharded)]
    optimizers = [FusedAdam(model.parameters(), lr=0.1, master_weights=True) for model in models]
    train(plain, optimizers[0], range(3))
    with pytest.raises(TypeError, match=r"\['exp_avg'\] is no DTensor, its parameter a DTensor \[Shard\(dim=0\)\]"):
        optimizers[1].load_state_dict(optimizers[0].state_dict())
    assert not optimizers[1].state
    full = get_optimizer_state_dict(models[0], optimizers[0])
    set_optimizer_state_dict(models[1], optimizers[1], full, options=StateDictOptions(full_state_dict=True))
    with torch.no_grad():
        for p, q in zip(plain, sharded, strict=True):
            q.copy_(distribute_tensor(p.detach(), mesh, q.placements))
    for params, optimizer in ((plain, optimizers[0]), (sharded, optimizers[1])):
        train(params, optimizer, range(3, 5))
    assert_same_training((plain, optimizers[0]), (sharded, optimizers[1]))


@case
def gradients_of_other_placements_are_refused(mesh: Any, folder: Path) -> None:
    _, sharded = pairs(mesh, torch.float32)
    optimizer = FusedAdam(sharded, lr=0.1)
    train(sharded, optimizer, range(1))
    before = [p.to_local().detach().clone() for p in sharded]
    sharded[1].grad = placed(numbers(0, SHAPES[1]), mesh, Replicate())
    with pytest.raises(TypeError, match=r"parameter 1 of group 0 is a DTensor \[Shard.* and its gradient .*Replicate"):
        optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1
    for p, expected in zip(sharded, before, strict=True):
        assert torch.equal(p.to_local(), expected)


@case
def a_sharded_model_trains_with_the_bits_of_a_whole_one(mesh: Any, folder: Path) -> None:
    """Both ranks see the same tokens, so the mean of their gradients is each one's."""
    for fp8, dtype in ((False, BF16), (True, BF16), (False, torch.float32), (True, torch.float32)):
        torch.manual_seed(3)
        plain = te.LayerNormMLP(32, 64, params_dtype=dtype, device="cpu")
        sharded = te.LayerNormMLP(32, 64, params_dtype=dtype, device="meta")
        fully_shard(sharded, mesh=mesh)
        sharded.to_empty(device="cpu")
        torch.manual_seed(3)
        sharded.reset_parameters()
        both = [(m, FusedAdam(m.parameters(), lr=0.01, master_weights=True)) for m in (plain, sharded)]
        for step in range(3):
            outputs = []
            for module, optimizer in both:
                optimizer.zero_grad()
                with te.autocast(enabled=fp8, recipe=RECIPE):
                    y = module(numbers(step, (24, 32), dtype))
                y.backward(numbers(50 + step, (24, 32), dtype))
                optimizer.step()
                outputs.append(y.detach())
            assert_same_bits(*outputs, f"step {step}")
        assert_same_training(*[(list(m.parameters()), optimizer) for m, optimizer in both])


@pytest.mark.parametrize("name", CASES)
def test_two_ranks(name: str, failures: list[dict[str, str]]) -> None:
    assert not [failed[name] for failed in failures if name in failed], failures[0].get(name) or failures[1][name]
