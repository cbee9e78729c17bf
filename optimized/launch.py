"""Load cubins and launch their kernels, through CuPy, on torch's current stream.

CuPy is only the loader and launcher: it allocates nothing (its memory pool stays at 0 bytes), and arguments
are torch's own pointers. Modules are loaded and functions looked up once per device, so an op can be captured
into a CUDA graph after its first call.

    kernel = launch.function("cast", "cast", {"BF16": 1})
    launch.launch(kernel, (blocks,), (256,), [x.data_ptr(), np.int32(rows)], device=x.device.index)
"""

import functools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from optimized import compiler
from optimized import device as device_checks

_lock = threading.RLock()
_modules: dict[tuple[Any, ...], Any] = {}


class _Stream:
    """What CuPy needs of a stream: `.ptr`. (torch's Stream objects cost 3.8 µs each, the raw handle 0.1.)"""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class Kernel:
    """One `__global__` function of a kernel file, loaded on each device at its first use there.

    Args:
        kernel: the file, without `.cu`.
        name: the function in it (declared `extern "C"`).
        defines: preprocessor macros of this configuration.
        max_dynamic_smem: bytes of dynamic shared memory that launches may ask for (at most 232448).
    """

    __slots__ = ("_functions", "defines", "kernel", "max_dynamic_smem", "name")

    def __init__(self, kernel: str, name: str, defines: dict[str, int | str], max_dynamic_smem: int) -> None:
        self.kernel = kernel
        self.name = name
        self.defines = defines
        self.max_dynamic_smem = max_dynamic_smem
        self._functions: dict[int, Any] = {}

    def on(self, index: int) -> Any:
        """The CuPy function on CUDA device `index` (which must be the current device at the first use)."""
        function = self._functions.get(index)
        return self._load(index) if function is None else function

    def _load(self, index: int) -> Any:
        with _lock:
            if index in self._functions:
                return self._functions[index]
            device_checks.check(index)
            device_checks.check_cupy()
            from cupy.cuda.function import Module

            configuration = (index, self.kernel, tuple(sorted(self.defines.items())))
            module = _modules.get(configuration)
            if module is None:
                module = Module()
                module.load(compiler.cubin(self.kernel, self.defines).read_bytes())
                _modules[configuration] = module
            function = module.get_function(self.name)
            if self.max_dynamic_smem > 48 * 1024:
                _allow_shared_memory(function, self.max_dynamic_smem)
            self._functions[index] = function
            return function


def _allow_shared_memory(function: Any, size: int) -> None:
    from cupy_backends.cuda.api import driver

    driver.funcSetAttribute(function.ptr, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, size)


@functools.cache
def _by_value_type() -> Any:
    from cupy.cuda.function import CPointer

    class ByValue(CPointer):  # type: ignore[misc]
        """A pointer to the argument's bytes that keeps them alive."""

        def __init__(self, storage: np.ndarray) -> None:
            super().__init__(storage.ctypes.data)
            self.storage = storage

    return ByValue


def by_value(storage: np.ndarray) -> Any:
    """A kernel argument that is a struct: the bytes of `storage`, read at each launch (40 ns, make it once)."""
    return _by_value_type()(storage)


_kernels: dict[tuple[Any, ...], Kernel] = {}


def function(kernel: str, name: str, defines: compiler.Defines | None = None, max_dynamic_smem: int = 0) -> Kernel:
    """The function `name` of `kernels/<kernel>.cu` compiled with `defines`; one object per configuration.

    Nothing is compiled or loaded before the first launch, so this works at import, without CuPy or a GPU.
    """
    configuration = (kernel, name, tuple(sorted((defines or {}).items())), max_dynamic_smem)
    with _lock:
        found = _kernels.get(configuration)
        if found is None:
            found = _kernels[configuration] = Kernel(kernel, name, dict(defines or {}), max_dynamic_smem)
        return found


def launch(
    kernel: Kernel,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    args: Sequence[Any],
    smem: int = 0,
    *,
    device: int,
) -> None:
    """Launch a kernel on torch's current stream of a device.

    Args:
        kernel: from `function`.
        grid: blocks in x, y, z (one to three numbers).
        block: threads in x, y, z (one to three numbers).
        args: in the kernel's order: `tensor.data_ptr()` and other 64-bit integers as int, everything else as
            NumPy scalars of the exact type (`np.int32(rows)`, `np.float32(x)`), structs through `by_value`
            (a tensor map: its `.argument`).
        smem: bytes of dynamic shared memory.
        device: index of the CUDA device on which the tensors are (`tensor.device.index`).
    """
    previous = torch._C._cuda_exchangeDevice(device)
    try:
        stream = _Stream(torch._C._cuda_getCurrentRawStream(device))
        kernel.on(device)(grid, block, args, smem, stream)
    finally:
        if previous != device:
            torch._C._cuda_exchangeDevice(previous)


def processors(index: int) -> int:
    """Number of multiprocessors of CUDA device `index`: the grid of a persistent kernel."""
    return torch.cuda.get_device_properties(index).multi_processor_count
