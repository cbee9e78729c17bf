"""What the CUDA driver is given for a launch, byte for byte: `launch` and `tensor_map` over a pretended driver."""

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from shared.driver_stub import STREAM, Cuda, arguments

from optimized.cuda import launch, tensor_map
from optimized.ops.gemms import gemm_tile

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


def test_in_a_capture_a_kernel_is_early_after_one_other_kernel_alone(cuda: Cuda) -> None:
    """CUDA has no such edge from a copy, and one that is asked for ends the capture."""
    kernel = launch.function("f", "one")
    for kinds, early in (([0], True), ([1], False), ([], False), ([0, 0], False), (None, True)):
        cuda.captured = kinds
        cuda.calls.clear()
        launch.launch(kernel, (1,), (1,), [np.int32(9)], device=0, early=True)
        assert len(cuda.of("launch early")) == early
        assert len(cuda.of("launch")) == (not early)


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
    cached = (launch._driver, launch.runtime, launch._library, tensor_map._driver)
    for one in cached:
        one.cache_clear()
    try:
        assert launch._driver() == "the driver"
        assert launch.runtime() == "the runtime"
        assert launch._library() is launch._library()
        pointers = [ctypes.POINTER(kind) for kind in (ctypes.c_uint64,) * 2 + (ctypes.c_uint32,) * 2]
        first = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p]
        assert tensor_map._driver().argtypes == [*first, *pointers, *[ctypes.c_int] * 4]
        assert opened == ["libcuda.so.1"] * 2
    finally:
        for one in cached:
            one.cache_clear()
