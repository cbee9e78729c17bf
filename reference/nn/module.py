"""What every layer shares: FP8 state, its way into checkpoints, and the checks before a forward."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from reference import model_init, recompute, scaling
from reference.autocast import AutocastState, current
from reference.nn.float8_tensor import FP8, Float8Tensor, dequantized
from reference.nn.parameters import DeviceDefault, InitMethod
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
        fp8_weights: names of the weights, and their columns of `scaling_fwd`.
        quantized_init: the settings of the `quantized_model_init` that it was made in; None outside of one.
    """

    num_gemms = 1
    fp8_sizes: tuple[str, ...] = ()
    fp8_weights: ClassVar[dict[str, int]] = {}
    fuse_wgrad_accumulation = return_layernorm_output = False
    eps: Any = None  # of a layer with a norm, as the next two
    zero_centered_gamma: Any = None
    kind: Any = None
    activation: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.fp8 = False
        self.fp8_meta: dict[str, Any] = {}
        self._history_rows: int | None = None  # what the state is known to have: no need to look
        self._fp8_workspaces: dict[str, Operand] = {}
        self._membership: scaling.Membership | None = None
        self.quantized_init = model_init.current()
        scaling.register(self)

    def __getstate__(self) -> dict[str, Any]:
        """Without the membership: a process group can be neither copied nor pickled."""
        return {**self.__dict__, "_membership": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy or an unpickled module is a module of its own: it registers itself."""
        super().__setstate__(state)
        scaling.register(self)
        self._bind_weights()

    # --- FP8 state -----------------------------------------------------------------------------------

    def _columns(self, key: str) -> int:
        names = FORWARD_TENSORS if key == "scaling_fwd" else BACKWARD_TENSORS
        return self.num_gemms * len(names)

    def _parameter_device(self) -> torch.device:
        return next(parameter for parameter in self._parameters.values() if parameter is not None).device

    def initialize(self, name: str, init_method: InitMethod) -> None:
        """Let `init_method` fill a weight; in `quantized_model_init` what it gives is cast to FP8 and let go."""
        weight = self._parameters[name]
        assert weight is not None
        if self.quantized_init is None:
            init_method(weight)
            return
        if isinstance(weight, Float8Tensor):
            values = weight.dequantize()
            init_method(values)
            weight.quantize_(values)
        else:
            self._check_fp8_sizes("in quantized_model_init")
            init_method(weight)
            values = weight.detach()
            if not self.fp8_meta:
                self._fresh_state(weight.device)
            cast = Float8Tensor.of(values, self.fp8_meta["scaling_fwd"], self.fp8_weights[name])
            weight = torch.nn.Parameter(cast, requires_grad=weight.requires_grad)
            self.register_parameter(name, weight)
        if self.quantized_init.preserve:
            weight._high_precision_init_val = values.to("cpu", copy=True)  # type: ignore[attr-defined]

    def _fresh_state(self, device: torch.device) -> None:
        """No FP8 state, as before the first forward; where weights are kept in FP8 the one that they begin with."""
        self.fp8_meta.clear()
        scaling.register(self)
        if self.quantized_init is not None and self.fp8_weights:
            recipe = self.quantized_init.recipe
            self.fp8_meta["recipe"] = recipe
            for key in scaling.KEYS:
                self.fp8_meta[key] = FP8TensorMeta.fresh(self._columns(key), recipe.amax_history_len, device)

    def _bind_weights(self) -> None:
        """Let weights in FP8 take their scales from this module's state; not one that it shares of another's."""
        for name, weight in self._fp8_parameters().items():
            if "scaling_fwd" in self.fp8_meta and self.fp8_weights.get(name) == weight._column:
                weight.bind(self.fp8_meta["scaling_fwd"])

    def _fp8_parameters(self) -> dict[str, Float8Tensor]:
        """The weights that are kept in FP8."""
        parameters: dict[str, Any] = self._parameters
        return {name: weight for name, weight in parameters.items() if isinstance(weight, Float8Tensor)}

    def init_fp8_metadata(self) -> AutocastState:
        """Make or resize the FP8 state for the current autocast, if that needs any; return that autocast."""
        state = current()
        recompute.refuse_foreign_recompute(self, state.enabled or self.fp8)
        # `Module.__setattr__` takes its time; a compiler would guard what is read.
        if torch.compiler.is_compiling() or self.fp8 != state.enabled:
            if state.enabled:
                self._check_fp8_sizes("under FP8 autocast")
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
        fp8: dict[str, Any] = self._fp8_parameters()
        self._parameters.update(dict.fromkeys(fp8))
        super()._apply(fn, recurse)
        self._parameters.update(fp8)
        for weight in self._fp8_parameters().values():
            weight.follow(fn)
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
        for name, weight in self._fp8_parameters().items():
            if not keep_vars:
                destination[prefix + name], _, destination[f"{prefix}{name}_scale_inv"] = weight.operand(False)

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
        """Load FP8 state and parameters; refuse a broken state before anything of this module changes.

        Weights may be FP8 codes with a scale_inv, as a module that keeps them in FP8 saves them, or plain numbers,
        whichever of both this module keeps; plain ones are cast with the scales that are loaded.
        """
        names = [f"{prefix}{key}.{part}" for key in scaling.KEYS for part in ("scale", "amax_history")]
        present = [name for name in names if name in state_dict]
        self._check_checkpoint(state_dict, prefix, names, present)
        self._fp8_workspaces.clear()
        self._history_rows = None
        assigned = [state_dict[prefix + name] for name in self._parameters if prefix + name in state_dict]
        replaces = bool(assigned) and local_metadata.get("assign_to_params_buffers", False)
        device = assigned[0].device if replaces else self._parameter_device()
        if present:
            for key in scaling.KEYS:
                scale = state_dict[f"{prefix}{key}.scale"].detach().to(device, copy=True).contiguous()
                history = state_dict[f"{prefix}{key}.amax_history"].detach().to(device, copy=True).contiguous()
                self.fp8_meta[key] = FP8TensorMeta(scale, history)
        else:
            of = prefix.rstrip(".") or "the module"
            say_once("fresh state", f"checkpoint: no FP8 state for {of!r}: scales start at 1, as in a fresh module")
            self._fresh_state(device)
        self._bind_weights()
        state_dict = self._with_weights(state_dict, prefix)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        unexpected_keys[:] = [name for name in unexpected_keys if name not in present]
        self._bind_weights()

    def _with_weights(self, state_dict: dict[str, Any], prefix: str) -> dict[str, Any]:
        """`state_dict` with weights of FP8 codes as one tensor each: a Float8Tensor, or numbers of its dtype."""
        state_dict = dict(state_dict)
        for name, column in self.fp8_weights.items():
            weight, codes = self._parameters.get(name), state_dict.get(prefix + name)
            if weight is None or codes is None or codes.dtype != FP8:
                continue
            scale_inv = state_dict.pop(f"{prefix}{name}_scale_inv")
            if self.quantized_init is None:
                state_dict[prefix + name] = dequantized(codes, scale_inv, weight.dtype)
            else:
                meta = self.fp8_meta["scaling_fwd"]
                state_dict[prefix + name] = Float8Tensor.of_codes(codes, scale_inv, weight.dtype, meta, column)
        return state_dict

    def _check_checkpoint(self, state_dict: dict[str, Any], prefix: str, names: list[str], present: list[str]) -> None:
        for name in self._parameters:
            value = state_dict.get(prefix + name)
            if isinstance(value, torch.Tensor) and value.dtype.itemsize == 1:
                value = _check_codes(prefix + name, value, state_dict.get(f"{prefix}{name}_scale_inv"))
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

    def _check_fp8_sizes(self, where: str) -> None:
        for name in self.fp8_sizes:
            if getattr(self, name) % 16:
                raise ValueError(
                    f"{type(self).__name__}: {name}={getattr(self, name)} {where}; a multiple of 16 is "
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


def _check_codes(name: str, codes: torch.Tensor, scale_inv: Any) -> torch.Tensor:
    """The numbers of a weight that is saved as FP8 codes."""
    if codes.dtype != FP8 or scale_inv is None:
        beside = f"and no {name}_scale_inv" if scale_inv is None else f"beside {name}_scale_inv"
        raise ValueError(f"checkpoint: {name} is {codes.dtype} {beside}; {FP8} with a scale_inv is accepted.")
    _check_state(f"{name}_scale_inv", scale_inv, scale_inv.shape == (1,), "[1]")
    return dequantized(codes, scale_inv, torch.float32)


def _check_state(name: str, value: torch.Tensor, fits: bool, accepted: str) -> None:
    if value.dtype != torch.float32 or not fits:
        raise ValueError(f"checkpoint: {name} is {value.dtype} {list(value.shape)}; float32 {accepted} is accepted.")
