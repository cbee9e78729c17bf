"""`make_graphed_callables`: modules whose forward and backward replay CUDA graphs, FP8 state included.

Kernels read scales, amax histories and random states and change them in place, so a replay does so as well. The host's
part stays outside the graphs: autocast's updates of the scales, and dropout's seeds, which are drawn before each
replay (`reference.state.graph_seeds`). Warm-up and capture change no state. With `cache_quantized_params` weights are
cast outside, too: a graph reads FP8 copies, which a call with `is_first_microbatch=True` makes anew where they lie.
"""

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from reference.arguments import check_arguments, check_unread
from reference.float8.kept_tensor import KeptTensor
from reference.graphs.graph_capture import Hooks, checked_hooks, into_graphs, warm_up
from reference.graphs.pipeline_order import modules_of_passes
from reference.memory import recompute
from reference.nn.core.dropout import Generator
from reference.nn.core.module import TransformerEngineBaseModule
from reference.random import fork, undrawn
from reference.recipe import DelayedScaling
from reference.recipes.quantized import Quantized
from reference.state import graph_seeds, scaling
from reference.state.autocast import AutocastState, autocast, current, restored
from reference.state.threads import here
from reference.support.nested import tensors_of
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
    fp8_recipe: DelayedScaling | None = None,
    fp8_group: Any = None,
    fp8_weight_caching: bool | None = None,
    enabled: bool | tuple[bool, ...] | None = None,
    calibrating: bool | None = None,
    recipe: DelayedScaling | None = None,
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
        _Graphed(module, keywords, AutocastState(bool(flag), *shared), caches, own, retain_graph_in_backward)
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
def _unchanged(graphs: "list[_Graphed]") -> Iterator[None]:
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


def replays(module: torch.nn.Module) -> bool:
    """Whether a pass of a schedule replays graphs of this module."""
    return any(graph.module is module and graph.replay is not None for graph in list(_graphs))


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


class _Graphed:
    """One module, during its capture and around its replays."""

    def __init__(
        self,
        module: torch.nn.Module,
        keywords: Mapping[str, Any],
        settings: AutocastState,
        caches: bool,
        hooks: Hooks,
        retains: bool,
    ) -> None:
        self.module = module
        self.hooks = hooks
        self.saved: list[torch.Tensor] | None = [] if retains else None
        self.settings = settings
        self.tensors = {name: value for name, value in keywords.items() if isinstance(value, torch.Tensor)}
        self.constants = {name: value for name, value in keywords.items() if name not in self.tensors}
        if self.constants.get("is_first_microbatch") is not None:
            raise NotImplementedError(
                f"make_graphed_callables: is_first_microbatch={self.constants['is_first_microbatch']!r} is not "
                f"offered; None is accepted (cache_quantized_params=True takes it in each call)."
            )
        self.own_forward = "forward" in vars(module)
        self.original: Callable[..., Any] = module.forward
        self.training = module.training
        self.layers = [
            one
            for one in module.modules()
            if isinstance(one, TransformerEngineBaseModule)
            and one.fp8_sizes
            and one.runs_in(one.own_recipe or settings.recipe)
        ]
        if any(layer.delay_wgrad_compute for layer in self.layers):
            raise NotImplementedError(
                "make_graphed_callables: a layer with delay_wgrad_compute=True is not offered; False is accepted: a "
                "graph's backward keeps no operands."
            )
        self.caches = caches  # and so takes is_first_microbatch
        if self.caches and any(layer.fuse_wgrad_accumulation for layer in self.layers):
            raise NotImplementedError(
                "make_graphed_callables: cache_quantized_params=True with a layer with fuse_wgrad_accumulation=True is "
                "not offered (its first microbatch overwrites main_grad, which a graph cannot); False is accepted."
            )
        self.choices = self._choices()
        # A layer is updated from its first call on, not from its capture on.
        self.memberships = [layer._membership for layer in self.layers]
        with restored(settings):
            for layer in self.layers:
                layer.init_fp8_metadata(recompute.current_run())
        self.copies: dict[tuple[TransformerEngineBaseModule, str], Quantized] = {}
        self.eager_copies = [dict(layer._store.casts) for layer in self.layers]
        self.has_backward = False
        self.graphs: list[Any] = []  # of the forward and, if there is one, the backward
        self.replay: Callable[..., Any] | None = None  # None after `reset`
        _graphs.add(self)

    def _choices(self) -> list[Any]:
        """What `te.recipe.by_layer` has chosen for its layers."""
        return [(layer.own_recipe, layer.in_high_precision) for layer in self.layers]

    def _fp8_state(self) -> list[torch.Tensor]:
        metas = [layer.fp8_meta[key] for layer in self.layers for key in scaling.KEYS if key in layer.fp8_meta]
        return [tensor for meta in metas for tensor in (meta.scale, meta.amax_history)]

    def state(self) -> list[torch.Tensor]:
        """The tensors that warm-up runs change: FP8 state, random states, gradients accumulated in main_grad."""
        found = [m.state for m in self.module.modules() if isinstance(m, Generator)] + self._fp8_state()
        main_grads = (getattr(parameter, "main_grad", None) for parameter in self.module.parameters())
        return found + [grad for grad in main_grads if grad is not None]

    @torch.no_grad()
    def cast_weights(self, first: bool) -> None:
        """Bring the copies of all weights that are cast up to date, where the graph reads them.

        As in eager mode, weights are cast in the first microbatch, and where a checkpoint or a move has dropped a copy.
        """
        for layer in self.layers:
            if not layer.roles.gemms:
                continue
            context = layer.context(torch.bfloat16, first)
            for gemm in context.gemms.values():
                name, quantizer = gemm.parameter, gemm.weight
                parts: list[Any] = [*layer.parts_of(name)]
                kept = self.copies.get((layer, name))
                if not quantizer.fp8 or isinstance(parts[0], KeptTensor):  # nothing is cast
                    continue
                weight = parts[0] if len(parts) == 1 else torch.cat(parts)
                found = context.weight(gemm, weight, quantizer.dtype_t is None)
                if kept is None:
                    kept = self.copies[layer, name] = found
                for to, new in zip(tensors_of(kept), tensors_of(found), strict=True):
                    if to is not new:
                        _bytes(to).copy_(_bytes(new))
                context.store.keep(name, type(context.recipe), kept, quantizer)

    def captured(self, *args: torch.Tensor) -> Any:
        """The module's forward during warm-up and capture: under the settings, without updates."""
        if not self.caches:
            return self._captured(*args)
        if not self.copies:
            with restored(self.settings):
                self.cast_weights(first=True)
        for layer in self.layers:
            layer.reuses_weights = True
        try:
            return self._captured(*args)
        finally:
            for layer in self.layers:
                del layer.reuses_weights

    def _captured(self, *args: torch.Tensor) -> Any:
        count = len(args) - len(self.tensors)
        tensors = dict(zip(self.tensors, args[count:], strict=True))
        with ExitStack() as around:
            around.enter_context(restored(self.settings))
            if graph_seeds.present() is None:  # it is no capture
                around.enter_context(undrawn())
            elif self.saved is not None:  # otherwise the first backward would give its memory to what comes later
                around.enter_context(torch.autograd.graph.saved_tensors_hooks(self._save, _itself))
            out = self.original(*args[:count], **tensors, **self.constants)
        self.has_backward = any(one.requires_grad for one in torch.utils._pytree.tree_leaves(out))
        return out

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self.saved is not None
        self.saved.append(tensor)
        return tensor

    def forget(self) -> None:
        """Forget what the capture has left in the layers."""
        for layer, membership, copies in zip(self.layers, self.memberships, self.eager_copies, strict=True):
            layer._membership, layer._store.casts = membership, dict(copies)

    def install(self, in_module: bool) -> None:
        """Let the module itself replay, unless the pass is called by itself."""
        self.held = self._fp8_state()
        if in_module:
            self.module.forward = self.forward  # type: ignore[method-assign]
            self.module.reset = self.reset  # type: ignore[assignment]

    def reset(self) -> None:
        """Free the graphs and their memory; calls then run the module without them."""
        for graph in self.graphs:
            graph.reset()
        self.graphs, self.replay, self.saved = [], None, None
        if vars(self.module).get("forward") == self.forward:
            self.put_back()

    def put_back(self) -> None:
        """Give the module the forward that it had."""
        if self.own_forward:
            self.module.forward = self.original  # type: ignore[method-assign]
        else:
            del self.module.forward

    def __call__(self, *args: torch.Tensor, **kwargs: Any) -> Any:
        """A pass of a schedule."""
        return self.forward(*args, **kwargs)

    def forward(self, *args: torch.Tensor, **kwargs: Any) -> Any:
        """The module's forward after the capture."""
        if self.module.training != self.training or self.replay is None:
            return self.original(*args, **kwargs)
        first_microbatch = kwargs.pop("is_first_microbatch", None) if self.caches else None
        self._check(kwargs)
        if self.caches:
            if not isinstance(first_microbatch, bool):
                raise TypeError(
                    f"{type(self.module).__name__}: is_first_microbatch={first_microbatch!r}; True and False are "
                    f"accepted: its CUDA graph was captured with cache_quantized_params=True."
                )
            self.cast_weights(first_microbatch)
        state = current()
        if state.enabled or state.calibrating:
            for layer in self.layers:
                own = layer.own_settings(state)
                if not (own.enabled or own.calibrating):
                    continue
                if layer._fitted is not own.recipe:  # another recipe may have run without the graph
                    layer.fit_state(own.recipe)
                scaling.join(layer, own.recipe, own.group)
        out = self.replay(*[_with_own_grad(x) for x in (*args, *(kwargs[name] for name in self.tensors))])
        first = out[0] if isinstance(out, tuple) else out
        # As in `reference.nn.core.autograd`: the first FP8 module runs backward last and updates the gradients' scales.
        thread = here()
        if state.enabled and self.layers and first.grad_fn is not None and thread.first_module_pending:
            thread.first_module_pending = False
            first.grad_fn.register_hook(lambda *_: scaling.update(forward=False, thread=thread.number))
        return out

    def _check(self, kwargs: Mapping[str, Any]) -> None:
        """Refuse a call that the graph was not captured for."""
        name = type(self.module).__name__
        state, captured = current(), self.settings
        for what, now, then in (
            ("enabled", state.enabled, captured.enabled),
            ("calibrating", state.calibrating, captured.calibrating),
            ("recipe", state.recipe, captured.recipe),
        ):
            if now != then and (what != "recipe" or captured.enabled or captured.calibrating):
                raise RuntimeError(
                    f"{name}: its CUDA graph was captured with {what}={then!r} and is called with {what}={now!r}; call "
                    f"it under an autocast like the one given to make_graphed_callables."
                )
        if captured.enabled or captured.calibrating:
            if self._choices() != self.choices:
                raise RuntimeError(
                    f"{name}: te.recipe.by_layer has chosen other recipes since its CUDA graph was captured; the "
                    f"choices of then are accepted, or another make_graphed_callables."
                )
            held = self._fp8_state()
            if len(held) != len(self.held) or any(a is not b for a, b in zip(held, self.held, strict=True)):
                raise RuntimeError(
                    f"{name}: its FP8 state has moved since its CUDA graph was captured (a move, a checkpoint or a "
                    f"recipe with another amax_history_len); capture it again with make_graphed_callables."
                )
        missing = [key for key in self.tensors if key not in kwargs]
        other = [key for key, value in kwargs.items() if key not in self.tensors and self.constants.get(key) != value]
        if missing or other:
            raise TypeError(
                f"{name}: its CUDA graph was captured with keywords {[*self.tensors, *self.constants]} and is called "
                f"with {list(kwargs)}; the same are accepted, with other tensors but no other values."
            )


_graphs: weakref.WeakSet[_Graphed] = weakref.WeakSet()


def _with_own_grad(x: torch.Tensor) -> torch.Tensor:
    """An input whose `.grad`, if it will have one, is no memory of the graph's, which the next backward overwrites."""
    if x.requires_grad and x.is_leaf and torch.is_grad_enabled():
        x = x.view_as(x)
        x.register_hook(torch.clone)
    return x


def _itself(x: torch.Tensor) -> torch.Tensor:
    return x


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """FP8 codes as bytes, which every device copies; scales as they are."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
