"""All 2^32 fp32 words through a function, in 256 numbers: the same sums on the GPU and on the CPU.

    PYTHONPATH=. python tests/golden/record_elementary.py FOLDER

records, on a Hopper machine, FOLDER/digests.npz, which is `elementary_h200.npz` here, and FOLDER/tables.npz, which is
`reference/numbers/tables/elementary_h200.npz`: `ex2.approx` on its grid, and the activations of all 16-bit words.

The sum of a block of 2^24 consecutive input words is, modulo 2^64, the sum of splitmix64's finaliser over
(input word << 32 | result word), every NaN as 0x7FC00000. One different result bit changes it.
"""

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from optimized import measure
from optimized.cuda import compiler
from reference.numbers import elementary
from reference.support import files
from reference.support.numba_jit import jit

HERE = Path(__file__).parent

# The fp32 functions of reference.numbers.elementary, and their names in kernels/common/elementary.cuh.
KERNEL_NAMES = {
    "exp": "exp",
    "exp2_grid": "exp2_grid",
    "rsqrt": "rsqrt",
    "gelu": "gelu_f32",
    "dgelu": "dgelu_f32",
    "silu": "silu_f32",
    "dsilu": "dsilu_f32",
}
BLOCKS = 256
_WORDS = 1 << 24
_CHUNK = 1 << 16

_U64 = np.uint64
_SHIFTS = (_U64(30), _U64(27), _U64(31), _U64(32))
_FACTORS = (_U64(0xBF58476D1CE4E5B9), _U64(0x94D049BB133111EB))
_ABOVE_INFINITY, _NAN = np.uint32(0x7F800000), np.uint32(0x7FC00000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)


@jit
def _mix(inputs: np.ndarray, results: np.ndarray) -> np.uint64:
    total = _U64(0)
    for i in range(inputs.size):
        word = results[i]
        if (word & _MAGNITUDE) > _ABOVE_INFINITY:
            word = _NAN
        z = (_U64(inputs[i]) << _SHIFTS[3]) | _U64(word)
        z = (z ^ (z >> _SHIFTS[0])) * _FACTORS[0]
        z = (z ^ (z >> _SHIFTS[1])) * _FACTORS[1]
        total += z ^ (z >> _SHIFTS[2])
    return total


def block(name: str, index: int, evaluate: Callable[[str, np.ndarray], np.ndarray] | None = None) -> int:
    """The reference's sum over input words `index · 2^24` to `(index + 1) · 2^24 - 1`.

    Args:
        name: a key of `reference.numbers.elementary.SCALARS`.
        index: 0 to 255.
        evaluate: in place of `reference.numbers.elementary.evaluate`.
    """
    total = 0
    with np.errstate(all="ignore"):
        for start in range(index * _WORDS, (index + 1) * _WORDS, _CHUNK):
            words = np.arange(start, start + _CHUNK, dtype=np.uint32)
            results = (evaluate or elementary.evaluate)(name, words.view(np.float32))
            total += int(_mix(words, results.view(np.uint32)))
    return total % (1 << 64)


def reference_digest(name: str, threads: int) -> np.ndarray:
    """The reference's 256 sums, uint64 `[256]`; seconds to a minute."""
    block(name, 127)  # compiles outside the threads
    with ThreadPoolExecutor(threads) as pool:
        return np.array(list(pool.map(lambda index: block(name, index), range(BLOCKS))), dtype=np.uint64)


@cache
def _kernel(name: str, function: str) -> Any:
    """`name` of elementary_words.cu with `function` compiled in."""
    from cupy.cuda.function import Module

    module = Module()
    module.load(compiler.build("elementary_words", {"FUNCTION": function}, root=HERE).cubin)
    return module.get_function(name)


def kernel_digest(name: str) -> np.ndarray:
    """Hopper's 256 sums, uint64 `[256]`."""
    sums = torch.zeros(BLOCKS, dtype=torch.int64, device="cuda")
    _kernel("digest", KERNEL_NAMES[name])((1 << 16,), (256,), [sums.data_ptr()])
    return sums.cpu().numpy().view(np.uint64)


def apply(function: str, x: torch.Tensor) -> torch.Tensor:
    """A device function of kernels/common/elementary.cuh over a flat fp32 CUDA tensor."""
    out = torch.empty_like(x)
    _kernel("apply", function)((-(-x.numel() // 256),), (256,), [x.data_ptr(), out.data_ptr(), np.int32(x.numel())])
    return out


def first_differences(name: str, index: int, limit: int = 4) -> list[str]:
    """Where GPU and reference differ inside block `index`: input, reference's result, Hopper's, as words."""
    words = np.arange(index * _WORDS, (index + 1) * _WORDS, dtype=np.uint32)
    x = words.view(np.float32)
    ours = elementary.evaluate(name, x)
    theirs = apply(KERNEL_NAMES[name], torch.from_numpy(x).cuda()).cpu().numpy()
    differ = (ours.view(np.uint32) != theirs.view(np.uint32)) & ~(np.isnan(ours) & np.isnan(theirs))
    return [
        f"{name}(0x{words[i]:08X} = {x[i]:g}): reference 0x{ours.view(np.uint32)[i]:08X}, "
        f"H200 0x{theirs.view(np.uint32)[i]:08X}"
        for i in np.flatnonzero(differ)[:limit]
    ]


def tables() -> dict[str, np.ndarray]:
    """What `reference` looks up: 2 · 32,768 words of `ex2.approx`, and 65,536 of each activation in either 16 bits."""
    steps = torch.arange(-32768, 32768, dtype=torch.int32, device="cuda")
    below, above = apply("ex2_approx", steps.float() / 32768).view(torch.int32).chunk(2)
    found = {"exp2": torch.cat([above, below + (1 << 23)])}
    words = torch.arange(65536, dtype=torch.int32, device="cuda").to(torch.int16)
    for name in elementary.ACTIVATIONS:
        for kind, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            y = apply(name, words.view(dtype).float())
            found[f"{name}_{kind}"] = torch.where(y.isnan(), 0x7FC00000, y.view(torch.int32))
    return {name: tensor.cpu().numpy().view(np.uint32) for name, tensor in found.items()}


def main() -> None:
    """Record into the folder named on the command line."""
    origin = measure.provenance(()) | {"kernels": {"elementary_words": compiler.source_hash("elementary_words", HERE)}}
    digests = {name: kernel_digest(name) for name in KERNEL_NAMES}
    for name, arrays in (("digests", digests), ("tables", tables())):
        with files.replacing(Path(sys.argv[1]) / f"{name}.npz") as file:
            np.savez_compressed(file, **arrays, provenance=np.array(json.dumps(origin)))


if __name__ == "__main__":
    main()
