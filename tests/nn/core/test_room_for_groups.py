"""What parallel layers will stand on: groups in plans, collectives on tapes, sizes on the device. Each with a toy."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits
from shared.processes import free_port, ranks, run


def _train(rank: int, *arguments: Any) -> None:
    from shared.parallel_toys import train

    train(rank, *arguments)


def _alone(rank: int, folder: str, world: int, steps: int) -> None:
    from shared.parallel_toys import alone

    torch.save(alone(world, steps), f"{folder}/alone.pt")


def check_ranks(folder: Path, world: int, backend: str, steps: int, compiled: bool = False) -> None:
    """Each rank finds the words of one process."""
    ranks(_train, (free_port(), world, backend, str(folder), compiled), world)
    ranks(_alone, (str(folder), world, steps), 1)
    expected = torch.load(folder / "alone.pt")
    for rank in range(world):
        for i, (a, b) in enumerate(zip(torch.load(folder / f"{rank}.pt"), expected[rank], strict=True)):
            assert_same_bits(a, b, f"rank {rank}, tensor {i}")


@pytest.mark.parametrize(("world", "compiled"), [(3, False), (1, True)])
def test_a_plan_names_a_group_and_a_collective_is_an_op(world: int, compiled: bool, tmp_path: Path) -> None:
    """A row-parallel layer on gloo, in eager mode and compiled into one graph: the sum over ranks is in their order."""
    check_ranks(tmp_path, world, "gloo", 3, compiled)


@pytest.mark.gpu
@pytest.mark.gpus(2)
def test_a_collective_is_played_on_gpus(tmp_path: Path) -> None:
    """The same on two GPUs, played from tapes and then from a CUDA graph."""
    check_ranks(tmp_path, 2, "nccl", 8)


_DRY = """
import json
import torch
from shared.dry_gpu import DryGpu
import optimized, reference as te
from shared import parallel_toys as toys
from optimized.tapes import call_groups

BF16 = torch.bfloat16
toys.DRY = True
with DryGpu() as gpu:
    gpu.tapes()
    layer = toys.{factory}(optimized)(64, 32, bias=False, params_dtype=BF16)
    x = torch.empty(48, 64, dtype=BF16, device="cuda").requires_grad_()
    extra = {extra}
    steps = []
    for step in range(6):
        gpu.lines.clear()
        toys.CALLS.clear()
        with te.autocast(recipe=te.DelayedScaling()):
            y = layer(x, extra)
        y.backward(torch.empty_like(y))
        layer.zero_grad(set_to_none=True)
        x.grad = y = None
        groups = list(call_groups._groups.values())
        steps.append([gpu.lines.copy(), len(toys.CALLS), [group.usable for group in groups]])
    collected = [sorted(one.kernel for one in kernels) for kernels in gpu.collected]
print(json.dumps([steps, collected]))
"""


def dry(factory: str, extra: str) -> Any:
    """Steps of a toy on a GPU that only takes notes: lines, collectives that ran, whether calls are played."""
    done = run(_DRY.format(factory=factory, extra=extra))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_tape_contains_a_collective() -> None:
    """It runs between its GEMM and what follows, once a step; the dry pass of the compiler does not run it."""
    steps, collected = dry("parallel_rows", '"a group"')
    (first, calls_of_first, _), *_, (last, calls_of_last, usable) = steps
    assert all(usable)
    assert calls_of_first == 1  # and none in the dry pass, which came before
    assert any("gemm_fp8" in one for one in collected)
    assert calls_of_last == 0
    played = [line.split()[1].split(".")[0] for line in last if line.startswith("again ")]
    assert played.count("Collective") == 1
    at = played.index("Collective")
    assert played[at - 1] == "gemm_fp8"
    assert "again Collective _sum" in last
    kernels = [line.split(".")[0] for line in first if "." in line.split()[0]]
    assert [one for one in played if one != "Collective"] == kernels


def test_launches_depend_on_no_size_that_lies_on_the_device() -> None:
    """The tokens of each expert are numbers of a tensor: here they have no values at all, and steps are played."""
    steps, _ = dry("by_experts", 'torch.empty(4, dtype=torch.int64, device="cuda")')
    *_, (last, _, usable) = steps
    assert all(usable)
    launched = [line for line in last if ".scaled [" in line]
    assert len(launched) == 2
    assert all(line.startswith("again ") for line in launched)


def test_the_definition_reads_sizes() -> None:
    """On a CPU the same op takes them as they are."""
    done = run(
        "import torch; from shared import parallel_toys as toys\n"
        "x = torch.ones(6, 2)\n"
        "for sizes in ([1, 2, 3], [0, 0, 6], [6, 0, 0]):\n"
        "    print(toys.twin.toy_scaled(x, torch.tensor(sizes))[:, 0].tolist())\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "[0.0, 1.0, 1.0, 2.0, 2.0, 2.0]",
        "[2.0, 2.0, 2.0, 2.0, 2.0, 2.0]",
        "[0.0, 0.0, 0.0, 0.0, 0.0, 0.0]",
    ]
