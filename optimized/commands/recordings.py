"""What an H200 recorded, as this clone of the repository holds it under tests/golden.

A recording stores outputs only; its inputs are made again by the script that recorded it, which lies beside it.
An installation without the repository has no recordings: `folder` says so in a sentence.
"""

import functools
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
from reference import files, tensor_core

GOLDEN = Path(__file__).parents[2] / "tests" / "golden"
RESTORED = ": `git checkout -- tests/golden` brings it back"
DTYPES = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
# Where few tiles meet a long K, cuBLASLt computes slices of K apart and adds them in fp32, in order. (M, N, K) of the
# recorded products where it did, with the length of the slices: found by trying all, and the words agree.
SLICES_OF_CUBLASLT = {(256, 256, 16384): 5504, (64, 64, 65536): 2688}


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
    path = folder() / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"twin_golden_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up while it is being executed
    try:
        spec.loader.exec_module(module)
    except (OSError, SyntaxError, ValueError) as error:
        raise files.Damaged(f"{path} is missing or damaged ({error}){RESTORED}.") from error
    return module


def exists(name: str) -> bool:
    """Whether tests/golden/<name>.npz is here."""
    return (folder() / f"{name}.npz").is_file()


class _Whole(dict[str, Any]):
    """What a recording holds, by name; a name that it lacks is damage."""

    def __init__(self, path: Path, found: dict[str, Any]) -> None:
        super().__init__(found)
        self.path = path

    def __missing__(self, name: str) -> Any:
        raise files.Damaged(f"{self.path} is damaged: it has no {name!r}{RESTORED}.")


@cache
def arrays(name: str) -> dict[str, np.ndarray]:
    """Every array of tests/golden/<name>.npz."""
    path = folder() / f"{name}.npz"
    if not path.is_file():
        raise CommandError(f"the recording {path} is missing{RESTORED}.")
    return _Whole(path, files.arrays(path, RESTORED))


def provenance(name: str) -> dict[str, Any]:
    """Where a recording comes from: GPU, driver, versions, date."""
    beside = folder() / f"{name}.json"
    if beside.is_file():
        return _Whole(beside, files.record(beside, RESTORED))
    path = folder() / f"{name}.npz"
    try:
        return _Whole(path, json.loads(str(arrays(name)["about"]))["provenance"])
    except (LookupError, TypeError, json.JSONDecodeError) as error:
        raise files.Damaged(f"{path} is damaged: {error!r}{RESTORED}.") from error


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
    def slices(self) -> int:
        """How many slices cuBLASLt cut K into."""
        return -(-self.k // self._slice)

    @property
    def _slice(self) -> int:
        return SLICES_OF_CUBLASLT.get((self.m, self.n, self.k), self.k)

    def predict(self) -> torch.Tensor:
        """The same product by the model of the tensor core, in cuBLASLt's order of additions."""
        partial = [
            tensor_core.gemm(a.contiguous(), b.contiguous(), self.accumulate)
            for a, b in zip(self.a.split(self._slice, 1), self.b.split(self._slice, 1), strict=True)
        ]
        return functools.reduce(torch.add, partial)

    @property
    def title(self) -> str:
        """Formats and shape, as a reader would say them."""
        return f"{self.operands}, {self.m}×{self.n}×{self.k}, {self.accumulate}"

    @property
    def operands(self) -> str:
        """The two formats."""
        return " × ".join(self.formats.upper().split("."))


@dataclass(frozen=True)
class Steps:
    """Recorded tiles of `wgmma`: d = a·bᵀ + c; a [T, 64, K], b [T, 8, K], c and d fp32 words int32 [T, 64, 8]."""

    formats: str
    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    d: torch.Tensor


def steps() -> Iterator[Steps]:
    """Every case of raw `wgmma` instructions, one step or a chain of them."""

    def typed(array: np.ndarray, name: str) -> torch.Tensor:
        dtype = DTYPES[name]
        return torch.from_numpy(np.ascontiguousarray(array).view(np.uint8)).view(dtype)

    def words(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array).view(np.int32))

    older = arrays("wgmma_h200")
    for case in sorted({name.rsplit(".", 1)[0] for name in older}):
        left, right = ("fp16" if name == "f16" else name for name in case.split(".")[:2])
        a, b, c, d = (older[f"{case}.{letter}"] for letter in "ABCD")
        yield Steps(f"{left}.{right}", typed(a, left), typed(b, right), words(c), words(d))
    newer = arrays("tensor_core_h200")
    for made in script("tensor_core_cases").cases():
        left, right = made.name.split(".")[:2]
        yield Steps(
            f"{left}.{right}", typed(made.a, left), typed(made.b, right), words(made.c), words(newer[made.name])
        )


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
