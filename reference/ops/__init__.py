"""The operations of namespace `twin`: importing this package registers every CPU definition."""

from reference import not_offered
from reference.ops import (  # noqa: F401
    activation,
    adafactor,
    adam,
    adam_capturable,
    adam_states,
    amax,
    attention,
    attention_backward,
    attention_bias,
    attention_fp8,
    attention_sink,
    cast,
    cast_stats,
    cast_transpose,
    cat_cast_transpose,
    clip_grads,
    cross_entropy,
    dbias,
    dropout,
    embedding,
    flops,
    gemm,
    gemm_fp8,
    gemm_fused,
    grad_norm,
    multi_cast_transpose,
    norm,
    normal,
    rotary,
    scale_update,
    sgd,
    softmax,
)

not_offered.explain(__name__)  # of Transformer Engine's `ops`
