"""The CUDA implementations of the ops of namespace `twin`: host glue, one file per op, named as in `reference.ops`.

Importing registers them; nothing is compiled, loaded or looked for before the first call with a CUDA tensor.
Each module lists its kernels' `CONFIGURATIONS` (kernel file, macros), which the CPU suite compiles for sm_90a.
"""

import reference.ops  # noqa: F401  (declares the ops)
from optimized.ops import amax, cast, cast_transpose, dbias, gemm, gemm_fp8, norm, scale_update

MODULES = (amax, cast, cast_transpose, dbias, gemm, gemm_fp8, norm, scale_update)

__all__ = ["MODULES"]
