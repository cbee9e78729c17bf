"""What all recipes share: formats, Transformer Engine's queries, and the interface for quantizers and updates."""

import copy
import dataclasses
import os
from enum import Enum
from typing import Any, ClassVar, NamedTuple, Self

import torch

from reference.recipes.quantized import KEEPING, Accumulation
from reference.recipes.quantizer import Dequantized, ForwardOnly, HighPrecision, Quantizer
from reference.recipes.roles import Role, Roles, linear_map
from reference.support.notice import say_once

_OVERRIDES = {"high_precision": ForwardOnly, "dequantized": Dequantized}  # how backward reads a forward's tensors
_UNREAD = {
    "NVTE_BACKWARD_OVERRIDE": "backward_override",
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "use_f32_scales",
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "use_power_2_scales",
    "NVTE_NVFP4_4OVER6": "nvfp4_4over6",
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": "disable_2d_quantization",
    "NVTE_NVFP4_DISABLE_RHT": "disable_rht",
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": "disable_stochastic_rounding",
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION": "row_scaled_activation",
}  # variables from which Transformer Engine takes the default of a field
_fixed: dict[Any, Any] = {}  # by each recipe, the copy of it that autocast and layers keep
_MOST_FIXED = 256


def _added(recipe: Any) -> dict[str, int]:
    """What a recipe has beside its fields, each with the `id` of its value."""
    fields = getattr(recipe, "__dataclass_fields__", {})
    return {name: id(x) for name, x in vars(recipe).items() if name not in fields and name != "_fixed"}


class FormatLimits(NamedTuple):
    """Largest finite magnitude of the forward and of the backward format."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    """Which FP8 format the tensors of a GEMM have.

    `E4M3`: every tensor; `HYBRID`: E4M3 in the forward pass, E5M2 for gradients. `E5M2` names the format alone. As a
    recipe it would leave the forward pass two bits of mantissa, so no recipe accepts it (nor does Transformer Engine).
    `E2M1` is that of NVFP4's codes.
    """

    E4M3 = FormatLimits(max_fwd=448.0, max_bwd=448.0)
    E5M2 = FormatLimits(max_fwd=57344.0, max_bwd=57344.0)
    HYBRID = FormatLimits(max_fwd=448.0, max_bwd=57344.0)
    E2M1 = FormatLimits(max_fwd=6.0, max_bwd=6.0)

    def dtype(self, forward: bool) -> torch.dtype:
        """The float8 dtype of that direction's tensors; of E2M1 uint8, a byte for two codes."""
        if self is Format.E2M1:
            return torch.uint8
        if self is Format.E5M2 or (self is Format.HYBRID and not forward):
            return torch.float8_e5m2
        return torch.float8_e4m3fn

    def fp8_max(self, forward: bool) -> float:
        """The largest finite value of `dtype(forward)`."""
        return self.value.max_fwd if forward else self.value.max_bwd


class MMParams(NamedTuple):
    """How a GEMM accumulates; of block scaling only `use_split_accumulator=True`."""

    use_split_accumulator: bool = True


class QParams(NamedTuple):
    """How a tensor is quantized.

    Attributes:
        power_2_scale: scales that are powers of two.
        amax_epsilon: the least amax of a block.
        random_hadamard_transform, stochastic_rounding, fp4_2d_quantization: of NVFP4, which reads no other.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


class Recipe:
    """Which quantizer each role of a layer's tensors has, and what is updated when.

    A recipe is a hashable dataclass in a file of its own that defines `quantizer`. A recipe with state between steps
    sets `history_rows`; its layers keep scales and amax histories (`reference.state.scaling.FP8TensorMeta`), from which
    `update` computes the next step's scales.

    Fields may be set, as Transformer Engine's. What is set is checked like an argument, and counts from the next
    `autocast`, `quantized_model_init` or `by_layer` on: these keep `fixed`.
    """

    fp8_format: Format
    fp8_dpa: bool = False
    backward_override: str | None = None
    history_rows: ClassVar[int | None] = None
    rows_of_parts: ClassVar[int] = 16
    """A kept weight in several parameters: each has a multiple of so many rows."""

    @property
    def keeps_weights(self) -> bool:
        """Whether `quantized_model_init` keeps weights in what this recipe's quantizer of a weight makes.

        A recipe with state keeps them with one scale, that of the state (`reference.float8.float8_tensor`).
        """
        if self.history_rows is not None:
            return True
        return self.quantizer(linear_map("", "weight").weight, None).layout in KEEPING

    @property
    def fixed(self) -> Self:
        """The recipe as it is now, in a copy whose fields cannot be set; equal recipes have the same copy.

        So a program may make its recipe anew in each step: layers ask whether the copy is the one of their last run.
        """
        if torch.compiler.is_compiling():  # no graph can hold a copy; one is compiled anew when a field is set
            return self
        kept: Self | None = vars(self).get("_fixed")
        if kept is None:
            kept = vars(self)["_fixed"] = self._shared()
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A deep copy or an unpickled recipe has the shared copy, too; what was such a copy stays one of its own."""
        vars(self).update(state)
        if vars(self).get("_fixed") is not self:
            vars(self).pop("_fixed", None)

    def _shared(self) -> Self:
        """The copy that all recipes equal to this one share; those of a subclass whose objects have no hash share none.

        Recipes that are equal may still differ in what a subclass has added to them.
        """
        found: Any = None if type(self).__hash__ is None else _fixed.get(self)
        if found is None or _added(self) != _added(found):
            found = copy.copy(self)
            vars(found)["_fixed"] = found
            if len(_fixed) >= _MOST_FIXED:
                _fixed.clear()
            if type(self).__hash__ is not None:
                _fixed[found] = found
        return found  # type: ignore[no-any-return]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):  # not while the recipe is made
            if vars(self).get("_fixed") is self:
                raise dataclasses.FrozenInstanceError(
                    f"{type(self).__name__}: {name}={value!r} is set on the copy of a recipe that autocast and layers "
                    f"keep; the recipe itself is accepted, and counts from the next autocast on."
                )
            changed = copy.copy(self)
            vars(changed)[name] = value
            changed.check()
            vars(self).pop("_fixed", None)
        super().__setattr__(name, value)

    def codes(self, forward: bool) -> tuple[torch.dtype, float]:
        """The FP8 dtype of that direction's tensors, and its largest finite value."""
        # Functions, not bound methods: torch 2.11 traces no method of an Enum that a compiled region sets.
        return Format.dtype(self.fp8_format, forward), Format.fp8_max(self.fp8_format, forward)

    @property
    def sees_other_tokens(self) -> bool:
        """Whether what a forward makes of a token depends on the other tokens in it."""
        return False

    def scaled_max(self, forward: bool) -> float:
        """2^-margin · fp8_max: what a scale of that direction times its amax is, in a recipe with `history_rows`."""
        return self.codes(forward)[1]

    def check(self) -> None:
        """Raise ValueError, TypeError or NotImplementedError, in a sentence, for a field that is not accepted."""

    def quantizer(self, role: Role, state: Any) -> Quantizer:
        """What quantizes a tensor; `state` is the layer's of that direction, None without `history_rows`."""
        raise NotImplementedError

    def accumulation(self, part: str) -> Accumulation:
        """How the GEMMs of a layer's linear map accumulate."""
        return Accumulation()

    @property
    def reads_dtype(self) -> bool:
        """Whether a backward reads tensors in the activation dtype, so that quantizers depend on it."""
        return self.backward_override is not None

    def quantizers(self, roles: Roles, forward: Any, backward: Any, dtype: torch.dtype) -> dict[str, Quantizer]:
        """Role's name → quantizer; `backward_override` leaves the forward alone in FP8.

        `forward` and `backward` are the layer's state, `dtype` is the activations'.
        """
        found = {}
        for role in roles.all:
            if self.backward_override is None:
                found[role.name] = self.quantizer(role, forward if role.is_forward else backward)
            elif role.is_forward:
                found[role.name] = _OVERRIDES[self.backward_override](self.quantizer(role, forward), dtype)
            else:
                found[role.name] = HighPrecision(dtype)
        return found

    def update(self, forward: bool, metas: list[Any], group: Any) -> None:
        """Compute the scales of the next step, for several layers' states of one direction and device."""

    @classmethod
    def delayed(cls) -> bool:
        """False. Transformer Engine's queries of a recipe's kind; each recipe answers True to its own."""
        return False

    float8_per_tensor_scaling = float8_current_scaling = delayed
    mxfp8 = nvfp4 = float8_block_scaling = custom = delayed


def _speak_of_the_environment(recipe: Any) -> None:
    """Say once of each variable that would have changed a default of Transformer Engine's that it changes none here."""
    for variable, field in _UNREAD.items():
        text = os.environ.get(variable)
        if not text or not hasattr(recipe, field):
            continue
        value = getattr(recipe, field)
        if value != getattr(type(recipe), field):  # an argument
            continue
        if value != (text == "1" if isinstance(value, bool) else text):
            say_once(
                variable,
                f"{type(recipe).__name__}: {variable}={text!r} in the environment is not read; the recipe has "
                f"{field}={value!r}, and an argument changes it",
            )


def check_recipe(recipe: Any) -> None:
    """Refuse E5M2 as a recipe's format, fp8_mha, and a backward that is neither in FP8 nor in high precision."""
    name = type(recipe).__name__
    if not torch.compiler.is_compiling():
        _speak_of_the_environment(recipe)
    if not isinstance(recipe.fp8_format, Format) or recipe.fp8_format not in (Format.HYBRID, Format.E4M3):
        raise ValueError(
            f"{name}: fp8_format={recipe.fp8_format!s}; Format.HYBRID and Format.E4M3 are accepted "
            f"(E5M2 in the forward pass has too few mantissa bits to train with)."
        )
    if not isinstance(recipe.fp8_dpa, bool):
        raise TypeError(f"{name}: fp8_dpa={recipe.fp8_dpa!r}; True and False are accepted.")
    if recipe.fp8_dpa and not recipe.delayed():
        raise NotImplementedError(
            f"{name}: fp8_dpa=True is not offered: a scale of this step's amax would let later tokens change what "
            f"earlier ones see; False is accepted, or DelayedScaling(fp8_dpa=True)."
        )
    if recipe.fp8_mha is not False:
        raise NotImplementedError(
            f"{name}: fp8_mha={recipe.fp8_mha!r} is not offered (attention's input and output stay 16 bits wide); "
            f"False is accepted."
        )
    override = recipe.backward_override
    if override is not None and (not isinstance(override, str) or override not in _OVERRIDES):
        raise ValueError(
            f"{name}: backward_override={override!r}; None, 'high_precision' and 'dequantized' are accepted."
        )
    if override is not None and recipe.fp8_dpa:
        raise NotImplementedError(
            f"{name}: backward_override={override!r} with fp8_dpa=True is not offered; one of them is accepted."
        )
