"""`Sequential`: modules one after the other, with extra inputs and outputs."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from reference.arguments import check_arguments
from reference.support import transforms


class Sequential(torch.nn.Sequential):
    """Runs modules one after the other; operations of `te.ops` may take extra inputs and give extra outputs.

    Args:
        args: modules of any kind, or one dictionary of them by name.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*((OrderedDict(args[0]),) if len(args) == 1 and isinstance(args[0], dict) else args))

    @property
    def num_extra_inputs(self) -> int:
        """Tensors that its operations take besides x."""
        return sum(getattr(one, "num_extra_inputs", 0) for one in self)

    @property
    def num_extra_outputs(self) -> int:
        """Tensors that its operations give besides the last result."""
        return sum(getattr(one, "num_extra_outputs", 0) for one in self)

    def forward(self, input: Any, *extra_inputs: torch.Tensor, op_kwargs: None = None) -> Any:
        """Apply all.

        Args:
            input: of the first module.
            extra_inputs: of the operations that take some, in their order.
            op_kwargs: only None is offered.

        Returns:
            the last result; a tuple of it and of the extra outputs, in their order, where there are any.
        """
        if op_kwargs is not None:
            check_arguments("ops.Sequential.forward", {"op_kwargs": op_kwargs})
        if len(extra_inputs) != self.num_extra_inputs:
            transforms.refuse("ops.Sequential", *extra_inputs)  # torch.onnx.export gives None for `op_kwargs`
            raise ValueError(
                f"ops.Sequential: {len(extra_inputs)} extra_inputs; {self.num_extra_inputs}, as many as its operations "
                f"take, is accepted."
            )
        given: Iterator[torch.Tensor] = iter(extra_inputs)
        found: list[torch.Tensor] = []
        for module in self:
            extras = [next(given) for _ in range(getattr(module, "num_extra_inputs", 0))]
            input = module(input, *extras)
            if getattr(module, "num_extra_outputs", 0):
                input, *more = input
                found += more
        return (input, *found) if found else input

    def __add__(self, other: Iterable[torch.nn.Module]) -> "Sequential":
        """The modules of both."""
        return Sequential(*self, *other)
