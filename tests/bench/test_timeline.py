"""`twin bench timeline`: what it makes of a profiler's events."""

import types
from typing import Any

import pytest

from optimized.bench.layers import timeline
from optimized.bench.layers.timeline import Event

SPIN = "at::cuda::(anonymous namespace)::spin_kernel(long)"
NAMES = {  # a profiler's name of a kernel: its short name and its category
    "norm_cast_transpose": ("norm_cast_transpose", "norm"),
    "norm_total": ("norm_total", "norm"),
    "gemm_fp8_fused": ("gemm_fp8_fused", "GEMM"),
    "nvjet_sm90_qqtst_192x192_128x4_2x1_v_bz_coopB_bias_TNN": ("nvjet_sm90_qqtst_192x192_128x4_2x1_v_bz_", "GEMM"),
    "activation_cast_transpose": ("activation_cast_transpose", "activation"),
    "forward_kernel": ("forward_kernel", "activation"),
    "cat_cast_transpose": ("cat_cast_transpose", "cast"),
    "total": ("total", "cast"),
    "transpose_optimized_kernel(__nv_fp8_e4m3 const*, float const*)": ("transpose_optimized_kernel", "cast"),
    "void transformer_engine::delayed_scaling_recipe::(anonymous namespace)::amax_and_scale_update::kernel_bulk(f)": (
        "kernel_bulk",
        "cast",
    ),
    "dots": ("dots", "attention"),
    "attention_backward": ("attention_backward", "attention"),
    "cudnn_generated_fort_native_sdpa_sm90": ("cudnn_generated_fort_native_sdpa_sm90", "attention"),
    "void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, 11>(c10::BFloat16*)": (
        "softmax_warp_forward",
        "attention",
    ),
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>(int)": (
        "vectorized_layer_norm_kernel",
        "norm",
    ),
    "void at::native::vectorized_elementwise_kernel<8, at::native::GeluCUDAKernelImpl(int)::{lambda()#1}>(int)": (
        "vectorized_elementwise_kernel, gelu",
        "activation",
    ),
    "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<float>, int>(int)": (
        "vectorized_elementwise_kernel, add",
        "other",
    ),
    "void at::native::vectorized_elementwise_kernel<4, at::native::compare_scalar_kernel<int>(int)>(int)": (
        "vectorized_elementwise_kernel",
        "other",
    ),
    "Memcpy DtoD (Device -> Device)": ("Memcpy DtoD", "other"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_has_a_short_name_and_a_category(name: str) -> None:
    assert (timeline.short(name), timeline.category(name)) == NAMES[name]


def test_steps_begin_after_the_kernel_that_spins() -> None:
    events: list[Event] = [("b", 5, 7), (SPIN, 1, 4), ("early", 0, 1), ("c", 6, 9), (SPIN, 10, 12), ("d", 13, 14)]
    steps = timeline.steps_of(events)
    assert steps == [[("b", 5, 7), ("c", 6, 9)], [("d", 13, 14)]]
    assert [timeline.span(step) for step in steps] == [4, 1]


def contestant() -> Any:
    described = {"step": "x", "attention": "y", "in_contract": True}
    return types.SimpleNamespace(title="x / y", described=lambda: described)


def test_the_step_of_median_length_is_kept() -> None:
    steps: list[list[Event]] = [
        [("cast_transpose", 100, 100 + length), ("gemm", 200, 300 + length)] for length in (9, 1, 4)
    ]
    found = timeline.described(contestant(), steps)
    assert found["ms"] == [0.209, 0.201, 0.204]
    assert found["kernels"] == [["cast_transpose", 0.0, 4, "cast"], ["gemm", 100.0, 104, "GEMM"]]
    assert found["step"] == "x"


def test_times_have_a_tenth_of_a_microsecond() -> None:
    """Both the start, which counts from the step's first kernel, and the duration."""
    step: list[Event] = [("cast_transpose", 1000.25, 1003.5), ("gemm", 1004.75, 1012.0625)]
    (_, *first), (_, *second) = timeline.described(contestant(), [step])["kernels"]
    for found, (start, duration) in ((first, (0.0, 3.25)), (second, (4.5, 7.3125))):
        assert found[:2] == pytest.approx([start, duration], abs=0.0501)


@pytest.mark.parametrize("steps", [[], [[]], [[("gemm", 0, 1)], [("gemm", 0, 1), ("gemm", 1, 2)]]])
def test_steps_that_differ_or_are_empty_are_refused(steps: list[list[Event]]) -> None:
    with pytest.raises(RuntimeError, match="x / y: the steps have"):
        timeline.described(contestant(), steps)


def test_times_by_category_and_without_a_kernel() -> None:
    variant = {"kernels": [["a", 0.0, 1000, "cast"], ["b", 500.0, 1000, "GEMM"], ["c", 2500.0, 500, "GEMM"]]}
    found = timeline.milliseconds(variant)
    assert (found["cast"], found["GEMM"], found["norm"]) == (1.0, 1.5, 0.0)
    assert timeline.idle(variant) == 1.0
