"""`twin::cast_nvfp4`: the cast to NVFP4, E2M1 codes with an E4M3 scale for each 16 along a row and one scale for all.

    amax         = max |x|, fp32                              of the whole matrix; NaN where x has one
    encode       = min(2688 / amax, M)                        2688 = 448 · 6, M the largest fp32 number; 1 where it is 0
    decode       = 1 / encode
    amax[r, b]   = max |x| over x[r, 16·b .. 16·b + 15]
    scales[r, b] = cast_E4M3(min(amax[r, b] · (encode · fp32(1/6)), 448))
    factor[r, b] = min(1 / (fp32(scales[r, b]) · decode), M)
    q[r, c]      = E2M1(fp32(x[r, c]) · factor[r, c // 16])   to nearest, or by random bytes; saturates at ±6

Each operation is one of fp32, in this order. What q stands for is q · scales · amax / 2688: a GEMM multiplies by the
last two factors (`twin::gemm_nvfp4`). With `square` a block is 16 rows high, too, and all its rows have one scale; then
the cast of xᵀ has the same codes and scales, transposed.

K = cols is padded with zeros to whole blocks. E2M1 has no NaN, so NaN and infinities live on in the scales: a NaN makes
`amax` and all `scales` NaN, an infinity makes `amax` infinite. Of zeros alone amax, codes and scales are 0.

**Stochastic rounding**, where `rng_state` is given (`reference.numbers.philox.new_state`), rounds x · factor up in
proportion to its distance from the number below (`block_formats.encode_e2m1_stochastic`). A Philox counter serves the
16 numbers of a block:

    words = philox4x32(counter = (low, high) half of block, (low, high) half of offset; key = seed)
    byte of number i of the block = byte i of those four words, low byte first

with block = r · ceil16(K) / 16 + b. The op advances the offset by one.

Rounded to nearest, every word is that of Transformer Engine 2.20's `NVFP4QuantizerRef`
(`pytorch/custom_recipes/reference_nvfp4.py`), special values included.
"""

import numpy as np
import torch

from reference.numbers import block_formats, formats, philox
from reference.ops.checks import check_input
from reference.ops.library import define
from reference.ops.random.dropout import state_values

OP = "twin::cast_nvfp4"
BLOCK = 16
SCALE_DTYPE = formats.E4M3.dtype
LARGEST = formats.E4M3.largest * block_formats.E2M1_LARGEST
"""What amax is mapped to: 2688."""

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def outputs(x: torch.Tensor, square: bool, rng_state: torch.Tensor | None) -> Three:
    check_input(OP, "x", x)
    if rng_state is not None and (rng_state.dtype != torch.int64 or tuple(rng_state.shape) != (2,)):
        raise ValueError(
            f"{OP}: rng_state must be an int64 [2] tensor (seed, offset) or None; got {rng_state.dtype} "
            f"{tuple(rng_state.shape)}."
        )
    count = block_formats.blocks(x.shape[1], BLOCK)
    return (
        x.new_empty((x.shape[0], BLOCK // 2 * count), dtype=torch.uint8),
        x.new_empty((x.shape[0], count), dtype=SCALE_DTYPE),
        x.new_empty(1, dtype=torch.float32),
    )


def random_bytes(rng_state: torch.Tensor, blocks: int) -> torch.Tensor:
    """Sixteen bytes for each block: uint8 `[blocks, 16]`."""
    seed, offset = state_values(rng_state)
    words = np.stack(philox.element_words(seed, 0, blocks, offset), axis=1).astype("<u4")
    return torch.from_numpy(words.view(np.uint8))


@define(outputs, mutates=("rng_state",), cpu_only=block_formats.CPU_ONLY)
def cast_nvfp4(x: torch.Tensor, square: bool, rng_state: torch.Tensor | None) -> Three:
    """x `[rows, K]` -> (codes uint8 `[rows, ceil16(K) / 2]`, scales E4M3 `[rows, ceil16(K) / 16]`, amax fp32 `[1]`)."""
    codes, scales, amax = outputs(x, square, rng_state)
    amax.copy_(x.abs().amax()) if x.numel() else amax.zero_()
    # Divisions of two tensors: torch divides a number by a tensor as reciprocal times number.
    one, most = torch.ones((), dtype=torch.float32, device="cpu"), torch.finfo(torch.float32).max
    encode = torch.div(LARGEST * one, amax).clamp(max=most)
    encode = torch.where(encode == 0, one, encode)
    decode = torch.div(one, encode)
    sixth = torch.div(one, block_formats.E2M1_LARGEST * one)
    per_block = block_formats.block_amax(x, BLOCK, square) * (encode * sixth)
    formats.cast_into(scales, per_block.clamp(max=formats.E4M3.largest), one)
    factor = torch.div(one, formats.decode(scales) * decode).clamp(max=most)
    scaled = block_formats.whole(x, BLOCK).float().view(*scales.shape, BLOCK) * factor[..., None]
    if rng_state is None:
        found = block_formats.encode_e2m1(scaled)
    else:
        random = random_bytes(rng_state, scales.numel()).view(scaled.shape)
        found = block_formats.encode_e2m1_stochastic(scaled, random)
        rng_state[1] += 1
    codes.copy_(block_formats.pack(found).view(codes.shape))
    return codes, scales, amax
