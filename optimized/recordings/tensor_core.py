"""What an H200's tensor cores computed: single `wgmma` instructions, and GEMMs of cuBLASLt."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from optimized.compare import Tally, differing
from optimized.recordings import tensor_core_cases as inputs
from optimized.recordings.reader import arrays
from reference.numbers import tensor_core

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16, "fp16": torch.float16}
# The cases of wgmma_h200.npz: pairs of FP8 formats, each with three kinds of operands, and the 16-bit formats.
OLDER = (
    *(f"{a}.{b}.{kind}" for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2") for kind in ("k32", "k128", "special")),
    "f16.f16",
    "bf16.bf16",
)
# Where few tiles meet a long K, cuBLASLt computes slices of K separately and adds them in fp32, in order. These are M,
# N and K of the recorded GEMMs for which it did, with the length of a slice: all lengths were tried, and with this one
# the words agree.
SLICES_OF_CUBLASLT = {(256, 256, 16384): 5504, (64, 64, 65536): 2688}


@dataclass(frozen=True)
class Product:
    """A recorded corner of a GEMM of cuBLASLt: out = a·bᵀ, fp32 [rows, columns], with operands [·, k]."""

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
        """How many slices of K cuBLASLt computed."""
        return -(-self.k // self._slice)

    @property
    def _slice(self) -> int:
        return SLICES_OF_CUBLASLT.get((self.m, self.n, self.k), self.k)

    def predict(self) -> torch.Tensor:
        """The same GEMM by the model of the tensor core, in cuBLASLt's order of additions."""
        partial = [
            tensor_core.gemm(a.contiguous(), b.contiguous(), self.accumulate)
            for a, b in zip(self.a.split(self._slice, 1), self.b.split(self._slice, 1), strict=True)
        ]
        return functools.reduce(torch.add, partial)

    def compare(self) -> Tally:
        """Compare the prediction with the recorded words."""
        return Tally(self.out.numel(), differing(self.predict(), self.out))

    @property
    def title(self) -> str:
        """Formats, shape and accumulation, for a reader."""
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

    def compare(self) -> Tally:
        """Compute every tile by single steps, chained through C, and compare all words, NaN included."""
        depth = 32 if self.a.element_size() == 1 else 16
        tally = Tally()
        for a, b, c, d in zip(self.a, self.b, self.c, self.d, strict=True):
            if a.shape[1] > 64 * depth:  # a long chain, which was recorded with C = 0
                out = tensor_core.gemm(a, b)
            else:
                out = c.view(torch.float32)
                for k in range(0, a.shape[1], depth):
                    out = tensor_core.step(a[:, k : k + depth], b[:, k : k + depth], out)
            tally.add(out.view(torch.int32), d)
        return tally


def steps() -> Iterator[Steps]:
    """Every recorded `wgmma` case: one step, or a chain of steps."""

    def typed(array: np.ndarray, name: str) -> torch.Tensor:
        dtype = DTYPES[name]
        return torch.from_numpy(np.ascontiguousarray(array).view(np.uint8)).view(dtype)

    def words(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array).view(np.int32))

    older = arrays("wgmma_h200")
    for case in OLDER:
        left, right = ("fp16" if name == "f16" else name for name in case.split(".")[:2])
        a, b, c, d = (older[f"{case}.{letter}"] for letter in "ABCD")
        yield Steps(f"{left}.{right}", typed(a, left), typed(b, right), words(c), words(d))
    newer = arrays("tensor_core_h200")
    for made in inputs.cases():
        left, right = made.name.split(".")[:2]
        yield Steps(
            f"{left}.{right}", typed(made.a, left), typed(made.b, right), words(made.c), words(newer[made.name])
        )


def products() -> Iterator[Product]:
    """Every GEMM that cuBLASLt computed on an H200 through `torch._scaled_mm`."""
    words = arrays("tensor_core_h200")
    for index, (formats, m, n, k) in enumerate(inputs.PRODUCTS):
        codes = inputs.product_inputs(index, corner=True)
        a, b = (
            torch.from_numpy(array).view(DTYPES[name]) for array, name in zip(codes, formats.split("."), strict=True)
        )
        for accumulate in ("fast", "split"):
            recorded = words[f"product.{formats}.{m}x{n}x{k}.{accumulate}"]
            yield Product(formats, m, n, k, accumulate, a, b, torch.from_numpy(recorded.view(np.float32)))
