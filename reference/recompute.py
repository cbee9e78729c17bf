"""`checkpoint`: recompute a part of the model in backward, in FP8, with the bits of its first run.

The recomputation happens after autocast has ended and the scales have been updated. So a checkpoint records the
autocast state and each module's scales, restores both, and its recomputed casts record no amax. PyTorch's own
`torch.utils.checkpoint` does none of this: an FP8 module refuses to be recomputed by it.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
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
        self.draws = here().undrawn is None  # whether dropout draws seeds from torch's generator
        self.tensors: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.used: dict[int, int] = {}

    def next_tensor(self, module: torch.nn.Module) -> torch.Tensor:
        """The tensor that `module` used at this point of the first run."""
        position = self.used[id(module)]
        if position >= len(self.tensors[id(module)]):
            raise RuntimeError(
                f"checkpoint: {type(module).__name__} runs more often when recomputed ({position + 1} times) than in "
                f"the first run; a function that does the same each time is accepted."
            )
        self.used[id(module)] = position + 1
        return self.tensors[id(module)][position]


Inner = contextlib.AbstractContextManager[Any]  # the user's own, around the same run


@contextlib.contextmanager
def _recording(frame: _Frame, inner: Inner) -> Iterator[None]:
    """The first run."""
    frame.tensors.clear()
    here().recording.append(frame)
    try:
        with inner:
            yield
    finally:
        close(here().recording, frame)


class _Replaying:
    """The run in backward, which may stop early. If the graph is kept, a second backward enters it again."""

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
    """Whether a checkpointed part is being recomputed in this thread."""
    return len(here().replaying) > 0


def active() -> bool:
    """Whether a checkpointed part is running in this thread, for the first time or again."""
    return len(here().recording) + len(here().replaying) > 0


def recalled(module: torch.nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    """In a first run record `tensor` as it is now and return it; in a recomputation return the recorded one."""
    thread = here()
    if thread.replaying:
        tensor = thread.replaying[-1].next_tensor(module)
    elif thread.recording:
        tensor = tensor.clone()
    for frame in thread.recording:
        frame.tensors[id(module)].append(tensor)
    return tensor


def refuse_foreign_recompute(module: torch.nn.Module, fp8: bool) -> None:
    """Refuse an FP8 module's forward inside a backward pass, unless our `checkpoint` recomputes it."""
    # A compiler traces forward only, and cannot trace the last condition.
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

    The gradients have the same bits as without `checkpoint`, in FP8 too, and no amax is recorded twice. Inside
    `torch.compile` nothing is recomputed.

    Args:
        function: a module or function that does the same each time it runs.
        use_reentrant: accepted as in Transformer Engine; the recomputation is always non-reentrant, with the same bits.
        distribute_saved_activations, get_rng_state_tracker, tp_group: tensor parallelism; not offered.
        context_fn, determinism_check, debug: as in `torch.utils.checkpoint.checkpoint`.
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
        return _recording(frame, first), _Replaying(frame, again)

    return torch.utils.checkpoint.checkpoint(
        function,
        *args,
        use_reentrant=False,
        context_fn=contexts,
        determinism_check=determinism_check,
        debug=debug,
        **kwargs,
    )
