"""Whether this process computes with subnormal fp32 numbers ("denormals"), as every definition here assumes.

`torch.set_flush_denormal(True)`, and libraries built with fast-math, make the CPU flush them to zero in PyTorch, NumPy
and compiled code alike. Amaxes, casts and sums of small numbers would then silently differ from the hardware's.

Each thread has its own switch, which a new thread inherits from the one that starts it. So every op on the CPU checks
the calling thread by a multiplication in Python, which takes some hundredths of a microsecond. Torch's worker threads
are checked at import, and again whenever their number is new: existing threads keep their switch.
"""

import numpy as np
import torch
from torch import get_num_threads

_SMALLEST = 5e-324  # a variable, because Python would compute a product of constants at compile time
_GRAIN = 1 << 15  # elements for which torch uses one more thread
_seen: set[int] = set()  # numbers of torch's threads for which subnormals were alive in every thread


def denormals_are_alive() -> bool:
    """Whether PyTorch (on all its threads) and NumPy keep subnormal inputs and subnormal results."""
    count = _GRAIN * torch.get_num_threads()
    smallest = torch.full((count,), 1, dtype=torch.int32, device="cpu").view(torch.float32)  # 2^-149
    normal = torch.full((count,), 1 << 23, dtype=torch.int32, device="cpu").view(torch.float32)  # 2^-126
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
    if _SMALLEST * 1.0 and get_num_threads() in _seen:
        return
    if not _SMALLEST * 1.0 or not denormals_are_alive():
        raise RuntimeError(
            "Subnormal numbers are flushed to zero in this process, which changes results: call "
            "torch.set_flush_denormal(False), or find the library that turned flushing on "
            "(one built with -ffast-math), before using Twin Engine."
        )
    _seen.add(get_num_threads())
