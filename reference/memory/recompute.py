"""`checkpoint`: recompute a part of the model in backward, in FP8, with the bits of its first run.

The recomputation happens after autocast has ended and the scales have been updated. So `checkpoint` records the
autocast state and each module's scales, restores both, and its recomputed casts record no amax.

What changes between the two runs cannot be brought back: if a weight or an input was changed in place or replaced,
the recomputation is refused. `by_layer`'s choices are those of the first run.

The same holds inside `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`, which Hugging Face's
`gradient_checkpointing_enable` calls: modules recognise PyTorch's frame by its saved-tensor hooks and keep their
records with it. With `use_reentrant=True`, or where the outer one of two nested `checkpoint`s would recompute the inner
one's modules, an FP8 module refuses to be recomputed.
"""

import contextlib
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch.utils.checkpoint import noop_context_fn

from reference.arguments import check_arguments
from reference.memory.recompute_inputs import Reads
from reference.state.autocast import OFF, AutocastState, current, restored
from reference.state.threads import Thread, close, here

__all__ = ["activation_recompute_forward", "checkpoint"]


class _Frame:
    """One call that is recomputed: its autocast state and, per module, the scales or random states in the order of use.

    In PyTorch's own checkpoint each module records the autocast states of its runs, too. `tracker` is the tracker of
    random states whose states a recomputation starts with, or None.
    """

    updates = False  # whether a recomputed layer may update the gradients' scales; that of the first run does

    def __init__(self, tracker: Any = None, reads: Reads | None = None) -> None:
        self.tracker, self.reads = tracker, reads or Reads()
        self.state: AutocastState = current()
        self.draws = not here().undrawn  # whether dropout draws seeds from torch's generator
        self.tensors: dict[Any, list[Any]] = defaultdict(list)
        self.used: dict[Any, int] = defaultdict(int)
        self.run: Any = None  # PyTorch's hook of the last recomputation

    def record(self, module: object, value: Any, what: str = "tensor") -> None:
        """Keep what `module` uses at this point of the first run."""
        self.tensors[id(module), what].append(value)

    def next_tensor(self, module: object, what: str = "tensor") -> Any:
        """The tensor, or what else `what` names, that `module` used at this point of the first run."""
        position, found = self.used[id(module), what], self.tensors[id(module), what]
        if position >= len(found):
            raise RuntimeError(
                f"checkpoint: {type(module).__name__} runs more often when recomputed ({position + 1} times) than in "
                f"the first run; a function that does the same each time is accepted."
            )
        self.used[id(module), what] = position + 1
        return found[position]


class _Queues(_Frame):
    """What recomputations that somebody else has written record: of each module that trains, the oldest first."""

    updates = True  # there is no other: the first run has no graph

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = weakref.WeakKeyDictionary()

    def record(self, module: object, value: Any, what: str = "tensor") -> None:
        if not getattr(module, "training", True):
            return
        queues = self.kept.setdefault(module, defaultdict(deque))
        queues[what].append(value)
        if hasattr(module, "fp8_meta"):  # whether it was the autocast's first FP8 module, whose backward updates scales
            queues["first"].append(here().first_module_pending)
            here().first_module_pending = False

    def next_tensor(self, module: object, what: str = "tensor") -> Any:
        queues = self.kept.get(module, {})
        if not queues.get(what):
            raise RuntimeError(
                f"activation_recompute_forward: {type(module).__name__} runs with recompute_phase=True more often than "
                f"it ran, in training, with recompute_phase=False; as often is accepted."
            )
        if queues.get("first"):
            here().first_module_pending |= queues["first"].popleft()
        return queues[what].popleft()


_QUEUES = _Queues()


class activation_recompute_forward(contextlib.AbstractContextManager[None], contextlib.ContextDecorator):
    """Around the runs of a part whose recomputation somebody else has written, such as Megatron's.

    The first run, without a graph, and its recomputation in backward each stand in one. Layers in FP8 then use the
    scales of the first run, and record no amax twice; those with dropout repeat their masks. Runs of one layer are
    recomputed in the order in which they ran first. `checkpoint` needs none of this.

    Args:
        activation_recompute: False does nothing.
        recompute_phase: whether this is the recomputation.
    """

    def __init__(self, activation_recompute: bool = False, recompute_phase: bool = False) -> None:
        for name, value in (("activation_recompute", activation_recompute), ("recompute_phase", recompute_phase)):
            if not isinstance(value, bool):
                raise TypeError(f"activation_recompute_forward: {name}={value!r}; True and False are accepted.")
        self.active, self.again = activation_recompute, recompute_phase
        self.outer: list[bool] = []

    def __enter__(self) -> None:
        if not self.active:
            return
        thread = here()
        (thread.recomputations if self.again else thread.first_runs).append(_QUEUES)
        self.outer.append(thread.first_module_pending)
        if self.again:
            thread.first_module_pending = False

    def __exit__(self, *error: Any) -> None:
        if not self.active:
            return
        thread, pending = here(), self.outer.pop()
        close(thread.recomputations if self.again else thread.first_runs, _QUEUES)
        if self.again:
            thread.first_module_pending = pending


Inner = contextlib.AbstractContextManager[Any]  # the user's own, around the same run


@contextlib.contextmanager
def _first_run(frame: _Frame, inner: Inner) -> Iterator[None]:
    """The first run."""
    frame.tensors.clear()
    here().first_runs.append(frame)
    try:
        with frame.reads.hooks(), inner:
            yield
    finally:
        close(here().first_runs, frame)
        frame.reads.end([one.reads for one in here().first_runs if one is not _QUEUES])


class _Recomputation:
    """The run in backward, which may stop early. If the graph is kept, a second backward enters it again."""

    def __init__(self, frame: _Frame, inner: Inner) -> None:
        self.frame, self.inner, self.tracker = frame, inner, frame.tracker
        tracker = frame.tracker
        self.first_states = None if tracker is None else tracker.get_states()
        self.opened: list[contextlib.ExitStack] = []

    def __enter__(self) -> None:
        self.frame.reads.check()
        self.frame.used = defaultdict(int)
        with contextlib.ExitStack() as around:  # the user's may refuse to begin
            around.enter_context(restored(self.frame.state))
            around.callback(close, here().recomputations, self.frame)
            here().recomputations.append(self.frame)
            if self.tracker is not None:
                around.callback(self.tracker.set_states, self.tracker.get_states())
                self.tracker.set_states(self.first_states)
            around.enter_context(self.inner)
            self.opened.append(around.pop_all())

    def __exit__(self, *error: Any) -> None:
        self.opened.pop().__exit__(*error)


def _pack_code(hooks: Any) -> Any:
    """The code of the function that a class of PyTorch's saved-tensor hooks packs with."""
    return next(one for one in hooks.__init__.__code__.co_consts if getattr(one, "co_name", "") == "pack_hook")


_FIRST_RUN = _pack_code(torch.utils.checkpoint._checkpoint_hook)
_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_RECOMPUTATION = _pack_code(torch.utils.checkpoint._recomputation_hook)


def _innermost() -> tuple[_Frame | None, bool]:
    """The innermost recomputed part that this code runs in, and whether it recomputes: ours, or else PyTorch's."""
    thread = here()
    if thread.recomputations:
        return thread.recomputations[-1], True
    if thread.first_runs:
        return thread.first_runs[-1], False
    if torch.compiler.is_compiling():  # a compiler cannot trace the hooks, and recomputes by itself
        return None, False
    hooks = _hooks(True)
    if hooks is None:
        return None, False
    pack: Any = getattr(hooks[0], "__wrapped__", hooks[0])  # PyTorch 2.13 hides one of the two from compilers
    code = getattr(pack, "__code__", None)
    if code is _FIRST_RUN and torch._C._current_graph_task_id() == -1:
        owner = pack.__closure__[code.co_freevars.index("frame")].cell_contents
        if not hasattr(owner, "twin"):
            owner.twin = _Frame()
        return owner.twin, False
    if code is _RECOMPUTATION:
        owner = pack.__closure__[code.co_freevars.index("target_frame_ref")].cell_contents()
        frame: _Frame | None = getattr(owner, "twin", None)
        if frame is not None and frame.run is not pack:  # a kept graph goes backward again
            frame.reads.check()
            frame.run, frame.used = pack, defaultdict(int)
        return frame, frame is not None
    return None, False


def frame_recomputed() -> _Frame | None:
    """The part that is being recomputed in this thread, if one is."""
    frame, again = _innermost()
    return frame if again else None


def updates_scales() -> bool:
    """Whether a layer that runs now may be the one whose backward updates the gradients' scales."""
    frame = frame_recomputed()
    return frame is None or frame.updates


def recomputing() -> bool:
    """Whether a part is being recomputed in this thread."""
    return _innermost()[1]


def active() -> bool:
    """Whether a part that is recomputed is running in this thread, for the first time or again."""
    return _innermost()[0] is not None


def recalled(module: object, tensor: torch.Tensor) -> torch.Tensor:
    """In a first run record `tensor` as it is now and return it; in a recomputation return the recorded one."""
    frame, again = _innermost()
    if frame is None:
        return tensor
    tensor = frame.next_tensor(module) if again else tensor.clone()
    for one in here().first_runs or ([] if again else [frame]):
        one.record(module, tensor)
    return tensor


class Run(NamedTuple):
    """What a forward must know about where it runs. A layer asks once, for all of its parts.

    Attributes:
        state: the autocast.
        thread: the open contexts of its thread.
        compiling: whether a compiler traces it.
        recomputed: whether backward computes it again, or does so now; see `same_run`.
        again: whether it recomputes.
        plain: none of these, and no backward is under way: a layer that goes on as before need not look any further.
    """

    state: AutocastState
    thread: Thread
    compiling: bool
    recomputed: bool
    again: bool
    plain: bool


def current_run() -> Run:
    """That of a forward now."""
    compiling, thread = torch.compiler.is_compiling(), here()
    opened = thread.autocasts
    state: AutocastState = opened[-1].settings if opened else OFF  # `current()`, whose thread is at hand
    if thread.recomputations or thread.first_runs:  # ours restores it
        return Run(state, thread, compiling, True, len(thread.recomputations) > 0, False)
    if compiling:
        return Run(state, thread, True, False, False, False)
    # Without hooks, which is the rule, there is no recomputation of PyTorch's.
    frame, again = (None, False) if _hooks(True) is None else _innermost()
    plain = frame is None and torch._C._current_graph_task_id() == -1
    return Run(state, thread, False, frame is not None, again, plain)


def same_run(module: Any, state: AutocastState, again: bool) -> AutocastState:
    """In a first run note `state`, the module's own settings, and its weights; in a recomputation return those of then.

    Raises:
        RuntimeError: a weight was changed or replaced since the first run.
    """
    frame = _innermost()[0]
    if frame is None or (frame is _QUEUES and not module.training):
        return state
    if again:
        state, own = frame.next_tensor(module, "run")
        if own is not None:
            own.check()
    for one in here().first_runs or ([] if again else [frame]):
        own = Reads() if one is _QUEUES else None  # of runs whose end nobody tells, each has its own
        (own or one.reads).add(module)
        one.record(module, (state, own), "run")
    return state


def refuse_foreign_recompute(module: torch.nn.Module) -> None:
    """Refuse an FP8 module's forward inside a backward pass, unless it recomputes what a first run has recorded."""
    if torch._C._current_graph_task_id() != -1 and not recomputing():
        raise RuntimeError(
            f"{type(module).__name__} ran in FP8 and is being recomputed by torch.utils.checkpoint with "
            f"use_reentrant=True, nested, or by other means, which bring back neither autocast nor the scales of the "
            f"first run; use_reentrant=False, or `checkpoint` of this package, is accepted."
        )


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = True,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[..., Any] | None = None,
    tp_group: Any = None,
    context_fn: Callable[[], tuple[Inner, Inner]] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    **kwargs: Any,
) -> Any:
    """Run `function(*args, **kwargs)`, keep only its inputs, and recompute the rest in backward.

    The gradients have the same bits as without `checkpoint`, in FP8 too, and no amax is recorded twice. Inside
    `torch.compile` nothing is recomputed.

    Args:
        function: a module or function that does the same each time it runs.
        use_reentrant: accepted as in Transformer Engine; the recomputation is always non-reentrant, with the same bits.
        distribute_saved_activations: a part of each input on each rank of tp_group; not offered.
        get_rng_state_tracker: gives a tracker of random states (`get_states`, `set_states`); the recomputation starts
            with the states of the first run, and leaves those that it finds.
        tp_group: None or a process group, without effect: each rank keeps its inputs.
        context_fn, determinism_check, debug: as in `torch.utils.checkpoint.checkpoint`.

    Raises:
        RuntimeError: in backward, where an input or a weight was changed in place or replaced since this run.
    """
    if not callable(function):
        raise TypeError(f"checkpoint: function={function!r}; a module or function is accepted.")
    given = {"get_rng_state_tracker": get_rng_state_tracker, "tp_group": tp_group}
    check_arguments("checkpoint", {"distribute_saved_activations": distribute_saved_activations, **given})
    tracker = None if get_rng_state_tracker is None else get_rng_state_tracker()
    if torch.compiler.is_compiling():  # the compiler decides what a backward keeps; the bits are the same
        return function(*args, **kwargs)
    frame = _Frame(tracker, Reads(function, args, kwargs))

    def contexts() -> tuple[Inner, Inner]:
        first, again = context_fn()
        return _first_run(frame, first), _Recomputation(frame, again)

    return torch.utils.checkpoint.checkpoint(
        function,
        *args,
        use_reentrant=False,
        context_fn=contexts,
        determinism_check=determinism_check,
        debug=debug,
        **kwargs,
    )
