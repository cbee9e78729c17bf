"""`cross_entropy` and Transformer Engine's `parallel_cross_entropy`, with the same bits everywhere.

Both read logits `[..., V]` in fp32, bf16 or fp16, compute in fp32 and return fp32. For backward they keep the logits
and two numbers of each row. The gradient is computed there, in one pass, and rounded once. So a scale of the loss acts
before the rounding, and nothing is computed for a gradient that nobody wants. Ranks may have columns of the logits each
(`reference.parallel.vocabulary`).

Arithmetic and order: `reference.ops.vocabulary.cross_entropy`.
"""

from typing import Any, NamedTuple

import torch

from reference.arguments import check_arguments
from reference.nn.core.autograd import differentiable, wanted
from reference.nn.core.checks import check_tensor
from reference.nn.core.context import BlockContext
from reference.nn.core.tensor_parallel import check_same_on_ranks, refuse_compiler
from reference.ops.library import twin
from reference.parallel.tokens import Tokens
from reference.parallel.vocabulary import Shard, gradient_of_logits, losses
from reference.support import groups
from reference.support.nested import Tensors

REDUCTIONS = ("mean", "sum", "none")


class Loss(NamedTuple):
    """The arguments of a loss. `kind`: "none", or what `twin::cross_entropy_mean` divides by."""

    ignore_index: int
    kind: str
    smoothing: float


class Plan(NamedTuple):
    """Which gradients are wanted (logits, target), the loss, and what this rank has: of the classes, of the rows; None
    is all."""

    needs: tuple[bool, ...]
    loss: Loss
    shard: Shard | None = None
    tokens: Tokens | None = None


class Saved(NamedTuple):
    """What backward reads: by what the loss was divided (None: nothing), the logits, the targets, two numbers a row."""

    divisor: torch.Tensor | None
    logits: torch.Tensor
    target: torch.Tensor
    maximum: torch.Tensor
    inverse: torch.Tensor


def forward(
    plan: Plan, context: BlockContext, logits: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, Saved]:
    """The loss, `[]` or `[rows]`, of logits `[rows, V]`."""
    ignored, kind, smoothing = plan.loss
    if plan.shard is None:
        loss, *stats = twin.cross_entropy(logits, target, ignored, smoothing)
    else:
        loss, *stats = losses(plan.shard, logits, target, ignored, smoothing)
    divisor = None
    if kind != "none":
        of_all = target
        if plan.tokens is not None:
            loss, of_all = plan.tokens.gathered(loss), plan.tokens.gathered(target)
        loss, divisor = twin.cross_entropy_mean(loss, of_all, ignored, kind)
    return loss, Saved(divisor, logits, target, *stats)


def backward(plan: Plan, context: BlockContext, saved: Saved, grad: torch.Tensor) -> Tensors:
    """The gradient of the logits."""
    given = (grad.contiguous(), *saved, plan.loss.ignore_index, plan.loss.smoothing)
    if plan.shard is not None:
        return gradient_of_logits(plan.shard, *given), None
    return twin.cross_entropy_backward(*given), None


def check_targets(name: str, target: Any, shape: torch.Size, device: torch.device) -> torch.Tensor:
    """The targets as int64 `[rows]`; refuse all but int64 and int32 tensors of that shape on that device."""
    if not isinstance(target, torch.Tensor) or target.dtype not in (torch.int64, torch.int32):
        what = f"a {target.dtype} tensor" if isinstance(target, torch.Tensor) else f"a {type(target).__name__}"
        raise TypeError(f"{name}: target is {what}; classes as a tensor of torch.int64 or torch.int32 are accepted.")
    if target.shape != shape:
        raise ValueError(f"{name}: target has shape {list(target.shape)}; {list(shape)}, one a row, is accepted.")
    if target.device != device:
        raise RuntimeError(f"{name}: target is on {target.device}, the rows on {device}; one device is accepted.")
    return target.reshape(-1).to(torch.int64)


def check_loss(name: str, ignore_index: Any, reduction: Any, label_smoothing: Any) -> None:
    """Refuse what these arguments do not accept. The first line is for compilers, which it spares the tables."""
    plain = type(ignore_index) is int and -(2**63) <= ignore_index < 2**63 and type(label_smoothing) is float
    if plain and reduction in REDUCTIONS and 0.0 <= label_smoothing <= 1.0:
        return
    arguments = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    check_arguments(name, arguments)


def _loss(name: str, logits: Any, target: Any, loss: Loss, group: Any = None, cp_group: Any = None) -> torch.Tensor:
    check_tensor(name, "logits" if name == "cross_entropy" else "inp", logits)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"{name}: the logits have shape {list(logits.shape)}; [..., classes] is accepted.")
    target = check_targets(name, target, logits.shape[:-1], logits.device)
    rows = logits.reshape(-1, logits.shape[-1]).contiguous()
    shard = None
    if group is not None and group.size() > 1:
        refuse_compiler(name, f"dist_process_group of {group.size()} processes")
        shard = Shard(groups.name_of(group), logits.shape[-1])
        check_same_on_ranks(name, "inp", logits, shard.group)
    tokens = None
    if cp_group is not None and cp_group.size() > 1:
        refuse_compiler(name, f"cp_group of {cp_group.size()} ranks")
        tokens = Tokens(groups.name_of(cp_group))
        check_same_on_ranks(name, "logits", logits, tokens.group)  # first: no rank waits for another
        if logits.dim() < 2 or logits.shape[0] % 2:
            raise ValueError(
                f"{name}: logits have shape {list(logits.shape)} with a cp_group of {cp_group.size()} ranks; "
                f"[sequence, ..., classes] is accepted, the sequence a multiple of 2."
            )
    plan = Plan(wanted(rows, target), loss, shard, tokens)
    out: torch.Tensor = differentiable(forward, backward, plan, BlockContext(), rows, target)
    return out.view(logits.shape[:-1]) if loss.kind == "none" else out


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    cp_group: Any = None,
) -> torch.Tensor:
    """The softmax cross-entropy of logits and classes, as `torch.nn.functional.cross_entropy` of `[rows, V]`.

    Args:
        logits: `[..., V]`, fp32, bf16 or fp16: the classes are the last dimension.
        target: int64 or int32 `[...]`, a class of each row, or `ignore_index`.
        ignore_index: the target of rows that count for nothing.
        reduction: "mean" over the rows that count (NaN without any), "sum", or "none".
        label_smoothing: the part of the target's weight that all classes share.
        cp_group: a process group whose ranks have some of the tokens each, in the first dimension, as
            `te.parallel.tokens_of_rank` gives them. A mean, and a sum, is that of all ranks' tokens, the
            same on each rank, and each has the gradient of its own logits.

    Returns:
        fp32: `[]`, or with "none" `[...]`.

    Raises:
        IndexError: on a CPU, a target that is no class. On a GPU its loss is NaN.
    """
    check_loss("cross_entropy", ignore_index, reduction, label_smoothing)
    if cp_group is not None:
        check_arguments("cross_entropy", {"cp_group": cp_group})
    loss = Loss(int(ignore_index), reduction, float(label_smoothing))
    return _loss("cross_entropy", logits, target, loss, cp_group=cp_group)


def parallel_cross_entropy(
    inp: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
    *,
    overwrite_input: bool = False,
    _input: torch.Tensor | None = None,
    cp_group: Any = None,
) -> torch.Tensor:
    """Transformer Engine's name for `cross_entropy`.

    Args:
        inp: `[..., V]`; Transformer Engine's are `[b, s, V]` or `[s, b, V]`.
        target: `[...]`.
        label_smoothing: as `cross_entropy`'s.
        reduce_loss: the mean over the rows that count, 0 without any, instead of a loss for each row.
        dist_process_group: whose rank r has the r-th part of the classes, V / t of them; targets are numbers of all
            classes, the same on all ranks. Every rank gets the whole loss. None: all classes are here.
        ignore_idx: `ignore_index`.
        is_cg_capturable: either value; it always is.
        overwrite_input: only False is offered; True would let the gradient take the logits' memory.
        _input: only None is offered; Transformer Engine's older name of `inp`.
        cp_group: as `cross_entropy`'s; with both groups a rank has some classes of some tokens. Not Transformer
            Engine's.

    Returns:
        fp32: `[...]`, or `[]`.

    Source: Transformer Engine's `pytorch/cross_entropy.py`.
    """
    name = "parallel_cross_entropy"
    if overwrite_input is not False:
        check_arguments(name, {"overwrite_input": overwrite_input})
    if _input is not None:
        raise NotImplementedError(f"{name}: _input is inp's older name and not offered; inp is accepted.")
    if dist_process_group is not None:
        check_arguments(name, {"dist_process_group": dist_process_group})
    if cp_group is not None:
        check_arguments(name, {"cp_group": cp_group})
    if type(reduce_loss) is not bool or type(is_cg_capturable) is not bool:
        check_arguments(name, {"reduce_loss": reduce_loss, "is_cg_capturable": is_cg_capturable})
    check_loss(name, ignore_idx, "none", label_smoothing)
    kind = "mean_or_zero" if reduce_loss else "none"
    loss = Loss(int(ignore_idx), kind, float(label_smoothing))
    return _loss(name, inp, target, loss, dist_process_group, cp_group)
