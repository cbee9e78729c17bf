"""cuBLASLt called directly, through ctypes: every algorithm that its heuristic offers for an FP8 product.

`torch._scaled_mm` takes the first of them, which is not always the fastest; `twin bench gemm` compares with both.
Enumerators and structs are those of cublasLt.h (CUDA 13.0), documented in NVIDIA's cuBLAS manual.

cuBLASLt is column-major: it sees a row-major `[rows, K]` as a `K x rows` matrix. So D[M, N] = A · Bᵀ is computed as
Dᵀ = op(B) · A with op = transpose, and what cuBLASLt calls A is our b.
"""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from optimized import measure

WORKSPACE_BYTES = 64 << 20
ALGORITHMS = 8
# cudaDataType_t
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_COMPUTE_FP32 = 68  # CUBLAS_COMPUTE_32F
_TRANSPOSE_A, _A_SCALE, _B_SCALE, _FAST_ACCUMULATION = 3, 17, 18, 25  # CUBLASLT_MATMUL_DESC_...
_MAX_WORKSPACE = 1  # CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True)
class Product:
    """a `[M, K]` and b `[N, K]` float8 contiguous, scales fp32 `[1]` -> `[M, N]`; accumulate "fast" or "split"."""

    a: torch.Tensor
    b: torch.Tensor
    a_scale: torch.Tensor
    b_scale: torch.Tensor
    out_dtype: torch.dtype
    accumulate: str


def _call(name: str, *args: Any) -> None:
    status = getattr(_library(), name)(*args)
    if status != 0:
        raise RuntimeError(f"{name} returned cublasStatus_t {status}.")


@functools.cache
def _library() -> ctypes.CDLL:
    torch.cuda.init()  # it loads the library, so that the bare name finds it
    return ctypes.CDLL("libcublasLt.so.13")


@functools.cache
def _handle() -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _call("cublasLtCreate", ctypes.byref(handle))
    return handle


@functools.cache
def _workspace() -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def _created(name: str, *args: Any) -> ctypes.c_void_p:
    """An opaque object from cublasLt<name>Create; it is small and is never destroyed."""
    created = ctypes.c_void_p()
    _call(f"cublasLt{name}Create", ctypes.byref(created), *args)
    return created


def _set(struct: str, target: ctypes.c_void_p, attribute: int, value: Any) -> None:
    size = ctypes.c_size_t(ctypes.sizeof(value))
    _call(f"cublasLtMatmul{struct}SetAttribute", target, attribute, ctypes.byref(value), size)


def _layout(x: torch.Tensor) -> ctypes.c_void_p:
    rows, columns = x.shape
    sizes = (ctypes.c_uint64(columns), ctypes.c_uint64(rows), ctypes.c_int64(columns))
    return _created("MatrixLayout", _TYPES[x.dtype], *sizes)


def algorithms(product: Product, count: int = ALGORITHMS) -> list[Callable[[], torch.Tensor]]:
    """At most `count` algorithms in the order of cuBLASLt's heuristic, each as a call that queues the product.

    All of them write to, and return, one output.

    Raises:
        RuntimeError: cuBLASLt refuses the problem (two E5M2 operands, for example), or a call failed.
    """
    a, b = product.a, product.b
    out = torch.empty(a.shape[0], b.shape[0], dtype=product.out_dtype, device=a.device)
    operation = _created("MatmulDesc", _COMPUTE_FP32, _TYPES[torch.float32])
    _set("Desc", operation, _TRANSPOSE_A, ctypes.c_int32(1))
    _set("Desc", operation, _A_SCALE, ctypes.c_void_p(product.b_scale.data_ptr()))
    _set("Desc", operation, _B_SCALE, ctypes.c_void_p(product.a_scale.data_ptr()))
    _set("Desc", operation, _FAST_ACCUMULATION, ctypes.c_int8(product.accumulate == "fast"))
    a_layout, b_layout, out_layout = (_layout(x) for x in (a, b, out))
    preference = _created("MatmulPreference")
    _set("Preference", preference, _MAX_WORKSPACE, ctypes.c_uint64(WORKSPACE_BYTES))
    results = (_Heuristic * count)()
    found = ctypes.c_int()
    _call(
        "cublasLtMatmulAlgoGetHeuristic",
        *(_handle(), operation, b_layout, a_layout, out_layout, out_layout, preference),
        *(ctypes.c_int(count), results, ctypes.byref(found)),
    )
    one, zero = ctypes.c_float(1), ctypes.c_float(0)

    def multiply(result: Any) -> torch.Tensor:
        # `product` keeps the operands alive, and the scales, whose addresses are in `operation`.
        a_data, b_data, out_data = (ctypes.c_void_p(x.data_ptr()) for x in (product.a, product.b, out))
        _call(
            "cublasLtMatmul",
            *(_handle(), operation, ctypes.byref(one), b_data, b_layout, a_data, a_layout),
            *(ctypes.byref(zero), out_data, out_layout, out_data, out_layout, ctypes.byref(result.algorithm)),
            *(ctypes.c_void_p(_workspace().data_ptr()), ctypes.c_size_t(WORKSPACE_BYTES)),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )
        return out

    offered = [functools.partial(multiply, result) for result in results[: found.value] if result.state == 0]
    if not offered:
        sides = " and ".join(f"{x.dtype} {tuple(x.shape)}" for x in (a, b))
        raise RuntimeError(f"cuBLASLt offers no algorithm for {sides}.")
    return offered  # type: ignore[return-value]


def fastest(product: Product, repeats: int = 7) -> Callable[[], torch.Tensor]:
    """The fastest of `algorithms`, by the median of a few interleaved launches."""
    offered = {str(i): call for i, call in enumerate(algorithms(product))}
    times = measure.interleave(offered, repeats=repeats, warmup=2)
    return offered[min(offered, key=lambda i: measure.summary(times[i])["median"])]
