"""All 2^32 fp32 words through a function, in 256 numbers: the same sums on the GPU and on the CPU.

The sum of a block of 2^24 consecutive input words is, modulo 2^64, the sum of splitmix64's finaliser over
(input word << 32 | result word), every NaN as 0x7FC00000. One different result bit changes it.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch

from optimized import launch
from reference import elementary
from reference.numba_jit import jit

# The fp32 functions of reference.elementary, and their names in kernels/elementary.cuh.
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
        name: a key of `reference.elementary.SCALARS`.
        index: 0 to 255.
        evaluate: in place of `reference.elementary.evaluate`.
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
def _scratch() -> torch.Tensor:
    return torch.empty(BLOCKS, dtype=torch.int64, device="cuda")


def kernel_digest(name: str) -> np.ndarray:
    """Hopper's 256 sums, uint64 `[256]`."""
    sums = _scratch().zero_()
    kernel = launch.function("elementary_bench", "digest", {"FUNCTION": KERNEL_NAMES[name]})
    launch.launch(kernel, (1 << 16,), (256,), [sums.data_ptr()], device=sums.device.index)
    return sums.cpu().numpy().view(np.uint64)


def apply(function: str, x: torch.Tensor) -> torch.Tensor:
    """A device function of kernels/elementary_candidates.cuh over a flat fp32 CUDA tensor."""
    out = torch.empty_like(x)
    kernel = launch.function("elementary_bench", "apply", {"FUNCTION": function})
    blocks = -(-x.numel() // 256)
    args = [x.data_ptr(), out.data_ptr(), np.int32(x.numel())]
    launch.launch(kernel, (blocks,), (256,), args, device=x.device.index)
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
