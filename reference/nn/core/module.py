"""What all layers have in common: construction, and the quantizers of a forward."""

from operator import is_
from typing import Any

import torch

from reference.float8.kept_tensor import KeptTensor, kept_in
from reference.memory import recompute
from reference.nn.core.attributes import OfModule
from reference.nn.core.context import ModuleContext, Precision
from reference.nn.core.delayed_wgrad import DelayedGradients
from reference.nn.core.parameters import DeviceDefault, InitMethod
from reference.nn.core.state_dict import Checkpointed
from reference.nn.core.tensor_parallel import TensorParallel
from reference.parallel.tensor import shared_quantizers
from reference.parallel.tokens import quantizers_of_tokens
from reference.recipe import Recipe
from reference.recipes.quantizer import Calibrating, HighPrecision, Quantizer
from reference.recipes.roles import Roles
from reference.state import model_init, scaling
from reference.state.autocast import current
from reference.state.scaling import FP8TensorMeta
from reference.state.weight_store import WeightStore, main_grad_of
from reference.support.dtensor import is_dtensor


class TransformerEngineBaseModule(TensorParallel, OfModule, DelayedGradients, DeviceDefault, Checkpointed):
    """A layer with FP8 state: see `WithFP8State` for its attributes."""

    fuse_wgrad_accumulation = False
    taped = True  # whether `optimized` may play its launches from tapes
    _found: tuple[Precision, tuple[Any, ...]] | None = None  # of the last forward, with what it depends on
    reuses_weights = (
        False  # every forward is one with is_first_microbatch=False: of a CUDA graph (`reference.graphs.graph`)
    )

    def __init__(self) -> None:
        super().__init__()
        self.fp8 = False
        self.fp8_meta: dict[str, Any] = {}
        self._fitted: Recipe | None = None
        self._store = WeightStore()
        self._keepers = {}
        self._precision: Precision | None = None  # that of the last forward in FP8
        self._wide: dict[torch.dtype, Precision] = {}  # of forwards outside of FP8
        self._membership: scaling.Membership | None = None
        self.quantized_init = model_init.current()
        self._take_roles()
        scaling.register(self)

    def own_roles(self) -> Roles:
        """The roles of this layer as it is now; those of one that casts nothing."""
        return Roles()

    def _take_roles(self) -> None:
        self.roles = self.own_roles()
        self.name_scale_invs(self.fp8_weights)

    def __getstate__(self) -> dict[str, Any]:
        """Without the membership, which may hold a process group; cached weights as bytes: torch pickles no float8.

        Gradients that are still to be computed stay with this module, whose backward they belong to.
        """
        state = {**self.__dict__, "_membership": None, "_precision": None, "_fp8_workspaces": self._store.packed()}
        for name in ("_store", "_wide", "_found", "roles"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register a copy or an unpickled module as a module of its own."""
        state = dict(state)
        packed = state.pop("_fp8_workspaces")
        state.pop("_delayed", None)  # of 1.0: a queue, empty
        state.setdefault("_keepers", {})
        super().__setstate__(state)
        self._store, self._wide = WeightStore(), {}
        self._store.unpack(packed)
        self._take_roles()
        scaling.register(self)
        self._bind_weights()

    def _replicate_for_data_parallel(self) -> Any:
        """Refuse `torch.nn.DataParallel` in FP8: it runs copies in threads of its own, where no autocast is open."""
        if current().enabled:
            raise RuntimeError(
                f"{type(self).__name__}: torch.nn.DataParallel under FP8 autocast is not offered; "
                f"torch.nn.parallel.DistributedDataParallel is accepted."
            )
        replica: Any = super()._replicate_for_data_parallel()
        replica._store = WeightStore()
        return replica

    # --- FP8 state -----------------------------------------------------------------------------------

    def initialize(self, name: str, init_method: InitMethod) -> None:
        """Let `init_method` fill a weight; in `quantized_model_init` its values are cast to FP8 and dropped."""
        weight = self._parameters.get(name)
        if weight is None:
            raise RuntimeError(
                f"{type(self).__name__}: {name} is no parameter of the layer any more (parametrized, or flattened by "
                f"FSDP with use_orig_params=False); reset_parameters before that is accepted."
            )
        self._store.casts.clear()
        init_method = self.of_part(name, init_method)
        if self.quantized_init is None:
            init_method(weight)
            return
        if isinstance(weight, KeptTensor):
            values = weight.numbers()
            init_method(values)
            weight.quantize_(values)
        elif (rows := kept_in(weight)) is not None:  # every rank draws and casts the whole, and keeps its rows
            rows.place_on(weight.device_mesh)  # type: ignore[attr-defined]
            values = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
            init_method(values)
            rows.take_rows(KeptTensor.of(values, self.scales_of(name), self.fp8_weights[name]))
            rows._place.drawn = values.to("cpu", copy=True) if self.quantized_init.preserve else None
            return
        else:
            if is_dtensor(weight):
                raise NotImplementedError(
                    f"{type(self).__name__}: {name} is a DTensor of numbers in a layer that was made in "
                    f"quantized_model_init; fully_shard of weights in FP8 is accepted."
                )
            self._check_fp8_sizes("in quantized_model_init")
            init_method(weight)
            values = weight.detach()
            if "scaling_fwd" not in self.fp8_meta:
                self._fresh_state(weight.device)
            cast = KeptTensor.of(values, self.scales_of(name), self.fp8_weights[name])
            weight = torch.nn.Parameter(cast, requires_grad=weight.requires_grad)
            self._parameters[name] = weight  # not registered anew: Accelerate's init_empty_weights would rebuild it
        if self.quantized_init.preserve:
            weight._high_precision_init_val = values.to("cpu", copy=True)  # type: ignore[attr-defined]

    def keep_in_fp8(self) -> None:
        """In `quantized_model_init` on the meta device: make weights in FP8, without numbers yet."""
        if self.quantized_init is None or not self.fp8_weights:
            return
        self._check_fp8_sizes("in quantized_model_init")
        self._fresh_state(self._parameter_device())
        for name, column in self.fp8_weights.items():
            weight = self._parameters[name]
            assert weight is not None
            kept = KeptTensor.empty(weight.shape, weight.dtype, weight.device, self.scales_of(name), column)
            self._parameters[name] = torch.nn.Parameter(kept, requires_grad=weight.requires_grad)

    # --- forward -------------------------------------------------------------------------------------

    def context(
        self, dtype: torch.dtype, is_first_microbatch: bool | None, run: recompute.Run | None = None
    ) -> ModuleContext:
        """The context of this forward; `dtype` is the activations', `run` is None where nobody has asked yet."""
        if self.quantized_init is not None:
            self._check_kept_in_fp8()
        if self.fuse_wgrad_accumulation:  # a backward would find a bad main_grad after it has added to others
            for name in self.fp8_weights:
                if getattr(self._parameters.get(name), "main_grad", None) is not None:
                    main_grad_of(self, name)
        if self.delay_wgrad_compute:
            self.refuse_what_cannot_delay()
        if self.reuses_weights:
            is_first_microbatch = False
        run = recompute.current_run() if run is None else run
        if run.plain and self._found is not None and all(map(is_, self._found[1], self._depends_on(run, dtype))):
            precision = self._found[0]  # all that it depends on is the same object again
        else:
            precision = self._find_precision(run, dtype)
            if run.plain and (run.state.enabled or not run.state.calibrating):  # calibrating, quantizers are made anew
                self.__dict__["_found"] = (precision, self._depends_on(run, dtype))  # `Module.__setattr__` is slow
        return ModuleContext(self, precision, is_first_microbatch)

    def _depends_on(self, run: recompute.Run, dtype: torch.dtype) -> tuple[Any, ...]:
        state, metas = run.state, self.fp8_meta
        return (
            *(dtype, state.enabled, state.calibrating, state.recipe, state.group, run.thread),
            *(self.own_recipe, self.in_high_precision, self.fp8, self._fitted, self._precision, self._membership),
            *(metas.get("scaling_fwd"), metas.get("scaling_bwd"), metas.get("recipe")),
        )

    def _find_precision(self, run: recompute.Run, dtype: torch.dtype) -> Precision:
        """The quantizers of a forward."""
        state = self.init_fp8_metadata(run)
        if state.enabled:
            precision = self._fp8_precision(state.recipe, run.recomputed, dtype)
        elif state.calibrating and state.recipe.history_rows is not None and not recompute.recomputing():
            precision = self._calibrating(dtype)
        else:
            precision = self._high_precision(dtype)
        if self.tp_size > 1:
            self.check_shared(precision)
        if self.cp_name is not None:
            self.check_tokens(precision)
        return precision

    def _fp8_precision(self, recipe: Recipe, recomputed: bool, dtype: torch.dtype) -> Precision:
        """The quantizers of `recipe`; in a recomputation they have the scales of the first run."""
        forward: Any = self.fp8_meta.get("scaling_fwd")
        backward: Any = self.fp8_meta.get("scaling_bwd")
        recalled = recomputed and recipe.history_rows is not None
        if recalled:
            scale = recompute.recalled(self, forward.scale)
            history = None if recompute.recomputing() else forward.amax_history
            forward = FP8TensorMeta(scale, history, recipe.scaled_max(True))
        if recalled or torch.compiler.is_compiling():
            quantizers = self._shared(recipe.quantizers(self.roles, forward, backward, dtype))
            return Precision(self.roles, quantizers, recipe, forward, backward)
        known = self._precision
        of_backward = dtype if recipe.reads_dtype else None
        if (
            known is None
            or not (known.recipe is recipe and known.forward is forward and known.backward is backward)
            or known.dtype is not of_backward
        ):
            quantizers = self._shared(recipe.quantizers(self.roles, forward, backward, dtype))
            known = self._precision = Precision(self.roles, quantizers, recipe, forward, backward, of_backward)
        return known

    def _shared(self, quantizers: dict[str, Quantizer]) -> dict[str, Quantizer]:
        """A recipe's quantizers, as they are where ranks share the layer's maps, or their tokens."""
        return quantizers_of_tokens(self.roles, shared_quantizers(self.roles, quantizers))

    def _calibrating(self, dtype: torch.dtype) -> Precision:
        """Quantizers to `dtype` that record amaxes for a later run in FP8."""
        forward, wide = self.fp8_meta["scaling_fwd"], HighPrecision(dtype)
        quantizers: dict[str, Quantizer] = {
            role.name: Calibrating(dtype, forward, role.column, role.tensor == "weight") if role.is_forward else wide
            for role in self.roles.all
        }
        return Precision(self.roles, self._shared(quantizers))

    def _high_precision(self, dtype: torch.dtype) -> Precision:
        """No FP8."""
        compiling = torch.compiler.is_compiling()  # its graph would have to watch the dictionary
        found = None if compiling else self._wide.get(dtype)
        if found is None:
            wide: Quantizer = HighPrecision(dtype)
            quantizers = dict.fromkeys([role.name for role in self.roles.all], wide)
            found = Precision(self.roles, self._shared(quantizers))
            if not compiling:
                self._wide[dtype] = found
        return found

    def _check_kept_in_fp8(self) -> None:
        """Refuse a plain parameter that has replaced a weight kept in FP8."""
        for name in self.fp8_weights:
            weight: Any = self._parameters.get(name)
            replaced = weight is None or isinstance(weight, torch.nn.Parameter)
            weight = getattr(self, name) if weight is None else weight
            if replaced and not isinstance(weight, KeptTensor):
                raise RuntimeError(
                    f"{type(self).__name__}: {name} is a plain {weight.dtype} tensor in a layer that was made in "
                    f"quantized_model_init; a weight in FP8 is accepted. What replaced it (FSDP, a parametrization, an "
                    f"assignment) needs a layer that was made outside of quantized_model_init."
                )
