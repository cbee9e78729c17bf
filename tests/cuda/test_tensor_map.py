"""What the driver is asked to encode as a tensor map, and what is refused before it or an op's kernel is asked."""

import ctypes
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shared.dry_gpu import DryGpu

from optimized.cuda import tensor_map
from optimized.ops.gemms import gemm_tile

# cuda.h: CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion.
TYPES = {torch.uint8: 0, torch.float8_e4m3fn: 0, torch.float8_e5m2: 0, torch.float16: 6, torch.float32: 7}
TYPES[torch.bfloat16] = 9


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """What the driver is asked to encode; it writes 128 bytes, and gives error 700 for address 16."""
    asked: list[tuple[Any, ...]] = []

    def encode(words: int, kind: int, rank: int, pointer: int, *rest: Any) -> int:
        ctypes.memset(words, 1 + len(asked), 128)
        arrays = tuple((one._type_, tuple(one)) if hasattr(one, "_type_") else one for one in rest)
        asked.append((words, kind, rank, pointer, *arrays))
        return 700 if pointer == 16 else -1 if pointer == 32 else 0

    monkeypatch.setattr(tensor_map, "_driver", lambda: encode)
    tensor_map.encode.cache_clear()
    yield asked
    tensor_map.encode.cache_clear()


def test_a_tensor_map_is_what_the_driver_is_asked_for(encoded: list[tuple[Any, ...]]) -> None:
    u64, u32 = ctypes.c_uint64, ctypes.c_uint32
    for dtype, kind in TYPES.items():
        found = tensor_map.encode(1 << 20, dtype, (64, 32), (256,), (16, 8))
        words, *asked = encoded[-1]
        shapes = [(u64, (64, 32)), (u64, (256,)), (u32, (16, 8)), (u32, (1, 1))]
        assert asked == [kind, 2, 1 << 20, *shapes, 0, 0, 2, 0]
        assert words % 64 == 0
        assert words == found.words.ctypes.data == found.argument.address
        assert found.words.shape == (128,)
        assert (found.words == len(encoded)).all()
    for (swizzle, number), (l2, promotion) in zip(
        {0: 0, 32: 1, 64: 2, 128: 3}.items(), {0: 0, 64: 1, 128: 2, 256: 3}.items(), strict=True
    ):
        tensor_map.encode(1 << 20, torch.uint8, (64, 32), (256,), (16, 8), swizzle, l2)
        assert encoded[-1][8:] == (0, number, promotion, 0)
    tensor_map.encode(1 << 20, torch.uint8, (64,), (), (16,))
    assert encoded[-1][4:8] == ((u64, (64,)), (u64, (0,)), (u32, (16,)), (u32, (1,)))
    tensor_map.encode(1 << 20, torch.uint8, (64, 2, 3, 4, 5), (64, 128, 256, 512), (16, 1, 2, 3, 4))
    assert encoded[-1][2] == 5
    assert encoded[-1][5:7] == ((u64, (64, 128, 256, 512)), (u32, (16, 1, 2, 3, 4)))


def test_a_matrix_is_given_by_rows(encoded: list[tuple[Any, ...]]) -> None:
    made = tensor_map.tensor_map_2d(1 << 20, torch.bfloat16, 100, 64, 256, 32, 16)
    assert encoded[-1][4:] == (
        *((ctypes.c_uint64, (64, 100)), (ctypes.c_uint64, (256,)), (ctypes.c_uint32, (16, 32))),
        *((ctypes.c_uint32, (1, 1)), 0, 3, 2, 0),
    )
    assert tensor_map.tensor_map_2d(1 << 20, torch.bfloat16, 100, 64, 256, 32, 16) is made
    assert len(encoded) == 1
    tensor_map.tensor_map_2d(1 << 20, torch.bfloat16, 100, 64, 256, 32, 16, 32)
    assert encoded[-1][9] == 1
    assert tensor_map.encode.cache_info().maxsize == 4096


@pytest.mark.parametrize(("pointer", "status"), [(16, 700), (32, -1)])
def test_a_map_that_the_driver_refuses_is_described(encoded: list[tuple[Any, ...]], pointer: int, status: int) -> None:
    with pytest.raises(RuntimeError) as refusal:
        tensor_map.encode(pointer, torch.uint8, (64, 32), (256,), (16, 8), 32)
    assert str(refusal.value) == (
        f"cuTensorMapEncodeTiled returned CUresult {status} for pointer={pointer:#x}, dtype=torch.uint8, "
        "shape=(64, 32), strides=(256,), box=(16, 8), swizzle=32."
    )


MOST = {
    "pointer": 16,
    "dtype": torch.float32,
    "shape": (2**32, 1, 1, 1, 2**32),
    "strides": (16, 16, 16, 2**40 - 16),
    "box": (32, 256, 1, 1, 1),
    "swizzle": 128,
    "l2": 256,
}


def test_the_largest_map_is_accepted() -> None:
    tensor_map.check(**MOST)  # type: ignore[arg-type]
    tensor_map.check(0, torch.uint8, (1,), (), (256,), 0, 0)
    for dtype, wide in ((torch.bfloat16, 64), (torch.float16, 64), (torch.uint8, 128), (torch.float8_e5m2, 128)):
        tensor_map.check(0, dtype, (1,), (), (wide,), 128)
        with pytest.raises(ValueError, match=f"{wide} bytes wide|bytes wide; with swizzle=64 at most 64"):
            tensor_map.check(0, dtype, (1,), (), (wide,), 64)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"shape": (2**32 + 1, 1, 1, 1, 1)}, "every extent"),
        ({"shape": (1, 1, 1, 1, 0)}, "every extent"),
        ({"shape": (), "strides": (), "box": ()}, "1 to 5 dimensions"),
        ({"shape": (1,) * 6, "strides": (16,) * 5, "box": (16,) * 6}, "1 to 5 dimensions"),
        ({"box": (32, 256, 1, 1)}, "1 to 5 dimensions"),
        ({"strides": (16, 16, 16)}, "1 to 5 dimensions"),
        ({"strides": (16, 16, 16, 16, 16)}, "1 to 5 dimensions"),
        ({"strides": (16, 16, 16, 2**40)}, "below 2\\^40"),
        ({"strides": (16, 16, 24, 16)}, "each is a multiple of 16"),
        ({"box": (32, 0, 1, 1, 1)}, "extents are 1 to 256"),
        ({"box": (32, 257, 1, 1, 1)}, "extents are 1 to 256"),
        ({"box": (30, 1, 1, 1, 1)}, "innermost a multiple of 16 bytes"),
        ({"box": (36, 1, 1, 1, 1)}, "is 144 bytes wide; with swizzle=128 at most 128"),
        ({"pointer": 15}, "pointer=0xf is not a multiple of 16"),
        ({"pointer": 17}, "pointer=0x11 is not a multiple of 16"),
        ({"l2": 512}, "swizzle=128, l2=512"),
    ],
)
def test_a_map_beyond_the_limits_is_refused(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        tensor_map.check(**{**MOST, **changed})


# --- what the ops refuse ----------------------------------------------------------------------------------

twin = torch.ops.twin


def test_what_a_gpu_cannot_take_is_refused() -> None:
    fp8, half = torch.float8_e4m3fn, torch.bfloat16
    with DryGpu() as gpu:

        def empty(*shape: int, dtype: torch.dtype = half, start: int = 0) -> torch.Tensor:
            return torch.empty(torch.Size(shape).numel() + start, dtype=dtype, device="cuda")[start:].view(shape)

        one = empty(1, dtype=torch.float32)
        here = torch.ones(1)
        for call, sentence in (
            (
                lambda: twin.attention(*[empty(257, 256, 1, 8)] * 3, 1.0, "none", -1, -1, None, 0.0, None),
                "at most 65535.*65792",
            ),
            (lambda: twin.rotary(empty(1, 1, 1, 4098), empty(1, 4098, dtype=torch.float32), False, False), "4096 dim"),
            (lambda: twin.gemm(empty(8, 8), torch.ones(8, 8, dtype=half), None, half), "b is on cpu and a on cuda:0"),
            (lambda: twin.gemm(empty(8, 8), empty(8, 8), torch.ones(8, dtype=half), half), "bias is on cpu and a on"),
            (
                lambda: twin.gemm_fp8(empty(8, 16, dtype=fp8), empty(16, 16, dtype=fp8), here, one, None, half, "fast"),
                "a_scale_inv is on cpu and a on cuda:0",
            ),
            (
                lambda: twin.gemm_fp8(
                    *(empty(16, 16, dtype=fp8), empty(16, 16, dtype=fp8, start=8), one, one, None, half, "fast")
                ),
                r"b starts at address 0x\w+8; the copy engine needs a multiple of 16",
            ),
            (
                lambda: twin.multi_cast_transpose(
                    *([empty(16, 16)], [one], [], [0], [empty(16, 16, dtype=fp8, start=8)]),
                    *([empty(16, 16, dtype=fp8)], [one]),
                ),
                r"q\[0\] and q_t\[0\] must start at multiples of 16 bytes",
            ),
            (
                lambda: twin.multi_cast_transpose(
                    *([empty(16, 16)], [one], [], [0], [empty(16, 16, dtype=fp8)]),
                    *([empty(16, 16, dtype=fp8, start=8)], [one]),
                ),
                r"q\[0\] and q_t\[0\] must start at multiples of 16 bytes",
            ),
            (
                lambda: twin.scale_update([one], [torch.zeros(1, 1)], 448.0, 0, "max"),
                "a scale is on cuda:0 and its amax_history on cpu",
            ),
        ):
            with pytest.raises(ValueError, match=sentence):
                call()
        assert gpu.launches == []
        heads = [empty(255, 257, 1, 8)] * 3
        twin.attention(*heads, 1.0, "none", -1, -1, None, 0.0, None)  # 65535
        assert len(gpu.launches) == 2  # tickets, tiles


@pytest.mark.parametrize(
    "about",
    [
        *((0, 64, 4), (4, 64, 4), (1, 0, 4), (1, 48, 4), (1, 288, 4), (1, 64, 1), (1, 64, 4, 3), (1, 64, 4, 0)),
        *((1, 64, 4, 1, True), (1, 256, 4, 2, True)),
    ],
)
def test_a_tile_that_no_kernel_has_is_refused(about: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="a tile has 1 to 3 warpgroups, 16 columns or 32 to 256"):
        gemm_tile.Tile(*about)


def test_a_tile_fits_shared_memory() -> None:
    assert gemm_tile.Tile(1, 16, 22).shared_bytes == 225984
    # 2 · (128 + 256) · 128 bytes and 32 for barriers, four times, is the most for this tile.
    assert gemm_tile.Tile(2, 256, 4).shared_bytes == 4 * (384 * 128 + 32)
    with pytest.raises(ValueError, match="needs 245920 bytes of shared memory; a block has 232448"):
        gemm_tile.Tile(2, 256, 5)
    for block_n in (16, 32, 64, 96, 128, 160, 192, 224, 256):
        assert gemm_tile.Tile(1, block_n, 2).narrow == min(block_n, 224)


def test_a_map_of_the_same_tensor_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver writes the address; a thread without a context gets one and asks again."""
    asked: list[Any] = []
    answers = [0, 201, 0, 201, 700]

    def replace(words: int, pointer: int) -> int:
        asked.append((words, pointer))
        return answers[len(asked) - 1]

    monkeypatch.setattr(tensor_map, "_replacer", lambda: replace)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    devices = SimpleNamespace(setDevice=lambda index: asked.append(index))
    monkeypatch.setattr(tensor_map.launch, "runtime", lambda: devices)
    tensor_map.replace_address(64, 1 << 20)
    assert asked == [(64, 1 << 20)]
    answers.insert(2, -1)  # where the device is set
    tensor_map.replace_address(128, 1 << 21)
    assert asked[1:] == [(128, 1 << 21), 5, (128, 1 << 21)]
    answers.insert(5, -1)
    with pytest.raises(RuntimeError, match=r"cuTensorMapReplaceAddress returned CUresult 700 for pointer=0x400000\."):
        tensor_map.replace_address(192, 1 << 22)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_map_with_another_address_is_the_one_that_is_encoded_there(dtype: torch.dtype) -> None:
    x, y = (torch.zeros(64, 128, device="cuda").to(dtype) for _ in range(2))
    size = x.element_size()
    for shape, strides, box in (
        ((128, 64), (128 * size,), (64 // size, 8)),
        ((64, 2, 64), (64 * size, 128 * size), (16, 1, 8)),
    ):
        found = [tensor_map.encode(t.data_ptr(), dtype, shape, strides, box, 64, 256).words for t in (x, y)]
        assert found[0].tobytes() != found[1].tobytes()
        room = tensor_map.TensorMap(0).words
        room[:] = found[0]
        tensor_map.replace_address(room.ctypes.data, y.data_ptr())
        assert room.tobytes() == found[1].tobytes()


@pytest.mark.gpu
def test_a_thread_in_which_nothing_has_run_on_the_gpu_encodes_maps() -> None:
    """Such as autograd's, where a backward may begin with a GEMM."""
    x = torch.zeros(64, 8, dtype=torch.bfloat16, device="cuda")
    tensor_map.encode.cache_clear()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            tensor_map.encode(x.data_ptr(), x.dtype, (8, 64), (16,), (8, 64))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert errors == []
