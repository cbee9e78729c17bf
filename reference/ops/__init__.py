"""The operations of namespace `twin`: importing this package registers every CPU definition."""

from reference.ops import (
    activation,
    amax,
    attention,
    attention_backward,
    cast,
    cast_transpose,
    dbias,
    dropout,
    gemm,
    gemm_fp8,
    gemm_fused,
    multi_cast_transpose,
    norm,
    rotary,
    scale_update,
    softmax,
)

__all__ = [
    "activation",
    "amax",
    "attention",
    "attention_backward",
    "cast",
    "cast_transpose",
    "dbias",
    "dropout",
    "gemm",
    "gemm_fp8",
    "gemm_fused",
    "multi_cast_transpose",
    "norm",
    "rotary",
    "scale_update",
    "softmax",
]
