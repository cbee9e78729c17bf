"""What every layer shares: FP8 state, its way into checkpoints, and the checks before a forward."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from reference import model_init, recompute, scaling
from reference.autocast import AutocastState, current
from reference.formats import WIDE_DTYPES
from reference.nn import fp8_state
from reference.nn.float8_tensor import FP8, Float8Tensor, dequantized
from reference.nn.parameters import DeviceDefault, InitMethod
from reference.nn.precision import CalibratingCall, Call, FP8Call, Operand
from reference.notice import say_once
from reference.recipe import DelayedScaling
from reference.scaling import BACKWARD_TENSORS, FORWARD_TENSORS, FP8TensorMeta


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

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """`weight_scale_inv` and the like, which `state_dict` names beside weights that are kept in FP8."""
        super().__init_subclass__(**kwargs)
        for name in cls.__dict__.get("fp8_weights", ()):
            setattr(cls, f"{name}_scale_inv", property(functools.partial(_scale_inv, name=name)))

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
        """Without the membership, which may be of a process group; cached weights as bytes: torch pickles no float8."""
        cached = {name: list(map(_as_bytes, one)) for name, one in self._fp8_workspaces.items()}
        return {**self.__dict__, "_membership": None, "_fp8_workspaces": cached}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy or an unpickled module is a module of its own: it registers itself."""
        super().__setstate__(state)
        cached: dict[str, Any] = self._fp8_workspaces
        self._fp8_workspaces = {name: Operand(*map(_of_bytes, one)) for name, one in cached.items()}
        scaling.register(self)
        self._bind_weights()

    def _replicate_for_data_parallel(self) -> Any:
        """`torch.nn.DataParallel` runs copies in threads of its own, where no autocast is open."""
        if current().enabled:
            raise RuntimeError(
                f"{type(self).__name__}: torch.nn.DataParallel under FP8 autocast is not offered; "
                f"torch.nn.parallel.DistributedDataParallel is accepted."
            )
        return super()._replicate_for_data_parallel()

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
        self._fp8_workspaces.clear()
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

    def keep_in_fp8(self) -> None:
        """In `quantized_model_init` on the meta device: weights in FP8, without numbers yet."""
        if self.quantized_init is None or not self.fp8_weights:
            return
        self._check_fp8_sizes("in quantized_model_init")
        self._fresh_state(self._parameter_device())
        for name, column in self.fp8_weights.items():
            weight = self._parameters[name]
            assert weight is not None
            codes = torch.empty(weight.shape, dtype=FP8, device=weight.device)
            scale_inv = torch.empty(1, dtype=torch.float32, device=weight.device)
            kept = Float8Tensor.of_codes(codes, scale_inv, weight.dtype, self.fp8_meta["scaling_fwd"], column)
            self.register_parameter(name, torch.nn.Parameter(kept, requires_grad=weight.requires_grad))

    def _fresh_state(self, device: torch.device) -> None:
        """Scales of 1 and empty histories; where weights are kept in FP8 state exists from the beginning."""
        for key in scaling.KEYS:
            if key in self.fp8_meta:
                self.fp8_meta[key].to(device)
                self.fp8_meta[key].reset()
            elif self.quantized_init is not None and self.fp8_weights:
                rows = self.quantized_init.recipe.amax_history_len
                self.fp8_meta[key] = FP8TensorMeta.fresh(self._columns(key), rows, device)
                self.fp8_meta["recipe"] = self.quantized_init.recipe

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
            if not recompute.replaying():  # autograd's thread is not the one whose autocast updates
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

    def state_columns(self) -> dict[str, int]:
        """How many columns `scaling_fwd` and `scaling_bwd` have."""
        return {key: self._columns(key) for key in scaling.KEYS}

    def get_extra_state(self) -> torch.Tensor:
        """The FP8 state as `reference.nn.fp8_state` packs it; before the first run in FP8 a fresh one."""
        state = self.fp8_meta
        if not state:
            rows, device = DelayedScaling().amax_history_len, self._parameter_device()
            state = {key: FP8TensorMeta.fresh(columns, rows, device) for key, columns in self.state_columns().items()}
        return fp8_state.pack(state)

    def set_extra_state(self, state: Any) -> None:
        """Take the FP8 state that `get_extra_state` gave."""
        fp8_state.check_state(f"{type(self).__name__}.{fp8_state.STATE}", state, self.state_columns())
        self._take_state(fp8_state.unpack(state, self.state_columns(), self._parameter_device()))
        self._bind_weights()

    def make_state(self, recipe: DelayedScaling) -> None:
        """Make or resize the FP8 state as a run under `recipe` would."""
        _make_state(id(self), recipe.amax_history_len)
        self._history_rows = None
        self._bind_weights()

    def load_state(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Take the FP8 state, checked before, that `state_dict` has under `prefix`."""
        state = fp8_state.take(state_dict, prefix, self.state_columns(), self._parameter_device())
        if state is not None:
            self._take_state(state)
            self._bind_weights()

    def _take_state(self, state: fp8_state.State) -> None:
        """Replace the FP8 state, in its memory where that has the same shape: CUDA graphs read it there."""
        for key, new in state.items():
            if key not in self.fp8_meta or not self.fp8_meta[key].copy_(new):
                self.fp8_meta[key] = new
        self._history_rows = None

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, weight in self._fp8_parameters().items():
            if not keep_vars:
                destination[prefix + name], _, destination[f"{prefix}{name}_scale_inv"] = weight.operand(False)

    def check_checkpoint(self, state_dict: Mapping[str, Any], prefix: str, assign: bool) -> None:
        """Refuse broken entries of this module in a checkpoint, which are copied, or put in its place."""
        for name, parameter in self._parameters.items():
            if parameter is not None and prefix + name in state_dict:
                scale_inv = state_dict.get(f"{prefix}{name}_scale_inv")
                fp8_state.check_weight(prefix + name, state_dict[prefix + name], scale_inv, parameter, assign)
        if self.fp8_weights:
            fp8_state.check_present(state_dict, prefix, self.state_columns())

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
        """Load FP8 state and parameters; refuse what is broken before anything of the whole model changes.

        Weights may be FP8 codes with a scale_inv, as a module that keeps them in FP8 saves them, or plain numbers,
        whichever of both this module keeps; plain ones are cast with the scales that are loaded.
        """
        assign = local_metadata.get("assign_to_params_buffers", False)
        fp8_state.check_all(self, state_dict, prefix, assign)
        self._fp8_workspaces.clear()
        state_dict = dict(state_dict)
        own = [state_dict[prefix + name] for name in self._parameters if prefix + name in state_dict]
        if self.fp8_weights:
            device = own[0].device if own and assign else self._parameter_device()
            state = fp8_state.take(state_dict, prefix, self.state_columns(), device)
            if state is None or fp8_state.is_fresh(state):
                of = prefix.rstrip(".") or "the module"
                say_once("fresh state", f"checkpoint: no FP8 state for {of!r}: scales start at 1, as in a fresh module")
            if state is not None:
                self._take_state(state)
            elif own:
                self._fresh_state(device)
            self._bind_weights()
            self._join_weights(state_dict, prefix, assign)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        missing_keys[:] = [name for name in missing_keys if name != prefix + fp8_state.STATE]  # plain checkpoints load
        self._bind_weights()

    def _join_weights(self, state_dict: dict[str, Any], prefix: str, assign: bool) -> None:
        """Make each weight of `state_dict` what this module keeps: a Float8Tensor, or numbers of its dtype."""
        for name, column in self.fp8_weights.items():
            weight, value = self._parameters.get(name), state_dict.get(prefix + name)
            if weight is None or value is None:
                continue
            state: Any = self.fp8_meta.get("scaling_fwd")
            if value.dtype == FP8:
                scale_inv = state_dict.pop(f"{prefix}{name}_scale_inv")
                if self.quantized_init is None:
                    value = dequantized(value, scale_inv, weight.dtype)
                else:
                    value = Float8Tensor.of_codes(value, scale_inv, weight.dtype, state, column)
            elif self.quantized_init is not None and assign:  # copied otherwise, which casts
                value = value.dequantize() if isinstance(value, Float8Tensor) else value.detach()
                value = Float8Tensor.of(value, state, column)
            state_dict[prefix + name] = value

    # --- forward -------------------------------------------------------------------------------------

    def call(self, inp: torch.Tensor, is_first_microbatch: bool | None) -> Call:
        """How this forward computes, from the current autocast and the input's dtype."""
        if self.quantized_init is not None:
            self._check_kept_in_fp8()
        if self.fuse_wgrad_accumulation:  # a backward would find out when it has added to others already
            for name in self.fp8_weights:
                if getattr(self._parameters.get(name), "main_grad", None) is not None:
                    self.main_grad(name)
        state, dtype = self.init_fp8_metadata(), self.activation_dtype(inp)
        if state.enabled:
            meta = self.fp8_meta["scaling_fwd"]
            scale = recompute.scale_for(self, meta.scale)
            history = None if recompute.replaying() else meta.amax_history
            return FP8Call(self, dtype, state.recipe, is_first_microbatch, scale, history)
        if state.calibrating and not recompute.replaying():
            return CalibratingCall(self, dtype)
        return Call(self, dtype)

    def _check_kept_in_fp8(self) -> None:
        """Refuse a plain parameter in the place of a weight that this module keeps in FP8."""
        for name in self.fp8_weights:
            weight = self._parameters.get(name)
            if isinstance(weight, torch.nn.Parameter) and not isinstance(weight, Float8Tensor):
                raise RuntimeError(
                    f"{type(self).__name__}: {name} is a plain {weight.dtype} parameter in a layer that was made in "
                    f"quantized_model_init; a weight in FP8 is accepted. What replaced it (FSDP2's fully_shard, an "
                    f"assignment) needs a layer that was made outside of quantized_model_init."
                )

    def main_grad(self, name: str) -> torch.Tensor | None:
        """Where the gradient of weight `name` is to be added, if `fuse_wgrad_accumulation` asks for it."""
        if not self.fuse_wgrad_accumulation:
            return None
        weight = getattr(self, name)
        main_grad: torch.Tensor | None = getattr(weight, "main_grad", None)
        if main_grad is None:
            raise RuntimeError(
                f"{type(self).__name__}: fuse_wgrad_accumulation=True and {name} has no main_grad; "
                f"a float32 or bfloat16 tensor of the weight's shape is accepted."
            )
        fits = main_grad.shape == weight.shape and main_grad.device == weight.device
        if main_grad.dtype not in WIDE_DTYPES or not fits:
            raise RuntimeError(
                f"{type(self).__name__}: {name}.main_grad is {main_grad.dtype} {list(main_grad.shape)} on "
                f"{main_grad.device}; a float32, bfloat16 or float16 tensor {list(weight.shape)} on {weight.device} is "
                f"accepted."
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


def _scale_inv(module: TransformerEngineBaseModule, name: str) -> torch.Tensor:
    weight = module._parameters.get(name)
    if not isinstance(weight, Float8Tensor):
        raise AttributeError(f"{type(module).__name__}: {name} is not kept in FP8 and has no scale_inv.")
    found: torch.Tensor = weight._scale_inv
    return found


def _as_bytes(t: torch.Tensor | None) -> Any:
    return t if t is None or t.dtype.itemsize > 1 else (t.view(torch.uint8), t.dtype)


def _of_bytes(kept: Any) -> Any:
    return kept[0].view(kept[1]) if isinstance(kept, tuple) else kept


def _make_state(identity: int, length: int) -> None:
    """Make, move or resize the FP8 state of the module with that `id` where its device or rows are not the module's."""
    module = scaling.registered(identity)
    device = module._parameter_device()
    for key in scaling.KEYS:
        if key not in module.fp8_meta:
            module.fp8_meta[key] = FP8TensorMeta.fresh(module._columns(key), length, device)
            continue
        meta: FP8TensorMeta = module.fp8_meta[key]
        meta.to(device)  # a loader may have replaced the parameters one by one
        if meta.amax_history.shape[0] != length:
            meta.resize(length)
    module.fp8_meta.setdefault("recipe", None)  # set by the caller; there already, so that guards see no new key


# `torch.compiler.assume_constant_result`, without importing the compiler: a compiler runs this while it traces and not
# in its graph, where new state would be an intermediate result. Such a graph serves this module only; one traced when
# eager mode has made the state serves every module like it. torch 2.11 lets only constants in: hence the `id`.
_make_state._dynamo_marked_constant = True  # type: ignore[attr-defined]
