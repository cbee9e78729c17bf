"""`Part`: a slice or a chunk of a Float8Tensor, which is one, too."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from reference.float8.float8_storage import Kept
from reference.float8.float8_tensor import Float8Tensor
from reference.float8.quantized_tensor import View, wrapper

Make = Callable[[torch.Tensor], Any]


class Part(View, Float8Tensor):
    """It has the codes of its part, and the scale of the whole.

    A write to it reads and writes the whole, as of every view: one scale holds for all codes. No layer takes it as its
    weight; `clone` gives a Float8Tensor with memory and a quantizer of its own.
    """

    _source: Float8Tensor

    @staticmethod
    def __new__(cls: Any, codes: torch.Tensor, source: Float8Tensor, make: Make) -> "Part":  # type: ignore[override]
        self: Part = wrapper(cls, source, codes.shape, source.dtype, codes.device, codes.stride())
        self._source, self._make = source, make
        return self

    @property
    def _kept(self) -> Kept:  # type: ignore[override]
        return replace(self._source._kept, codes=self._make(self._source.codes), transposed=None)

    @property
    def is_weight(self) -> bool:
        return False

    def numbers(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        return Float8Tensor.numbers(self, dtype)

    def sharing(self, dtype: torch.dtype, shape: torch.Size) -> "Part":
        if shape != self.shape:
            raise ValueError(
                f"make_like: shape={list(shape)} of a part of a Float8Tensor; {list(self.shape)} is accepted, or "
                f"its clone."
            )
        whole: Any = self._source.sharing(dtype, self._source.shape)
        return Part(self.codes, whole, self._make)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Float8Tensor({self.numbers()}, scale_inv={self._scale_inv}), a part of another"

    def _shared(self) -> "Part":  # type: ignore[override]
        return Part(self, self._source, self._make)

    def _reshaped(self, shape: torch.Size) -> "Part":
        made: Part = parts(self, lambda codes: codes.view(shape))
        return made

    def _copied(self, device: torch.device) -> Float8Tensor:
        kept = self._kept
        scales: Any = kept.scales
        whole: Any = Float8Tensor.of_codes(kept.codes.contiguous(), kept.scale_inv, self.dtype, scales, kept.column)
        return whole._copied(device)  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> Float8Tensor:  # type: ignore[override]
        return memo.setdefault(id(self), self._copied(self.device).requires_grad_(self.requires_grad))  # type: ignore

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._copied(self.device).__reduce_ex__(protocol)


def parts(whole: Float8Tensor, make: Make) -> Any:
    """What `make` cuts out of `whole`: a part, or several."""
    found = make(whole.codes)
    if isinstance(found, torch.Tensor):
        return Part(found, whole, make)
    return [Part(one, whole, functools.partial(_nth, make, i)) for i, one in enumerate(found)]


Float8Tensor._cut = staticmethod(parts)


def _nth(make: Make, i: int, whole: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = make(whole)[i]
    return found
