"""Twin Engine's reference side: what every number of FP8 transformer training is, on any CPU.

import reference as te

layer = te.Linear(768, 3072, params_dtype=torch.bfloat16)
with te.autocast(recipe=te.DelayedScaling()):
    y = layer(x)
y.backward(dy)
"""

import reference.ops  # noqa: F401  (registers the CPU definitions)
from reference import formats, not_offered, optimizers, philox, random, recipe, tensor_core
from reference.anomaly import detect_anomaly
from reference.autocast import autocast, fp8_autocast
from reference.denormals import check_denormals
from reference.fp8_checkpoint import init_fp8_state, load_fp8_state
from reference.graph import make_graphed_callables
from reference.model_init import fp8_model_init, quantized_model_init
from reference.nn.attention import DotProductAttention
from reference.nn.layernorm import LayerNorm, RMSNorm
from reference.nn.layernorm_linear import LayerNormLinear
from reference.nn.layernorm_mlp import LayerNormMLP
from reference.nn.linear import Linear
from reference.nn.multihead_attention import MultiheadAttention
from reference.nn.transformer_layer import TransformerLayer
from reference.precision import PrecisionPlan, auto_precision
from reference.recipe import DelayedScaling, Format
from reference.recompute import checkpoint
from reference.statistics import collect_stats

check_denormals()
__getattr__ = not_offered.explain(__name__)

__all__ = [
    "DelayedScaling",
    "DotProductAttention",
    "Format",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "PrecisionPlan",
    "RMSNorm",
    "TransformerLayer",
    "auto_precision",
    "autocast",
    "checkpoint",
    "collect_stats",
    "detect_anomaly",
    "formats",
    "fp8_autocast",
    "fp8_model_init",
    "init_fp8_state",
    "load_fp8_state",
    "make_graphed_callables",
    "optimizers",
    "philox",
    "quantized_model_init",
    "random",
    "recipe",
    "tensor_core",
]
