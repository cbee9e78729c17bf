"""A layer's FP8 state: the scales and amax histories of recipes with state, and when they are created and moved."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from reference.float8.kept_tensor import KeptTensor, kept_in
from reference.memory import recompute
from reference.nn.core.parameters import parameter_device
from reference.recipe import DelayedScaling, Recipe
from reference.recipes.delayed_scaling import SCALED_MAX
from reference.recipes.quantizer import Quantizer
from reference.recipes.roles import Roles
from reference.state import model_init, scaling
from reference.state.autocast import AutocastState
from reference.state.scaling import KEYS, FP8TensorMeta
from reference.state.weight_store import WeightStore
from reference.support.dtensor import is_dtensor, like


class WithFP8State(torch.nn.Module):
    """The state of one layer.

    Attributes:
        fp8_meta: `"scaling_fwd"` and `"scaling_bwd"` (`FP8TensorMeta`), once the layer has run under a recipe with
            state, has calibrated, or has loaded state; and `"recipe"`, that of its last run in FP8.
        fp8: whether the last forward ran in FP8.
        roles: its tensors that are quantized (`reference.recipes.roles`).
        fp8_sizes: names of the attributes that must be multiples of 16 in FP8.
        keeps_scales: whether checkpoints have its state although it has no such weights.
        quantized_init: the settings of the `quantized_model_init` that it was made in; None outside of one.
        own_recipe, in_high_precision: what it runs in, whatever autocast says (`reference.recipes.by_layer`).
    """

    roles: Roles
    fp8_sizes: tuple[str, ...] = ()
    keeps_scales = False
    fp8: bool
    fp8_meta: dict[str, Any]
    quantized_init: model_init.QuantizedInit | None
    own_recipe: Recipe | None = None
    in_high_precision = False
    _fitted: Recipe | None = None  # the recipe that the state fits, if known: spares looking at it
    _store: WeightStore
    _keepers: dict[str, Quantizer]  # of weights that are kept in FP8 under a recipe without state

    @property
    def fp8_weights(self) -> Mapping[str, int]:
        """The parameters that are or may be kept in FP8, and their columns of `scaling_fwd`."""
        return self.roles.weights

    def scales_of(self, name: str) -> FP8TensorMeta | Quantizer:
        """What says the scales of a weight that is kept: the layer's state, or the recipe's quantizer of its role."""
        assert self.quantized_init is not None
        recipe = self.quantized_init.recipe
        if recipe.history_rows is not None:
            state: FP8TensorMeta = self.fp8_meta[KEYS[0]]
            return state
        if name not in self._keepers:
            self._keepers[name] = recipe.quantizer(self.roles.of_weight(name), None)
        return self._keepers[name]

    def says_scales(self, weight: KeptTensor) -> bool:
        """Whether the scales of a kept weight are this layer's."""
        scales: Any = weight._kept.scales
        return self.fp8_meta.get(KEYS[0]) is scales or scales in self._keepers.values()

    def _parameter_device(self) -> torch.device:
        device = parameter_device(self)
        if device is None:
            raise RuntimeError(
                f"{type(self).__name__}: its parameters are gone, and no tensors are in their place; a layer with its "
                f"weight is accepted."
            )
        return device

    def _fresh_state(self, device: torch.device) -> None:
        """Reset scales to 1 and histories to 0; where weights are kept in FP8, create the state."""
        recipe = None if self.quantized_init is None or not self.fp8_weights else self.quantized_init.recipe
        for key in KEYS:
            if key in self.fp8_meta:
                self.fp8_meta[key].to(device)
                self.fp8_meta[key].reset()
            elif recipe is not None and recipe.history_rows is not None:
                self.fp8_meta[key] = FP8TensorMeta.fresh(self.state_columns()[key], recipe.history_rows, device)
                self.fp8_meta[key].fit(recipe.scaled_max(key == KEYS[0]))
                self.fp8_meta["recipe"] = recipe
        self._fitted = None

    def _bind_weights(self) -> None:
        """Let weights in FP8 take their scales from this module, except a shared one of another column or cast."""
        for name, weight in self._fp8_parameters().items():
            before = weight._kept.scales
            if self.fp8_weights.get(name) != weight._kept.column:
                continue
            if isinstance(before, FP8TensorMeta) and KEYS[0] in self.fp8_meta:
                weight.bind(self.fp8_meta[KEYS[0]])
            keeper = self._keepers.get(name)
            if keeper is not None and isinstance(before, Quantizer) and before.key == keeper.key:
                weight.bind(keeper)

    def _fp8_parameters(self) -> dict[str, KeptTensor]:
        """Those kept in FP8, and of those that `fully_shard` has sharded this rank's rows."""
        found = {name: kept_in(p) for name, p in self._parameters.items()}
        return {name: weight for name, weight in found.items() if weight is not None}

    def runs_in(self, recipe: Recipe) -> bool:
        """Whether FP8 autocast with that recipe means this layer."""
        return True

    def own_settings(self, state: AutocastState) -> AutocastState:
        """An autocast's settings as they are for this layer."""
        if self.own_recipe is not None:
            state = replace(state, recipe=self.own_recipe)
        if self.in_high_precision or not self.runs_in(state.recipe):
            state = AutocastState(False, False, state.recipe, state.group)  # twice as fast as `replace`
        return state

    def run_settings(self, run: recompute.Run) -> AutocastState:
        """The settings of a forward."""
        state = run.state
        if self.own_recipe is not None or self.in_high_precision or not self.runs_in(state.recipe):
            state = self.own_settings(state)
        if run.recomputed and not run.compiling:
            state = recompute.same_run(self, state, run.again)
        return state

    def init_fp8_metadata(self, run: recompute.Run) -> AutocastState:
        """Create or resize the FP8 state for a forward, if necessary; return its settings."""
        state, compiling, again = self.run_settings(run), run.compiling, run.again
        if not compiling and (state.enabled or self.fp8):  # a compiler traces forward only
            recompute.refuse_foreign_recompute(self)
        # `Module.__setattr__` is slow; a compiler would guard the attribute if it were read.
        if compiling or self.fp8 != state.enabled:
            if state.enabled:
                self._check_fp8_sizes("under FP8 autocast")
            self.fp8 = state.enabled
        if state.enabled or state.calibrating:
            if not again and (compiling or self._fitted is not state.recipe):  # what runs again may have another recipe
                self.fit_state(state.recipe)
            self.fp8_meta["recipe"] = state.recipe
            if not again:  # autograd's thread has no autocast that would update
                scaling.join(self, state.recipe, state.group)
        return state

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Move FP8 state with the module, by device only, and drop cached weights."""
        fp8: dict[str, Any] = {name: self._parameters[name] for name in self._fp8_parameters()}
        self._parameters.update(dict.fromkeys(fp8))
        super()._apply(fn, recurse)
        self._parameters.update(fp8)
        for name, weight in fp8.items():
            if is_dtensor(weight):
                self._parameters[name] = _rows_followed(weight, fn)
            else:
                weight.follow(fn)
        for key in KEYS:
            if key in self.fp8_meta:
                self.fp8_meta[key].apply(fn)
        self._store.casts.clear()
        return self

    def state_columns(self) -> dict[str, int]:
        """The number of columns of `scaling_fwd` and `scaling_bwd`."""
        return scaling.columns_of(max(self.roles.slots, len(self.roles.parts)))

    def columns_of_parts(self) -> Mapping[str, int]:
        """Names of the parameters that are or could be kept in FP8, and their columns if they are."""
        return self.fp8_weights

    def fit_state(self, recipe: Recipe) -> None:
        """Create or resize the state for a recipe with state, and bring its scales to that format and margin."""
        settings = _settings(recipe)
        if not torch.compiler.is_compiling():
            if settings is not None:
                _fit(self, *settings)
            self._fitted = recipe
        elif settings is not None and (self._fitted is None or _settings(self._fitted) != settings):
            # Not the state itself is asked: a trace may begin again, and must go the same way when it has been made.
            # A number that differs from an earlier trace's may be a symbol; a range's length and a constant are none.
            rows, *scaled_max = settings
            _make_state(id(self), len(range(rows)), *[_constant(x) for x in scaled_max])
            self._fitted = None

    def make_state(self, recipe: DelayedScaling) -> None:
        """Create or resize the FP8 state as a run under `recipe` would."""
        self.fit_state(recipe.fixed)
        self._bind_weights()

    def _take_state(self, state: dict[str, Any]) -> None:
        """Replace the FP8 state, in place where the shapes are the same: CUDA graphs read that memory."""
        for key, new in state.items():
            if key in KEYS and key in self.fp8_meta:
                self.fp8_meta[key].take(new)
            else:
                self.fp8_meta[key] = new
        self._fitted = None

    def _check_fp8_sizes(self, where: str) -> None:
        for name in self.fp8_sizes:
            if getattr(self, name) % 16:
                raise ValueError(
                    f"{type(self).__name__}: {name}={getattr(self, name)} {where}; a multiple of 16 is "
                    f"accepted (rows of FP8 operands start at multiples of 16 bytes)."
                )


def _rows_followed(p: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.nn.Parameter:
    """A DTensor of rows that are kept in FP8, with the device and dtype of `nn.Module._apply`'s function."""
    rows = p._local_tensor
    found = fn(torch.empty(1, dtype=rows.dtype, device=rows.device))
    if (found.device, found.dtype) == (rows.device, rows.dtype):
        return p  # type: ignore[no-any-return]
    with torch.no_grad():
        moved = like(p, rows.on(found.device).in_dtype(found.dtype))
    return torch.nn.Parameter(moved, p.requires_grad)


def _settings(recipe: Recipe) -> tuple[int, float, float] | None:
    """What the state depends on: rows, and `scaled_max` forward and backward; None for a recipe without state."""
    rows = recipe.history_rows
    return None if rows is None else (rows, recipe.scaled_max(True), recipe.scaled_max(False))


def _constant(scaled_max: float) -> float:
    """The same number, as a constant of a trace."""
    for one in SCALED_MAX:
        if one == scaled_max:
            return one
    return scaled_max


def _fit(module: Any, length: int, *scaled_max: float) -> None:
    """Create, move, resize or rescale a module's FP8 state; `scaled_max` forward and backward."""
    device = module._parameter_device()
    for key, its_max in zip(KEYS, scaled_max, strict=True):
        if key not in module.fp8_meta:
            module.fp8_meta[key] = FP8TensorMeta.fresh(module.state_columns()[key], length, device)
        meta: FP8TensorMeta = module.fp8_meta[key]
        meta.to(device)  # a loader may have replaced the parameters on another device
        if meta.fit(its_max) and key == KEYS[0]:
            module._store.casts.clear()  # another margin has cast them
        if meta.amax_history.shape[0] != length:
            meta.resize(length)
    module.fp8_meta.setdefault("recipe", None)  # the caller sets it; guards must not see a new key


def _make_state(identity: int, length: int, *scaled_max: float) -> None:
    """`_fit` of the module with that `id`."""
    _fit(scaling.registered(identity), length, *scaled_max)


# `torch.compiler.assume_constant_result`, without importing the compiler: a compiler runs this while tracing and not in
# its graph, where new state would be an intermediate result. Such a graph serves this module only; one traced after
# eager mode has made the state serves every module like it. torch 2.11 accepts only constants: hence the `id`.
_make_state._dynamo_marked_constant = True  # type: ignore[attr-defined]
