"""`make_graphed_callables`: modules whose forward and backward replay CUDA graphs, FP8 state included.

Kernels read scales, amax histories and random states and change them in place, so a replay does so as well. The host's
part stays outside the graphs: autocast's updates of the scales, and dropout's seeds, which are drawn before each
replay (`reference.state.graph_seeds`). Warm-up and capture change no state. With `cache_quantized_params` weights are
cast outside, too: a graph reads FP8 copies, which a call with `is_first_microbatch=True` makes anew where they lie.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from reference.arguments import check_arguments, check_unread
from reference.graphs.graph_capture import checked_hooks, into_graphs, warm_up
from reference.graphs.graphed_module import GraphedModule
from reference.graphs.pipeline_order import modules_of_passes
from reference.random import fork
from reference.recipes.base import Recipe
from reference.state.autocast import AutocastState, autocast
from reference.support.notice import say_once

__all__ = ["make_graphed_callables"]

OLDER_NAMES = {
    "enabled": "fp8_enabled",
    "calibrating": "fp8_calibrating",
    "recipe": "fp8_recipe",
    "amax_reduction_group": "fp8_group",
    "cache_quantized_params": "fp8_weight_caching",
}


def make_graphed_callables(
    modules: Any,
    sample_args: tuple[Any, ...],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Any = None,
    fp8_enabled: bool | tuple[bool, ...] | None = None,
    fp8_calibrating: bool | None = None,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    fp8_weight_caching: bool | None = None,
    enabled: bool | tuple[bool, ...] | None = None,
    calibrating: bool | None = None,
    recipe: Recipe | None = None,
    amax_reduction_group: Any = None,
    cache_quantized_params: bool | None = None,
    _order: list[int] | None = None,
    _num_layers_per_chunk: list[int] | None = None,
    pool: Any = None,
    retain_graph_in_backward: bool = False,
    _reuse_graph_input_output_buffers: bool = False,
    clone_param_grads_on_return: bool = True,
    pre_warmup_hook: Callable[[], Any] | None = None,
    post_warmup_hook: Callable[[], Any] | None = None,
    capture_time_hooks: list[dict[str, dict[Any, Callable[[Any], None]]] | None] | None = None,
) -> Any:
    """Capture modules as CUDA graphs; on a CPU, where there is nothing to capture, return them unchanged.

    Call the result like the module, under an `autocast` of the same settings, which updates the scales. In evaluation
    mode a module captured in training mode runs without a graph, and vice versa. Outputs live in the graph's memory and
    are overwritten by the next call.

    Args:
        modules: a layer, or a tuple or list of layers in the order in which they run; the result is a tuple, too.
        sample_args: a tuple or list of tensors, or one for each module; shapes, dtypes and requires_grad as in later
            calls.
        num_warmup_iters: runs before the capture.
        allow_unused_input: accept inputs that get no gradient.
        sample_kwargs: keyword arguments, or one dict for each module. Tensors may change from call to call; other
            values are fixed by the capture.
        enabled, calibrating, recipe, amax_reduction_group: as in `autocast`; `enabled` may be a tuple, one for each
            module.
        fp8_enabled, fp8_calibrating, fp8_recipe, fp8_group, fp8_weight_caching: their older names.
        pool: memory pool of another graph to share; with `_order` each pass has its own.
        clone_param_grads_on_return: copy the parameters' gradients out of the graph's memory, which the next backward
            overwrites.
        cache_quantized_params: keep FP8 copies of the weights. Each call then needs `is_first_microbatch`: True casts
            them, False takes the copies as they are. The modules themselves need not accept it.
        _order, and with it _num_layers_per_chunk: a pipeline's schedule, in which a module has several forwards open at
            a time (`reference.graphs.pipeline_order`). Each pass is a graph and an entry of `sample_args`; the result
            is a callable for each pass, and the modules stay as they are.
        _reuse_graph_input_output_buffers: accepted with `_order`, without effect: passes share no memory.
        retain_graph_in_backward: keep what the forward has saved, so that backward with `retain_graph=True` can be
            followed by another one of the same forward. Costs that memory as long as the graphs live.
        pre_warmup_hook, post_warmup_hook: functions without arguments, called once before and after all warm-up runs.
        capture_time_hooks: None, or for each module None or a dict with some of "forward_pre_hooks", "forward_hooks",
            "backward_pre_hooks" and "backward_hooks", each a dict of functions of the module, which return None. They
            run in warm-up and around each capture, and are no part of a graph.

    Returns:
        The module or modules, or the passes of `_order`. Each has `reset()`, which frees its graphs; it then runs
            without them.

    Source: Transformer Engine's `pytorch/graph.py`.
    """
    modules = tuple(modules) if isinstance(modules, list) else modules
    given = dict(locals())
    check_arguments("make_graphed_callables", given)
    for name, older in OLDER_NAMES.items():
        if given[name] is not None and given[older] is not None:
            raise ValueError(f"make_graphed_callables: {name} and {older}, its older name, are given; one is accepted.")
        given[name] = given[older] if given[name] is None else given[name]
    if _order is None:
        of_order = {"_reuse_graph_input_output_buffers": False, "_num_layers_per_chunk": None}
        check_unread("make_graphed_callables", given, of_order, "_order=None", "an _order")
    count = len(modules) if isinstance(modules, tuple) else 1
    flags = given["enabled"] if isinstance(given["enabled"], tuple) else (given["enabled"],) * count
    if len(flags) != count:
        raise ValueError(
            f"make_graphed_callables: enabled has {len(flags)} entries for {count} modules; one flag or as many as "
            f"modules are accepted."
        )
    targets, args, kwargs = _one_each(modules, sample_args, sample_kwargs, ordered=_order is not None)
    hooks = checked_hooks(capture_time_hooks, count)
    if _order is not None:
        passes = modules_of_passes(_order, _num_layers_per_chunk, count, len(args))
        targets, flags = tuple(targets[i] for i in passes), tuple(flags[i] for i in passes)
        hooks = [hooks[i] for i in passes]
    # An autocast checks them.
    settings = autocast(recipe=given["recipe"], amax_reduction_group=given["amax_reduction_group"]).settings
    if _nothing_to_capture(args):
        say_once("graph", "make_graphed_callables: on a CPU there is nothing to capture; the modules run as they are")
        for target in targets:
            target.reset = _nothing
        return targets if isinstance(modules, tuple) else targets[0]
    _check_modules(targets)
    shared = (bool(given["calibrating"]), settings.recipe, given["amax_reduction_group"])
    caches = bool(given["cache_quantized_params"])
    graphs = [
        GraphedModule(module, keywords, AutocastState(bool(flag), *shared), caches, own, retain_graph_in_backward)
        for module, keywords, flag, own in zip(targets, kwargs, flags, hooks, strict=True)
    ]
    if _order is not None:
        for graph in graphs:  # the passes of a module read one copy of its weights
            graph.copies = next(other.copies for other in graphs if other.module is graph.module)
    gc.collect()  # destroying an older graph, which is garbage, would end a capture
    with _unchanged(graphs), fork():  # warm-up draws from torch's generators what its own ops in the modules need
        outputs = warm_up(graphs, args, num_warmup_iters, allow_unused_input, (pre_warmup_hook, post_warmup_hook))
        if _order is None:
            into_graphs(graphs, args, pool=pool, allow_unused_input=allow_unused_input)
        else:
            for graph, tensors in zip(graphs, args, strict=True):
                into_graphs([graph], [tensors], allow_unused_input=allow_unused_input)
    del outputs
    if clone_param_grads_on_return:
        hooked = dict.fromkeys(parameter for target in targets for parameter in target.parameters())
        for parameter in (one for one in hooked if one.requires_grad):
            parameter.register_hook(torch.clone)
    for graph in graphs:
        graph.install(in_module=_order is None)
    found = targets if _order is None else tuple(graphs)
    return found if isinstance(modules, tuple) else found[0]


@contextmanager
def _unchanged(graphs: list[GraphedModule]) -> Iterator[None]:
    """What runs inside changes no state of the modules."""
    kept = [tensor for graph in graphs for tensor in graph.state()]
    before = [tensor.clone() for tensor in kept]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(kept, before, strict=True):
                tensor.copy_(value)
        for graph in graphs:
            graph.forget()


def _nothing() -> None:
    """`reset` of a module that has no graph."""


def _one_each(modules: Any, sample_args: Any, sample_kwargs: Any, ordered: bool) -> tuple[tuple[Any, ...], ...]:
    """Modules, their sample tensors and their sample keywords, as tuples; of one length, unless `ordered`."""
    if not isinstance(modules, tuple):
        modules, sample_args, sample_kwargs = (modules,), (sample_args,), (sample_kwargs,)
    if not isinstance(sample_args, (tuple, list)):
        raise TypeError(
            f"make_graphed_callables: sample_args={sample_args!r}; a tuple of tensors for each is accepted."
        )
    count = len(sample_args) if ordered else len(modules)
    kwargs = ({},) * count if sample_kwargs is None else tuple(keywords or {} for keywords in sample_kwargs)
    for name, given in (("sample_args", sample_args), ("sample_kwargs", kwargs)):
        if len(given) != count:
            raise ValueError(
                f"make_graphed_callables: {name} has {len(given)} entries for {count} "
                f"{'sample_args' if ordered else 'modules'}; one for each is accepted."
            )
    for module in modules:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(
                f"make_graphed_callables: modules={module!r}; a module, or a tuple or list of them, is accepted."
            )
    for args in sample_args:
        if not isinstance(args, (tuple, list)) or not all(isinstance(arg, torch.Tensor) for arg in args):
            raise TypeError(f"make_graphed_callables: sample_args={args!r}; a tuple of tensors for each is accepted.")
    return modules, tuple(map(tuple, sample_args)), kwargs


def _check_modules(modules: tuple[torch.nn.Module, ...]) -> None:
    """Refuse modules that no graph can stand for."""
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    for module in modules:
        name = type(module).__name__
        if any(getattr(module, name) for name in hooks):
            raise RuntimeError(
                f"make_graphed_callables: {name} has hooks, which its graph would not run; a module without any is "
                f"accepted. It may get some afterwards, and capture_time_hooks run beside the capture."
            )
        if any(buffer.requires_grad for buffer in module.buffers()):
            raise RuntimeError(
                f"make_graphed_callables: {name} has a buffer with requires_grad=True; only parameters are accepted."
            )


def _nothing_to_capture(sample_args: tuple[tuple[torch.Tensor, ...], ...]) -> bool:
    return all(tensor.device.type == "cpu" for args in sample_args for tensor in args)
