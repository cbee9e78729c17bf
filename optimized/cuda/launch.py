"""Load cubins and launch their kernels, through CuPy, on torch's current stream.

CuPy only loads and launches: it allocates nothing (its memory pool stays at 0 bytes), and arguments are torch's own
pointers. A module is loaded and a function looked up once for each device, so an op can be captured into a CUDA graph
after its first call. A launch calls CuPy's binding of the driver, with an argument block that is kept for each kernel
and thread. CuPy's `Function` would make an object of every argument, which costs as much as the launch.

    kernel = launch.function("cast", "cast", {"BF16": 1})
    launch.launch(kernel, (blocks,), (256,), [x.data_ptr(), np.int32(rows)], device=x.device.index)
"""

import contextlib
import ctypes
import functools
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from optimized.cuda import compiler
from optimized.cuda import device as device_checks

_lock = threading.RLock()
_modules: dict[tuple[Any, ...], Any] = {}


@dataclass(eq=False, slots=True)
class Kernel:
    """One `__global__` function of a kernel file, loaded on each device at its first use there.

    Args:
        kernel: the file, without `.cu`.
        name: the function in it (declared `extern "C"`).
        defines: preprocessor macros of this configuration.
        max_dynamic_smem: bytes of dynamic shared memory that launches may ask for (at most 232448).
        carveout: percent of a multiprocessor's 228 KB that its blocks may share at most; the rest is L1's. -1: as much
            as the largest number of blocks takes.
    """

    kernel: str
    name: str
    defines: dict[str, int | str]
    max_dynamic_smem: int
    carveout: int
    _functions: list[Any] = field(default_factory=list)  # CuPy's, which keep the modules loaded
    _handles: dict[int, int] = field(default_factory=dict)

    @property
    def configuration(self) -> tuple[str, dict[str, int | str]]:
        """What is compiled: the file and its macros."""
        return self.kernel, self.defines

    @property
    def loaded(self) -> bool:
        """Whether it is loaded on some device."""
        return bool(self._handles)

    def on(self, index: int) -> int:
        """The driver's handle on CUDA device `index` (which must be the current device at the first use)."""
        handle = self._handles.get(index)
        return self._load(index) if handle is None else handle

    def _load(self, index: int) -> int:
        with _lock:
            if index in self._handles:
                return self._handles[index]
            device_checks.check(index)
            device_checks.check_cupy()
            from cupy.cuda.function import Module

            configuration = (index, self.kernel, tuple(sorted(self.defines.items())))
            module = _modules.get(configuration)
            if module is None:
                module = Module()
                module.load(compiler.cubin(self.kernel, self.defines))
                _modules[configuration] = module
            function, driver = module.get_function(self.name), _driver()
            if self.max_dynamic_smem > 48 * 1024:  # which every kernel may have
                attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                driver.funcSetAttribute(function.ptr, attribute, self.max_dynamic_smem)
            if self.carveout >= 0:
                attribute = driver.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
                driver.funcSetAttribute(function.ptr, attribute, self.carveout)
            self._functions.append(function)
            self._handles[index] = function.ptr
            return self._handles[index]


@functools.cache
def _driver() -> Any:
    from cupy_backends.cuda.api import driver

    return driver


@functools.cache
def runtime() -> Any:
    """CuPy's binding of the CUDA runtime."""
    from cupy_backends.cuda.api import runtime

    return runtime


class ByValue:
    """A kernel argument that is a struct: the bytes of `storage`, which each launch reads and which it keeps alive.

    An address in it is a 64-bit integer of the storage's dtype, or belongs to a tensor map. `maps` says where those
    are: the first byte of each, and the address that it describes.
    """

    __slots__ = ("address", "maps", "storage")

    def __init__(self, storage: np.ndarray, maps: Sequence[tuple[int, int]] = ()) -> None:
        self.storage, self.maps = storage, maps
        self.address = storage.ctypes.data


by_value = ByValue  # in a list of arguments


# The format of a scalar in its eight bytes. x86-64 and Arm are little-endian: a kernel reads the first of them.
_FORMATS = {int: "q", np.int32: "q", np.int64: "q", np.uint32: "q", np.uint64: "Q", np.float32: "f4x"}


class _Arguments:
    """The argument block of one kernel in one thread: scalars in slots of eight bytes, and a pointer to each."""

    __slots__ = ("address", "format", "pointers", "structs", "values")

    def __init__(self, kernel: Kernel, args: Sequence[Any]) -> None:
        formats = []
        for position, argument in enumerate(args):
            cls = type(argument)
            if cls is not ByValue and cls not in _FORMATS:
                accepted = ", ".join(sorted(accepted.__name__ for accepted in _FORMATS))
                raise TypeError(
                    f"{kernel.kernel}.{kernel.name}: argument {position} is a {cls.__name__}; "
                    f"accepted are {accepted} and launch.by_value(array)."
                )
            formats.append(_FORMATS.get(cls, "q"))
        self.structs = [position for position, argument in enumerate(args) if type(argument) is ByValue]
        self.format = struct.Struct("=" + "".join(formats))
        self.values = (ctypes.c_uint64 * len(args))()
        first = ctypes.addressof(self.values)
        self.pointers = (ctypes.c_uint64 * len(args))(*(first + 8 * position for position in range(len(args))))
        self.address = ctypes.addressof(self.pointers)

    def fill(self, args: Sequence[Any]) -> int:
        """Put `args` in place and return the address of the array of pointers that the driver wants."""
        if self.structs:
            scalars = list(args)
            for position in self.structs:
                self.pointers[position] = scalars[position].address
                scalars[position] = 0
            args = scalars
        self.format.pack_into(self.values, 0, *args)
        return self.address


class Launch:
    """A launch that can be made again: the kernel, its grid, and arguments of its own.

    Attributes:
        args: as `launch` was given them.
        scalars: their 64-bit words; 0 in place of a struct.
    """

    __slots__ = ("_early", "_head", "_kept", "_pointers", "args", "scalars")
    capturable = True

    def __init__(self, kernel: Kernel, head: tuple[int, ...], args: Sequence[Any], early: bool) -> None:
        block = _Arguments(kernel, args)
        self._head = head  # handle, grid, block, bytes of shared memory
        self._early = early
        self._pointers = block.fill(args)
        self._kept: Any = block  # what `_pointers` points to
        self.args, self.scalars = args, block.values

    def play(self, stream: int) -> None:
        """Launch it on the current device."""
        _start(self._head, stream, self._pointers, self._early)

    def with_arguments(self, pointers: int, kept: Any) -> "Launch":
        """The same launch with other arguments: the address of pointers to them, and what keeps them alive."""
        other = Launch.__new__(Launch)
        other._head, other._early, other._pointers, other._kept = self._head, self._early, pointers, kept
        return other


class Tape(Protocol):
    """What takes the launches of `recording`, and what else can be done again."""

    def append(self, entry: Any) -> None: ...


class _Thread(threading.local):
    """What each thread has for itself.

    The driver reads an argument block while the interpreter's lock is free, so each thread has its own. `devices` are
    those whose context is current in this thread: launches call the driver, and a thread of autograd's has no context
    until the CUDA runtime is called in it.
    """

    def __init__(self) -> None:
        self.arguments: dict[Kernel, _Arguments] = {}
        self.devices: set[int] = set()
        self.tape: Tape | None = None
        self.collected: dict[Kernel, None] | None = None  # kernels noted in place of launches, in their order

    def attach(self, index: int) -> None:
        """Make the device's context current in this thread."""
        runtime().setDevice(index)
        if self.collected is None:
            self.devices.add(index)

    def collects(self, kernel: Kernel, index: int) -> bool:
        """Note a kernel if this thread collects them; otherwise attach the device, as the first launch on it must."""
        if self.collected is None:
            self.attach(index)
            return False
        self.collected[kernel] = None
        return True


_thread = _Thread()
_kernels: dict[tuple[Any, ...], Kernel] = {}


def function(
    kernel: str, name: str, defines: compiler.Defines | None = None, max_dynamic_smem: int = 0, carveout: int = -1
) -> Kernel:
    """The function `name` of `kernels/<kernel>.cu` compiled with `defines`; one object per configuration.

    Nothing is compiled or loaded before the first launch, so this works at import, without CuPy or a GPU.
    """
    configuration = (kernel, name, tuple(sorted((defines or {}).items())), max_dynamic_smem, carveout)
    with _lock:
        found = _kernels.get(configuration)
        if found is None:
            found = _kernels[configuration] = Kernel(kernel, name, dict(defines or {}), max_dynamic_smem, carveout)
        return found


def launch(
    kernel: Kernel,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    args: Sequence[Any],
    smem: int = 0,
    *,
    device: int,
    early: bool = False,
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
        early: whether it may start while the kernel before it ends, and waits for that one itself
            (kernels/ptx/grid.cuh).
    """
    previous = torch._C._cuda_exchangeDevice(device)
    try:
        # A thread that collects has no devices: so a thread that launches need not ask whether it collects.
        if device not in _thread.devices and _thread.collects(kernel, device):
            return
        handle = kernel.on(device)
        block_of_arguments = _thread.arguments.get(kernel)
        if block_of_arguments is None:
            block_of_arguments = _thread.arguments[kernel] = _Arguments(kernel, args)
        pointers = block_of_arguments.fill(args)
        stream = torch._C._cuda_getCurrentRawStream(device)
        head = (handle, *_three(grid), *_three(block), smem)
        _start(head, stream, pointers, early)
        if _thread.tape is not None:
            _thread.tape.append(Launch(kernel, head, args, early))
    finally:
        if previous != device:
            torch._C._cuda_exchangeDevice(previous)


def current_stream(device: int) -> int:
    """torch's current stream of the current device, `device`, ready for launches of this thread."""
    if device not in _thread.devices:
        _thread.attach(device)
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return stream


@contextlib.contextmanager
def recording(tape: Tape) -> Iterator[None]:
    """Make this thread's launches and also note them in `tape`."""
    outer, _thread.tape = _thread.tape, tape
    try:
        yield
    finally:
        _thread.tape = outer


def tape() -> Tape | None:
    """What takes this thread's launches, if they are recorded."""
    return _thread.tape


def collects() -> bool:
    """Whether this thread's launches are collected in place of made."""
    return _thread.collected is not None


def noted() -> bool:
    """Whether this thread's launches are recorded or collected; then no tape may be played in their place."""
    return _thread.tape is not None or _thread.collected is not None


@contextlib.contextmanager
def collecting() -> Iterator[dict[Kernel, None]]:
    """Note the kernels that this thread would launch, and launch none: what they would write is left undefined.

    `clusters_at_once`, which asks the driver about a kernel, still loads it.
    """
    outer = _thread.collected, _thread.devices
    _thread.collected, _thread.devices = {}, set()
    try:
        yield _thread.collected
    finally:
        _thread.collected, _thread.devices = outer


def _three(extent: tuple[int, ...]) -> tuple[int, ...]:
    return extent + (1, 1, 1)[len(extent) :]


@functools.cache
def processors(index: int) -> int:
    """Number of multiprocessors of CUDA device `index`: the grid of a persistent kernel."""
    return torch.cuda.get_device_properties(index).multi_processor_count


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of the driver's API."""

    _fields_ = (
        ("extents", ctypes.c_uint * 6),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of the driver's API, for values that are integers."""

    _fields_ = (("name", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


_EARLY = _LaunchAttribute(name=6, value=(1,))  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _after_a_kernel(stream: int) -> bool:
    """Whether a kernel may be launched early on a stream: in a capture only a kernel may be what it depends on."""
    status, count, deps, edges = ctypes.c_int(), ctypes.c_size_t(), ctypes.c_void_p(), ctypes.c_void_p()
    found = [ctypes.byref(one) for one in (deps, edges, count)]
    of = (ctypes.c_void_p(stream), ctypes.byref(status), None, None, *found)
    error = _library().cuStreamGetCaptureInfo_v3(*of)
    if error == 0 and status.value == 0:  # CU_STREAM_CAPTURE_STATUS_NONE
        return True
    if error != 0 or count.value != 1:
        return False
    kind = ctypes.c_int(-1)
    node = ctypes.cast(deps, ctypes.POINTER(ctypes.c_void_p))[0]
    return _library().cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0 and kind.value == 0  # a kernel


def _start(head: tuple[int, ...], stream: int, pointers: int, early: bool) -> None:
    """Launch: `head` is the handle, the grid, the block and the bytes of shared memory."""
    if not early or not _after_a_kernel(stream):
        _driver().launchKernel(*head, stream, pointers, 0)
        return
    handle, *extents, smem = head
    config = _LaunchConfig(tuple(extents), smem, stream, ctypes.addressof(_EARLY), 1)
    status = _library().cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(handle), ctypes.c_void_p(pointers), None)
    if status != 0:
        raise RuntimeError(f"cuLaunchKernelEx gave error {status}.")


@functools.cache
def clusters_at_once(kernel: Kernel, blocks: int, threads: int, smem: int, device: int) -> int:
    """How many clusters of `blocks` blocks run at once: the grid of a persistent kernel with clusters.

    A cluster lies within one part of the GPU, and what is left of a part may be too small for a whole cluster.
    """
    found = ctypes.c_int()
    config = _LaunchConfig(extents=(blocks, 1, 1, threads, 1, 1), shared_bytes=smem)
    with torch.cuda.device(device):
        if device not in _thread.devices:
            _thread.attach(device)
        handle = ctypes.c_void_p(kernel.on(device))
        status = _library().cuOccupancyMaxActiveClusters(ctypes.byref(found), handle, ctypes.byref(config))
    if status != 0:
        raise RuntimeError(f"{kernel.kernel}: cuOccupancyMaxActiveClusters({blocks} blocks) gave error {status}.")
    return max(1, found.value)
