"""What every layer shares: FP8 state, its way into checkpoints, and the checks before a forward."""

from collections.abc import Callable
from typing import Any

import torch

from reference import recompute, scaling
from reference.autocast import AutocastState, current
from reference.nn.parameters import DeviceDefault
from reference.nn.precision import CalibratingCall, Call, FP8Call, Operand
from reference.notice import say_once
from reference.scaling import BACKWARD_TENSORS, FORWARD_TENSORS, FP8TensorMeta

ACTIVATION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TransformerEngineBaseModule(DeviceDefault, torch.nn.Module):
    """A layer with FP8 state.

    Attributes:
        fp8_meta: `"scaling_fwd"` and `"scaling_bwd"` (`FP8TensorMeta`) and `"recipe"`, once the layer has run in
            FP8, has calibrated, or has loaded FP8 state; empty before.
        fp8: whether the last forward ran in FP8.
        fp8_sizes: names of the attributes that must be multiples of 16 in FP8.
    """

    num_gemms = 1
    fp8_sizes: tuple[str, ...] = ()
    fuse_wgrad_accumulation = False

    def __init__(self) -> None:
        super().__init__()
        self.fp8 = False
        self.fp8_meta: dict[str, Any] = {}
        self._history_rows: int | None = None  # what the state is known to have: no need to look
        self._fp8_workspaces: dict[str, Operand] = {}
        self._membership: scaling.Membership | None = None
        scaling.register(self)

    def __getstate__(self) -> dict[str, Any]:
        """Without the membership: a process group can be neither copied nor pickled."""
        return {**self.__dict__, "_membership": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy or an unpickled module is a module of its own: it registers itself."""
        super().__setstate__(state)
        scaling.register(self)

    # --- FP8 state -----------------------------------------------------------------------------------

    def _columns(self, key: str) -> int:
        names = FORWARD_TENSORS if key == "scaling_fwd" else BACKWARD_TENSORS
        return self.num_gemms * len(names)

    def _parameter_device(self) -> torch.device:
        return next(parameter for parameter in self._parameters.values() if parameter is not None).device

    def init_fp8_metadata(self) -> AutocastState:
        """Make or resize the FP8 state for the current autocast, if that needs any; return that autocast."""
        state = current()
        recompute.refuse_foreign_recompute(self, state.enabled or self.fp8)
        # `Module.__setattr__` takes its time; a compiler would guard what is read.
        if torch.compiler.is_compiling() or self.fp8 != state.enabled:
            self.fp8 = state.enabled
        if state.enabled or state.calibrating:
            length = state.recipe.amax_history_len
            if self._history_rows != length:
                _make_state(id(self), length)
                self._history_rows = None if torch.compiler.is_compiling() else length
            self.fp8_meta["recipe"] = state.recipe
            scaling.join(self, state.recipe, state.group)
        return state

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Move FP8 state with the module, by device only, and forget cached weights."""
        super()._apply(fn, recurse)
        for key in scaling.KEYS:
            if key in self.fp8_meta:
                self.fp8_meta[key].apply(fn)
        self._fp8_workspaces.clear()
        return self

    # --- checkpoints ---------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for key in scaling.KEYS:
            if key in self.fp8_meta:
                meta = self.fp8_meta[key]
                destination[f"{prefix}{key}.scale"] = meta.scale.detach()
                destination[f"{prefix}{key}.amax_history"] = meta.amax_history.detach()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load parameters and FP8 state; refuse a broken state before anything of this module changes."""
        names = [f"{prefix}{key}.{part}" for key in scaling.KEYS for part in ("scale", "amax_history")]
        present = [name for name in names if name in state_dict]
        self._check_checkpoint(state_dict, prefix, names, present)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        unexpected_keys[:] = [name for name in unexpected_keys if name not in present]
        self._fp8_workspaces.clear()
        self._history_rows = None
        if present:
            device = self._parameter_device()
            for key in scaling.KEYS:
                scale = state_dict[f"{prefix}{key}.scale"].detach().to(device, copy=True).contiguous()
                history = state_dict[f"{prefix}{key}.amax_history"].detach().to(device, copy=True).contiguous()
                self.fp8_meta[key] = FP8TensorMeta(scale, history)
        else:
            of = prefix.rstrip(".") or "the module"
            say_once("fresh state", f"checkpoint: no FP8 state for {of!r}: scales start at 1, as in a fresh module")
            self.fp8_meta.clear()
            scaling.register(self)

    def _check_checkpoint(self, state_dict: dict[str, Any], prefix: str, names: list[str], present: list[str]) -> None:
        for name in self._parameters:
            value = state_dict.get(prefix + name)
            if isinstance(value, torch.Tensor) and value.is_floating_point() and bool(value.isnan().any()):
                raise ValueError(
                    f"checkpoint: {prefix + name} holds {int(value.isnan().sum())} NaN; finite weights are accepted."
                )
        if not present:
            return
        if len(present) < len(names):
            absent = [name for name in names if name not in state_dict]
            raise ValueError(
                f"checkpoint: partial FP8 state, {', '.join(absent)} missing beside {present[0]}; all of "
                f"{', '.join(names)} or none of them is accepted."
            )
        for key in scaling.KEYS:
            columns = self._columns(key)
            scale, history = state_dict[f"{prefix}{key}.scale"], state_dict[f"{prefix}{key}.amax_history"]
            _check_state(f"{prefix}{key}.scale", scale, scale.dim() == 1 and scale.shape[0] == columns, f"[{columns}]")
            fits = history.dim() == 2 and history.shape[0] >= 1 and history.shape[1] == columns
            _check_state(f"{prefix}{key}.amax_history", history, fits, f"[amax_history_len >= 1, {columns}]")
            if not bool((scale.isfinite() & (scale > 0)).all()):
                raise ValueError(f"checkpoint: {prefix}{key}.scale={scale.tolist()}; finite scales > 0 are accepted.")
            if not bool((history >= 0).all()):
                raise ValueError(
                    f"checkpoint: {prefix}{key}.amax_history holds negative numbers or NaN; amaxes >= 0 are accepted."
                )

    # --- forward -------------------------------------------------------------------------------------

    def call(self, inp: torch.Tensor, is_first_microbatch: bool | None) -> Call:
        """How this forward computes, from the current autocast and the input's dtype."""
        if current().enabled:
            self._check_fp8_sizes()
        state, dtype = self.init_fp8_metadata(), self.activation_dtype(inp)
        if state.enabled:
            meta = self.fp8_meta["scaling_fwd"]
            scale = recompute.scale_for(self, meta.scale)
            history = None if recompute.replaying() else meta.amax_history
            return FP8Call(self, dtype, state.recipe, is_first_microbatch, scale, history)
        if state.calibrating and not recompute.replaying():
            return CalibratingCall(self, dtype)
        return Call(self, dtype)

    def main_grad(self, name: str) -> torch.Tensor | None:
        """Where the gradient of weight `name` is to be added, if `fuse_wgrad_accumulation` asks for it."""
        if not self.fuse_wgrad_accumulation:
            return None
        main_grad = getattr(getattr(self, name), "main_grad", None)
        if main_grad is None:
            raise RuntimeError(
                f"{type(self).__name__}: fuse_wgrad_accumulation=True and {name} has no main_grad; "
                f"a float32 or bfloat16 tensor of the weight's shape is accepted."
            )
        return main_grad

    def _check_fp8_sizes(self) -> None:
        for name in self.fp8_sizes:
            if getattr(self, name) % 16:
                raise ValueError(
                    f"{type(self).__name__}: {name}={getattr(self, name)} under FP8 autocast; a multiple of 16 is "
                    f"accepted (rows of FP8 operands start at multiples of 16 bytes)."
                )

    def activation_dtype(self, inp: torch.Tensor) -> torch.dtype:
        """The dtype of the output: torch.autocast's where that is on, otherwise the input's."""
        if torch.is_autocast_enabled(inp.device.type):
            return torch.get_autocast_dtype(inp.device.type)
        return inp.dtype

    def check_input(self, inp: torch.Tensor, features: int) -> None:
        """Refuse an input this layer cannot take, in a sentence."""
        name = type(self).__name__
        if not isinstance(inp, torch.Tensor):
            raise TypeError(f"{name}: inp={inp!r}; a tensor is accepted.")
        if inp.dtype not in ACTIVATION_DTYPES:
            raise TypeError(f"{name}: inp has dtype {inp.dtype}; float32, bfloat16 and float16 are accepted.")
        if inp.dim() < 1 or inp.shape[-1] != features:
            raise ValueError(f"{name}: inp has shape {list(inp.shape)}; [..., {features}] is accepted.")
        device = self._parameter_device()
        if inp.device != device:
            raise RuntimeError(
                f"{name}: inp is on {inp.device} and the parameters are on {device}; one device is accepted."
            )


def _make_state(identity: int, length: int) -> None:
    """Make or resize the FP8 state of the module with that `id` where it is missing or has not `length` rows."""
    module = scaling.registered(identity)
    for key in scaling.KEYS:
        if key not in module.fp8_meta:
            columns = module._columns(key)
            module.fp8_meta[key] = FP8TensorMeta.fresh(columns, length, module._parameter_device())
        elif module.fp8_meta[key].amax_history.shape[0] != length:
            module.fp8_meta[key].resize(length)
    module.fp8_meta.setdefault("recipe", None)  # set by the caller; there already, so that guards see no new key


# `torch.compiler.assume_constant_result`, without importing the compiler: a compiler runs this while it traces and not
# in its graph, where new state would be an intermediate result. Such a graph serves this module only; one traced when
# eager mode has made the state serves every module like it. torch 2.11 lets only constants in: hence the `id`.
_make_state._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _check_state(name: str, value: torch.Tensor, fits: bool, accepted: str) -> None:
    if value.dtype != torch.float32 or not fits:
        raise ValueError(f"checkpoint: {name} is {value.dtype} {list(value.shape)}; float32 {accepted} is accepted.")
