"""`te.ops`: single operations as modules, and `Sequential`, which runs them one after the other.

    te.ops.Sequential(te.ops.LayerNorm(768), te.ops.Linear(768, 3072), te.ops.GELU(), te.ops.Linear(3072, 768))

    BasicLinear      x·wᵀ, as `te.Linear` without a bias
    Linear           x·wᵀ + b, as `te.Linear`: one rounding
    Bias             T(x + b)                                        db in the order of `twin::dbias`
    LayerNorm, RMSNorm                                               as `te.LayerNorm`, `te.RMSNorm`
    L2Normalization  `twin::norm`                                    `reference.nn.layers.layernorm`
    GELU, GEGLU, ...                                                 `twin::activation`
    Quantize         T(fp32(q) · scale_inv) of q = cast(x)           in `te.autocast`; outside x
    Dropout          `twin::bias_dropout_add`, in training
    ConstantScale    T(x · scale)            scale in fp32
    Reshape, Identity
    AddExtraInput    T(x + extra input)
    MakeExtraOutput  x, and x once more as an extra output           its gradient is T(g + extra g)

T is the dtype of x, or torch.autocast's. Transformer Engine fuses neighbours, by which some roundings in between
vanish; here every operation rounds, and means the same wherever it stands. Linears compute in FP8 inside `te.autocast`.
Names, arguments and defaults are Transformer Engine's; weights of linears start as there, uniform in ±1/√in
(`reference.numbers.philox.uniform`). docs/operations.md has more.
"""

from reference.nn.operations.activation import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    ClampedSwiGLU,
    ReGLU,
    ReLU,
    SiLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from reference.nn.operations.basic import (
    AddExtraInput,
    Bias,
    ConstantScale,
    Dropout,
    Identity,
    L2Normalization,
    LayerNorm,
    MakeExtraOutput,
    Reshape,
    RMSNorm,
)
from reference.nn.operations.linear import BasicLinear, Linear
from reference.nn.operations.quantize import Quantize
from reference.nn.operations.sequential import Sequential

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "AddExtraInput",
    "BasicLinear",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "Dropout",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "Linear",
    "MakeExtraOutput",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "Reshape",
    "SReGLU",
    "SReLU",
    "Sequential",
    "SiLU",
    "SwiGLU",
]
WITH_DEVICE = ("BasicLinear", "Bias", "Dropout", "LayerNorm", "Linear", "RMSNorm")
"""Those with tensors of their own, whose default device is the package's."""
