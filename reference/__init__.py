"""Twin Engine's reference side: what every number of FP8 transformer training is, on any CPU.

import twin_engine.reference as te

layer = te.Linear(768, 3072, params_dtype=torch.bfloat16)
with te.autocast(recipe=te.DelayedScaling()):
    y = layer(x)
y.backward(dy)
"""

import sys

import reference.ops
from reference import optimizers, parallel, quantization, random, recipe
from reference.conversion import convert
from reference.float8 import float8_part as _float8_part  # noqa: F401 (it gives Float8Tensor its parts)
from reference.float8 import float8_shard as _float8_shard  # noqa: F401 (and kept weights their rows under FSDP2)
from reference.float8.float8_blockwise_tensor import Float8BlockwiseQTensor
from reference.float8.float8_quantizer import DType, Float8CurrentScalingQuantizer, Float8Quantizer, Quantizer
from reference.float8.float8_tensor import Float8Tensor
from reference.float8.quantized_tensor import QuantizedTensor
from reference.generation.draft_model import DraftModel
from reference.generation.generator import Generator
from reference.generation.sampling import Sampling
from reference.graphs.graph import make_graphed_callables
from reference.inspect.anomaly import detect_anomaly
from reference.inspect.diff import diff
from reference.inspect.precision import PrecisionPlan, auto_precision
from reference.inspect.recorded_step.recorder import record
from reference.inspect.statistics import collect_stats
from reference.inspect.trails.state import digest
from reference.inspect.trails.trail import trail
from reference.memory.offload import get_cpu_offload_context, mark_not_offload
from reference.memory.recompute import checkpoint
from reference.memory.rng_tracker import CudaRNGStatesTracker
from reference.nn import operations as _operations
from reference.nn.attentions.dot_product_attention import DotProductAttention
from reference.nn.attentions.fp8_keys_values import keys_and_values_in_fp8
from reference.nn.attentions.kv_cache import InferenceParams
from reference.nn.attentions.multihead_attention import MultiheadAttention
from reference.nn.attentions.rotary_embedding import RotaryPositionEmbedding, apply_rotary_pos_emb
from reference.nn.core.fp8_state_io import init_fp8_state, load_fp8_state, transformer_engine_state_dict
from reference.nn.layers.cross_entropy import cross_entropy, parallel_cross_entropy
from reference.nn.layers.embedding import Embedding
from reference.nn.layers.fused_linear_cross_entropy import fused_linear_cross_entropy
from reference.nn.layers.layernorm import LayerNorm, RMSNorm
from reference.nn.layers.layernorm_linear import LayerNormLinear
from reference.nn.layers.layernorm_mlp import LayerNormMLP
from reference.nn.layers.linear import Linear
from reference.nn.transformer.transformer_layer import TransformerLayer
from reference.numbers import formats, philox, tensor_core
from reference.numbers.denormals import check_denormals
from reference.quantization import (
    get_cudnn_version,
    get_default_recipe,
    get_device_compute_capability,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from reference.recipe import DelayedScaling, Format
from reference.state.autocast import autocast, fp8_autocast
from reference.state.model_init import fp8_model_init, quantized_model_init
from reference.support import not_offered
from reference.te import stand_in
from reference.version import __version__ as __version__

check_denormals()
# Transformer Engine's `te.ops`; the package itself, of the ops that layers are made of, does not know layers.
vars(reference.ops).update({name: getattr(_operations, name) for name in _operations.__all__})
fp8 = quantization
"""`quantization` under its older name."""
sys.modules[f"{__name__}.fp8"] = fp8


def install_as_transformer_engine() -> None:
    """Let `import transformer_engine.pytorch` mean this package from now on (`reference.te.stand_in`).

    Raises:
        RuntimeError: the real Transformer Engine is installed, or `optimized` stands in for it already.
    """
    stand_in.install(sys.modules[__name__])


not_offered.explain(__name__)

__all__ = [
    "CudaRNGStatesTracker",
    "DType",
    "DelayedScaling",
    "DotProductAttention",
    "DraftModel",
    "Embedding",
    "Float8BlockwiseQTensor",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Format",
    "Generator",
    "InferenceParams",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "PrecisionPlan",
    "QuantizedTensor",
    "Quantizer",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "Sampling",
    "TransformerLayer",
    "apply_rotary_pos_emb",
    "auto_precision",
    "autocast",
    "checkpoint",
    "collect_stats",
    "convert",
    "cross_entropy",
    "detect_anomaly",
    "diff",
    "digest",
    "formats",
    "fp8",
    "fp8_autocast",
    "fp8_model_init",
    "fused_linear_cross_entropy",
    "get_cpu_offload_context",
    "get_cudnn_version",
    "get_default_recipe",
    "get_device_compute_capability",
    "init_fp8_state",
    "install_as_transformer_engine",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "keys_and_values_in_fp8",
    "load_fp8_state",
    "make_graphed_callables",
    "mark_not_offload",
    "optimizers",
    "parallel",
    "parallel_cross_entropy",
    "philox",
    "quantization",
    "quantized_model_init",
    "random",
    "recipe",
    "record",
    "tensor_core",
    "trail",
    "transformer_engine_state_dict",
]
