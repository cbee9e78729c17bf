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
from reference.nn.cross_entropy import cross_entropy, parallel_cross_entropy
from reference.nn.embedding import Embedding
from reference.nn.fused_linear_cross_entropy import fused_linear_cross_entropy
from reference.nn.layernorm import LayerNorm, RMSNorm
from reference.nn.layernorm_linear import LayerNormLinear
from reference.nn.layernorm_mlp import LayerNormMLP
from reference.nn.linear import Linear
from reference.nn.multihead_attention import MultiheadAttention
from reference.nn.transformer_layer import TransformerLayer
from reference.precision import PrecisionPlan, auto_precision
from reference.recipe import DelayedScaling, Format
from reference.recompute import checkpoint
from reference.recorded_step.recorder import record
from reference.statistics import collect_stats
from reference.version import __version__ as __version__

check_denormals()
not_offered.explain(__name__)

__all__ = [
    "DelayedScaling",
    "DotProductAttention",
    "Embedding",
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
    "cross_entropy",
    "detect_anomaly",
    "formats",
    "fp8_autocast",
    "fp8_model_init",
    "fused_linear_cross_entropy",
    "init_fp8_state",
    "load_fp8_state",
    "make_graphed_callables",
    "optimizers",
    "parallel_cross_entropy",
    "philox",
    "quantized_model_init",
    "random",
    "recipe",
    "record",
    "tensor_core",
]
