"""A module during the capture of its CUDA graphs, and around their replays (`reference.graphs.graph`)."""

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from reference.float8.kept_tensor import KeptTensor
from reference.graphs.graph_capture import Hooks
from reference.memory import recompute
from reference.nn.core.dropout import Generator
from reference.nn.core.module import TransformerEngineBaseModule
from reference.random import undrawn
from reference.recipes.quantized import Quantized
from reference.state import graph_seeds, scaling
from reference.state.autocast import AutocastState, current, restored
from reference.state.threads import here
from reference.support.nested import tensors_of


class GraphedModule:
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
            there = {id(tensor) for tensor in self._fp8_state()}  # the graph reads nothing that a checkpoint has added
            if any(id(tensor) not in there for tensor in self.held):
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


_graphs: weakref.WeakSet[GraphedModule] = weakref.WeakSet()


def replays(module: torch.nn.Module) -> bool:
    """Whether a pass of a schedule replays graphs of this module."""
    return any(graph.module is module and graph.replay is not None for graph in list(_graphs))


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
