"""The warm-up and the capture of `reference.graphs.graph`, and the hooks that run beside them.

    pre_warmup_hook()       once
    warm-up                 of each module, or pass of a schedule, its forward and its backward, as often as asked for
    post_warmup_hook()      once
    capture                 the forwards, and then, the last one first, the backwards

Around each forward and each backward, in both, run the module's `capture_time_hooks`. They stand outside of the graphs,
so a replay repeats none of them.
"""

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from reference.state import graph_seeds

__all__ = ["checked_hooks", "into_graphs", "warm_up"]

NAMES = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
Hooks = Mapping[str, Mapping[Any, Callable[[torch.nn.Module], None]]]


def checked_hooks(given: Any, modules: int) -> list[Hooks]:
    """`capture_time_hooks`, one dict for each module."""
    if given is None:
        return [{}] * modules
    if not isinstance(given, (list, tuple)) or len(given) != modules:
        raise ValueError(
            f"make_graphed_callables: capture_time_hooks={given!r} for {modules} modules; None, or a list with a dict "
            f"or None for each, is accepted."
        )
    for i, hooks in enumerate(given):
        if hooks is not None and not (isinstance(hooks, Mapping) and all(map(_is_named, hooks, hooks.values()))):
            raise ValueError(
                f"make_graphed_callables: capture_time_hooks[{i}]={hooks!r}; None, or a dict with some of {NAMES}, "
                f"each a dict of functions of the module, is accepted."
            )
    return [hooks or {} for hooks in given]


def _is_named(name: Any, hooks: Any) -> bool:
    return name in NAMES and isinstance(hooks, Mapping) and all(map(callable, hooks.values()))


def _run(graph: Any, name: str) -> None:
    """Run the hooks of a module that have this name."""
    for hook in graph.hooks.get(name, {}).values():
        out = hook(graph.module)
        if out is not None:
            raise RuntimeError(
                f"make_graphed_callables: a hook of capture_time_hooks, {name!r} of {type(graph.module).__name__}, "
                f"returned {out!r}; None is accepted."
            )


@contextlib.contextmanager
def _same_stream(stream: Any = None) -> Any:
    """Run on `stream`, or on the present one, and leave the present one present, whatever fails inside."""
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.current_stream() if stream is None else stream()):
        yield
    torch.cuda.synchronize()


@contextlib.contextmanager
def _stand_in(graphs: Sequence[Any]) -> Any:
    """The modules run under the graphs' settings; what fails leaves them as they were."""
    for graph in graphs:
        graph.module.forward = graph.captured
    try:
        yield
    finally:
        for graph in graphs:
            graph.put_back()


def warm_up(graphs: Sequence[Any], samples: Sequence[Any], rounds: int, allow_unused_input: bool, hooks: Any) -> Any:
    """Run each graph's module forward and backward, on another stream; `hooks` are called before and after all.

    Returns:
        the last outputs. While they live, autograd accumulates gradients on that other stream, of which PyTorch warns
        once, during the capture. Without them it would warn in a replay's backward.
    """
    before, after = hooks
    outputs: list[torch.Tensor] = []
    with _same_stream(torch.cuda.Stream):
        if before is not None:
            before()
        for graph, tensors in zip(graphs, samples, strict=True):
            with _stand_in([graph]):
                for _ in range(rounds):
                    outputs = _warm_up(graph, (*tensors, *graph.tensors.values()), allow_unused_input)
        if after is not None:
            after()
    return outputs


def _warm_up(graph: Any, tensors: tuple[torch.Tensor, ...], allow_unused_input: bool) -> list[torch.Tensor]:
    _run(graph, "forward_pre_hooks")
    outputs = [one for one in tree_leaves(graph.module(*tensors)) if one.requires_grad]
    _run(graph, "forward_hooks")
    if not outputs:
        return outputs
    inputs = [one for one in (*tensors, *graph.module.parameters()) if one.requires_grad]
    _run(graph, "backward_pre_hooks")
    torch.autograd.grad(
        outputs, inputs, [torch.empty_like(one) for one in outputs], only_inputs=True, allow_unused=allow_unused_input
    )
    _run(graph, "backward_hooks")
    return outputs


def into_graphs(graphs: Sequence[Any], samples: Sequence[Any], **options: Any) -> None:
    """Capture one module, or several that run one after the other and share memory."""
    for graph in graphs:
        graph.has_backward = False

    def of(number: int) -> tuple[Any, str]:
        """What the capture with this number is of. Modules whose output needs no gradient have no backward."""
        if number < len(graphs):
            return graphs[number], "forward"
        return [graph for graph in reversed(graphs) if graph.has_backward][number - len(graphs)], "backward"

    def before(number: int) -> None:
        graph, what = of(number)
        _run(graph, f"{what}_pre_hooks")

    def after(number: int) -> None:
        graph, what = of(number)
        _run(graph, f"{what}_hooks")

    with warnings.catch_warnings(), _same_stream(), _stand_in(graphs), graph_seeds.begun(before, after) as found:
        # The warm-up's outputs are of another stream.
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
        torch.cuda.make_graphed_callables(
            tuple(graph.module for graph in graphs),
            tuple((*tensors, *graph.tensors.values()) for tensors, graph in zip(samples, graphs, strict=True)),
            num_warmup_iters=0,
            **options,
        )
        for graph in graphs:
            graph.replay = graph.module.forward
    for number, captured in enumerate(found):
        of(number)[0].graphs.append(captured)
