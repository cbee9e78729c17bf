"""The arguments of a launch, read where the driver would read them."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from optimized.cuda import launch


def read(likes: Sequence[Any], pointers: int) -> list[Any]:
    """Kernel arguments by the address of pointers to them, each of the type of one of `likes`."""
    addresses = (ctypes.c_uint64 * len(likes)).from_address(pointers)
    return [_read(like, address) for like, address in zip(likes, addresses, strict=True)]


def _read(like: Any, address: int) -> Any:
    if isinstance(like, launch.ByValue):
        found = np.frombuffer(ctypes.string_at(address, like.storage.nbytes), like.storage.dtype)
        return launch.by_value(found.reshape(like.storage.shape))
    if isinstance(like, int):
        return ctypes.c_int64.from_address(address).value
    return np.frombuffer(ctypes.string_at(address, like.nbytes), like.dtype)[0]
