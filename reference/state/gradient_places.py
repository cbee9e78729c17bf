"""Where a weight's next gradient is written: at its place in a bucket of DistributedDataParallel.

DDP sends buckets, and copies to them the gradients that backward gives. With `gradient_as_bucket_view=True` it copies
none that lies in its bucket already (c10d::Reducer, `mark_variable_ready_dense`). So

    GradientOrder      learns from its hook's buckets where each gradient lies, and offers these places in a step's
                       last microbatch, the one in which DDP communicates
    a layer's backward takes the places of its weights (`reference.nn.core.autograd`)
    a weight's product is written there (`written_to`, or by a tape, whose result it is)

DDP looks at the storage alone. So nothing but a weight's own gradient may reach it in its place, and no two at once:

- A place is taken once a step: the second gradient of a weight that is used twice has memory of its own, and autograd
  adds both in new memory.
- It is taken only where autograd's next node is the one that accumulates the weight's gradient, runs in this backward
  (not for `torch.autograd.grad`), and finds `.grad` None. Otherwise a gradient would be added to itself.
- Not where somebody may keep the gradient that backward gives: the parameter's hooks, or a dispatch mode. (A hook of
  an autograd node that keeps it sees DDP's sum in it later, as one that keeps `.grad` does.)
- Dtype, shape and layout are the weight's, and it begins at a multiple of 512 bytes, as memory of its own would.
- What is left over when the step ends is withdrawn; no other backward finds it.

Whoever holds a place keeps its bucket's storage alive. DDP makes new buckets after its first step; a gradient at a
place of an old one is copied like any other. Between steps the place is the optimizer's (`.grad` is there); a backward
reads what the optimizer wrote, so it comes after it, and DDP's backward has waited for the hook's stream.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ALIGNMENT = 512  # bytes, as of PyTorch's allocator
Places = dict[torch.Tensor, torch.Tensor]  # by parameter
offered: Places = {}
"""The places of all steps that are in their last microbatch."""

aten = torch.ops.aten


class Taken(NamedTuple):
    """A place that one backward has: the gradient's number among its results, the parameter, and the place."""

    number: int
    parameter: torch.Tensor
    place: torch.Tensor


class _Thread(threading.local):
    taken: tuple[Taken, ...] = ()  # by the backward that this thread runs


here = _Thread()


def place_of(p: torch.Tensor, view: torch.Tensor) -> torch.Tensor | None:
    """The place of p's gradient, `view` in a bucket; None where gradients do not lie as there, or are no matrices."""
    fits = p.dim() > 1 and p.is_contiguous() and view.is_contiguous() and p.numel()
    same = (view.shape, view.dtype, view.device) == (p.shape, p.dtype, p.device)
    return view.detach() if fits and same and not view.storage_offset() * view.itemsize % ALIGNMENT else None


@contextlib.contextmanager
def offering(places: Places) -> Iterator[None]:
    """Offer them in the block."""
    offered.update(places)
    try:
        yield
    finally:
        for p in places:
            offered.pop(p, None)


def take(ctx: Any, first: int) -> tuple[Taken, ...]:
    """Take the offered places of the gradients that a backward is about to compute.

    Args:
        ctx: of an `autograd.Function`.
        first: of its arguments the first whose gradient is a result.
    """
    if torch._C._len_torch_dispatch_stack():
        return ()
    nodes = [node for node, _ in ctx.next_functions if node is not None]
    numbers = [i for i, needed in enumerate(ctx.needs_input_grad) if needed]
    if len(nodes) != len(numbers):
        return ()
    found = []
    for number, node in zip(numbers, nodes, strict=True):
        p = getattr(node, "variable", None)  # of a node that accumulates
        if p is not None and p in offered and _is_free(p, node):
            place = offered.pop(p, None)
            if place is not None:
                # Another tensor than the one that is kept: autograd copies what others hold.
                found.append(Taken(number - first, p, place.detach()))
    return tuple(found)


def _is_free(p: torch.Tensor, node: Any) -> bool:
    """Whether this backward sets p's gradient to what it gets, if that is one gradient."""
    if p.grad is not None or p._backward_hooks or p._post_accumulate_grad_hooks:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))  # type: ignore[attr-defined]
    except RuntimeError:  # torch.autograd.grad, whose result is the user's
        return False


class _Into(TorchDispatchMode):
    """Gives the first allocation that is like `place` its memory."""

    transparent = True  # ops that bypass the dispatcher may go on doing so

    def __init__(self, place: torch.Tensor) -> None:
        super().__init__()
        self.place: torch.Tensor | None = place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place, given = self.place, kwargs or {}
        if place is not None and func is aten.new_empty.default:
            dtype = given.get("dtype") or args[0].dtype
            if (tuple(args[1]), dtype, args[0].device) == (tuple(place.shape), place.dtype, place.device):
                self.place = None
                return place
        return func(*args, **given)


def written_to(parameter: Any) -> contextlib.AbstractContextManager[Any]:
    """Around an op whose result is the parameter's gradient: it is written to its place, if this backward has one.

    Ops allocate their result before anything else (`reference.ops.library`), by `new_empty`.
    """
    for one in here.taken:
        if one.parameter is parameter:
            here.taken = tuple([other for other in here.taken if other is not one])
            return _Into(one.place)
    return contextlib.nullcontext()
