"""Loading and launching: what needs no GPU first, then streams, graphs and devices on one."""

import copy
import ctypes
import threading

import numpy as np
import pytest
import torch
from shared.bits import assert_same_bits

import optimized
from optimized.cuda import device, launch, tensor_map
from optimized.ops.casts.cast_transpose import tile_grid
from optimized.tapes import Tape

twin = torch.ops.twin


def test_function_is_one_object_per_configuration_and_loads_nothing() -> None:
    first = launch.function("cast", "cast", {"WIDE": 1, "FP8": 0})
    assert first is launch.function("cast", "cast", {"FP8": 0, "WIDE": 1})
    assert first is not launch.function("cast", "cast", {"WIDE": 2, "FP8": 0})
    # Not even the file is looked for.
    assert launch.function("no_such_kernel", "f").kernel == "no_such_kernel"


@pytest.mark.parametrize("down", [0, 1, 65535, 65536, 131071, 10**6])
def test_every_tile_has_a_block(down: int) -> None:
    x, y, z = tile_grid(3, down)
    assert x == 3
    assert max(y, z) <= 65535
    assert max(1, down) <= y * z < max(1, down) + 65535
    assert tile_grid(0, down)[0] == 1


def read(arguments: launch._Arguments, position: int, kind: type) -> object:
    """What a kernel would read as its argument at `position`."""
    return kind.from_address(arguments.pointers[position]).value


def test_arguments_stand_where_a_kernel_reads_them() -> None:
    kernel = launch.function("no_such_kernel", "f")
    struct = np.arange(4, dtype=np.int64)
    args = [2**47 + 5, np.int32(-3), np.float32(1.5), launch.by_value(struct), np.uint32(2**32 - 1), np.uint64(2**63)]
    arguments = launch._Arguments(kernel, args)
    for args[1] in (np.int32(-3), np.int32(7)):  # the block is filled again for each launch
        assert arguments.fill(args) == ctypes.addressof(arguments.pointers)
        assert read(arguments, 0, ctypes.c_int64) == 2**47 + 5
        assert read(arguments, 1, ctypes.c_int32) == args[1]
        assert read(arguments, 2, ctypes.c_float) == 1.5
        assert arguments.pointers[3] == struct.ctypes.data
        assert read(arguments, 4, ctypes.c_uint32) == 2**32 - 1
        assert read(arguments, 5, ctypes.c_uint64) == 2**63


def test_an_argument_without_an_exact_type_is_refused() -> None:
    with pytest.raises(TypeError, match=r"no_such_kernel\.f: argument 1 is a float; accepted are float32, int"):
        launch._Arguments(launch.function("no_such_kernel", "f"), [1, 1.5])


# --- what a machine lacks, in a sentence ------------------------------------------------------------------


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_a_gpu_that_is_not_hopper_is_named(capability: tuple[int, int]) -> None:
    with pytest.raises(device.UnsupportedDevice) as refusal:
        device.check_capability("NVIDIA X100", capability)
    sentence = str(refusal.value)
    assert "'NVIDIA X100'" in sentence
    assert f"{capability[0]}.{capability[1]}" in sentence
    assert "sm_90a" in sentence
    assert "9.0 (Hopper" in sentence


def test_hopper_is_accepted() -> None:
    device.check_capability("NVIDIA H200", (9, 0))


def test_cupy_missing_names_the_command_that_installs_it() -> None:
    with pytest.raises(device.MissingDependency, match=r'CuPy .*is not installed.*pip install "twin-engine\[gpu\]"'):
        device.check_cupy(lambda name: None)


def test_problems_are_sentences() -> None:
    problems = device.problems()
    assert all(sentence.endswith(".") for sentence in problems)
    if not torch.cuda.is_available():
        assert any("no CUDA device" in sentence for sentence in problems)


# --- tensor maps ------------------------------------------------------------------------------------------

GOOD = {
    "pointer": 1 << 20,
    "dtype": torch.bfloat16,
    "shape": (4096, 128),
    "strides": (8192,),
    "box": (64, 128),
    "swizzle": 128,
}


def test_a_good_tensor_map_is_accepted() -> None:
    tensor_map.check(**GOOD)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"dtype": torch.float64}, "dtype=torch.float64 has no tensor map"),
        ({"pointer": 8}, "not a multiple of 16"),
        ({"shape": (4096,)}, "a tensor map has 1 to 5 dimensions"),
        ({"shape": (4096, 0)}, "every extent"),
        ({"strides": (8200,)}, "each is a multiple of 16"),
        ({"box": (64, 257)}, "extents are 1 to 256"),
        ({"box": (4, 16)}, "innermost a multiple of 16 bytes"),
        ({"box": (128, 16)}, "at most 128 are accepted"),
        ({"swizzle": 16}, "accepted are 0, 32, 64, 128"),
        ({"l2": 32}, "accepted are 0, 32, 64, 128 and 0, 64, 128, 256"),
    ],
)
def test_what_the_hardware_cannot_describe_is_refused(changed: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        tensor_map.check(**{**GOOD, **changed})


@pytest.mark.gpu
def test_tensor_maps_are_cached_and_bounded() -> None:
    x = torch.zeros(256, 256, dtype=torch.bfloat16, device="cuda")
    arguments = (x.data_ptr(), x.dtype, 256, 256, 512, 64, 64)
    first = tensor_map.tensor_map_2d(*arguments)
    assert first.words.any()
    assert tensor_map.tensor_map_2d(*arguments) is first
    assert tensor_map.tensor_map_2d(*arguments[:-1], 32) is not first
    assert tensor_map.encode.cache_info().maxsize is not None


# --- on a GPU ---------------------------------------------------------------------------------------------

E4M3 = torch.float8_e4m3fn


def every_op(x: torch.Tensor, state: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """One call of every memory-bound op."""
    scale, history = state["scale"], state["history"]
    out = [*twin.cast(x, scale, history, 0, E4M3)]
    out += twin.cast_transpose(x, scale, history, 1, E4M3)
    out += twin.cast_transpose_dbias(x, scale, history, 2, torch.float8_e5m2)
    out.append(twin.dbias(x))
    twin.amax(x, history, 0)
    twin.scale_update([scale], [history], 448.0, 0, "max")
    return out


def fresh_state(where: str) -> dict[str, torch.Tensor]:
    return {"scale": torch.ones(3, device=where), "history": torch.zeros(5, 3, device=where)}


def compare_with_cpu(out: list[torch.Tensor], state: dict[str, torch.Tensor], x: torch.Tensor) -> None:
    cpu = fresh_state("cpu")
    for a, b in zip(out, every_op(x.cpu(), cpu), strict=True):
        assert_same_bits(a, b)
    for key in cpu:
        assert_same_bits(state[key], cpu[key], key)


@pytest.mark.gpu
def test_every_device_computes_and_the_current_one_stays() -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.set_device(0)
        state = fresh_state(f"cuda:{index}")
        x = torch.randn(100, 64, device=f"cuda:{index}")
        out = every_op(x, state)
        assert torch.cuda.current_device() == 0
        torch.cuda.synchronize(index)
        compare_with_cpu(out, state, x)


@pytest.mark.gpu
def test_a_model_may_lie_on_several_devices() -> None:
    """One autocast over layers of every device; the current device is another than most of them."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())] * 2
    torch.manual_seed(1)
    cpu = [optimized.LayerNormLinear(64, 64, params_dtype=torch.bfloat16, device="cpu") for _ in devices]
    gpu = [copy.deepcopy(layer).to(device) for layer, device in zip(cpu, devices, strict=True)]
    for step in range(3):
        x = torch.randn(33, 64).bfloat16() * 2.0**step
        grads = []
        for layers, places in ((cpu, [torch.device("cpu")] * len(cpu)), (gpu, devices)):
            y = x.clone().requires_grad_()
            grads.append(y)
            with optimized.autocast(recipe=optimized.DelayedScaling(amax_history_len=2)):
                for layer, place in zip(layers, places, strict=True):
                    y = layer(y.to(place))
            y.backward(torch.ones_like(y))
        assert_same_bits(grads[1].grad, grads[0].grad, f"dx of step {step}")
    for a, b in zip(gpu, cpu, strict=True):
        assert_same_bits(a.weight.grad.cpu(), b.weight.grad)
        for key in ("scaling_fwd", "scaling_bwd"):
            assert_same_bits(a.fp8_meta[key].scale.cpu(), b.fp8_meta[key].scale)
            assert_same_bits(a.fp8_meta[key].amax_history.cpu(), b.fp8_meta[key].amax_history)


@pytest.mark.gpu
def test_a_cuda_graph_replays_what_eager_computes() -> None:
    x = torch.randn(130, 256, device="cuda").bfloat16()
    every_op(x, fresh_state("cuda"))  # load the modules
    state = fresh_state("cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = every_op(x, state)
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randn(130, 256) * 3)
        state["scale"].fill_(1.0)
        state["history"].zero_()
        graph.replay()
        torch.cuda.synchronize()
        compare_with_cpu(out, state, x)


@pytest.mark.gpu
def test_recorded_launches_are_made_again_on_any_stream_and_inside_a_capture() -> None:
    """The first times one by one, then as a CUDA graph, which cannot itself be captured."""

    def casts(x: torch.Tensor, history: torch.Tensor) -> list[torch.Tensor]:
        scale = torch.full((3,), 0.5, device=x.device)
        return [scale, *(t for column in range(3) for t in twin.cast_transpose(x, scale, history, column, E4M3))]

    x, history = torch.randn(130, 256, device="cuda").bfloat16(), torch.zeros(5, 3, device="cuda")
    launches = Tape()
    with launch.recording(launches):
        out = casts(x, history)
    captured, other = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    for time in range(7):
        x.copy_(torch.randn(130, 256) * 3)
        history.zero_()
        for result in out[1:]:
            result.zero_()
        torch.cuda.synchronize()
        if time == 6:
            with torch.cuda.graph(captured):
                launches.play(0)
            captured.replay()
        else:
            with torch.cuda.stream(other if time in (1, 4) else torch.cuda.current_stream()):
                launches.play(0)
        torch.cuda.synchronize()
        expected = torch.zeros(5, 3)
        for a, b in zip([*out, history], [*casts(x.cpu(), expected), expected], strict=True):
            assert_same_bits(a, b)
        assert (launches._graph is not None) == (time >= 2)


@pytest.mark.gpu
def test_cupy_allocates_nothing() -> None:
    import cupy

    every_op(torch.randn(64, 64, device="cuda"), fresh_state("cuda"))
    optimized.Linear(64, 64)
    assert cupy.get_default_memory_pool().total_bytes() == 0
    assert cupy.get_default_pinned_memory_pool().n_free_blocks() == 0


@pytest.mark.gpu
def test_where_gradients_would_be_recorded_the_op_is_refused() -> None:
    x = torch.randn(16, 16, device="cuda", requires_grad=True)
    with pytest.raises(RuntimeError, match="no derivative of its own"):
        twin.dbias(x)


@pytest.mark.gpu
def test_tensors_on_two_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="scale is on cpu"):
        twin.cast(torch.ones(16, 16, device="cuda"), torch.ones(1), None, 0, E4M3)


@pytest.mark.gpu
def test_the_first_call_of_a_thread_may_be_a_kernel_of_ours() -> None:
    """autograd's threads have no context before the CUDA runtime is called in them; we call the driver."""
    x = torch.randn(70, 64, device="cuda").bfloat16()
    torch.empty(4096, device="cuda")  # cached: the thread's own allocations need not call the runtime
    results: list[torch.Tensor | BaseException] = []

    def run() -> None:
        try:
            results.append(twin.dbias(x))
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert isinstance(results[0], torch.Tensor), results[0]
    assert_same_bits(results[0], twin.dbias(x.cpu()))
