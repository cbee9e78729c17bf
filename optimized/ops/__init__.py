"""The CUDA implementations of the ops of namespace `twin`: host glue, one file per op, named as in `reference.ops`.

Importing registers them; nothing is compiled, loaded or looked for before the first call with a CUDA tensor.
Each module lists its kernels' `CONFIGURATIONS` (kernel file, macros), which the CPU suite compiles for sm_90a.
"""

import importlib

import reference.ops  # noqa: F401  (declares the ops)
from reference import not_offered

_NAMES = (
    *("activation", "adafactor", "adam", "adam_capturable", "adam_states", "amax", "attention", "attention_backward"),
    *("attention_bias", "attention_fp8", "attention_fp8_backward", "attention_sink"),
    *("cast", "cast_stats", "cast_transpose", "cat_cast_transpose", "clip_grads", "cross_entropy", "dbias"),
    *("dropout", "embedding", "gemm", "gemm_fp8", "gemm_fp8_split_k", "gemm_fused", "grad_norm"),
    *("multi_cast_transpose", "norm", "norm_backward", "norm_cast_transpose", "normal", "rotary", "scale_update"),
    *("sgd", "softmax"),
)
MODULES = tuple(importlib.import_module(f"{__name__}.{name}") for name in _NAMES)

__all__ = ["MODULES"]

not_offered.explain(__name__)  # of Transformer Engine's `ops`
