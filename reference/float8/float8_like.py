"""Other tensors of a Float8Tensor's codes: `make_like`, `to_dtype` and `get_metadata`, Transformer Engine's names.

A tensor made without `data` shares all of its source's memory: a write to one changes the other, transposed codes too.
With `data` it has codes of its own, and the source's scale_inv and quantizer.
"""

from collections.abc import Iterable
from typing import Any

import torch

from reference.arguments import check_arguments


class Alike:
    """What `te.Float8Tensor` has of them."""

    @classmethod
    def make_like(
        cls: Any,
        tensor: Any,
        *,
        shape: Iterable[int] | None = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
        data: torch.Tensor | None = None,
        data_transpose: torch.Tensor | None = None,
    ) -> Any:
        """A Float8Tensor with the attributes of `tensor`; what is given replaces them.

        Args:
            tensor: a Float8Tensor.
            shape: another shape of the codes; None is that of `data`, or of `tensor`.
            dtype: of the numbers that it stands for; None is that of `tensor`.
            requires_grad: whether a gradient is wanted.
            data: other codes, as in the constructor; None shares those of `tensor`.
            data_transpose: their transposed codes; accepted with `data` only, since shared codes keep their own.
        """
        if not isinstance(tensor, cls):
            raise TypeError(f"make_like: tensor={tensor!r}; a te.Float8Tensor is accepted.")
        if data is None and data_transpose is not None:
            raise ValueError("make_like: data_transpose without data; both, data alone, or neither is accepted.")
        dtype = tensor.dtype if dtype is None else dtype
        check_arguments("Float8Tensor", {"dtype": dtype, "requires_grad": requires_grad})
        if data is not None:
            given = {**tensor.get_metadata(), "data": data, "data_transpose": data_transpose}
            return cls(data.shape if shape is None else shape, dtype, requires_grad=requires_grad, **given)
        size = torch.Size([shape] if isinstance(shape, int) else tensor.shape if shape is None else shape)
        if size.numel() != tensor.numel():
            raise ValueError(f"make_like: shape={list(size)}; one of {tensor.numel()} numbers, as tensor, is accepted.")
        return tensor.sharing(dtype, size).requires_grad_(requires_grad)

    def to_dtype(self, dtype: torch.dtype) -> Any:
        """The same memory, standing for numbers of another dtype."""
        return type(self).make_like(self, dtype=dtype)

    def get_metadata(self: Any) -> dict[str, Any]:
        """The constructor's arguments but shape and dtype; the tensors are its own."""
        turned = self._transpose
        parts = {"data": self._data, "fp8_scale_inv": self._scale_inv, "fp8_dtype": self._fp8_dtype}
        return {**parts, "data_transpose": turned, "quantizer": self._quantizer}
