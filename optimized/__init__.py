"""Twin Engine's optimized side: the layers of `reference` on Hopper tensor cores, with the same bits.

    import twin_engine as te

    layer = te.Linear(768, 3072, params_dtype=torch.bfloat16)   # on "cuda"
    with te.autocast(recipe=te.DelayedScaling()):
        y = layer(x)

The names are those of `reference`; only the default device differs. Importing registers the CUDA implementations and
needs neither CuPy nor a GPU: the first kernel says, in a sentence, what is missing.
"""

import sys
from typing import Any

import torch

import optimized.ops
import reference
from optimized.cuda import device as _device
from optimized.cuda import precompile as _ahead
from optimized.tapes import TapeRunner as _TapeRunner
from optimized.tapes import beside_launches as _beside_launches
from reference import (  # noqa: F401
    CudaRNGStatesTracker,
    DelayedScaling,
    DraftModel,
    DType,
    Float8BlockwiseQTensor,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    Format,
    Generator,
    PrecisionPlan,
    QuantizedTensor,
    Quantizer,
    Sampling,
    apply_rotary_pos_emb,
    auto_precision,
    autocast,
    checkpoint,
    collect_stats,
    cross_entropy,
    detect_anomaly,
    diff,
    digest,
    fp8,
    fp8_autocast,
    fp8_model_init,
    fused_linear_cross_entropy,
    get_cpu_offload_context,
    get_cudnn_version,
    get_default_recipe,
    get_device_compute_capability,
    init_fp8_state,
    is_bf16_available,
    is_mxfp8_available,
    is_nvfp4_available,
    keys_and_values_in_fp8,
    load_fp8_state,
    make_graphed_callables,
    mark_not_offload,
    optimizers,
    parallel,
    parallel_cross_entropy,
    quantization,
    quantized_model_init,
    random,
    recipe,
    record,
    trail,
    transformer_engine_state_dict,
)
from reference import conversion as _conversion
from reference.nn import operations as _operations
from reference.nn.core import autograd as _autograd
from reference.nn.core.parameters import DeviceDefault
from reference.numbers import formats, philox, tensor_core  # noqa: F401
from reference.support import groups as _groups
from reference.support import not_offered
from reference.te import stand_in as _stand_in
from reference.version import __version__ as __version__

__all__: list[str] = []
__all__ += reference.__all__  # as type checkers read it

# For `from optimized.recipe import DelayedScaling`: the modules themselves, under this name too.
sys.modules.update(
    {f"{__name__}.{name}": globals()[name] for name in ("recipe", "optimizers", "parallel", "quantization", "fp8")}
)
_autograd.register(_TapeRunner())
_groups.register(_beside_launches)
not_offered.explain(__name__)


def _kernels_run(name: str, return_reason: bool) -> bool | tuple[bool, str]:
    problems = _device.problems()
    return quantization.answer(name, (not problems, " ".join(problems)), return_reason)


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether the kernels run on this machine's GPUs; with `return_reason` also a sentence for each thing missing."""
    return _kernels_run("is_fp8_available", return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """As `is_fp8_available`."""
    return _kernels_run("is_fp8_block_scaling_available", return_reason)


def install_as_transformer_engine() -> None:
    """As `reference.install_as_transformer_engine`, for this package."""
    _stand_in.install(sys.modules[__name__])


class _OneClass(type):
    """A class here and `reference`'s of that name are one to `isinstance` and `issubclass`."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or issubclass(type(instance), cls)

    def __subclasscheck__(cls, subclass: type) -> bool:
        # A class that a program derives from one of these has only its own instances.
        named = _OnHopper in cls.__bases__
        return super().__subclasscheck__(subclass) or (named and issubclass(subclass, cls.__bases__[-1]))


class _OnHopper(DeviceDefault, metaclass=_OneClass):
    """A layer whose default device is "cuda"; it refuses a GPU that cannot run the kernels."""

    default_device = "cuda"

    @classmethod
    def same_side(cls, layer_type: Any) -> Any:
        """This package's class of that name, if it has one."""
        return _HERE.get(layer_type, layer_type)

    @classmethod
    def resolve_device(cls, device: torch.device | str | None) -> torch.device:
        """The device; a GPU that cannot run the kernels is refused with a sentence."""
        resolved = super().resolve_device(device)
        if resolved.type == "cuda":
            current = torch.cuda.current_device() if torch.cuda.is_available() else 0
            _device.check(current if resolved.index is None else resolved.index)
        return resolved


class Linear(_OnHopper, reference.Linear):
    """`reference.Linear` with "cuda" as its default device."""


class Embedding(_OnHopper, reference.Embedding):
    """`reference.Embedding` with "cuda" as its default device."""


class LayerNorm(_OnHopper, reference.LayerNorm):
    """`reference.LayerNorm` with "cuda" as its default device."""


class RMSNorm(_OnHopper, reference.RMSNorm):
    """`reference.RMSNorm` with "cuda" as its default device."""


class LayerNormLinear(_OnHopper, reference.LayerNormLinear):
    """`reference.LayerNormLinear` with "cuda" as its default device."""


class LayerNormMLP(_OnHopper, reference.LayerNormMLP):
    """`reference.LayerNormMLP` with "cuda" as its default device."""


class DotProductAttention(_OnHopper, reference.DotProductAttention):
    """`reference.DotProductAttention` with "cuda" as its default device."""


class MultiheadAttention(_OnHopper, reference.MultiheadAttention):
    """`reference.MultiheadAttention` with "cuda" as its default device."""


class TransformerLayer(_OnHopper, reference.TransformerLayer):
    """`reference.TransformerLayer` with "cuda" as its default device."""

    def _attend(self, *arguments: Any) -> Any:
        """As there; meanwhile the kernels of both halves may be compiled together."""
        if torch.compiler.is_compiling():
            return super()._attend(*arguments)
        _ahead.running.layer, outer = self, _ahead.running.layer
        try:
            return super()._attend(*arguments)
        finally:
            _ahead.running.layer = outer


class InferenceParams(_OnHopper, reference.InferenceParams):
    """`reference.InferenceParams` with "cuda" as its default device."""


class RotaryPositionEmbedding(_OnHopper, reference.RotaryPositionEmbedding):
    """`reference.RotaryPositionEmbedding` with "cuda" as its default device."""


_HERE: dict[Any, Any] = {
    getattr(reference, name): cls
    for name, cls in tuple(globals().items())
    if isinstance(cls, type) and issubclass(cls, _OnHopper) and cls is not _OnHopper
}


def _publish_operations() -> None:
    """Transformer Engine's `te.ops`: `reference`'s, those with tensors of their own with "cuda" as default device."""
    for name in _operations.__all__:
        found = getattr(_operations, name)
        if name in _operations.WITH_DEVICE:
            about = {"__module__": optimized.ops.__name__, "__doc__": found.__doc__}
            found = type(name, (_OnHopper, found), about)
        setattr(optimized.ops, name, found)


_publish_operations()


def convert(
    model: torch.nn.Module,
    *,
    recipe: recipe.Recipe | None = None,
    filter: _conversion.Filter = None,
    blocks: bool = False,
) -> _conversion.Conversion:
    """As `reference.convert`, into this package's layers; parameters stay on the device where they are."""
    return _conversion.convert_into(
        _conversion.Layers(Linear, LayerNorm, RMSNorm, TransformerLayer), model, recipe, filter, blocks
    )
