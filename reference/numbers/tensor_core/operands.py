"""Torch tensors as operands of the tensor core: the formats that it multiplies, and their codes."""

import numpy as np
import torch
from numpy.typing import NDArray

from reference.numbers.tensor_core import model

FORMATS = {
    torch.float8_e4m3fn: model.E4M3,
    torch.float8_e5m2: model.E5M2,
    torch.float16: model.FP16,
    torch.bfloat16: model.BF16,
}
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def check_depth(a: torch.Tensor, b: torch.Tensor) -> None:
    """Refuse two matrices of different K."""
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(f"a has K = {a.shape[-1]} and b has K = {b.shape[-1]}; a [M, K] and b [N, K] share K.")


def as_operands(a: torch.Tensor, b: torch.Tensor, batched: bool = False) -> model.Operands:
    """Check a `[M, K]` and b `[N, K]`, or where `batched` H of each, and view them as contiguous codes."""
    for name, tensor in (("a", a), ("b", b)):
        if tensor.dtype not in FORMATS:
            raise TypeError(f"{name} is {tensor.dtype}; float8_e4m3fn, float8_e5m2, bfloat16 and float16 are accepted.")
        if tensor.device.type != "cpu":
            raise ValueError(f"{name} is on {tensor.device}; the model of the tensor core runs on the CPU.")
        if tensor.dim() != 2 and not (batched and tensor.dim() == 3):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; a matrix [rows, K] is needed.")
    fp8 = a.dtype in FP8_DTYPES
    if a.dtype != b.dtype and not (fp8 and b.dtype in FP8_DTYPES):
        raise TypeError(f"a is {a.dtype} and b {b.dtype}; both must be FP8 (of either format), bfloat16 or float16.")
    if a.shape[:-2] != b.shape[:-2]:
        raise ValueError(f"a has shape {tuple(a.shape)} and b {tuple(b.shape)}; as many matrices of each are needed.")
    check_depth(a, b)
    instruction = model.FP8_STEP if fp8 else model.HALF_STEP
    return model.Operands(_codes(a), FORMATS[a.dtype], _codes(b), FORMATS[b.dtype], instruction)


def _codes(tensor: torch.Tensor) -> NDArray[np.unsignedinteger]:
    rows = tensor.detach().contiguous()  # torch copies a transposed view eight times as fast as NumPy does
    if tensor.dtype in FP8_DTYPES:
        return np.from_dlpack(rows.view(torch.uint8)).view(np.uint8)
    return np.from_dlpack(rows.view(torch.int16)).view(np.uint16)
