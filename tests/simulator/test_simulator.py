"""The simulator itself: it finds the faults that docs/simulator.md says it finds."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import simulator
from optimized import measure
from optimized.cuda import launch
from optimized.cuda.tensor_map import encode
from simulator import AT_ONCE, AT_RANDOM, LATE, Simulator

pytestmark = pytest.mark.skipif(not simulator.available, reason="needs g++")

KERNEL = """
#include "ptx/bulk.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
using namespace twin;
extern "C" __global__ void fetch(const float* from, float* to, int arrivals, int waits) {
    __shared__ __align__(16) float words[32];
    __shared__ __align__(8) unsigned long long barrier;
    const unsigned full = shared_address(&barrier);
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        if (arrivals > 0) mbarrier_arrive_expect_tx(full, 128);
        for (int i = 1; i < arrivals; i++) mbarrier_arrive(full + 8 * (i > 2));
        bulk_load(shared_address(words), from, 128, full);
    }
    if (waits) mbarrier_wait(full, 0);
    to[threadIdx.x] = words[threadIdx.x];
    __syncthreads();
}
extern "C" __global__ void give(float* to, int everything) {
    __shared__ __align__(16) float words[32];
    words[threadIdx.x] = threadIdx.x;
    __syncthreads();
    if (threadIdx.x == 0) {
        bulk_store(to, shared_address(words), 128);
        bulk_commit();
        if (everything) bulk_wait<0>();
        else bulk_wait_read<0>();
    }
    __syncthreads();
    words[threadIdx.x] = -1.0f;
    __syncthreads();
    if (threadIdx.x == 1) to[32] = to[31];
}
extern "C" __global__ void outside(float* to, int offset) {
    __shared__ __align__(16) float words[32];
    words[threadIdx.x] = 0.0f;
    __syncthreads();
    if (threadIdx.x == 5) bulk_store(to, shared_address(words) + offset, 128);
}
extern "C" __global__ void fetch_box(const __grid_constant__ CUtensorMap map, unsigned char* to, int x) {
    __shared__ __align__(128) unsigned char box[4 * 32];
    __shared__ __align__(8) unsigned long long barrier;
    const unsigned full = shared_address(&barrier);
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(full, 4 * 32);
        tma_load_2d(shared_address(box), &map, full, x, 1);
    }
    __syncthreads();
    mbarrier_wait(full, 0);
    for (int row = 0; row < 4; row++) to[32 * row + threadIdx.x] = box[32 * row + threadIdx.x];
}
inline float* of_an_inline_function() {
    __shared__ float words[32 + MORE];
    return words;
}
extern "C" __global__ void fill(int bytes) {
    extern __shared__ __align__(16) unsigned char memory[];
    for (int i = threadIdx.x; i < bytes; i += 32) memory[i] = 1;
}
extern "C" __global__ void unwritten(float* to) {
    to[threadIdx.x] = of_an_inline_function()[threadIdx.x];
    __syncthreads();
    of_an_inline_function()[threadIdx.x] = static_cast<float>(shared_address(of_an_inline_function()) * 0);
}
"""


@pytest.fixture
def run(tmp_path: Path):  # type: ignore[no-untyped-def]
    """run(function, when, *args): a launch of 32 threads of KERNEL; the dynamic shared memory that it wrote."""
    (tmp_path / "faults.cu").write_text(KERNEL)
    (tmp_path / "ptx").symlink_to(measure.ROOT / "optimized" / "kernels" / "ptx")

    def launched(function: str, when: int, *args: object, more: int = 0, smem: int = 0) -> int:
        kernel = launch.Kernel("faults", function, {"MORE": more}, smem, -1)
        with Simulator(when=when) as gpu:
            gpu.run(kernel, (1,), (32,), args, smem, tmp_path)
        ((_, asked, written),) = gpu.shared
        assert asked == smem
        return written

    return launched


@pytest.mark.parametrize("when", [AT_ONCE, LATE, AT_RANDOM])
def test_a_copy_that_is_waited_for(run, when: int) -> None:  # type: ignore[no-untyped-def]
    x, y = torch.arange(32.0), torch.zeros(32)
    run("fetch", when, x.data_ptr(), y.data_ptr(), np.int32(1), np.int32(1))
    assert torch.equal(x, y)


def test_a_copy_that_is_not_waited_for(run) -> None:  # type: ignore[no-untyped-def]
    x, y = torch.arange(32.0), torch.zeros(32)
    run("fetch", LATE, x.data_ptr(), y.data_ptr(), np.int32(1), np.int32(0))
    assert y.isnan().all()


def test_who_waits_for_ever_is_named(run) -> None:  # type: ignore[no-untyped-def]
    x, y = torch.arange(32.0), torch.zeros(32)
    with pytest.raises(
        RuntimeError, match=r"faults\.fetch: stuck: .* 32 wait for an mbarrier \(first: block \(0, 0, 0\)"
    ):
        run("fetch", LATE, x.data_ptr(), y.data_ptr(), np.int32(0), np.int32(1))


def test_too_many_arrivals(run) -> None:  # type: ignore[no-untyped-def]
    x, y = torch.arange(32.0), torch.zeros(32)
    with pytest.raises(RuntimeError, match=r"thread \(0, 0, 0\): more arrivals at the mbarrier"):
        run("fetch", LATE, x.data_ptr(), y.data_ptr(), np.int32(2), np.int32(1))


def test_an_mbarrier_that_was_not_initialised(run) -> None:  # type: ignore[no-untyped-def]
    x, y = torch.arange(32.0), torch.zeros(32)
    with pytest.raises(RuntimeError, match=r"more arrivals|no mbarrier was initialised"):
        run("fetch", AT_ONCE, x.data_ptr(), y.data_ptr(), np.int32(4), np.int32(1))


def test_a_bulk_store_that_is_not_waited_for(run) -> None:  # type: ignore[no-untyped-def]
    """After `.read` shared memory is free, and what was written may not be there yet."""
    found = []
    for everything in (1, 0):
        y = torch.zeros(36)
        run("give", LATE, y.data_ptr(), np.int32(everything))
        assert torch.equal(y[:32], torch.arange(32.0))  # at the end of the launch at the latest
        found.append(y[32].item())
    assert found == [31.0, 0.0]


def test_an_address_outside_of_shared_memory(run) -> None:  # type: ignore[no-untyped-def]
    y = torch.zeros(32)
    with pytest.raises(RuntimeError, match=r"thread \(5, 0, 0\): shared memory at .* is outside of the block's"):
        run("outside", AT_ONCE, y.data_ptr(), np.int32(1 << 20))
    with pytest.raises(RuntimeError, match="not multiples of 16"):
        run("outside", AT_ONCE, y.data_ptr(), np.int32(4))


def test_dynamic_shared_memory_that_a_launch_does_not_ask_for(run) -> None:  # type: ignore[no-untyped-def]
    for count in (0, 1, 100, 4096, 232448):
        assert run("fill", AT_ONCE, np.int32(count), smem=count) == count
    assert run("fill", AT_ONCE, np.int32(7), smem=100) == 7
    for count in (101, 4096):
        with pytest.raises(RuntimeError, match=rf"byte {count - 1} of its dynamic .* the launch asks for 100 bytes"):
            run("fill", AT_ONCE, np.int32(count), smem=100)


def test_a_box_that_begins_off_16_bytes(run) -> None:  # type: ignore[no-untyped-def]
    """A GPU stops with an illegal instruction. Before and after a row there are zeros."""
    x, y = torch.arange(1, 257).to(torch.uint8).view(4, 64), torch.ones(4, 32, dtype=torch.uint8)
    with Simulator():
        of_x = encode(x.data_ptr(), torch.uint8, (64, 4), (64,), (32, 4)).argument
    for first in (0, 16, -16, 48):
        run("fetch_box", LATE, of_x, y.data_ptr(), np.int32(first))
        padded = torch.nn.functional.pad(x, (16, 16, 0, 1))
        assert torch.equal(y, padded[1:, 16 + first : 48 + first]), first
    for first in (1, 8, -4):
        with pytest.raises(
            RuntimeError, match=rf"a box begins at element {first} of a row, of 1 bytes each: not a mul"
        ):
            run("fetch_box", LATE, of_x, y.data_ptr(), np.int32(first))


def test_each_configuration_has_shared_memory_of_its_own(run) -> None:  # type: ignore[no-untyped-def]
    for more in (0, 64, 0):
        y = torch.zeros(32)
        run("unwritten", AT_ONCE, y.data_ptr(), more=more)
        assert y.isnan().all()


def test_every_instruction_has_its_twin() -> None:
    folders = measure.ROOT / "optimized" / "kernels" / "ptx", Path(simulator.__file__).parent / "ptx"
    kernels, ours = ({path.name for path in folder.iterdir()} for folder in folders)
    assert kernels == ours
    name = re.compile(r"(?:__forceinline__|^inline) \w[\w ]*? (\w+)\(", re.MULTILINE)
    for file in sorted(kernels):
        there, here = (set(name.findall((folder / file).read_text())) for folder in folders)
        assert there <= here, f"{file}: {sorted(there - here)}"
    headers = sorted(Path(simulator.__file__).parent.rglob("*.cuh"))
    assert [path for path in headers if not (folders[0].parent / path.relative_to(folders[1].parent)).is_file()] == []


def test_the_pages_example() -> None:
    page = (measure.ROOT / "docs" / "simulator.md").read_text()
    names: dict[str, object] = {}
    exec(re.search(r"```python\n(.*?)```", page, re.S)[1], names)  # type: ignore[index]
    assert names["gpu"].launches == ["attention.attention"]  # type: ignore[attr-defined]
