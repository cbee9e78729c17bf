"""Whether this process computes with subnormal fp32 numbers ("denormals"), as every definition here assumes.

`torch.set_flush_denormal(True)`, and libraries built with fast-math, switch the CPU to flushing them to zero:
for PyTorch, NumPy and compiled code alike. Amaxes, casts and sums of small numbers would then differ from the
hardware's without a word.
"""

import numpy as np
import torch

# Large enough that torch gives its worker threads a part: the switch is one of each thread.
_COUNT = 1 << 17


def denormals_are_alive() -> bool:
    """Whether PyTorch (on all its threads) and NumPy keep subnormal inputs and subnormal results."""
    smallest = torch.full((_COUNT,), 1, dtype=torch.int32, device="cpu").view(torch.float32)  # 2^-149
    normal = torch.full((_COUNT,), 1 << 23, dtype=torch.int32, device="cpu").view(torch.float32)  # 2^-126
    for kept, word in (
        (smallest + smallest, 2),  # a subnormal input and result
        (smallest * 2.0**23, 1 << 23),  # a subnormal input alone
        (normal * 2.0**-23, 1),  # a subnormal result alone
    ):
        if not bool((kept.view(torch.int32) == word).all()):
            return False
    few = smallest[:16].numpy()
    return bool(((few + few).view(np.int32) == 2).all())


def check_denormals() -> None:
    """Raise RuntimeError, with the remedy, if subnormal numbers are flushed to zero."""
    if not denormals_are_alive():
        raise RuntimeError(
            "Subnormal numbers are flushed to zero in this process, which changes results: call "
            "torch.set_flush_denormal(False), or find the library that turned flushing on "
            "(one built with -ffast-math), before using Twin Engine."
        )
