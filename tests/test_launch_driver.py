"""What the CUDA driver is given for a launch, byte for byte: `launch` and `tensor_map` over a pretended driver."""

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from optimized import compiler, launch, tensor_map
from optimized import device as device_checks
from optimized.ops import gemm_tile

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
    for name in ("_driver", "_runtime", "_library"):
        monkeypatch.setattr(launch, name, lambda: made)
    for name, value in (("_modules", {}), ("_kernels", {}), ("_retired", []), ("_pools", {})):
        monkeypatch.setattr(launch, name, value)
    monkeypatch.setattr(launch, "_thread", launch._Thread())
    monkeypatch.setattr(compiler, "cubin", lambda kernel, defines: f"{kernel} {sorted(defines.items())}".encode())
    monkeypatch.setattr(device_checks, "check", lambda index: made.calls.append(("check", index)))
    monkeypatch.setattr(device_checks, "check_cupy", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_exchangeDevice", made.exchange, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM + index, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: made.capturing, raising=False)
    launch.clusters_at_once.cache_clear()
    launch._capturing_stream.cache_clear()
    yield made
    launch.clusters_at_once.cache_clear()
    launch._capturing_stream.cache_clear()


# --- loading ----------------------------------------------------------------------------------------------


def test_functions_of_a_file_share_its_module_on_each_device(cuda: Cuda) -> None:
    first, second = (launch.function("f", name, {"B": 1, "A": 2}) for name in ("one", "two"))
    other = launch.function("f", "one", {"B": 2})
    assert first.on(0) == first.on(0) == 1001
    assert first._load(0) == 1001  # as a thread that waited for another one's loading
    assert second.on(0) == 1002
    cuda.current = 1
    assert first.on(1) == 1003
    assert first.on(0) == 1001
    assert other.on(1) == 1004
    cubin = b"f [('A', 2), ('B', 1)]"
    assert cuda.of("load") == [("load", cubin, 0), ("load", cubin, 1), ("load", b"f [('B', 2)]", 1)]
    assert cuda.of("function") == [("function", name) for name in ("one", "two", "one", "one")]
    assert cuda.of("check") == [("check", 0), ("check", 0), ("check", 1), ("check", 1)]
    assert cuda.of("attribute") == []


@pytest.mark.parametrize(
    ("shared", "carveout", "set_to"),
    [
        (0, -1, {}),
        (48 * 1024, -1, {}),  # what a block can have without being allowed more
        (48 * 1024 + 1, -1, {8: 49153}),
        (232448, 0, {8: 232448, 9: 0}),
        (0, 70, {9: 70}),
    ],
)
def test_shared_memory_is_allowed_and_the_carveout_set(
    cuda: Cuda, shared: int, carveout: int, set_to: dict[int, int]
) -> None:
    handle = launch.function("f", "one", None, shared, carveout).on(0)
    assert cuda.of("attribute") == [("attribute", handle, name, value) for name, value in set_to.items()]


def test_one_object_for_a_configuration(cuda: Cuda) -> None:
    made = {launch.function("f", "one", None, shared, carveout) for shared in (0, 1) for carveout in (-1, 0)}
    assert len(made) == 4
    plain = launch.function("f", "one")
    assert plain in made
    assert plain is launch.function("f", "one", {}, 0, -1)
    assert (plain.max_dynamic_smem, plain.carveout, plain.defines) == (0, -1, {})


# --- launching --------------------------------------------------------------------------------------------


def arguments(pointers: int, *kinds: Any) -> list[Any]:
    """What a kernel reads through the array of pointers."""
    addresses = (ctypes.c_uint64 * len(kinds)).from_address(pointers)
    return [kind.from_address(address).value for kind, address in zip(kinds, addresses, strict=True)]


def test_a_launch_is_what_the_driver_is_asked_for(cuda: Cuda) -> None:
    kernel = launch.function("f", "one")
    launch.launch(kernel, (7,), (32,), [2**40, np.int32(-5)], device=0)
    launch.launch(kernel, (7, 8), (32, 2), [2**40 + 1, np.int32(6)], 100, device=0)
    launch.launch(kernel, (7, 8, 9), (32, 2, 3), [3, np.int32(7)], smem=5, device=0)
    first, second, third = cuda.of("launch")
    block = first[10]
    assert first == ("launch", 1001, 7, 1, 1, 32, 1, 1, 0, STREAM, block, 0)
    assert second == ("launch", 1001, 7, 8, 1, 32, 2, 1, 100, STREAM, block, 0)
    assert third == ("launch", 1001, 7, 8, 9, 32, 2, 3, 5, STREAM, block, 0)
    assert arguments(block, ctypes.c_int64, ctypes.c_int32) == [3, 7]  # a block of a kernel is filled each time
    # The context is made current once, before the first, and the device stays.
    assert cuda.of("attach") == [("attach", 0)]
    assert cuda.of("device") == [("device", 0)] * 3


def test_the_current_device_comes_back(cuda: Cuda) -> None:
    kernel = launch.function("f", "one")
    launch.launch(kernel, (1,), (1,), [1], device=1)
    assert cuda.calls[:2] == [("device", 1), ("attach", 1)]
    assert cuda.of("launch")[0][9] == STREAM + 1
    assert cuda.calls[-1] == ("device", 0)
    with pytest.raises(TypeError, match="argument 0 is a str"):
        launch.launch(launch.function("f", "two"), (1,), (1,), ["x"], device=1)
    assert cuda.current == 0


def test_an_early_launch_names_the_attribute(cuda: Cuda) -> None:
    kernel = launch.function("f", "one")
    launch.launch(kernel, (7, 8), (32,), [np.int32(9)], 64, device=0, early=True)
    (_, about, function, pointers, extra) = cuda.calls[-1]
    # cuda.h: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION is 6, its value 1; one attribute.
    assert about == ((7, 8, 1, 32, 1, 1), 64, STREAM, 1, 6, 1)
    assert (function, extra) == (1001, None)
    assert arguments(pointers, ctypes.c_int32) == [9]
    assert cuda.of("launch") == []
    for status in (1, -1):
        cuda.status = status
        with pytest.raises(RuntimeError, match=f"cuLaunchKernelEx gave error {status}"):
            launch.launch(kernel, (1,), (1,), [np.int32(9)], device=0, early=True)


def test_a_thread_that_collects_launches_nothing(cuda: Cuda) -> None:
    kernel, other = (launch.function(name, "f") for name in ("one", "two"))
    launch.launch(kernel, (1,), (1,), [], device=0)
    asked = len(cuda.of("launch", "load", "attach"))
    with launch.collecting() as outer:
        for one in (other, kernel, other):
            launch.launch(one, (1,), (1,), [], device=1)
        with launch.collecting() as inner:
            launch.launch(kernel, (1,), (1,), [], device=0)
        launch.launch(other, (1,), (1,), [], device=0)
    assert (list(outer), list(inner)) == ([other, kernel], [kernel])
    assert len(cuda.of("launch", "load", "attach")) == asked
    assert cuda.current == 0
    launch.launch(kernel, (1,), (1,), [], device=0)  # the device is attached still
    assert len(cuda.of("launch", "load", "attach")) == asked + 1
    assert (kernel.loaded, other.loaded) == (True, False)


def test_clusters_are_asked_for_while_kernels_are_collected(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    kernel = launch.function("one", "f")
    with launch.collecting() as kernels:
        assert launch.clusters_at_once(kernel, 2, 128, 0, 0) == 5
        launch.launch(kernel, (1,), (1,), [], device=0)
    assert list(kernels) == [kernel]
    assert not cuda.of("launch")


def test_the_structures_are_cudas() -> None:
    """CUlaunchConfig and CUlaunchAttribute of cuda.h on 64 bits."""
    config, attribute = launch._LaunchConfig, launch._LaunchAttribute
    assert [getattr(config, name).offset for name, _ in config._fields_] == [0, 24, 32, 40, 48]
    assert ctypes.sizeof(config) == 56
    assert [getattr(attribute, name).offset for name, _ in attribute._fields_] == [0, 4, 8]
    assert ctypes.sizeof(attribute) == 72


def test_every_type_of_argument(cuda: Cuda) -> None:
    struct = np.arange(3, dtype=np.int32)
    given = [
        *(2**63 - 1, np.int32(-(2**31)), np.int64(-(2**63)), np.uint32(2**32 - 1), np.uint64(2**64 - 1)),
        *(np.float32(-0.5), launch.by_value(struct), launch.by_value(struct[1:])),
    ]
    launch.launch(launch.function("f", "one"), (1,), (1,), given, device=0)
    kinds = (ctypes.c_int64, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_float)
    found = arguments(cuda.of("launch")[0][10], *kinds, ctypes.c_int32, ctypes.c_int32)
    assert found == [2**63 - 1, -(2**31), -(2**63), 2**32 - 1, 2**64 - 1, -0.5, 0, 1]


def test_clusters_that_run_at_once(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def current(index: int) -> Iterator[None]:
        before, cuda.current = cuda.current, index
        yield
        cuda.current = before

    monkeypatch.setattr(torch.cuda, "device", current)
    kernel = launch.function("f", "one", None, 4096)
    assert launch.clusters_at_once(kernel, 4, 256, 2048, 1) == 5
    assert launch.clusters_at_once(kernel, 4, 256, 2048, 1) == 5
    assert cuda.of("clusters") == [("clusters", (4, 1, 1, 256, 1, 1), 2048, 1001, 1)]
    assert cuda.of("attach") == [("attach", 1)]
    cuda.clusters = 0  # the launch itself will say why
    assert launch.clusters_at_once(kernel, 8, 256, 2048, 1) == 1
    for status in (1, -1):
        cuda.status = status
        with pytest.raises(RuntimeError, match=rf"f: cuOccupancyMaxActiveClusters\(2 blocks\) gave error {status}"):
            launch.clusters_at_once(kernel, 2, 256, 2048, 1)
    assert cuda.of("attach") == [("attach", 1)]


def test_processors_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = {0: SimpleNamespace(multi_processor_count=132), 1: SimpleNamespace(multi_processor_count=114)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    for cached in (launch.processors, gemm_tile.multiprocessors):
        cached.cache_clear()
    try:
        assert [launch.processors(index) for index in (0, 1)] == [132, 114]
        properties[0] = properties[1]  # is not asked for again
        assert launch.processors(0) == 132
        assert [gemm_tile.multiprocessors(index) for index in (0, 1)] == [132, 114]
    finally:
        for cached in (launch.processors, gemm_tile.multiprocessors):
            cached.cache_clear()


def test_the_libraries_are_looked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    api = SimpleNamespace(driver="the driver", runtime="the runtime")
    for name in ("cupy_backends", "cupy_backends.cuda", "cupy_backends.cuda.api"):
        monkeypatch.setitem(sys.modules, name, api)
    opened: list[str] = []

    def open_library(name: str) -> Any:
        opened.append(name)
        return SimpleNamespace(cuTensorMapEncodeTiled=SimpleNamespace())

    monkeypatch.setattr(ctypes, "CDLL", open_library)
    cached = (launch._driver, launch._runtime, launch._library, tensor_map._driver)
    for one in cached:
        one.cache_clear()
    try:
        assert launch._driver() == "the driver"
        assert launch._runtime() == "the runtime"
        assert launch._library() is launch._library()
        pointers = [ctypes.POINTER(kind) for kind in (ctypes.c_uint64,) * 2 + (ctypes.c_uint32,) * 2]
        first = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p]
        assert tensor_map._driver().argtypes == [*first, *pointers, *[ctypes.c_int] * 4]
        assert opened == ["libcuda.so.1"] * 2
    finally:
        for one in cached:
            one.cache_clear()


# --- launches made again ----------------------------------------------------------------------------------


def test_recorded_launches_keep_their_own_arguments(cuda: Cuda) -> None:
    kernel, struct = launch.function("f", "one"), np.array([41, 42], np.int32)
    outer, inner = launch.Launches(), launch.Launches()
    with launch.recording(outer):
        launch.launch(kernel, (3,), (32,), [np.int32(1), launch.by_value(struct)], 16, device=0)
        with launch.recording(inner):
            launch.launch(kernel, (4,), (32,), [np.int32(2), launch.by_value(struct[1:])], device=0, early=True)
    launch.launch(kernel, (5,), (32,), [np.int32(3), launch.by_value(struct)], device=0)
    assert [len(one._entries) for one in (outer, inner)] == [1, 1]
    cuda.calls.clear()
    outer.again(0)
    (again,) = cuda.of("launch")
    assert again[:10] == ("launch", 1001, 3, 1, 1, 32, 1, 1, 16, STREAM)
    assert arguments(again[10], ctypes.c_int32, ctypes.c_int32) == [1, 41]
    inner.again(0)
    assert cuda.calls[-1][1] == ((4, 1, 1, 32, 1, 1), 0, STREAM, 1, 6, 1)
    assert arguments(cuda.calls[-1][3], ctypes.c_int32, ctypes.c_int32) == [2, 42]


def test_a_copy_is_made_on_the_stream(cuda: Cuda) -> None:
    copy = launch.Copy(1 << 20, 1 << 21, 4096)
    assert copy.capturable
    copy.again(77)
    assert cuda.calls == [("copy", 1 << 20, 1 << 21, 4096, 3, 77)]


class Entry:
    """Something to be made again."""

    def __init__(self, cuda: Cuda, capturable: bool = True) -> None:
        self.cuda, self.capturable = cuda, capturable

    def again(self, stream: int) -> None:
        self.cuda.calls.append(("again", stream))


@pytest.fixture
def capture(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """Streams that capture."""

    class Stream:
        ptr = 0xCA9

        def __init__(self, non_blocking: bool) -> None:
            cuda.calls.append(("new stream", non_blocking))

        def begin_capture(self, mode: int) -> None:
            cuda.calls.append(("begin", mode))

        def end_capture(self) -> Any:
            cuda.calls.append(("end",))
            return SimpleNamespace(graphExec="graph")

    @contextlib.contextmanager
    def within(kind: str, *about: Any) -> Iterator[None]:
        cuda.calls.append((kind, *about))
        yield
        cuda.calls.append((f"{kind} over",))

    sys.modules["cupy.cuda"].Stream = Stream  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda pointer, device: ("stream", pointer, device))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: within("current", stream))
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "MemPool", lambda: f"pool {len(launch._pools)}", raising=False)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool, device: within("memory", pool, device), raising=False)
    return cuda


def test_the_third_time_they_become_a_graph(capture: Cuda) -> None:
    launches = launch.Launches()
    for _ in range(3):
        launches.append(Entry(capture))
    for _ in range(2):
        launches.again(0)
        assert capture.of("again")[-3:] == [("again", STREAM)] * 3
        assert not capture.of("graph", "begin")
    launch._retired.append("old graph")
    capture.calls.clear()
    launches.again(0)
    assert capture.calls == [
        ("device", 0),
        ("new stream", True),
        ("current", ("stream", 0xCA9, 0)),
        ("memory", "pool 0", 0),
        ("begin", 2),
        *[("again", 0xCA9)] * 3,
        ("end",),
        ("memory over",),
        ("current over",),
        ("graph", "graph", STREAM),
    ]
    assert launch._retired == []
    capture.calls.clear()
    launches.again(0)
    assert capture.calls == [("device", 0), ("graph", "graph", STREAM)]
    # It belongs to its stream, and no capture of another's can hold it.
    capture.calls.clear()
    capture.capturing = True
    launches.again(0)
    assert not capture.of("graph")
    capture.capturing = False
    launches._stream += 1
    launches.again(0)
    assert capture.of("again") == [("again", STREAM)] * 6
    assert not capture.of("graph")
    # Where it may be destroyed, it is.
    del launches
    gc.collect()
    (retired,) = launch._retired
    assert retired.graphExec == "graph"


def test_what_never_becomes_a_graph(capture: Cuda) -> None:
    two, foreign = launch.Launches(), launch.Launches()
    for _ in range(2):
        two.append(Entry(capture))
    for capturable in (True, False, True):
        foreign.append(Entry(capture, capturable))
    for _ in range(6):
        two.again(0)
        foreign.again(0)
    capture.capturing = True
    captured = launch.Launches()
    for _ in range(3):
        captured.append(Entry(capture))
    for _ in range(6):
        captured.again(0)
    assert not capture.of("graph", "begin")
    assert len(capture.of("again")) == 6 * (2 + 3 + 3)
    del two
    gc.collect()
    assert launch._retired == []


def test_launches_on_another_device(capture: Cuda) -> None:
    launches = launch.Launches()
    for _ in range(5):
        launches.append(Entry(capture))
    for _ in range(3):
        launches.again(1)
    assert len(capture.of("again")) == 3 * 5
    assert capture.of("device") == [("device", 1), ("device", 0)] * 3
    assert capture.of("attach") == [("attach", 1)]
    assert capture.of("current") == [("current", ("stream", 0xCA9, 1))]
    assert capture.of("graph") == [("graph", "graph", STREAM + 1)]


def test_a_capture_that_fails_ends(capture: Cuda) -> None:
    class Fails(Entry):
        def again(self, stream: int) -> None:
            if stream == 0xCA9:
                raise RuntimeError("no")

    launches = launch.Launches()
    for _ in range(3):
        launches.append(Fails(capture))
    launches.again(0)
    launches.again(0)
    with pytest.raises(RuntimeError, match="no"):
        launches.again(0)
    assert capture.of("begin", "end") == [("begin", 2), ("end",)]
    assert launches._graph is None


def test_graphs_of_a_stream_share_their_memory(capture: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    for device, stream in ((0, 1), (0, 1), (0, 2), (1, 1)):
        with launch._memory(device, stream):
            pass
    pools = [call[1:] for call in capture.of("memory")]
    assert pools == [("pool 0", 0), ("pool 0", 0), ("pool 1", 0), ("pool 2", 1)]
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with launch._memory(0, 3):
        pass
    assert len(capture.of("memory")) == 4
    assert len(launch._pools) == 3
