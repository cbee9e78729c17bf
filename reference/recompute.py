"""`checkpoint`: recompute a part of the model in backward, in FP8, with the bits of its first run.

The recomputation happens after autocast has ended and after the scales have been updated. So a checkpoint
remembers the autocast state and each module's scale, brings both back, and its recomputed casts write no amax.
PyTorch's own `torch.utils.checkpoint` does none of this: an FP8 module recomputed by it refuses.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils.checkpoint import noop_context_fn

from reference.autocast import AutocastState, current, restored
from reference.threads import close, here

__all__ = ["checkpoint"]


class _Frame:
    """One checkpointed call: its autocast state and, per module, the scales or random states in the order of use."""

    def __init__(self) -> None:
        self.state: AutocastState = current()
        self.draws = here().undrawn is None  # whether dropout draws seeds of torch's generator
        self.tensors: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.used: dict[int, int] = {}

    def next_tensor(self, module: torch.nn.Module) -> torch.Tensor:
        """What `module` used at this point of the first run."""
        position = self.used[id(module)]
        if position >= len(self.tensors[id(module)]):
            raise RuntimeError(
                f"checkpoint: {type(module).__name__} runs more often when recomputed ({position + 1} times) than in "
                f"the first run; a function that does the same each time is accepted."
            )
        self.used[id(module)] = position + 1
        return self.tensors[id(module)][position]


Inner = contextlib.AbstractContextManager[Any]  # the user's own, around the same run


class _Recording:
    """The first run."""

    def __init__(self, frame: _Frame, inner: Inner) -> None:
        self.frame, self.inner = frame, inner

    def __enter__(self) -> None:
        self.frame.tensors.clear()
        here().recording.append(self.frame)
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)
        close(here().recording, self.frame)


class _Replaying:
    """The run in backward, which may stop early. A graph that is kept goes backward again, and enters this again."""

    def __init__(self, frame: _Frame, inner: Inner) -> None:
        self.frame, self.inner = frame, inner
        self.settings: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self.frame.used = defaultdict(int)
        self.settings.append(restored(self.frame.state))
        self.settings[-1].__enter__()
        here().replaying.append(self.frame)
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)
        close(here().replaying, self.frame)
        self.settings.pop().__exit__(*error)


def replaying() -> bool:
    """True while a checkpointed part is being recomputed in this thread."""
    return len(here().replaying) > 0


def active() -> bool:
    """True in a checkpointed part's first run and in its recomputation."""
    return len(here().recording) + len(here().replaying) > 0


def state_for(module: torch.nn.Module, state: torch.Tensor) -> torch.Tensor:
    """The random state an op of `module` has to draw from (and advance): its own, or a copy of the first run's."""
    if replaying():
        return recalled(module, state).clone()
    recalled(module, state)
    return state


def recalled(module: torch.nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    """In a first run note `tensor` as it is now; in a recomputation give back what was noted."""
    thread = here()
    if thread.replaying:
        tensor = thread.replaying[-1].next_tensor(module)
    elif thread.recording:
        tensor = tensor.clone()
    for frame in thread.recording:
        frame.tensors[id(module)].append(tensor)
    return tensor


def refuse_foreign_recompute(module: torch.nn.Module, fp8: bool) -> None:
    """Raise if an FP8 module runs forward inside a backward pass that our `checkpoint` did not arrange."""
    # A compiler traces forward only, and has no word for the question.
    if fp8 and not replaying() and not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            f"{type(module).__name__} ran in FP8 and is being recomputed by torch.utils.checkpoint, which brings "
            f"back neither autocast nor the scales of the first run: use `checkpoint` of this package instead."
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

    The gradients have the bits they have without `checkpoint`, in FP8 too, and no amax is taken twice. Inside
    `torch.compile` nothing is recomputed.

    Args:
        function: a module or function that does the same each time it runs.
        use_reentrant: accepted for Transformer Engine's sake; the recomputation is always non-reentrant, with
            the same bits.
        distribute_saved_activations, get_rng_state_tracker, tp_group: tensor parallelism; not offered.
        context_fn, determinism_check, debug: as `torch.utils.checkpoint.checkpoint` takes them.
    """
    if not callable(function):
        raise TypeError(f"checkpoint: function={function!r}; a module or function is accepted.")
    for name, value in (
        ("distribute_saved_activations", distribute_saved_activations),
        ("get_rng_state_tracker", get_rng_state_tracker),
        ("tp_group", tp_group),
    ):
        if value:
            raise NotImplementedError(
                f"checkpoint: {name}={value!r}; tensor parallelism is not offered, leave it at its default."
            )
    if torch.compiler.is_compiling():  # the compiler decides what a backward keeps; the bits are the same
        return function(*args, **kwargs)
    frame = _Frame()

    def contexts() -> tuple[Inner, Inner]:
        first, again = context_fn()
        return _Recording(frame, first), _Replaying(frame, again)

    return torch.utils.checkpoint.checkpoint(
        function,
        *args,
        use_reentrant=False,
        context_fn=contexts,
        determinism_check=determinism_check,
        debug=debug,
        **kwargs,
    )
