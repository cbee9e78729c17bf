"""docs/new_op.md keeps its word: an op is four files and a section of the contract, and all that looks at ops sees it.

The toy is added to a copy of the tree, where no other file is edited.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from optimized import measure

FILES = {
    "reference/ops/casts/toy.py": '''
"""`twin::toy`: y = -x."""

import torch

from reference.ops.library import define


def outputs(x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.float32:
        raise ValueError(f"twin::toy: x is {x.dtype}; torch.float32 is accepted.")
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@define(outputs)
def toy(x: torch.Tensor) -> torch.Tensor:
    return outputs(x).copy_(-x)
''',
    "optimized/ops/casts/toy.py": '''
"""`twin::toy` on the GPU: kernels/casts/toy.cu. Semantics: `reference.ops.casts.toy`."""

import numpy as np
import torch

from optimized import launch
from reference.ops.library import on_cuda
from reference.ops.casts.toy import outputs

_kernel = launch.function("toy", "toy", {})
CONFIGURATIONS = [_kernel.configuration]


@on_cuda
def toy(x: torch.Tensor) -> torch.Tensor:
    out = outputs(x)
    if x.numel():
        args = [x.data_ptr(), out.data_ptr(), np.int32(x.numel())]
        launch.launch(_kernel, (-(-x.numel() // 128),), (128,), args, device=x.device.index)
    return out
''',
    "optimized/kernels/casts/toy.cu": """
// toy: y = -x.
extern "C" __global__ void toy(const float* x, float* y, int count) {
    const int i = blockIdx.x * 128 + threadIdx.x;
    if (i < count) y[i] = -x[i];
}
""",
    "optimized/recordings/cases/toy.py": '''
"""Cases of `toy`."""

import torch

from optimized.recordings.calls import FP32, Call, Calls, Inputs

twin = torch.ops.twin


def calls(c: Inputs) -> Calls:
    for rows, start in ((1, 0), (5, 1)):
        yield Call(twin.toy, (c.x(rows, 48, dtype=FP32, start=start),))


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    yield Call(twin.toy, (c.x(rows, cols, dtype=FP32),))
''',
}
SECTION = "### `twin::toy`\n`y = -x`.\n"
CONTRACT = "docs/numerics.md"
ASKED = {
    "tests/ops/test_ops.py": (
        "test_a_call_gives_the_same_twice_and_changes_what_it_says[toy-4]",
        "test_a_compiler_may_trace_it[toy]",
        "test_cuda_gives_the_words_of_the_cpu[toy]",
        "test_nothing_gives_no_nan[toy]",
        "test_every_file_of_ops_is_in_the_contract",
    ),
    "tests/cuda/test_launches.py": ("test_launches_of_the_calls[toy]", "test_launches_of_any_size[toy]"),
    "tests/cuda/test_kernels.py": (
        "test_every_kernel_file_has_a_configuration",
        "test_it_compiles_without_spill_or_warning[toy]",
    ),
    "tests/recordings/test_parity.py": ("test_the_calls_of_a_list_are_compared[toy]",),
}
ASK = """
import sys
import pytest
code = pytest.main(sys.argv[1:])
from tools import sanitizer
made = [call.name for _, call in sanitizer.calls(["toy"], "cpu")]
assert made == ["toy", "toy"], made
sys.exit(code)
"""


def tree(folder: Path) -> Path:
    """A copy of what the tests of ops read, with the toy."""
    for name in ("reference", "optimized", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", ".*")
        shutil.copytree(measure.ROOT / name, folder / name, copy_function=os.symlink, ignore=ignored)
    shutil.copy(measure.ROOT / "pyproject.toml", folder)
    (folder / "docs").mkdir()
    (folder / CONTRACT).write_text((measure.ROOT / CONTRACT).read_text("utf-8") + SECTION, "utf-8")
    (folder / "docs" / "results").symlink_to(measure.ROOT / "docs" / "results")
    for name, text in FILES.items():
        (folder / name).write_text(text.lstrip("\n"), "utf-8")
    return folder


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A program of the copy."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_whatever_looks_at_ops_sees_a_new_one(tmp_path: Path) -> None:
    folder = tree(tmp_path)
    wanted = [f"{file}::{name}" for file, names in ASKED.items() for name in names]
    done = run(folder, "-c", ASK, "-q", "-p", "no:cacheprovider", "--simulate", *wanted)
    assert f"{len(wanted)} passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("piece", "test"),
    [
        ("optimized/recordings/cases/toy.py", "tests/ops/test_ops.py::test_every_op_has_its_cases"),
        (CONTRACT, "tests/ops/test_ops.py::test_every_file_of_ops_is_in_the_contract"),
        ("optimized/kernels/casts/toy.cu", "tests/cuda/test_kernels.py::test_every_kernel_file_has_a_configuration"),
    ],
)
@pytest.mark.slow
def test_a_piece_that_is_missing_is_missed(piece: str, test: str, tmp_path: Path) -> None:
    folder = tree(tmp_path)
    text = (folder / piece).read_text("utf-8")
    (folder / piece).unlink()
    if piece == CONTRACT:
        (folder / piece).write_text(text.removesuffix(SECTION), "utf-8")
    done = run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", test)
    assert done.returncode == 1, done.stdout[-4000:] + done.stderr[-2000:]
    assert "toy" in done.stdout
