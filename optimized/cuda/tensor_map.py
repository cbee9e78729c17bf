"""Tensor maps: the descriptors through which Hopper's copy engine (TMA) reads and writes tiles.

`encode` calls the driver's `cuTensorMapEncodeTiled` and `replace_address` its `cuTensorMapReplaceAddress` (CUDA driver
API, "Tensor Map Object Management") through ctypes. A map holds the tensor's address and shape and is cached by exactly
those: encoding takes 6 µs, finding a cached map well under one. Dimensions and boxes are given innermost first, as the
driver wants them; `tensor_map_2d` takes rows and columns.
"""

import ctypes
import functools
from typing import Any

import numpy as np
import torch

from optimized.cuda import launch

# CUtensorMapDataType (with the bytes of an element), CUtensorMapSwizzle, CUtensorMapL2promotion of cuda.h (CUDA 13.0).
_TYPES = {
    torch.uint8: (0, 1),
    torch.float8_e4m3fn: (0, 1),
    torch.float8_e5m2: (0, 1),
    torch.float16: (6, 2),
    torch.float32: (7, 4),
    torch.bfloat16: (9, 2),
}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_L2_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: a thread of autograd has none before it calls the CUDA runtime
_CACHED = 4096  # maps; one is 128 bytes and a training step of a deep model needs a few hundred


class TensorMap:
    """A `CUtensorMap`; `argument` passes it to a kernel by value (`const __grid_constant__ CUtensorMap`)."""

    __slots__ = ("_storage", "argument", "words")

    def __init__(self, pointer: int) -> None:
        # The driver wants 64-byte alignment, which NumPy does not promise.
        self._storage = np.zeros(128 + 64, np.uint8)
        start = -self._storage.ctypes.data % 64
        self.words = self._storage[start : start + 128]
        self.argument = launch.by_value(self.words, ((0, pointer),))


@functools.cache
def _driver() -> Any:
    encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    sizes, boxes = ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint32)
    of_tensor = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
    encode.argtypes = [*of_tensor, sizes, sizes, boxes, boxes, *[ctypes.c_int] * 4]
    return encode


@functools.cache
def _replacer() -> Any:
    replace = ctypes.CDLL("libcuda.so.1").cuTensorMapReplaceAddress
    replace.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return replace


def check(
    pointer: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
    l2: int = 128,
) -> None:
    """Refuse, with the argument's name, what the hardware cannot describe; the arguments are those of `encode`."""
    if dtype not in _TYPES:
        raise ValueError(f"dtype={dtype} has no tensor map; accepted are {', '.join(map(str, _TYPES))}.")
    size = _TYPES[dtype][1]
    rank = len(shape)
    if not 1 <= rank <= 5 or len(box) != rank or len(strides) != rank - 1:
        raise ValueError(
            f"shape={shape}, strides={strides}, box={box}: a tensor map has 1 to 5 dimensions, a box of as "
            f"many, and one stride fewer (the innermost is contiguous)."
        )
    if swizzle not in _SWIZZLES or l2 not in _L2_PROMOTIONS:
        raise ValueError(f"swizzle={swizzle}, l2={l2}: accepted are 0, 32, 64, 128 and 0, 64, 128, 256 bytes.")
    if pointer % 16:
        raise ValueError(f"pointer={pointer:#x} is not a multiple of 16 bytes, which a tensor map needs.")
    if any(extent < 1 or extent > 2**32 for extent in shape):
        raise ValueError(f"shape={shape}: every extent of a tensor map is 1 to 2^32.")
    if any(stride % 16 or stride >= 2**40 for stride in strides):
        raise ValueError(f"strides={strides} (bytes): each is a multiple of 16 and below 2^40.")
    if any(not 1 <= extent <= 256 for extent in box) or box[0] * size % 16:
        raise ValueError(f"box={box}: extents are 1 to 256, the innermost a multiple of 16 bytes.")
    if swizzle and box[0] * size > swizzle:
        raise ValueError(
            f"box={box} is {box[0] * size} bytes wide; with swizzle={swizzle} at most {swizzle} are accepted."
        )


@functools.lru_cache(maxsize=_CACHED)
def encode(
    pointer: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int = 0,
    l2: int = 128,
) -> TensorMap:
    """Encode a tiled tensor map of 1 to 5 dimensions, innermost first; out-of-bounds elements read as zero.

    Args:
        pointer: device address of the first element, a multiple of 16.
        dtype: element type (float8 is described as bytes).
        shape: extents.
        strides: bytes from one element to the next in dimensions 1, 2, ...; multiples of 16. Dimension 0 is contiguous.
        box: extents of a tile, each at most 256.
        swizzle: 0, 32, 64 or 128: bytes of the shared-memory swizzle pattern.
        l2: 0, 64, 128 or 256: bytes that L2 fetches at a time.

    Raises:
        ValueError: an argument that the hardware cannot describe.
        RuntimeError: the driver refused the map.
    """
    check(pointer, dtype, shape, strides, box, swizzle, l2)
    rank = len(shape)
    result = TensorMap(pointer)
    arguments = (
        result.words.ctypes.data,
        _TYPES[dtype][0],
        rank,
        pointer,
        (ctypes.c_uint64 * rank)(*shape),
        (ctypes.c_uint64 * max(1, rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*([1] * rank)),
        0,  # no interleave
        _SWIZZLES[swizzle],
        _L2_PROMOTIONS[l2],
        0,  # out of bounds reads zero
    )
    status = _called(_driver(), *arguments)
    if status != 0:
        raise RuntimeError(
            f"cuTensorMapEncodeTiled returned CUresult {status} for pointer={pointer:#x}, dtype={dtype}, "
            f"shape={shape}, strides={strides}, box={box}, swizzle={swizzle}."
        )
    return result


def replace_address(words: int, pointer: int) -> None:
    """Let a tensor map describe the same tensor at another address, a multiple of 16.

    Args:
        words: the map's own address, a multiple of 64.
        pointer: the tensor's.

    Raises:
        RuntimeError: the driver refused.
    """
    status = _called(_replacer(), words, pointer)
    if status != 0:
        raise RuntimeError(f"cuTensorMapReplaceAddress returned CUresult {status} for pointer={pointer:#x}.")


def _called(function: Any, *arguments: Any) -> int:
    status: int = function(*arguments)
    if status == _NO_CONTEXT:
        launch.runtime().setDevice(torch.cuda.current_device())
        status = function(*arguments)
    return status


def tensor_map_2d(
    pointer: int,
    dtype: torch.dtype,
    rows: int,
    cols: int,
    row_stride_bytes: int,
    box_rows: int,
    box_cols: int,
    swizzle: int = 128,
) -> TensorMap:
    """The tensor map of a row-major matrix `[rows, cols]` in tiles of `[box_rows, box_cols]`; see `encode`."""
    return encode(pointer, dtype, (cols, rows), (row_stride_bytes,), (box_cols, box_rows), swizzle)
