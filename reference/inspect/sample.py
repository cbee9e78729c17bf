"""One line of `collect_stats`: what a quantizer did to a tensor, as numbers, as text and as JSON."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from reference.numbers import formats
from reference.recipe import Recipe

GEMMS: dict[str, tuple[str, ...]] = {
    "input": ("fprop", "wgrad"),
    "weight": ("fprop", "dgrad"),
    "grad_output": ("dgrad", "wgrad"),
    "q": ("q·kᵀ",),
    "k": ("q·kᵀ",),
    "v": ("p·v",),
}
"""Role → the products that read it."""


_SWITCHES = (
    *("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization", "enable_2d_quantization"),
    "high_precision_weight_gradient",
)


@dataclass(frozen=True)
class Sample:
    """What one quantizer did to one role of one linear map, in one step or in several.

    Attributes:
        layer: the layer's name in the model; "" is the model itself.
        part: "fc1" or "fc2" of an MLP; "attention" of FP8 attention; "" of a layer with one linear map.
        role: "input", "weight" or "grad_output"; of FP8 attention "q", "k" or "v".
        recipe: the recipe of the quantizer; None for 16 bits.
        ran: whether the layer ran in it; otherwise it was measured beside, and nothing of it was used.
        dtype: of the codes, two of which are a byte in NVFP4; of the numbers in 16 bits.
        step: the forward of the model, from 0, in which it was measured; the last one of several.
        elements: how many there are; zeros and elements that are not finite count.
        amax: the largest magnitude that is not NaN.
        scale: what elements were multiplied by before they were rounded to FP8; the last one of several. None where
            each block has one.
        saturated, underflowed, nan, inf: how many elements.
        signal, noise: sums of squares of the elements and of what quantization added.
    """

    layer: str
    part: str
    role: str
    recipe: Recipe | None
    ran: bool
    dtype: torch.dtype
    step: int
    elements: int
    amax: float
    scale: float | None
    saturated: int
    underflowed: int
    nan: int
    inf: int
    signal: float
    noise: float

    @property
    def gemms(self) -> tuple[str, ...]:
        """The products that read it."""
        return GEMMS[self.role]

    @property
    def saturated_share(self) -> float:
        """Of all elements."""
        return self.saturated / max(1, self.elements)

    @property
    def underflowed_share(self) -> float:
        """Of all elements."""
        return self.underflowed / max(1, self.elements)

    @property
    def sqnr(self) -> float | None:
        """10·log10(signal / noise) in dB; infinite where nothing was lost, None in 16 bits."""
        if self.recipe is None:
            return None
        if self.noise == 0:
            return math.inf
        ratio = self.signal / self.noise
        return 10 * math.log10(ratio) if ratio > 0 else ratio - math.inf  # NaN stays NaN

    @property
    def format(self) -> str:
        """ "E4M3", "E5M2", "E2M1", or the dtype."""
        if self.recipe is None:
            return str(self.dtype).removeprefix("torch.")
        return "E2M1" if self.dtype == torch.uint8 else formats.format_of(self.dtype).name

    def merged(self, later: "Sample") -> "Sample":
        """This and a later sample of the same quantizer as one."""
        summed = ("elements", "saturated", "underflowed", "nan", "inf", "signal", "noise")
        sums: dict[str, Any] = {name: getattr(self, name) + getattr(later, name) for name in summed}
        return replace(later, amax=max(self.amax, later.amax), **sums)

    def row(self) -> tuple[str, ...]:
        """As a table has it."""
        name, fp8 = recipe_name(self.recipe), self.recipe is not None
        return (
            shown(self.layer, self.part),
            self.role,
            ", ".join(self.gemms),
            name if self.ran else f"({name})",
            self.format,
            f"{self.amax:.4g}",
            "" if self.scale is None else f"{self.scale:.4g}",
            f"{self.saturated_share:.2%}" if fp8 else "",
            f"{self.underflowed_share:.2%}" if fp8 else "",
            f"{self.sqnr:.1f}" if self.sqnr is not None else "",
            str(self.nan),
            str(self.inf),
        )

    def plain(self) -> dict[str, Any]:
        """As JSON has it; a number that is not finite is a string."""
        found = dict(vars(self))
        found |= {"recipe": None if self.recipe is None else repr(self.recipe), "dtype": str(self.dtype)}
        found |= {"gemms": list(self.gemms), "saturated_share": self.saturated_share}
        found |= {"underflowed_share": self.underflowed_share, "sqnr": self.sqnr}
        return {key: str(x) if isinstance(x, float) and not math.isfinite(x) else x for key, x in found.items()}


def shown(layer: str, part: str = "") -> str:
    """A layer's name in texts."""
    return ".".join(filter(None, (layer, part))) or "(the model)"


def recipe_name(recipe: Recipe | None) -> str:
    """A recipe in texts; its format where that is neither HYBRID nor the only one, and what is switched."""
    if recipe is None:
        return "16 bits"
    name = type(recipe).__name__
    name = name if recipe.fp8_format.name == "HYBRID" or recipe.nvfp4() else f"{name} {recipe.fp8_format.name}"
    name = ", ".join([name, *[one for one in _SWITCHES if getattr(recipe, one, False)]])
    how = {None: "", "high_precision": " in forward alone", "dequantized": ", dequantized for backward"}
    return f"{name}{how[recipe.backward_override]}"
