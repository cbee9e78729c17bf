"""Roles: the tensors of a layer that are quantized, by name.

A layer has a role for each of them, "fc1.weight" or "attention.q", and a recipe answers for a role with a quantizer
(`reference.recipes.base.Recipe.quantizer`). How many GEMMs a layer has is the layer's own affair.

    Linear                      input, weight, grad_output
    LayerNormMLP                fc1.input, fc1.weight, fc1.grad_output, the same of fc2
    DotProductAttention         attention.q, attention.k, attention.v

In a recipe with state, scales and amax histories have a column for each role, so a layer of n GEMMs has 3·n columns
forward, `input, weight, output` of each, and 2·n backward, `grad_output, grad_input` of each (Transformer Engine's).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

FORWARD_TENSORS = ("input", "weight", "output")
BACKWARD_TENSORS = ("grad_output", "grad_input")


class Role(NamedTuple):
    """One tensor.

    Attributes:
        part: of the layer: "fc1"; "" where it has one linear map.
        tensor: "input", "weight" or "grad_output" of a GEMM; "q", "k" or "v" of attention.
        column: of the scales and amax histories of its direction.
    """

    part: str
    tensor: str
    column: int

    @property
    def name(self) -> str:
        """Of a layer's roles each has another."""
        return f"{self.part}.{self.tensor}" if self.part else self.tensor

    @property
    def is_forward(self) -> bool:
        """Whether it is a tensor of the forward pass; gradients have formats and a state of their own."""
        return self.tensor != "grad_output"


class GemmRoles(NamedTuple):
    """The tensors of one linear map, which is three GEMMs, and the name of the parameter that is its weight.

    `shared`: which ranks have parts of it (`reference.parallel.tensor.Shared`); None where one has all of it.
    """

    part: str
    parameter: str
    input: Role
    weight: Role
    grad: Role
    shared: Any = None
    tokens: Any = None


def linear_map(part: str, parameter: str, slot: int = 0, shared: Any = None, tokens: Any = None) -> GemmRoles:
    """The roles of a layer's `slot`-th linear map."""
    of_input = len(FORWARD_TENSORS) * slot
    return GemmRoles(
        part,
        parameter,
        Role(part, "input", of_input),
        Role(part, "weight", of_input + FORWARD_TENSORS.index("weight")),
        Role(part, "grad_output", len(BACKWARD_TENSORS) * slot),
        shared,
        tokens,
    )


class Roles(NamedTuple):
    """Those of one layer.

    Attributes:
        gemms: of its linear maps.
        others: roles that belong to none.
        parts: parameter → column, where a linear map's weight is kept in FP8 as several parameters, each with a scale
            of its own; empty otherwise.
    """

    gemms: tuple[GemmRoles, ...] = ()
    others: tuple[Role, ...] = ()
    parts: Mapping[str, int] = {}

    @property
    def all(self) -> tuple[Role, ...]:
        """Every role."""
        return *[role for one in self.gemms for role in (one.input, one.weight, one.grad)], *self.others

    @property
    def weights(self) -> dict[str, int]:
        """The parameters that may be kept in FP8, and their columns."""
        return dict(self.parts) or {one.parameter: one.weight.column for one in self.gemms}

    def of_weight(self, name: str) -> Role:
        """The role of a parameter that may be kept in FP8; a part's is the weight's, with a column of its own."""
        found = next((one.weight for one in self.gemms if one.parameter == name), self.gemms[0].weight)
        return found._replace(column=self.weights[name])

    @property
    def slots(self) -> int:
        """For how many linear maps the state has columns, parts aside."""
        return 1 + max((one.column // len(FORWARD_TENSORS) for one in self.all if one.is_forward), default=0)


def columns_of_parts(weights: Sequence[str]) -> dict[str, int]:
    """The columns of a weight's parts, if each has a scale of its own."""
    return {name: linear_map("", name, i).weight.column for i, name in enumerate(weights)}
