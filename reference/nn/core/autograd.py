"""A layer's pair of pure functions under autograd.

    forward(plan, context, *tensors) -> (out, saved)
    backward(plan, context, saved, *grads) -> gradients of the tensors

`saved` is what backward reads: tensors by name, in a NamedTuple that may contain others. autograd keeps them flat
(`reference.support.nested`), and they are put together once, before a backward runs.

`plan` is frozen and hashable: everything but tensors that the functions depend on, including which gradients are wanted
(`needs`). `context` (`reference.nn.core.context`) holds the module's tensors. A backward reads only what went through
`save_for_backward`, so checkpointing and offloading see it; FP8 state stays on the module.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from reference.float8.float8_storage import Kept, freshen
from reference.float8.kept_tensor import KeptTensor
from reference.float8.quantized_tensor import QuantizedTensor
from reference.memory import recompute
from reference.nn.core import compiled
from reference.nn.core.context import BlockContext, ModuleContext
from reference.ops.library import twin
from reference.ops.random.dropout import state_or_none
from reference.state import gradient_places
from reference.state.threads import here
from reference.support import transforms
from reference.support.nested import Tensors, flatten, rebuild

Context = ModuleContext | BlockContext
Forward = Callable[..., tuple[Any, Any]]
Backward = Callable[..., Tensors]
Rows = tuple[tuple[int, ...] | None, ...]  # for each tensor None, or the rows of its parts


class Runner:
    """Runs a pair's functions; `optimized` registers a subclass that repeats their launches without running them."""

    def prepare(self, function: Forward, plan: Any, context: Context, tensors: Tensors, backward: Backward) -> None:
        """Called before somebody else runs a pair's functions: what `forward` does before it runs them itself."""

    def forward(
        self, function: Forward, plan: Any, context: Context, tensors: Tensors, backward: Backward
    ) -> tuple[Any, Tensors, Any]:
        """Out, the tensors that are saved, and a note for `backward`: what else it needs to read them."""
        out, saved = function(plan, context, *tensors)
        return out, *flatten(saved)

    def backward(
        self, function: Backward, plan: Any, context: Context, saved: Tensors, grads: Tensors, note: Any
    ) -> Tensors:
        """The gradients."""
        return function(plan, context, rebuild(note, saved), *grads)


_PLAIN = (torch.Tensor, torch.nn.Parameter, type(None))  # no weight that is kept in FP8
_PLAIN_SET = frozenset(_PLAIN)
_FIRST = 6  # arguments of `_Pair.forward` before the tensors
_plain = Runner()
runner = _plain


def register(other: Runner) -> None:
    """Let `other` run pairs from now on."""
    global runner
    runner = other


def _runner() -> Runner:
    return _plain if torch.compiler.is_compiling() else runner  # a compiler traces the functions


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        forward: Forward,
        backward: Backward,
        plan: Any,
        context: Context,
        updates: bool,
        rows: Rows | None,
        *tensors: Any,
    ) -> Any:
        trains = any(plan.needs)
        if rows is not None:
            tensors = _grouped(tensors, rows)
        unwrapped = tuple([x if type(x) in _PLAIN else context.unwrap_weight(x, trains) for x in tensors])
        ctx.kept = ()
        if trains and not _PLAIN_SET.issuperset(map(type, tensors)) and not torch.compiler.is_compiling():
            ctx.kept = _kept_in(tensors)
            if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:  # which may copy what is saved
                freshen(ctx.kept)
        out, saved, ctx.note = _runner().forward(forward, plan, context, unwrapped, backward)
        ctx.save_for_backward(*saved)
        ctx.backward_function, ctx.plan, ctx.context, ctx.updates, ctx.rows = backward, plan, context, updates, rows
        ctx.versions = None
        for x in context.reads if trains else ():
            if x is not None and not torch.compiler.is_compiling():
                ctx.versions = _versions(context.reads)
                break
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        compiling = torch.compiler.is_compiling()
        if not compiling and transforms.sees_gradients(grads):
            transforms.refuse_gradients(_name(ctx.context))
        # Gradients without a graph would make a second derivative silently zero.
        if torch.is_grad_enabled() and not compiling:
            raise RuntimeError("create_graph=True: layers have no second derivative; create_graph=False is accepted.")
        saved = ctx.saved_tensors if compiling else _saved_tensors(ctx)
        if ctx.kept:
            freshen(ctx.kept)
        if not _PLAIN_SET.issuperset(map(type, grads)):  # a quantized gradient: it is read
            grads = tuple([g.numbers() if isinstance(g, QuantizedTensor) else g for g in grads])
        takes = not compiling and ctx.rows is None and bool(gradient_places.offered)
        if takes:
            gradient_places.here.taken = gradient_places.take(ctx, _FIRST)
        try:
            results = _runner().backward(ctx.backward_function, ctx.plan, ctx.context, saved, grads, ctx.note)
        finally:
            if takes:
                gradient_places.here.taken = ()
        if ctx.updates:
            compiled.update_gradient_scales(ctx.context.stateful)
        if ctx.rows is not None:
            results = _split(results, ctx.rows)
        return None, None, None, None, None, None, *results


def _kept_in(tensors: tuple[Any, ...]) -> tuple[Kept, ...]:
    """What weights in FP8 keep, of whose transposed codes a backward may read."""
    every = [one for x in tensors for one in (x if type(x) is tuple else (x,))]
    return tuple([x._kept for x in every if isinstance(x, KeptTensor) and x.is_weight])


def _versions(reads: tuple[torch.Tensor | None, ...]) -> list[int]:
    """How often each was changed in place; -1 of what does not count it."""
    return [-1 if x is None or x.is_inference() else x._version for x in reads]


def _saved_tensors(ctx: Any) -> Tensors:
    """What the forward has saved; refused where it, or what else backward reads, was changed in place since.

    PyTorch looks at what is saved. Of a view that the forward took it speaks about no_grad mode, which the user has not
    asked for.
    """
    error: RuntimeError | None = None
    try:
        saved: Tensors = ctx.saved_tensors
    except RuntimeError as found:
        if "no_grad mode" not in str(found):
            raise
        error, what = found, "an input or a weight"
    else:
        if ctx.versions is None or ctx.versions == _versions(ctx.context.reads):
            return saved
        what = "a mask, rotary_pos_emb or alibi_slopes"
    raise RuntimeError(
        f"{_name(ctx.context)}: one of the variables needed for gradient computation has been modified by an inplace "
        f"operation since the forward: {what}; a change after backward, or of a clone, is accepted."
    ) from error


def _name(context: Context) -> str:
    """The layer of a context, for errors."""
    return type(context.modules[0].module).__name__ if context.modules else "Twin Engine"


def _grouped(tensors: tuple[Any, ...], rows: Rows) -> tuple[Any, ...]:
    """The tensors with each weight's parts in a tuple."""
    left = iter(tensors)
    return tuple([next(left) if one is None else tuple([next(left) for _ in one]) for one in rows])


def _split(grads: Tensors, rows: Rows) -> Tensors:
    """The gradients with that of each weight split into those of its parts."""
    found: list[torch.Tensor | None] = []
    for grad, one in zip(grads, rows, strict=True):
        found += [grad] if one is None else [None] * len(one) if grad is None else grad.split(one)
    return tuple(found)


def wanted(*tensors: Any) -> tuple[bool, ...]:
    """Which gradients a backward will compute: none under torch.no_grad(). A weight of several parts is a tuple."""
    if not torch.is_grad_enabled():
        return (False,) * len(tensors)
    return tuple([x is not None and (any(map(_trains, x)) if type(x) is tuple else x.requires_grad) for x in tensors])


def _trains(x: torch.Tensor) -> bool:
    return x.requires_grad


def differentiable(forward: Forward, backward: Backward, plan: Any, context: Context, *tensors: Any) -> Any:
    """`forward`'s output, with `backward` as its derivative with respect to `tensors`; see `plan.needs`.

    A tuple among `tensors` is a weight of several parts, by rows; the functions get it as one.
    """
    if not context.modules:  # a layer's forward has checked at its entry
        transforms.refuse(_name(context))
    rows: Rows | None = None
    if tuple in map(type, tensors):
        rows = tuple([tuple([len(one) for one in x]) if type(x) is tuple else None for x in tensors])
        tensors = tuple([one for x in tensors for one in (x if type(x) is tuple else (x,))])
    # The first module with scales of an outermost autocast runs backward last, and then updates the gradients' scales.
    stateful = context.stateful is not None and any(plan.needs)
    updates = stateful and here().first_module_pending and recompute.updates_scales()
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
        # torch.export looks into the pair; what it exports is for inference.
        with torch.no_grad():
            return _Pair.apply(forward, backward, plan, context, False, rows, *tensors)  # type: ignore[no-untyped-call]
    out = _Pair.apply(forward, backward, plan, context, updates, rows, *tensors)
    if updates:
        here().first_module_pending = False
    return out


class RoundedPlan(NamedTuple):
    """Whether the gradient is wanted."""

    needs: tuple[bool, ...]


def rounded_forward(plan: RoundedPlan, context: BlockContext, x: torch.Tensor) -> tuple[torch.Tensor, tuple[()]]:
    return twin.bias_dropout_add(x, None, None, 0.0, state_or_none(None, x)), ()


def rounded_backward(plan: RoundedPlan, context: BlockContext, saved: tuple[()], grad: torch.Tensor) -> Tensors:
    return (twin.dropout_backward(grad.contiguous(), 0.0, None),)


def rounded_gradient(x: torch.Tensor) -> torch.Tensor:
    """x; gradients that reach the result are added, and rounded to its dtype, before anything else is done with them.

    In eager mode that goes without saying. A compiler would fuse the sum with what follows, without the rounding; an op
    keeps it from that.
    """
    if not torch.compiler.is_compiling():
        return x.view_as(x)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return differentiable(rounded_forward, rounded_backward, RoundedPlan(wanted(rows)), BlockContext(), rows).view(
        x.shape
    )
