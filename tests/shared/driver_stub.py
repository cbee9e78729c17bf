"""A pretended CUDA driver and runtime: what `launch` and tapes ask of them is noted."""

import ctypes
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from optimized.cuda import compiler, launch
from optimized.cuda import device as device_checks
from optimized.tapes import tape

STREAM = 0x5EED


class Cuda:
    """The driver, the runtime and the current device; `calls` is what they were asked, in order."""

    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
    CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT = 9
    memcpyDeviceToDevice = 3
    streamCaptureModeRelaxed = 2

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.current = 0
        self.status = 0
        self.clusters = 5
        self.capturing = False
        self.captured: list[int] | None = None  # in a capture the kinds of nodes that come next depends on; 0: a kernel

    def exchange(self, index: int) -> int:
        """torch's, which sets the current device and tells the one before."""
        self.current, before = index, self.current
        self.calls.append(("device", index))
        return before

    def setDevice(self, index: int) -> None:
        self.calls.append(("attach", index))

    def funcSetAttribute(self, function: int, attribute: int, value: int) -> None:
        self.calls.append(("attribute", function, attribute, value))

    def launchKernel(self, *arguments: int) -> None:
        self.calls.append(("launch", *arguments))

    def memcpyAsync(self, *arguments: int) -> None:
        self.calls.append(("copy", *arguments))

    def graphLaunch(self, *arguments: Any) -> None:
        self.calls.append(("graph", *arguments))

    def cuLaunchKernelEx(self, config: Any, function: Any, pointers: Any, extra: Any) -> int:
        given = config._obj
        name = ctypes.c_int.from_address(given.attributes).value
        value = ctypes.c_int.from_address(given.attributes + 8).value
        about = (tuple(given.extents), given.shared_bytes, given.stream, given.count, name, value)
        self.calls.append(("launch early", about, function.value, pointers.value, extra))
        return self.status

    def cuStreamGetCaptureInfo_v3(self, stream: Any, status: Any, *found: Any) -> int:
        _, _, nodes, _, count = found
        kinds = self.captured or []
        self._nodes = (ctypes.c_void_p * len(kinds))(*(kind + 1 for kind in kinds))
        status._obj.value, count._obj.value = int(self.captured is not None), len(kinds)
        nodes._obj.value = ctypes.addressof(self._nodes)
        return 0

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:
        kind._obj.value = node.value - 1
        return 0

    def cuOccupancyMaxActiveClusters(self, found: Any, function: Any, config: Any) -> int:
        given = config._obj
        self.calls.append(("clusters", tuple(given.extents), given.shared_bytes, function.value, self.current))
        found._obj.value = self.clusters
        return self.status

    def of(self, *kinds: str) -> list[tuple[Any, ...]]:
        """The calls of some kinds."""
        return [call for call in self.calls if call[0] in kinds]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    made = Cuda()

    class Module:
        def load(self, cubin: bytes) -> None:
            made.calls.append(("load", cubin, made.current))

        def get_function(self, name: str) -> Any:
            made.calls.append(("function", name))
            return SimpleNamespace(ptr=1000 + len(made.of("function")))

    for name in ("cupy", "cupy.cuda", "cupy.cuda.function"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(Module=Module))
    for name in ("_driver", "runtime", "_library"):
        monkeypatch.setattr(launch, name, lambda: made)
    for owner, name in ((launch, "_modules"), (launch, "_kernels"), (tape, "_pools")):
        monkeypatch.setattr(owner, name, {})
    monkeypatch.setattr(tape, "_retired", [])
    monkeypatch.setattr(launch, "_thread", launch._Thread())
    monkeypatch.setattr(compiler, "cubin", lambda kernel, defines: f"{kernel} {sorted(defines.items())}".encode())
    monkeypatch.setattr(device_checks, "check", lambda index: made.calls.append(("check", index)))
    monkeypatch.setattr(device_checks, "check_cupy", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_exchangeDevice", made.exchange, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM + index, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: made.capturing, raising=False)
    launch.clusters_at_once.cache_clear()
    tape._capturing_stream.cache_clear()
    yield made
    launch.clusters_at_once.cache_clear()
    tape._capturing_stream.cache_clear()


def arguments(pointers: int, *kinds: Any) -> list[Any]:
    """What a kernel reads through the array of pointers."""
    addresses = (ctypes.c_uint64 * len(kinds)).from_address(pointers)
    return [kind.from_address(address).value for kind, address in zip(kinds, addresses, strict=True)]
