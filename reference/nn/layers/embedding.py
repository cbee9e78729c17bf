"""`Embedding`: rows of a table by their numbers, as `torch.nn.Embedding`, with the same bits everywhere.

Forward copies rows. The gradient of the table is a sum in a written order (`reference.ops.vocabulary.embedding`), in
the table's dtype. A table that is also the weight of a `Linear`, or of `fused_linear_cross_entropy`, gets both
gradients, added by autograd.

Ranks may share the table by rows (`reference.parallel.vocabulary`), as Megatron's VocabParallelEmbedding and PyTorch's
RowwiseParallel do.
"""

import functools
from typing import Any, NamedTuple

import torch

from reference.arguments import check_arguments
from reference.nn.core import init
from reference.nn.core.autograd import differentiable, wanted
from reference.nn.core.context import BlockContext
from reference.nn.core.parameters import DeviceDefault, InitMethod, parameter_dtype
from reference.nn.core.tensor_parallel import TensorParallel, check_same_on_ranks, refuse_compiler
from reference.ops.library import twin
from reference.parallel.ordered_reduce import gathered_rows, ranks_of
from reference.parallel.tokens import Tokens
from reference.parallel.vocabulary import Shard, gradient_of_table, rows_of_table
from reference.support.nested import Tensors


class Plan(NamedTuple):
    """Which gradients are wanted (weight, ids), the table's rows, and the row that gets none (-1 is none).

    `shard`: what this rank has of the table, whose rows and padding are then those of all ranks. `tokens`: which
    ranks have some of the numbers each.
    """

    needs: tuple[bool, ...]
    rows: int
    padding: int
    shard: Shard | None = None
    tokens: Tokens | None = None


class Saved(NamedTuple):
    """What backward reads."""

    ids: torch.Tensor


def forward(plan: Plan, context: BlockContext, weight: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, Saved]:
    """Rows `[count, width]` of weight `[rows, width]`."""
    out = twin.embedding(weight, ids) if plan.shard is None else rows_of_table(plan.shard, weight, ids)
    return out, Saved(ids)


def backward(plan: Plan, context: BlockContext, saved: Saved, grad: torch.Tensor) -> Tensors:
    """The gradient of the table."""
    grad, ids = grad.contiguous(), saved.ids
    if plan.shard is not None and plan.shard.sequence:
        grad = gathered_rows(plan.shard.group, grad)
    if plan.tokens is not None:
        grad, ids = plan.tokens.gathered(grad), plan.tokens.gathered(ids)
    if plan.shard is not None:
        return gradient_of_table(plan.shard, grad, ids, plan.padding), None
    return twin.embedding_backward(grad, ids, plan.rows, plan.padding), None


class Embedding(TensorParallel, DeviceDefault, torch.nn.Embedding):
    """`torch.nn.Embedding` with defined bits; its arguments, and the names that layers have here.

    Args:
        num_embeddings, embedding_dim: rows and width of `weight`.
        padding_idx: a row that starts as zeros and gets no gradient; negative numbers count from the end.
        max_norm, norm_type, scale_grad_by_freq, sparse: only torch's defaults are offered.
        device: None is the package's own.
        dtype, params_dtype: of the weight, fp32, bf16 or fp16; None is torch's default dtype.
        init_method: called with the weight; None draws normal(0, 1), torch's, by `reference.nn.core.init`.
        tp_group, tp_size: whose ranks share the table, as in `Linear`: num_embeddings are the rows of all ranks, and
            `weight` has this rank's. Every rank gets all numbers.
        sequence_parallel: the first dimension of the numbers is the sequence, and a rank gets the rows of its part.
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
        tp_group: Any = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
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
        self.take_tensor_group(tp_group, tp_size, sequence_parallel)
        shape, given = (self.divided("num_embeddings", int(num_embeddings), ""), int(embedding_dim)), _weight
        if _weight is None:
            weight_dtype = parameter_dtype("Embedding", params_dtype or dtype)
            _weight = torch.empty(shape, dtype=weight_dtype, device=self.resolve_device(device))
        elif tuple(_weight.shape) != shape:
            raise ValueError(f"Embedding: _weight has shape {list(_weight.shape)}; {list(shape)} is accepted.")
        if padding_idx is not None and padding_idx < 0:
            padding_idx += num_embeddings
        super().__init__(*shape, None, _weight=_weight, _freeze=_freeze)
        self.num_embeddings, self.padding_idx = int(num_embeddings), padding_idx
        self._init_method = init_method
        self.mark_parameters()
        if given is None and not self.weight.is_meta:
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weight anew; from the meta device, move to the default device first."""
        if self.weight.is_meta:
            self.to_empty(device=self.resolve_device(None))
        self.of_part("weight", self._init_method or functools.partial(init.normal_, std=1.0))(self.weight)
        rows = len(self.weight)
        first = 0 if self.tp_name is None else ranks_of(self.tp_name)[0] * rows
        if self.padding_idx is not None and first <= self.padding_idx < first + rows:
            self.weight[self.padding_idx - first].fill_(0)

    parallel_modes = ("row",)

    def divide(self, mode: str | None) -> None:
        self.divided("num_embeddings", self.num_embeddings, "")

    def partitions(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        return {"weight": (0, (self.num_embeddings // self.tp_size,))}

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Give the group after the layer was made: one of `tp_size` ranks, or None."""
        self._take_group(tp_group)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Rows `[..., embedding_dim]`, in the weight's dtype, of numbers `[...]`, int64 or int32."""
        self._check(input)
        shard = self._shard(input) if self.tp_size > 1 else None
        if self.cp_name is not None:
            self.check_rows_of_tokens("input", input, 1)
        ids = input.reshape(-1).to(torch.int64)
        weight = self.weight if self.weight.is_contiguous() else self.weight.contiguous()
        padding = -1 if self.padding_idx is None else self.padding_idx
        plan = Plan(wanted(weight, ids), self.weight.shape[0], padding, shard, self.tokens)
        out: torch.Tensor = differentiable(forward, backward, plan, BlockContext(), weight, ids)
        return out.view(*self._lead(input), self.weight.shape[1])

    def _lead(self, ids: torch.Tensor) -> tuple[int, ...]:
        """The dimensions before the result's last one."""
        return (ids.shape[0] // self.tp_size, *ids.shape[1:]) if self.sequence_parallel else tuple(ids.shape)

    def _shard(self, ids: torch.Tensor) -> Shard:
        """This rank's part of the table; refuse what its ranks cannot do together."""
        if self.tp_name is None:
            raise RuntimeError(
                f"Embedding: tp_size={self.tp_size} and no tp_group; set_tensor_parallel_group(group) before a forward "
                f"is accepted."
            )
        refuse_compiler("Embedding", f"tp_size={self.tp_size}")
        if self.sequence_parallel and (not ids.dim() or ids.shape[0] % self.tp_size):
            raise ValueError(
                f"Embedding: input has shape {list(ids.shape)} with sequence_parallel=True and tp_size={self.tp_size}; "
                f"[sequence, ...] is accepted, the sequence a multiple of {self.tp_size}."
            )
        check_same_on_ranks("Embedding", "input", ids, self.tp_name)
        return Shard(self.tp_name, len(self.weight), self.sequence_parallel)

    def _check(self, ids: Any) -> None:
        """Refuse all but int64 and int32 numbers on the weight's device."""
        if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int64, torch.int32):
            what = f"{ids.dtype} tensor" if isinstance(ids, torch.Tensor) else type(ids).__name__
            raise TypeError(f"Embedding: input is a {what}; a tensor of torch.int64 or torch.int32 is accepted.")
        if ids.device != self.weight.device:
            raise RuntimeError(
                f"Embedding: input is on {ids.device}, the weight on {self.weight.device}; one device is accepted."
            )
