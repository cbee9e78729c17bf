"""A run of the GPT in FP8 with dropout has one hash, on one process and on gloo ranks in any layout, and goes on in
others."""

import datetime
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from shared.hundred_steps import MODELS, PRECISIONS, hashes, recorded, steps_of
from shared.processes import free_port, ranks
from shared.training_text import corpus

from optimized.training.layout import Layout, Places
from optimized.training.settings import Settings
from optimized.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")
LIMIT = datetime.timedelta(seconds=600)
STEPS = 3
TINY = Settings(
    sequence=16, hidden=32, layers=1, rows=2, steps=4, warmup=2, dropout=0.1, clip=1.0, weight_decay=0.1, accumulate=8
)
WIDE = replace(TINY, hidden=256, rows=1, accumulate=2)  # a rank's part of K is a multiple of what the contract says
LONG = replace(TINY, sequence=512, rows=1, accumulate=2)
BOTH = replace(WIDE, sequence=512)


class Job(NamedTuple):
    """Some steps of runs in a layout, from their checkpoints on if there are any; rank 0 leaves one of each."""

    name: str
    size: Settings
    steps: int
    layout: dict[str, Any]
    precisions: tuple[str, ...] = PRECISIONS


def worker(rank: int, world: int, port: int, jobs: list[Job], path: str) -> None:
    """Each rank leaves its hashes."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=LIMIT)
    found = []
    for name, size, steps, layout, precisions in jobs:
        for precision in precisions:
            trainer = Trainer(replace(size, precision=precision, groups=size.accumulate), corpus(), **layout)
            file = Path(f"{path}.{name}.{precision}")
            if file.exists():
                trainer.load(file)
            dist.barrier()
            found.append(steps_of(trainer, steps))
            trainer.save(file if rank == 0 else None)
            del trainer
            gc.collect()  # layers that live on on one rank would have their scales reduced there alone
    Path(f"{path}.rank{rank}").write_text("\n".join(found))
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(world: int, jobs: list[Job], path: Path) -> dict[str, list[str]]:
    """What all ranks found, by job and precision."""
    ranks(worker, (world, free_port(), jobs, str(path)), world)
    found = {Path(f"{path}.rank{rank}").read_text() for rank in range(world)}
    assert len(found) == 1, "ranks differ"
    lines = iter(found.pop().split("\n"))
    return {job.name: [next(lines) for _ in job.precisions] for job in jobs}


def test_a_run_stops_in_one_layout_and_goes_on_in_another(tmp_path: Path) -> None:
    """Each run begins on two ranks and ends on four. Layers in each recipe that share more: test_tensor_parallel.py."""
    sizes = {"data": (TINY, PRECISIONS), "weights": (WIDE, ("block",)), "tokens": (LONG, ("current",))}
    sizes |= {"FSDP2 to TP": (WIDE, ("delayed",)), "weights and tokens": (BOTH, ("delayed",))}
    first: dict[str, Any] = {"data": {}, "weights": {"tensor": 2}, "tokens": {"context": 2}}
    first |= {"weights and tokens": {"context": 2}}
    first |= {"FSDP2 to TP": {"shard": True}}
    then: dict[str, Any] = {
        "data": {"shard": True},
        "weights": {"tensor": 2, "shard": True},
        "tokens": {"context": 2},
        "FSDP2 to TP": {"tensor": 2},
        "weights and tokens": {"tensor": 2, "context": 2},
    }
    jobs = [Job(name, size, STEPS - 1, first[name], precisions) for name, (size, precisions) in sizes.items()]
    on_ranks(2, jobs, tmp_path / "run")
    jobs = [one._replace(steps=1, layout=then[one.name]) for one in jobs]
    found = on_ranks(4, jobs, tmp_path / "run")
    assert found == {name: hashes(size, STEPS, precisions) for name, (size, precisions) in sizes.items()}


class InParts(torch.nn.Module):
    """A layer of two ranks, which have parts of the columns of `weight`; each has all of `bias`."""

    tp_size = 2

    def partitions(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        return {"weight": (1, (3,))}


def test_a_rank_has_its_parts_of_what_is_shared_and_all_of_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a model and in its optimizer; parts side by side are the whole again."""
    model = torch.nn.ModuleDict({"proj": InParts()})
    weights = ("model/proj.weight", "optimizer/proj.weight/exp_avg")
    whole = {name: torch.randn(4, 6) for name in (*weights, "model/proj.bias", "fp8/proj.weight", "random/cpu")}
    places, found = Places(Layout()), list[dict[str, torch.Tensor]]()
    places.layout, places.tensor = Layout(tensor=2), object()
    for rank in range(2):
        monkeypatch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
        found.append(places.part(model, whole))
    assert all(list(one) == list(whole) for one in found)
    for name, x in whole.items():
        parts = [one[name] for one in found]
        if name in weights:
            assert [part.shape for part in parts] == [(4, 3)] * 2
            assert torch.equal(torch.cat(parts, 1), x)
        else:
            assert all(torch.equal(part, x) for part in parts)


@pytest.mark.slow
def test_a_run_whose_weights_ranks_shared_goes_on_with_rows_of_them(tmp_path: Path) -> None:
    """From TP 2 to FSDP2 on four ranks, which need four groups."""
    size = replace(WIDE, accumulate=4)
    on_ranks(2, [Job("run", size, STEPS - 1, {"tensor": 2})], tmp_path / "run")
    assert on_ranks(4, [Job("run", size, 1, {"shard": True})], tmp_path / "run")["run"] == hashes(size, STEPS)


@pytest.mark.slow
def test_ranks_share_weights_tokens_and_microbatches(tmp_path: Path) -> None:
    """Each of the three at once, on eight ranks, with and without FSDP2; the run began on four."""
    jobs = [Job(name, BOTH, STEPS - 1, {"tensor": 2, "context": 2}) for name in ("DDP", "FSDP2")]
    on_ranks(4, jobs, tmp_path / "run")
    then = [one._replace(steps=1, layout=one.layout | {"shard": one.name == "FSDP2"}) for one in jobs]
    assert on_ranks(8, then, tmp_path / "run") == dict.fromkeys(("DDP", "FSDP2"), hashes(BOTH, STEPS))


@pytest.mark.slow
def test_eight_ranks_have_one_hash_in_any_layout(tmp_path: Path) -> None:
    """Those that a host with eight GPUs has, beside the data parallel ones of the hundred steps."""
    wide = replace(WIDE, hidden=512, heads=8)
    jobs = [
        Job("TP 8", replace(wide, hidden=1024), 2, {"tensor": 8}, ("delayed",)),
        Job("TP 4, DP 2", replace(wide, accumulate=4), 2, {"tensor": 4}, ("delayed",)),
        Job("TP 2, DP 4", replace(wide, accumulate=4), 2, {"tensor": 2}, ("block",)),
        Job("CP 2, DP 4", replace(LONG, accumulate=4), 2, {"context": 2}, ("current",)),
        Job("CP 2, FSDP2", replace(LONG, accumulate=4), 2, {"context": 2, "shard": True}, ("delayed",)),
    ]
    expected = {one.name: hashes(one.size, 2, one.precisions) for one in jobs}
    assert on_ranks(8, jobs, tmp_path / "run") == expected


@pytest.mark.slow
def test_layers_that_are_recomputed_may_be_divided(tmp_path: Path) -> None:
    jobs = [
        Job("data", replace(TINY, recompute=True), 2, {"shard": True}),
        Job("weights", replace(WIDE, recompute=True), 2, {"tensor": 2}),
        Job("tokens", replace(LONG, recompute=True), 2, {"context": 2}),
    ]
    assert on_ranks(2, jobs, tmp_path / "run") == {one.name: hashes(one.size, 2) for one in jobs}


FAMILIES: dict[str, dict[int, list[dict[str, Any]]]] = {
    "data": {world: [{}, {"shard": True}] for world in (2, 3, 4, 8)},
    "weights": {
        2: [{}, {"shard": True}, {"tensor": 2}],
        4: [{"tensor": 4}, {"tensor": 2}, {"tensor": 2, "shard": True}],
    },
    "tokens": {2: [{}, {"shard": True}, {"context": 2}], 4: [{"context": 2}, {"context": 2, "shard": True}]},
}
"""By the number of ranks the layouts in which each of `MODELS` is trained."""


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hundred_steps_have_one_hash_in_any_layout(family: str, tmp_path: Path) -> None:
    size = MODELS[family]
    expected = recorded(family)
    assert hashes(size, size.steps) == expected
    for world, layouts in FAMILIES[family].items():
        jobs = [Job(str(layout), size, size.steps, layout) for layout in layouts]
        for layout, found in on_ranks(world, jobs, tmp_path / f"run{world}").items():
            assert found == expected, (world, layout)


@pytest.mark.parametrize(
    ("layout", "more", "world", "sentence"),
    [
        ({"tensor": 2, "context": 2}, {}, 6, "6 ranks in groups of 4; a multiple of 4 is accepted"),
        ({"tensor": 2, "context": 2}, {}, 4, "sequence=16 with context=2; a multiple of 512 is accepted"),
        ({"tensor": 0}, {}, 1, "tensor=0; an int from 1 is accepted"),
        ({"context": 2}, {}, 3, "3 ranks in groups of 2; a multiple of 2 is accepted"),
        ({"context": 2}, {}, 2, "sequence=16 with context=2; a multiple of 512 is accepted"),
        (
            {"tensor": 2},
            {"precision": "mxfp8"},
            2,
            "precision='mxfp8' with ranks that share a microbatch; bf16, delayed",
        ),
        ({"tensor": 4}, {}, 4, "heads=2 with tensor=4; a multiple of 4 is accepted"),
        ({"tensor": 2}, {"precision": "delayed"}, 2, "layers' 32 columns of proj go to the ranks in multiples of 32;"),
        (
            {"tensor": 2},
            {"precision": "current", "hidden": 128},
            2,
            "layers' 384 rows of QKV go to the ranks in multiples",
        ),
    ],
)
def test_layouts_that_cannot_be_are_refused_in_a_sentence(
    layout: dict[str, Any], more: dict[str, Any], world: int, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        Layout(**layout).check(replace(TINY, **more), world)
