"""`Embedding`: rows of a table by their numbers, as `torch.nn.Embedding`, with the same bits everywhere.

Forward copies rows. The gradient of the table is a sum in a written order (`reference.ops.vocabulary.embedding`), in
the table's dtype. A table that is also the weight of a `Linear`, or of `fused_linear_cross_entropy`, gets both
gradients, added by autograd.
"""

from typing import Any, NamedTuple

import torch

from reference.arguments import check_arguments
from reference.nn.core import init
from reference.nn.core.autograd import differentiable, wanted
from reference.nn.core.context import BlockContext
from reference.nn.core.parameters import DeviceDefault, InitMethod, parameter_dtype
from reference.ops.library import twin
from reference.support.nested import Tensors


class Plan(NamedTuple):
    """Which gradients are wanted (weight, ids), the table's rows, and the row that gets none (-1 is none)."""

    needs: tuple[bool, ...]
    rows: int
    padding: int


class Saved(NamedTuple):
    """What backward reads."""

    ids: torch.Tensor


def forward(plan: Plan, context: BlockContext, weight: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, Saved]:
    """Rows `[count, width]` of weight `[rows, width]`."""
    return twin.embedding(weight, ids), Saved(ids)


def backward(plan: Plan, context: BlockContext, saved: Saved, grad: torch.Tensor) -> Tensors:
    """The gradient of the table."""
    return twin.embedding_backward(grad.contiguous(), saved.ids, plan.rows, plan.padding), None


class Embedding(DeviceDefault, torch.nn.Embedding):
    """`torch.nn.Embedding` with defined bits; its arguments, and the names that layers have here.

    Args:
        num_embeddings, embedding_dim: rows and width of `weight`.
        padding_idx: a row that starts as zeros and gets no gradient; negative numbers count from the end.
        max_norm, norm_type, scale_grad_by_freq, sparse: only torch's defaults are offered.
        device: None is the package's own.
        dtype, params_dtype: of the weight, fp32, bf16 or fp16; None is torch's default dtype.
        init_method: called with the weight; None draws normal(0, 1), torch's, by `reference.nn.core.init`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: torch.Tensor | None = None,
        _freeze: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        params_dtype: torch.dtype | None = None,
        init_method: InitMethod | None = None,
    ) -> None:
        check_arguments("Embedding", locals())
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(
                f"Embedding: padding_idx={padding_idx} with num_embeddings={num_embeddings}; None or an int from "
                f"{-num_embeddings} to {num_embeddings - 1} is accepted."
            )
        if None not in (params_dtype, dtype) and params_dtype != dtype:
            raise ValueError(
                f"Embedding: params_dtype={params_dtype} and dtype={dtype}, torch's name; one is accepted."
            )
        shape, given = (int(num_embeddings), int(embedding_dim)), _weight
        if _weight is None:
            weight_dtype = parameter_dtype("Embedding", params_dtype or dtype)
            _weight = torch.empty(shape, dtype=weight_dtype, device=self.resolve_device(device))
        elif tuple(_weight.shape) != shape:
            raise ValueError(f"Embedding: _weight has shape {list(_weight.shape)}; {list(shape)} is accepted.")
        super().__init__(*shape, padding_idx, _weight=_weight, _freeze=_freeze)
        self._init_method = init_method
        if given is None and not self.weight.is_meta:
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weight anew; from the meta device, move to the default device first."""
        if self.weight.is_meta:
            self.to_empty(device=self.resolve_device(None))
        if self._init_method is None:
            init.normal_(self.weight, std=1.0)
        else:
            self._init_method(self.weight)
        self._fill_padding_idx_with_zero()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Rows `[..., embedding_dim]`, in the weight's dtype, of numbers `[...]`, int64 or int32."""
        self._check(input)
        ids = input.reshape(-1).to(torch.int64)
        weight = self.weight if self.weight.is_contiguous() else self.weight.contiguous()
        padding = -1 if self.padding_idx is None else self.padding_idx
        plan = Plan(wanted(weight, ids), self.weight.shape[0], padding)
        out: torch.Tensor = differentiable(forward, backward, plan, BlockContext(), weight, ids)
        return out.view(*input.shape, self.weight.shape[1])

    def _check(self, ids: Any) -> None:
        """Refuse all but int64 and int32 numbers on the weight's device."""
        if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int64, torch.int32):
            what = f"{ids.dtype} tensor" if isinstance(ids, torch.Tensor) else type(ids).__name__
            raise TypeError(f"Embedding: input is a {what}; a tensor of torch.int64 or torch.int32 is accepted.")
        if ids.device != self.weight.device:
            raise RuntimeError(
                f"Embedding: input is on {ids.device}, the weight on {self.weight.device}; one device is accepted."
            )
