"""`twin::adam_states`: a step of Adam whose moments and masters are kept in fewer bits than fp32.

The arithmetic is `twin::adam`'s, in fp32. What differs is how numbers x of a moment or a master are kept, by dtype:

    float32      x
    bfloat16     x, rounded to nearest even
    float16      codes of 16 bits and an fp32 scale of the tensor, range 32752 (half of fp16's largest number)
    uint8        codes of E4M3 and an fp32 scale of the tensor, range 448

    x     = fp32(code) · scale                              one rounding
    scale = max(min(max |x|, FLT_MAX) / range, 2^-100)      of all new numbers of the tensor, NaN ignored; IEEE division
                                                            of no numbers it stays
    code  = round(x · (1 / scale))                          three roundings: of the quotient, the product, and to the
                                                            format: fp16 to nearest even, E4M3 as `cvt.rn.satfinite`

So a step reads with the old scale and writes with a new one. 2^-100 keeps every product of a code and a scale normal:
the codes of numbers that were read are the codes that they were read from, as a saved state needs. bf16 has fp32's
range and needs no scale.

int16 masters are remainders: the low half of an fp32 word, whose high half is the bf16 parameter, one more where the
low half has its highest bit (so that the parameter is the nearest bf16, ties away from zero). A NaN is kept as
0x7FC00000.

    word      = ((parameter − (remainder < 0)) << 16) | remainder           in 16 bits, as integers
    remainder = word & 0xFFFF,  parameter = (word >> 16) + (remainder < 0)

Source: Transformer Engine's `pytorch/optimizers/fused_adam.py` and `common/multi_tensor/adam.cu`. It makes NaN of a
tensor of zeros in E4M3, and −0 of a NaN with a remainder; this does not.
"""

from collections.abc import Sequence

import numpy as np
import torch

from reference.numbers import formats
from reference.ops.checks import check_each, check_lengths
from reference.ops.library import define
from reference.ops.optimizers.adam import update

OP = "twin::adam_states"
RANGES = {torch.float16: 32752.0, torch.uint8: 448.0}
MOMENTS = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
SMALLEST = 2.0**-100
FLT_MAX = float(np.finfo(np.float32).max)


def read(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """The numbers of a moment or a scaled master, fp32; on any device."""
    wide = (x.view(torch.float8_e4m3fn) if x.dtype == torch.uint8 else x).float()
    return wide if scale is None else wide * scale.reshape(())  # a scale `[1]` would give a number `[]` a dimension


def scale_of(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scale `[1]` with which fp32 numbers are kept as codes of `dtype`; on any device."""
    most = torch.where(x.isnan(), 0.0, x.abs()).amax().reshape(1) if x.numel() else x.new_zeros(1)
    # By a tensor: by a number, CUDA would multiply with its inverse.
    return (most.clamp(max=FLT_MAX) / torch.full_like(most, RANGES[dtype])).clamp(min=SMALLEST)


def codes(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes of fp32 numbers; on any device."""
    scaled = x * (1 / scale).reshape(())
    if dtype == torch.float16:
        return scaled.to(dtype)
    found = scaled.clamp(-RANGES[dtype], RANGES[dtype]).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(scaled.isnan(), found.new_full((), 0x7F), found)


def joined(parameter: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 masters of bf16 parameters and int16 remainders; on any device."""
    high = parameter.view(torch.int16).to(torch.int32) - (remainder < 0).to(torch.int32)
    return ((high << 16) | (remainder.to(torch.int32) & 0xFFFF)).view(torch.float32)


def parted(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bf16 parameters and int16 remainders of fp32 masters; on any device."""
    words = torch.where(master.isnan(), torch.full_like(master, float("nan")), master).view(torch.int32)
    words = torch.where(master.isnan(), words.new_full((), 0x7FC00000), words)
    low = (words << 16) >> 16
    high = (words >> 16) + (low < 0).to(torch.int32)
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def outputs(
    grads: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    rounded: Sequence[torch.Tensor],
    param_scales: Sequence[torch.Tensor],
    exp_avg_scales: Sequence[torch.Tensor],
    exp_avg_sq_scales: Sequence[torch.Tensor],
    *scalars: float,
) -> None:
    """Refuse what `twin::adam_states` does not accept; any scalars are accepted."""
    lists = {"params": params, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    scales = {"param_scales": param_scales, "exp_avg_scales": exp_avg_scales, "exp_avg_sq_scales": exp_avg_sq_scales}
    optional = {name: part for name, part in ({"rounded": rounded} | scales).items() if len(part)}
    check_lengths(OP, "grads", len(grads), lists | optional)
    if not len(grads):
        return
    wide, param = grads[0].dtype, params[0].dtype
    if wide not in formats.WIDE_DTYPES:
        raise TypeError(f"{OP}: grads[0] is {wide}; float32, bfloat16 and float16 are accepted.")
    for name, part in (("exp_avgs", exp_avgs), ("exp_avg_sqs", exp_avg_sqs)):
        if part[0].dtype not in MOMENTS:
            raise TypeError(f"{OP}: {name}[0] is {part[0].dtype}; float32, bfloat16, float16 and uint8 are accepted.")
    for (name, part), dtype in zip(scales.items(), (param, exp_avgs[0].dtype, exp_avg_sqs[0].dtype), strict=True):
        scaled = dtype in RANGES and (name != "param_scales" or dtype != wide or len(part) > 0)
        if bool(len(part)) != scaled:
            raise ValueError(f"{OP}: {name} has {len(part)} entries for {dtype}; float16 and uint8 have a scale each.")
    if param not in (torch.float32, torch.float16, torch.int16, wide) or param == torch.uint8:
        raise TypeError(f"{OP}: params[0] is {param}; float32, float16 with scales, int16 and {wide} are accepted.")
    if (param == torch.int16 and not len(rounded)) or (param == wide and not len(param_scales) and len(rounded)):
        raise ValueError(f"{OP}: rounded has {len(rounded)} entries for {param}; masters have copies, int16 must.")
    shapes, device = [grad.shape for grad in grads], grads[0].device
    check_each(OP, "grads", grads, wide, shapes, device)
    for name, part in (lists | optional).items():
        is_scale = name in scales
        dtype = torch.float32 if is_scale else part[0].dtype
        if name == "rounded":
            dtype = torch.bfloat16 if param == torch.int16 else wide
        check_each(OP, name, part, dtype, [(1,)] * len(grads) if is_scale else shapes, device)


@define(
    outputs,
    mutates=(
        *("params", "exp_avgs", "exp_avg_sqs", "rounded"),
        *("param_scales", "exp_avg_scales", "exp_avg_sq_scales"),
    ),
)
def adam_states(
    grads: list[torch.Tensor],
    params: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    rounded: list[torch.Tensor],
    param_scales: list[torch.Tensor],
    exp_avg_scales: list[torch.Tensor],
    exp_avg_sq_scales: list[torch.Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    correction1: float,
    correction2: float,
    decoupled: bool,
) -> None:
    """Change all lists but `grads` in place. They have the gradients' shapes, scales `[1]`.

    Args:
        grads: of one dtype, fp32, bf16 or fp16.
        params: of the gradients' dtype, fp32, fp16 with `param_scales`, or int16 remainders of `rounded`.
        exp_avgs, exp_avg_sqs: fp32, bf16, fp16 or uint8, each by itself.
        rounded: empty, or copies in the gradients' dtype of fp32 and scaled masters; bf16 parameters of remainders.
        param_scales, exp_avg_scales, exp_avg_sq_scales: fp32 `[1]` for what is scaled, otherwise empty.
        lr, beta1, beta2, eps, weight_decay, correction1, correction2, decoupled: those of `twin::adam`.
    """
    scales = (param_scales, exp_avg_scales, exp_avg_sq_scales)
    outputs(grads, params, exp_avgs, exp_avg_sqs, rounded, *scales)
    scalars = (lr, beta1, beta2, eps, weight_decay, correction1, correction2)
    for i, grad in enumerate(grads):
        kept = (params[i].detach(), exp_avgs[i], exp_avg_sqs[i])
        of = [part[i] if part else None for part in scales]
        old = [read(x, scale) for x, scale in zip(kept, of, strict=True)]
        if params[i].dtype == torch.int16:
            old[0] = joined(rounded[i].detach(), kept[0])
        g, p, m, v = (x.numpy() for x in (formats.widen(grad.detach()), *old))
        new = [torch.from_numpy(x) for x in update(g, p, m, v, scalars, decoupled)]
        for x, scale, value in zip(kept, of, new, strict=True):
            if x.dtype == torch.int16:
                high, low = parted(value)
                x.copy_(low)
                rounded[i].copy_(high)
            elif scale is None:
                x.copy_(value)
            elif value.numel():
                scale.copy_(scale_of(value, x.dtype))
                x.copy_(codes(value, scale, x.dtype))
        if rounded and params[i].dtype != torch.int16:
            rounded[i].copy_(new[0])
