"""A step recorded on a GPU replays on the CPU with the same bits, whatever the GPU had replayed before."""

import copy
from pathlib import Path

import pytest
import torch
from shared.recorded_steps import MODELS, RECIPES, given, made, recorded, replayed, step

import optimized  # noqa: F401  (registers the CUDA implementations)
import reference as te
from reference.inspect.recorded_step.digest import digest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_the_gpu_replays_on_the_cpu(name: str, recipe: str, tmp_path: Path, same_bits) -> None:
    """After steps that were replayed from tapes; the recorded step has the bits of one that is not recorded."""
    model = made(name, "cuda")
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
    for _ in range(3):
        step(model, given("cuda"), RECIPES[recipe], optimizer)
        model.zero_grad()
    alone, path = copy.deepcopy(model), tmp_path / "step.safetensors"
    torch.manual_seed(1)
    expected = step(alone, given("cuda"), RECIPES[recipe])
    torch.manual_seed(1)
    x = given("cuda")
    with te.record(model, path, optimizer):
        y = step(model, x, RECIPES[recipe], optimizer)
    same_bits(y, expected, "y")

    recording, result = replayed(path)
    assert result.equal, result.differences[0]
    assert result.ended is None
    assert result.ops == sum(op.kind != "fed" for op in recording.ops) >= 6
    assert recording.about["provenance"]["gpu"] == torch.cuda.get_device_name()
    assert all(op.phase in ("forward", "backward") for op in recording.ops if op.name.startswith("twin::gemm"))
    assert any(op.phase == "backward" and op.kind == "twin" for op in recording.ops)


def test_whole_outputs_of_the_gpu(tmp_path: Path) -> None:
    model = made("TransformerLayer", "cuda")
    recorded(tmp_path / "a", model, RECIPES["delayed"], device="cuda", ops="outputs")
    _, result = replayed(tmp_path / "a")
    assert result.equal, result.differences[0]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64]
)
@pytest.mark.parametrize("count", [1, 7, 70001, (1 << 24) + 12345])
def test_a_gpu_computes_the_same_digest(dtype: torch.dtype, count: int) -> None:
    """Of any words, NaNs of any bits among them."""
    x = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    assert torch.equal(digest(x.cuda()).cpu(), digest(x))
