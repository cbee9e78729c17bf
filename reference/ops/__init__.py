"""The operations of namespace `twin`: importing this package registers every CPU definition."""

from reference.ops import amax, cast, cast_transpose, dbias, gemm, gemm_fp8, norm, scale_update

__all__ = ["amax", "cast", "cast_transpose", "dbias", "gemm", "gemm_fp8", "norm", "scale_update"]
