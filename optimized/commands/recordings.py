"""What an H200 recorded, as this clone of the repository holds it under tests/golden.

A recording stores outputs only; its inputs are made again by the script that recorded it, which lies beside it.
An installation without the repository has no recordings: `folder` says so in a sentence.
"""

import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from optimized.commands import CommandError

GOLDEN = Path(__file__).parents[2] / "tests" / "golden"
DTYPES = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def folder() -> Path:
    """tests/golden of this clone."""
    if not GOLDEN.is_dir():
        raise CommandError(
            f"the recordings of an H200 are not installed: {GOLDEN} is missing. They come with the repository: run "
            f"`twin` from a clone (pip install -e .), or on a machine with a Hopper GPU."
        )
    return GOLDEN


@cache
def script(name: str) -> ModuleType:
    """The module tests/golden/<name>.py, which makes the inputs of a recording."""
    spec = importlib.util.spec_from_file_location(f"twin_golden_{name}", folder() / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up while it is being executed
    spec.loader.exec_module(module)
    return module


@cache
def arrays(name: str) -> dict[str, np.ndarray]:
    """Every array of tests/golden/<name>.npz."""
    path = folder() / f"{name}.npz"
    if not path.is_file():
        raise CommandError(f"the recording {path} is missing; `git checkout -- tests/golden` brings it back.")
    with np.load(path) as data:
        return {key: data[key] for key in data.files}


def provenance(name: str) -> dict[str, Any]:
    """Where a recording comes from: GPU, driver, versions, date."""
    beside = folder() / f"{name}.json"
    if beside.is_file():
        found: dict[str, Any] = json.loads(beside.read_text())
    else:
        found = json.loads(str(arrays(name)["about"]))["provenance"]
    return found


@dataclass(frozen=True)
class Product:
    """A recorded corner of a product of cuBLASLt: out = a·bᵀ, fp32 [rows, columns], of operands [·, k]."""

    formats: str
    m: int
    n: int
    k: int
    accumulate: str
    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor

    @property
    def title(self) -> str:
        """Formats and shape, as a reader would say them."""
        a, b = self.formats.upper().split(".")
        return f"{a} × {b}, {self.m}×{self.n}×{self.k}, {self.accumulate}"


def products() -> Iterator[Product]:
    """Every product that cuBLASLt computed on an H200 through `torch._scaled_mm`."""
    inputs, words = script("tensor_core_cases"), arrays("tensor_core_h200")
    for index, (formats, m, n, k) in enumerate(inputs.PRODUCTS):
        codes = inputs.product_inputs(index, corner=True)
        a, b = (
            torch.from_numpy(array).view(DTYPES[name]) for array, name in zip(codes, formats.split("."), strict=True)
        )
        for accumulate in ("fast", "split"):
            recorded = words.get(f"product.{formats}.{m}x{n}x{k}.{accumulate}")
            if recorded is not None:
                out = torch.from_numpy(recorded.view(np.float32))
                yield Product(formats, m, n, k, accumulate, a, b, out)
