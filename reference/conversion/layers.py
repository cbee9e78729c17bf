"""The layer that takes a module's place: what it is made of, or why there is none."""

import functools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from reference.conversion.attributes import reads_weight
from reference.conversion.blocks import HOOKS, DecoderBlock, is_as_written
from reference.conversion.norms import rms_norm_of
from reference.nn.core.module import TransformerEngineBaseModule
from reference.nn.transformer.transformer_layer import TransformerLayer
from reference.numbers.formats import WIDE_DTYPES
from reference.ops.library import twin
from reference.state import model_init

Places = Sequence[tuple[torch.nn.Module, str]]


class Layers(NamedTuple):
    """The layers of one side."""

    Linear: Any
    LayerNorm: Any
    RMSNorm: Any
    TransformerLayer: Any


class Replacement(NamedTuple):
    """The layer, without numbers yet (`fill`), and what the report says of it."""

    layer: Any
    note: str


class _Choice(NamedTuple):
    """A layer's class and its constructor's arguments."""

    cls: Any
    sizes: tuple[int, ...]
    settings: dict[str, Any]


def replacement_for(layers: Layers, module: Any, places: Places, tied: Sequence[str]) -> Replacement | str:
    """The replacement of a module with parameters, or why it stays. Nothing has changed then.

    Args:
        layers: of which side.
        module: a module with parameters.
        places: its owners, and its attributes' names there.
        tied: the other names of its weight.
    """
    if isinstance(module, TransformerEngineBaseModule):
        return "it is a layer of Twin Engine"
    choice = _choice(layers, module)
    reason = choice if isinstance(choice, str) else _obstacle(module, places)
    if reason is not None or isinstance(choice, str):
        return str(reason)
    settings, note = model_init.current(), ""
    if settings is not None and choice.cls is layers.Linear and tied:
        settings, note = None, f"not kept in FP8: its weight is tied to {', '.join(tied)}"
    kept = (False,) if settings is None else (True, settings.recipe, settings.preserve)
    try:
        with model_init.quantized_model_init(*kept):
            layer = choice.cls(*choice.sizes, **choice.settings, params_dtype=module.weight.dtype, device="meta")
    except (NotImplementedError, TypeError, ValueError) as error:
        return str(error)
    return Replacement(layer, note)


def _choice(layers: Layers, module: Any) -> _Choice | str:
    """The layer for a module, by its class; or why none fits."""
    if any(torch.nn.parameter.is_lazy(one) for one in module._parameters.values()):
        return "its parameters have no sizes yet: call the model once, then convert"
    if isinstance(module, (torch.nn.Linear, torch.nn.LayerNorm)) and module._parameters.get("weight") is None:
        return "it has no parameter weight"
    if _computes_as(torch.nn.Linear, module) or _is_conv1d(type(module)):
        rows, columns = module.weight.shape
        sizes = (rows, columns) if _is_conv1d(type(module)) else (columns, rows)
        if rows % 16 or columns % 16:
            return f"in_features={sizes[0]}, out_features={sizes[1]}: multiples of 16 are accepted in FP8"
        return _Choice(layers.Linear, sizes, {"bias": module.bias is not None})
    if isinstance(module, torch.nn.Linear):
        return "its class has a forward of its own"
    if _computes_as(torch.nn.LayerNorm, module):
        if len(module.normalized_shape) != 1 or module.bias is None:
            return "te.LayerNorm has one dimension, a weight and a bias"
        return _Choice(layers.LayerNorm, module.normalized_shape, {"eps": module.eps})
    found = rms_norm_of(module)
    if found is None:
        return "it is neither a linear layer nor a norm that te has"
    return _Choice(layers.RMSNorm, (module.weight.numel(),), found._asdict())


def _computes_as(cls: Any, module: Any) -> bool:
    """Whether the class of `module` is `cls`, or a subclass with its forward."""
    own: Any = type(module)
    same = issubclass(own, cls) and own.forward is cls.forward and own.__call__ is torch.nn.Module.__call__
    return same and is_as_written(cls)


def _obstacle(module: Any, places: Places) -> str | None:
    """What keeps a module of an accepted class where it is; None where nothing does."""
    for key, parameter in module._parameters.items():
        if parameter is not None and type(parameter) is not torch.nn.Parameter:
            return f"its {key} is a {type(parameter).__name__}"
        if parameter is not None and parameter.dtype not in WIDE_DTYPES:
            return f"its {key} is {parameter.dtype}: float32, bfloat16 and float16 are accepted"
    if "forward" in vars(module):
        return "its forward was replaced"
    if any(getattr(module, hooks) for hooks in HOOKS):
        return "hooks are registered on it"
    for owner, attribute in places:
        reader = reads_weight(owner, attribute)
        if reader is not None:
            return f"{reader} computes with its parameters itself"
    return None


def fill(layer: Any, module: Any) -> None:
    """Give a planned layer all that `module` has: its parameters, its attributes, its class."""
    cls, weight = type(module), module.weight
    if layer.quantized_init is None or not layer.fp8_weights:
        layer.weight = weight
    else:
        if _is_conv1d(cls):
            cls, weight = torch.nn.Linear, weight.t()
        if not weight.is_meta:
            layer.to_empty(device=weight.device)
            _cast(layer, weight.detach())
        layer.weight.requires_grad_(weight.requires_grad)
    if module._parameters.get("bias") is not None:
        layer.bias = module.bias
    elif "bias" in vars(layer):  # te.Linear's empty tensor; torch.nn.Linear has None
        del layer.bias
        layer.register_parameter("bias", None)
        layer.bias_names = []
    layer.training = module.training
    vars(layer).update((key, value) for key, value in vars(module).items() if key not in vars(layer))
    become(layer, cls)


def become(layer: Any, cls: Any) -> None:
    """Let `layer` be an instance of `cls`, too."""
    classes: Any = (type(layer), cls)
    layer.__class__ = both(*classes)


@torch.no_grad()
def _cast(layer: Any, values: torch.Tensor) -> None:
    """Write a weight that is kept in FP8, with the scale that its own amax gives it.

    In delayed scaling `quantized_model_init` casts new weights with scale 1, until a step has replaced it. Weights that
    exist are often far below 1, and frozen ones keep their first scale for ever.
    """
    recipe = layer.quantized_init.recipe
    layer.initialize("weight", lambda weight: weight.copy_(values))  # records the amax
    if recipe.history_rows is not None:
        state, fp8_max = layer.fp8_meta["scaling_fwd"], recipe.fp8_format.fp8_max(True)
        twin.scale_update([state.scale], [state.amax_history], fp8_max, recipe.margin, recipe.amax_compute_algo)
        layer.weight.quantize_(values)


def _is_conv1d(cls: type) -> bool:
    """Whether it is transformers' `Conv1D`: a linear layer whose weight is `[in, out]`."""
    owner = sys.modules.get("transformers.pytorch_utils")
    return owner is not None and cls is owner.Conv1D


# --- a layer that is also what it replaces ---------------------------------------------------------------


class _Converted(torch.nn.Module):
    """A layer of ours that is an instance of the class it replaces, too.

    Libraries ask for it: transformers initialises a missing weight by its module's class, PEFT chooses an adapter by
    it, and the Trainer's weight decay spares `torch.nn.LayerNorm`.
    """

    _classes: tuple[type, type]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Classes made at run time cannot be found by name; `copy.deepcopy` comes through here, too.
        return _empty, type(self)._classes, self.__getstate__()


class _InputFirst(torch.nn.Module):
    """A `te.Linear` whose weight is stored `[in, out]`, as `Conv1D` does; each forward transposes it once."""

    weight: torch.nn.Parameter

    def joined_weight(self) -> torch.Tensor:
        return self.weight.t().contiguous()


@functools.cache
def both(ours: type, theirs: type) -> type:
    """The class of a layer `ours` in the place of a module `theirs`; its forward, and all else that both have, is ours.

    It has our class's name, which transformers asks for "LayerNorm" and "RMSNorm"; a block has theirs, by which FSDP
    wraps decoder layers.
    """
    whole = issubclass(ours, TransformerLayer)
    first: tuple[type, ...] = (DecoderBlock,) if whole else (_InputFirst,) if _is_conv1d(theirs) else ()
    names = {"_classes": (ours, theirs), "__module__": ours.__module__, "__doc__": ours.__doc__}
    return type((theirs if whole else ours).__name__, (*first, _Converted, ours, theirs), names)


def _empty(ours: Any, theirs: Any) -> Any:
    """An object without state, for copies and pickles."""
    cls: Any = both(ours, theirs)
    return cls.__new__(cls)
