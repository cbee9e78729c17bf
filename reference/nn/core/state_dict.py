"""How a layer's FP8 state, and its weights that are kept in FP8, enter checkpoints and are loaded."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from reference.checkpoints import checkpoint_format, transformer_engine_state
from reference.float8.float8_storage import layout_of
from reference.float8.kept_tensor import FP8, KeptTensor, kept_in
from reference.nn.core.fp8_state import WithFP8State
from reference.recipe import DelayedScaling
from reference.recipes.quantized import Operand, dequantize
from reference.state.scaling import KEYS, FP8TensorMeta, columns_of, regrouped
from reference.support.dtensor import is_dtensor, like
from reference.support.notice import say_once


class Checkpointed(WithFP8State):
    """`state_dict` and `load_state_dict` of one layer; `reference.checkpoints.checkpoint_format` defines the
    entries."""

    @classmethod
    def name_scale_invs(cls, weights: Iterable[str]) -> None:
        """Add `weight_scale_inv` and the like, which `state_dict` has beside weights that are kept in FP8."""
        for name in weights:
            if not hasattr(cls, f"{name}_scale_inv"):
                read, write = functools.partial(_scale_inv, name=name), functools.partial(_set_scale_inv, name=name)
                setattr(cls, f"{name}_scale_inv", property(read, write))

    def get_extra_state(self) -> torch.Tensor:
        """The FP8 state as `reference.checkpoints.checkpoint_format` packs it; a fresh one before the first run in
        FP8."""
        state: Any = self.fp8_meta if "scaling_fwd" in self.fp8_meta else self._unused_state(self._parameter_device())
        weights: Any = self._fp8_parameters()
        kept = {column: weights[name]._scale_inv for name, column in self.fp8_weights.items() if name in weights}
        return checkpoint_format.pack(state, kept)

    def _unused_state(self, device: torch.device) -> checkpoint_format.State:
        rows, columns = DelayedScaling().amax_history_len, self.state_columns()
        return {key: FP8TensorMeta.fresh(columns[key], rows, device) for key in KEYS}

    def set_extra_state(self, state: Any) -> None:
        """Take the FP8 state of `get_extra_state`, or of Transformer Engine's; scales start at 1 where it has none.

        A loader of one entry after the other, as Hugging Face's `from_pretrained`, gives a layer that does not keep
        weights in FP8 the codes as numbers; it is refused.
        """
        prefix, device = f"{type(self).__name__}.", self._parameter_device()
        given = {prefix + checkpoint_format.STATE: state}
        self.check_present(given, prefix)
        self.refuse_codes("set_extra_state", state)
        self.load_state(self.taken(given, prefix, device))

    def _columns_in(self, state_dict: Mapping[str, Any], prefix: str) -> dict[str, int]:
        """The columns of the state in a checkpoint: a weight of several parts has one scale there, or one each."""
        own = max(self.roles.slots, len(self.roles.parts))
        parts = len(self.columns_of_parts())
        others = {1, max(parts, 1)} - {own} if self.roles.slots == 1 else ()
        return columns_of(checkpoint_format.gemms_of(state_dict, prefix, (own, *others)))

    def check_present(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Refuse broken state of this layer."""
        checkpoint_format.check_present(state_dict, prefix, self._columns_in(state_dict, prefix))

    def taken(self, state_dict: dict[str, Any], prefix: str, device: torch.device) -> checkpoint_format.State | None:
        """Remove the layer's state, checked before, from `state_dict`, and return it as this layer keeps it."""
        state = checkpoint_format.take(state_dict, prefix, self._columns_in(state_dict, prefix), device)
        return None if state is None else regrouped(state, max(self.roles.slots, len(self.roles.parts)))

    def refuse_codes(self, caller: str, state: Any, name: str = "") -> None:
        """Refuse the state of a layer that keeps weights in FP8, unless this one does."""
        kept = checkpoint_format.kept_weights(state, self._kept_in(state)) if self.quantized_init is None else {}
        for weight, scale_inv in kept.items():
            raise ValueError(
                f"{caller}: in the checkpoint {name or type(self).__name__} keeps {weight} in FP8 (scale_inv="
                f"{scale_inv}) and in the model it does not: a loader of single entries, such as from_pretrained, may "
                f"have read codes as numbers; layers made or converted in quantized_model_init, or load_state_dict, "
                f"are accepted."
            )

    def _kept_in(self, packed: Any) -> Mapping[str, int]:
        """The columns of the weights that a packed state says may be kept in FP8."""
        parts = self.columns_of_parts()
        written = checkpoint_format.gemms_of({checkpoint_format.STATE: packed}, "", (self.roles.slots, len(parts)))
        return parts if written == len(parts) else {}

    def load_state(self, state: checkpoint_format.State | None) -> None:
        """Take FP8 state that was checked before; where there is none, scales start at 1."""
        if state is None:
            self._fresh_state(self._parameter_device())
        else:
            self._take_state(state)
        self._bind_weights()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        theirs = transformer_engine_state.is_writing()
        if theirs:
            state = regrouped(self.fp8_meta, self.roles.slots) if "scaling_fwd" in self.fp8_meta else self.fp8_meta
            destination[prefix + checkpoint_format.STATE] = transformer_engine_state.write(state, self.roles.slots)
        for name, weight in self._fp8_parameters().items():
            of = self._parameters[name]
            if theirs:
                destination[prefix + name] = like(of, weight.numbers())
            elif not keep_vars:
                kept = weight._kept
                codes = like(of, kept.codes)
                destination[prefix + name], destination[f"{prefix}{name}_scale_inv"] = codes, kept.scale_inv

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Take what Hugging Face's `from_pretrained` sets for a weight that is kept in FP8: its codes and scale_inv.

        Of a weight that the checkpoint lacks it sets undefined numbers here, and draws others.
        """
        weight = self._parameters.get(name.removesuffix("_scale_inv"))
        if param is None or not isinstance(weight, KeptTensor) or isinstance(param, KeptTensor):
            super().register_parameter(name, param)
        elif name.endswith("_scale_inv"):
            weight.remove_caches()
            weight._kept.scale_inv = param.detach()
        elif param.dtype == FP8:
            scales, column = self.scales_of(name), self.fp8_weights[name]
            kept = KeptTensor.of_codes(param.detach(), weight._scale_inv, weight.dtype, scales, column)
            self._put(name, kept, param)
        elif weight.is_meta and type(param) is torch.nn.Parameter and not param.is_meta:
            if KEYS[0] in self.fp8_meta and self.fp8_meta[KEYS[0]].scale.is_meta:
                self._fresh_state(param.device)
            self._put(name, weight.on(param.device), param)
            self._bind_weights()
        else:
            super().register_parameter(name, param)

    def _put(self, name: str, weight: KeptTensor, param: torch.nn.Parameter) -> None:
        """Replace a weight that is kept in FP8; the new one has the marks that a loader has put on `param`."""
        before: Any = self._parameters[name]
        self._parameters[name] = made = torch.nn.Parameter(weight, requires_grad=before.requires_grad)
        vars(made).update((key, value) for key, value in vars(param).items() if key not in vars(made))

    def check_checkpoint(self, state_dict: Mapping[str, Any], prefix: str, assign: bool) -> None:
        """Refuse broken entries of this module in a checkpoint; `assign`: they will replace the parameters."""
        for name, parameter in self._parameters.items():
            if parameter is not None and prefix + name in state_dict:
                scale_inv = state_dict.get(f"{prefix}{name}_scale_inv")
                checkpoint_format.check_weight(prefix + name, state_dict[prefix + name], scale_inv, parameter, assign)
        self.check_state(state_dict, prefix)

    def check_state(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """`check_checkpoint` of the FP8 state."""
        name = prefix + checkpoint_format.STATE
        if self.fp8_weights or self.keeps_scales:
            self.check_present(state_dict, prefix)
            checkpoint_format.check_no_codes(state_dict, prefix, self._kept_in(state_dict.get(name)))
        elif name in state_dict:
            checkpoint_format.check_no_state(name, state_dict[name])

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
        """Load FP8 state and parameters; refuse broken entries before anything in the whole model changes.

        Weights may be FP8 codes with a scale_inv, as saved by a module that keeps them in FP8, or plain numbers,
        whichever this module keeps; plain ones are cast with the scales that are loaded.
        """
        assign = local_metadata.get("assign_to_params_buffers", False)
        checkpoint_format.check_all(self, state_dict, prefix, assign)
        self._store.casts.clear()
        state_dict = dict(state_dict)
        own = [state_dict[prefix + name] for name in self._parameters if prefix + name in state_dict]
        if self.fp8_weights or self.keeps_scales:
            device = own[0].device if own and assign else self._parameter_device()
            state = self.taken(state_dict, prefix, device)
            stateless = self.quantized_init is not None and self.quantized_init.recipe.history_rows is None
            if not stateless and (own if state is None else checkpoint_format.is_fresh(state)):
                of = prefix.rstrip(".") or "the module"
                say_once("fresh state", f"checkpoint: no FP8 state for {of!r}: scales start at 1, as in a fresh module")
            if state is not None:
                self._take_state(state)
            elif own:
                self._fresh_state(device)
            self._bind_weights()
            self._join_weights(state_dict, prefix, assign)
        else:
            state_dict.pop(prefix + checkpoint_format.STATE, None)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        # Checkpoints without FP8 state load, too.
        missing_keys[:] = [name for name in missing_keys if name != prefix + checkpoint_format.STATE]
        self._bind_weights()

    def _join_weights(self, state_dict: dict[str, Any], prefix: str, assign: bool) -> None:
        """Convert each weight of `state_dict` to what this module keeps: a KeptTensor, or numbers of its dtype."""
        for name, column in self.columns_of_parts().items():
            weight, value = self._parameters.get(name), state_dict.get(prefix + name)
            if weight is None or value is None:
                continue
            scales: Any = None if self.quantized_init is None else self.scales_of(name)
            dtype = value.dtype
            if value.dtype == FP8:
                scale_inv, dtype = state_dict.pop(f"{prefix}{name}_scale_inv"), weight.dtype
                scale_inv = checkpoint_format.filled_up(scale_inv, value.shape)
                layout = checkpoint_format.layout_beside(scale_inv, value.shape)
                assert layout is not None  # it was checked
                if (rows := kept_in(weight) if is_dtensor(value) else None) is not None:
                    if layout != layout_of(scales):
                        raise NotImplementedError(
                            f"checkpoint: {prefix}{name} has scales {list(scale_inv.shape)} of another recipe than the "
                            f"layer's, and is a DTensor; those of the same recipe are accepted."
                        )
                    rows.place_on(weight.device_mesh)  # type: ignore[attr-defined]
                    with torch.no_grad():
                        state_dict[prefix + name] = like(weight, rows.of_shard(value.to_local(), scale_inv))
                    continue
                if scales is not None and layout == layout_of(scales):
                    state_dict[prefix + name] = KeptTensor.of_codes(value, scale_inv, dtype, scales, column)
                    continue
                wide = dtype if scales is None else torch.float32
                value = dequantize(Operand(value, scale_inv, layout), value.shape[-1], wide)
            if scales is not None and assign:  # copied otherwise, which casts
                value = value.numbers() if isinstance(value, KeptTensor) else value.detach()
                value = KeptTensor.of(value, scales, column, dtype)
            state_dict[prefix + name] = value


# --- weight_scale_inv ------------------------------------------------------------------------------------


def _scale_inv(module: Checkpointed, name: str) -> torch.nn.Parameter:
    """The scale_inv of a weight that is kept in FP8. transformers asks for it by name, as for every other parameter."""
    weight = kept_in(module._parameters.get(name))
    if weight is None:
        raise AttributeError(f"{type(module).__name__}: {name} is not kept in FP8 and has no scale_inv.")
    found = torch.nn.Parameter(weight._scale_inv, requires_grad=False)
    # Whether transformers shall not count it among the missing: it is there, or will be drawn with its weight.
    found._is_hf_initialized = weight.is_meta or not found.is_meta  # type: ignore[attr-defined]
    return found


def _set_scale_inv(module: Checkpointed, value: Any, name: str) -> None:
    """Refused. transformers comes here where a checkpoint has a weight and no scale_inv."""
    weight: Any = module._parameters.get(name)
    if isinstance(weight, KeptTensor) and weight._scale_inv.is_meta and not weight.is_meta:
        raise ValueError(
            f"from_pretrained: in the checkpoint {name} has no {name}_scale_inv, and {type(module).__name__} keeps it "
            f"in FP8: transformers has rounded numbers to codes without a scale. Such a checkpoint is accepted by "
            f"load_state_dict, or by from_pretrained of a model that is converted afterwards."
        )
    raise AttributeError(f"{type(module).__name__}: {name}_scale_inv is written with {name} alone.")
