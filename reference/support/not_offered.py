"""The names of Transformer Engine's Python API that Twin Engine does not offer, and why.

`te.GroupedLinear` raises an AttributeError and `from reference import GroupedLinear` an ImportError; both give the
reason. So does a method that a class has not, except a layer's: there PyTorch's own AttributeError names it. The names
are those of Transformer Engine 2.20 (tests/transformer_engine_api.json).
"""

import importlib
import importlib.abc
import sys
from types import ModuleType
from typing import Any, NoReturn, TypeVar

from reference.support import older_names

Class = TypeVar("Class", bound=type)

OPS = "each operation of te.ops is a plain module, and there is no operation fuser"
RECIPES = (
    "te.recipe has DelayedScaling, Float8CurrentScaling, Float8BlockScaling and Float8RowwiseScaling, and on a CPU "
    "MXFP8BlockScaling and NVFP4BlockScaling"
)
QUANTIZED = (
    "te.Float8Tensor, with one scale for all of it, is the quantized tensor there is, and as a weight "
    "te.Float8BlockwiseQTensor"
)
_STORAGE = "there are no storages apart from tensors; inside of layers an FP8 matrix is a tuple of codes and scales"
EXPERTS = "there are no layers for a mixture of experts"
PARALLEL = (
    "layers take tp_group and set_context_parallel_group and choose themselves how ranks communicate; what is here of "
    "several ranks is te.parallel"
)
ATTENTION = "te.DotProductAttention, te.MultiheadAttention and te.TransformerLayer are the attention there is"
EXPORT = "there is no export"
STATE = "scales belong to a layer (layer.fp8_meta) and autocast's settings to a thread"
OFFLOAD = "te.get_cpu_offload_context is what offloads activations"
INTERNAL = "it is a part of Transformer Engine's inside"
_WHERE = "what is offered of it is an attribute of `te` itself"

# Package → reason → names.
NAMES: dict[str, dict[str, str]] = {
    "te": {
        EXPERTS: "GroupedLinear Fp8Padding Fp8Unpadding moe_permute moe_permute_and_pad_with_probs "
        "moe_permute_with_probs moe_sort_chunks_by_index moe_sort_chunks_by_index_with_probs moe_unpermute "
        "permutation router ep",
        PARALLEL: "initialize_ub destroy_ub UserBufferQuantizationMode CPLoadBalancingStrategy distributed_weight",
        ATTENTION: "FusedMLAQUpProjFunction FusedMLAQUpProjRopeQuant GatedDeltaNetAttention GatedDeltaNet2Attention "
        "GatedDeltaProductAttention",
        RECIPES: "QuantizerRole QuantizerRequest DelayedScalingRequest custom_recipes",
        QUANTIZED: "Float8BlockwiseQTensorStorage Float8BlockQuantizer MXFP8Tensor "
        "MXFP8TensorStorage MXFP8Quantizer NVFP4Tensor NVFP4TensorStorage NVFP4Quantizer HybridQuantizedTensor "
        "HybridQuantizedTensorStorage HybridQuantizer IdentityTensor IdentityTensorStorage IdentityQuantizer",
        _STORAGE: "QuantizedTensorStorage Float8TensorStorage prepare_for_saving restore_from_saved "
        "restore_from_func_ctx",
        _WHERE: "attention module transformer distributed jit tensor float8_tensor quantized_tensor",
        OFFLOAD: "ManualOffloadSynchronizer cpu_offload cpu_offload_v1",
        "te.TransformerLayer takes activation='swiglu' and 'geglu' as they are": "interleave_glu_tensor "
        "deinterleave_glu_tensor",
        EXPORT: "onnx_export export onnx_extensions",
        "te.optimizers has Adam, SGD and Adafactor": "newton_schulz newton_schulz_tp CusolverMpCtx",
        INTERNAL: "constants cpp_extensions dynamo numerics_debug torch_version triton utils",
    },
    "recipe": {RECIPES: "CustomRecipe"},
    "optimizers": {
        "te.optimizers has FusedAdam, FusedSGD and clip_grad_norm_": "MultiTensorApply multi_tensor_adam "
        "multi_tensor_adam_capturable multi_tensor_adam_capturable_master multi_tensor_adam_fp8 multi_tensor_applier "
        "multi_tensor_l2norm multi_tensor_scale multi_tensor_scale_tensor multi_tensor_sgd "
        "multi_tensor_unscale_l2norm"
    },
    "ops": {
        OPS: "BasicOperation FusedOperation FusibleOperation fused is_op_fuser_grouped_tensor_path_supported "
        "register_backward_fusion register_forward_backward_fusion register_forward_fusion",
        PARALLEL: "AllGather AllReduce ReduceScatter",
        EXPERTS: "GroupedLinear ScaledClampedQGeGLU ScaledSReLU ScaledSiTUGLU ScaledSwiGLU ScaledTanhSReLU",
        "there is no such activation": "SiTUGLU",
    },
    "quantization": {
        RECIPES: "CustomRecipeState Float8BlockScalingRecipeState MXFP8BlockScalingRecipeState "
        "NVFP4BlockScalingRecipeState QuantizerRole QuantizerRequest DelayedScalingRequest get_fp4_te_dtype",
        STATE: "RecipeState DelayedScalingRecipeState Float8CurrentScalingRecipeState FP8GlobalState",
        INTERNAL: "split_and_copy",
    },
}
_ROLES = {INTERNAL: "get_quantizer_roles set_meta_tensor", EXPORT: "onnx_forward"}
_NORM = {"its method reset_parameters is what draws parameters anew": "reset_layer_norm_parameters"}
# Class → reason → methods. A subclass of Quantizer has Quantizer's.
METHODS: dict[str, dict[str, str]] = {
    "Linear": _ROLES,
    "LayerNormLinear": {**_ROLES, **_NORM},
    "LayerNormMLP": {**_ROLES, **_NORM},
    "DotProductAttention": {INTERNAL: "get_qkv_quantization_capabilities get_quantizer_roles set_meta_tensor"},
    "MultiheadAttention": {INTERNAL: "fast_setattr"},
    "TransformerLayer": {INTERNAL: "fast_setattr", STATE: "reset_fp8_meta_tensors"},
    "InferenceParams": {
        "a layer's forward writes its keys and values itself (inference_params=...)": "step",
        "the cache has no pages": "convert_paged_to_nonpaged",
    },
    "FusedSGD": {"a parameter's momentum is the 'momentum_buffer' of its state": "get_momentums"},
    "Quantizer": {
        INTERNAL: "alloc_tensors create_metadata get_columnwise_shape inner_tensor_specs is_quantizable "
        "is_requantization_safe quantize_impl storage_metadata supports_only_rowwise_all_gather",
        EXPORT: "onnx_quantize onnx_dequantize",
    },
    "QuantizedTensor": {
        "its memory is free when nobody holds it": "clear",
        "te.Float8Tensor has it, a view and a weight in blocks have not": "get_metadata make_like to_dtype",
    },
    "Float8Tensor": {
        "`fully_shard` turns a rank's rows of a weight into a DTensor, which has it": "fsdp_pre_all_gather "
        "fsdp_post_all_gather"
    },
}
REASONS = {
    package: {name: reason for reason, names in groups.items() for name in names.split()}
    for package, groups in NAMES.items()
}
_INSIDE = __name__.removesuffix("reference.support.not_offered")  # "twin_engine." in a wheel
PACKAGES = dict.fromkeys(("twin_engine", f"{_INSIDE}reference", f"{_INSIDE}optimized"), "te")
PACKAGES |= {f"{root}.{part}": part for root in PACKAGES for part in ("recipe", "optimizers", "ops", "quantization")}


def sentence(package: str, name: str) -> str | None:
    """Why the module `package` has no `name`; None if Transformer Engine has no such name."""
    known = PACKAGES.get(package, "")
    if known == "te" and name in REASONS["recipe"]:  # DelayedScaling is a name of `te`; so others are looked for here
        known = "recipe"
    reason = REASONS.get(known, {}).get(name)
    return None if reason is None else f"{known}.{name} is not offered by Twin Engine: {reason}."


def explain(package: str) -> None:
    """Give the module `package` a `__getattr__` of this kind; type checkers do not see it, and report such names.

    It also gives modules by the names that they had before (`reference.support.older_names`).

    For `from package import name` Python asks the finder below, where a module has a `__path__`.
    """

    def missing(name: str) -> ModuleType:
        if older_names.current(f"{package}.{name}") is not None:
            return importlib.import_module(f"{package}.{name}")
        # With Python's own attributes, so that Python can suggest similar names.
        text = sentence(package, name) or f"module {package!r} has no attribute {name!r}"
        raise AttributeError(text, name=name, obj=sys.modules.get(package))

    older_names.keep_attributes(package)
    vars(sys.modules[package])["__getattr__"] = missing
    vars(sys.modules[package]).setdefault("__path__", [])


class _Absent:
    """A method that is not offered: asking for it raises an AttributeError, so `hasattr` says False."""

    def __init__(self, name: str, sentence: str) -> None:
        self.name, self.sentence = name, sentence

    def __get__(self, obj: Any, owner: Any = None) -> NoReturn:
        raise AttributeError(self.sentence, name=self.name, obj=owner if obj is None else obj)


def without_methods(cls: Class) -> Class:
    """Let a class that is no module say why it has not the methods of `METHODS`."""
    for reason, names in METHODS[cls.__name__].items():
        for name in names.split():
            text = f"{cls.__name__}.{name} is not offered by Twin Engine: {reason}."
            setattr(cls, name, _Absent(name, text))
    return cls


class _Finder(importlib.abc.MetaPathFinder):
    """Python's last finder for submodules; it also runs before `from package import name` fails."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        package, _, last = name.rpartition(".")
        text = sentence(package, last)
        if text is not None:
            raise ImportError(text, name=name)


sys.meta_path.append(_Finder())
