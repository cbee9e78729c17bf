"""Kernels that start while the one before them ends, and wait for it themselves (optimized/kernels/ptx/grid.cuh)."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from shared.dry_gpu import DryGpu
from shared.op_calls import LISTS

import optimized
from optimized.cuda import compiler, launch
from optimized.recordings import cases
from optimized.recordings.calls import Inputs

# By their files and names: the module of optimized/ops that launches them.
EARLY = {
    # What ends the work of many blocks.
    ("attention_backward_ends", "attention_dq"): "attention_backward",
    ("attention_decode", "attention_chain"): "attention_decode",
    ("current_scale", "total"): "current_scale",
    ("dbias", "total"): "dbias",
    ("gemm_fp8_split_k", "add_in_order"): "gemm_fp8_split_k",
    ("norm_cast_blocks", "norm_cast_blocks"): "norm_cast_blocks",
    ("norm_total", "norm_total"): "norm_backward",
    # What follows a small kernel, which sets a ticket or begins a gradient.
    ("attention", "attention"): "attention",
    ("attention_backward", "attention_backward"): "attention_backward",
    ("attention_fp8", "attention_fp8"): "attention_fp8",
    ("attention_wide", "attention"): "attention",
    # Products of weights that nobody writes.
    ("gemm", "gemm"): "gemm_config",
    ("gemm_fp8", "gemm_fp8"): "gemm_config",
    ("gemm_fp8_fused", "gemm_fp8_fused"): "gemm_config",
}
# Calls that launch them all.
FEW = [
    *(("attention_backward", "large"), ("attention_fp8", "large"), ("norm", "large"), ("attention_paged", "calls")),
    *((name, "calls") for name in ("cat_cast_transpose", "current_scale", "gemm", "gemm_fp8", "gemm_fp8_split_k")),
    *((name, "calls") for name in ("gemm_fused", "norm_cast_blocks")),
]


class Noting(DryGpu):
    """Notes which kernels are launched early."""

    def __init__(self) -> None:
        super().__init__(written=False)
        self.early: set[tuple[str, str]] = set()

    def _launch(self, kernel: launch.Kernel, *args: Any, early: bool = False, **named: Any) -> None:
        if early:
            self.early.add((kernel.kernel, kernel.name))
        super()._launch(kernel, *args, early=early, **named)


@pytest.mark.parametrize(
    "lists",
    [
        pytest.param(FEW, id="few"),
        pytest.param([*itertools.product(LISTS, ("calls", "large"))], id="all", marks=pytest.mark.slow),
    ],
)
def test_which_kernels_start_early(lists: list[tuple[str, str]]) -> None:
    with Noting() as gpu:
        for name, function in lists:
            for call in getattr(cases.MODULES[name], function, lambda inputs: ())(Inputs("cuda", filled=False)):
                call.run()
    assert gpu.early == EARLY.keys()


def test_who_launches_them() -> None:
    paths = Path(optimized.__file__).parent.rglob("*.py")
    found = {path.stem for path in paths if re.search(r"\bearly=", path.read_text("utf-8"))}
    assert found == set(EARLY.values())


WAIT = "wait_for_grid_before();"


def body(kernel: str, name: str) -> str:
    """The code of one function that is launched, from its name on; the file's, with all headers, if it has no other."""
    texts = {path: compiler.code_of(text) for path, text in compiler.sources(kernel).items()}
    (own,) = (text for path, text in texts.items() if path.endswith(f"/{kernel}.cu"))
    entries = re.split(r'extern "C" __global__', own)[1:]
    if len(entries) == 1:
        return "\n".join(texts.values())
    (entry,) = (one for one in entries if re.search(rf"\b{name}\(", one.partition("{")[0]))
    return entry


@pytest.mark.parametrize(("kernel", "name"), sorted(EARLY))
def test_what_starts_early_waits_for_the_kernel_before(kernel: str, name: str) -> None:
    assert WAIT in body(kernel, name)


def test_what_waits_starts_early() -> None:
    files = {path.stem for path in compiler.KERNELS.rglob("*.cu") if WAIT in compiler.code_of(path.read_text("utf-8"))}
    assert {"dbias", "norm_total"} <= files <= {kernel for kernel, _ in EARLY}
