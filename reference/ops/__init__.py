"""The operations of namespace `twin`: importing this package registers every CPU definition."""

from reference import not_offered
from reference.ops import (  # noqa: F401
    activation,
    adam,
    amax,
    attention,
    attention_backward,
    attention_bias,
    attention_sink,
    cast,
    cast_transpose,
    cat_cast_transpose,
    cross_entropy,
    dbias,
    dropout,
    embedding,
    gemm,
    gemm_fp8,
    gemm_fused,
    multi_cast_transpose,
    norm,
    normal,
    rotary,
    scale_update,
    softmax,
)

not_offered.explain(__name__)  # of Transformer Engine's `ops`
