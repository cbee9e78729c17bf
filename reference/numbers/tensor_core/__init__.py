"""What Hopper's tensor core computes, bit for bit, on any CPU.

`step` is one `wgmma` instruction, `gemm` a whole GEMM. `model` defines the arithmetic and is written to be read;
`fast` and `simd` compute the same bits on SIMD lanes and all cores.
"""

import numpy as np
import torch

from reference.numbers.denormals import check_denormals
from reference.numbers.tensor_core import fast, model
from reference.numbers.tensor_core.operands import as_operands

__all__ = ["SPLIT_K", "gemm", "step"]

SPLIT_K = 128
"""K of a chain in split accumulation."""


def step(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None) -> torch.Tensor:
    """One tensor-core instruction: a · bᵀ + c, fp32 `[M, N]`.

    Args:
        a, b: `[M, K]` and `[N, K]`, float8_e4m3fn and float8_e5m2 in any combination (K <= 32), or both bf16 or both
            fp16 (K <= 16). A shorter K stands for zeros in the rest.
        c: fp32 `[M, N]`; None is +0.

    Raises:
        RuntimeError: subnormal numbers are flushed to zero.
    """
    check_denormals()
    left = as_operands(a, b)
    shape = (a.shape[0], b.shape[0])
    if a.shape[1] > left.instruction.k:
        raise ValueError(f"a has K = {a.shape[1]}; one step of {a.dtype} takes at most {left.instruction.k}: use gemm.")
    if c is None:
        words = np.zeros(shape, np.uint32)
    elif c.dtype != torch.float32 or tuple(c.shape) != shape or c.device.type != "cpu":
        raise ValueError(f"c is {c.dtype} {tuple(c.shape)} on {c.device}; float32 {shape} on the CPU is needed.")
    else:
        words = c.detach().view(torch.int32).numpy().view(np.uint32)
    return torch.from_numpy(model.step_words(left, words).view(np.float32))


def gemm(a: torch.Tensor, b: torch.Tensor, accumulate: str = "fast", c: torch.Tensor | None = None) -> torch.Tensor:
    """a · bᵀ by chained tensor-core steps, fp32 `[M, N]`; any M, N and K, zero included.

    a `[H, M, K]`, b `[H, N, K]` and c `[H, M, N]` are H products, which one call computes: fp32 `[H, M, N]`.

    K is taken in order; its last step is filled up with zeros. A K of 0 gives +0, or c. NaN results are the word
    0x7FFFFFFF. The GEMM runs on as many threads as torch may use (`torch.set_num_threads`), with the same bits. The
    first call on a machine compiles for some seconds.

    Args:
        a, b: as for `step`, any strides.
        accumulate: "fast" is one chain over all of K, whose accumulator never leaves the tensor core. "split" (FP8
            only) consists of chains of K = 128 from zero; each partial sum is added to an fp32 accumulator with an
            ordinary addition, in order of K.
        c: fp32 `[M, N]`: what the chain ("fast") or the fp32 accumulator ("split") starts from instead of +0. So a
            product may be cut in two where K is a multiple of the step's or of `SPLIT_K`: the second part starts from
            the first one's result.

    Raises:
        RuntimeError: subnormal numbers are flushed to zero.
    """
    check_denormals()
    if accumulate not in ("fast", "split"):
        raise ValueError(f"accumulate is {accumulate!r}; 'fast' or 'split' is accepted.")
    left = as_operands(a, b, batched=True)
    split = accumulate == "split"
    if split and left.instruction is not model.FP8_STEP:
        raise ValueError(
            f"accumulate='split' with {a.dtype}: split accumulation is defined for FP8 operands; "
            f"16-bit GEMMs keep fp32's precision in one chain, use 'fast'."
        )
    start = None
    if c is not None:
        shape = (*a.shape[:-1], b.shape[-2])
        if c.dtype != torch.float32 or tuple(c.shape) != shape or c.device.type != "cpu":
            raise ValueError(f"c is {c.dtype} {tuple(c.shape)} on {c.device}; float32 {shape} on the CPU is needed.")
        start = c.detach().contiguous().view(torch.int32).numpy().view(np.uint32)
    words = fast.gemm_words(left, SPLIT_K if split else None, start)
    return torch.from_numpy(words.view(np.float32))
