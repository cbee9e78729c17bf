"""Whole blocks: a decoder layer of Llama's or Mistral's kind becomes one `te.TransformerLayer`.

    h = x + attention(norm(x))        y = h + down( silu(gate(norm(h))) · up(norm(h)) )

Norm, projections, rotary embedding, exact attention and MLP then run as our fused pairs. Parameters are shared, but for
the MLP's first weight: gate's rows and up's become one parameter. A state dict has Hugging Face's names all the same,
in both directions; the FP8 state of the block's parts is beside them.

With a cache of Hugging Face's (`past_key_values`), and where positions differ between rows, the same layer runs part by
part; the bits are the same. With `inference_params`, which `te.Generator` gives, it runs as `te.TransformerLayer`.
"""

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch

from reference.nn.attentions.apply_rotary import rotated_at
from reference.nn.transformer import halves
from reference.state import model_init

# Classes whose forward is the formula above; `transformers` is not imported.
CLASSES = {
    "transformers.models.llama.modeling_llama.LlamaDecoderLayer",
    "transformers.models.mistral.modeling_mistral.MistralDecoderLayer",
}
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")
PARTS = ("self_attn", "mlp", "mlp.act_fn")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
FUNCTIONS = ("apply_rotary_pos_emb", "rotate_half", "repeat_kv", "eager_attention_forward")
# The block's name → Hugging Face's; fc1_weight is gate's rows, then up's.
NAMES = {
    "self_attention.layernorm_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.layernorm_qkv.query_weight": "self_attn.q_proj.weight",
    "self_attention.layernorm_qkv.key_weight": "self_attn.k_proj.weight",
    "self_attention.layernorm_qkv.value_weight": "self_attn.v_proj.weight",
    "self_attention.proj.weight": "self_attn.o_proj.weight",
    "layernorm_mlp.layer_norm_weight": "post_attention_layernorm.weight",
    "layernorm_mlp.fc2_weight": "mlp.down_proj.weight",
}
FC1 = "layernorm_mlp.fc1_weight"
GATE, UP = "mlp.gate_proj.weight", "mlp.up_proj.weight"
NOTE = "gate and up are one parameter; the Trainer decays no weight of a name with layernorm in it, so few of these"
_ROPES = ("default", "linear", "llama3")  # whose frequencies do not depend on the length
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def is_block(module: torch.nn.Module) -> bool:
    """Whether `module` is a decoder layer of a class that is known here."""
    return f"{type(module).__module__}.{type(module).__qualname__}" in CLASSES


def rotary_of(model: torch.nn.Module, name: str) -> Any:
    """The rotary embedding of the nearest module around the one called `name`; None where there is none."""
    owners = name.split(".")
    for count in range(len(owners) - 1, -1, -1):
        found = getattr(model.get_submodule(".".join(owners[:count])), "rotary_emb", None)
        if found is not None:
            return found
    return None


def block_replacement(cls: Any, block: Any, parts: Mapping[str, Any], tied: set[str], rotary: Any) -> Any:
    """A `cls` (te.TransformerLayer) without numbers for a decoder layer, or why its modules are replaced one by one.

    Args:
        cls: the class of one side.
        block: the decoder layer.
        parts: the replacements of its modules, by their names inside: a `Replacement`, or why they stay.
        tied: the names inside of weights that are tied to others.
        rotary: the model's rotary embedding, or None.
    """
    reason = _obstacle(block, parts, tied, rotary)
    if reason is not None:
        return reason
    attention, norm = block.self_attn, parts[NORMS[0]].layer
    rows = {name: block.get_submodule(name).weight.shape[0] for name in (*ATTENTION, *MLP, *NORMS)}
    try:
        return cls(
            rows[NORMS[0]],
            rows[MLP[0]],
            rows[ATTENTION[0]] // attention.head_dim,
            num_gqa_groups=rows[ATTENTION[1]] // attention.head_dim,
            kv_channels=attention.head_dim,
            layernorm_epsilon=norm.eps,
            zero_centered_gamma=norm.zero_centered_gamma,
            normalization="RMSNorm",
            activation="swiglu",
            bias=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            attn_input_format="bshd",
            params_dtype=block.get_parameter(GATE).dtype,
            device="meta",
        )
    except (NotImplementedError, TypeError, ValueError) as error:
        return str(error)


def _obstacle(block: Any, parts: Mapping[str, Any], tied: set[str], rotary: Any) -> str | None:
    """Why a decoder layer does not become a whole block; None where nothing is in the way."""
    for name in (*ATTENTION, *MLP, *NORMS):
        if isinstance(parts.get(name), str) or name not in parts:
            return f"{name}: {parts.get(name, 'it is not there')}"
    others = sorted(set(parts) - {*ATTENTION, *MLP, *NORMS}) + sorted(block._parameters)
    if others:
        return f"it has {', '.join(others)}"
    attention, weights = block.self_attn, {name: block.get_submodule(name).weight for name in parts}
    norms = [parts[name].layer for name in NORMS]
    gate, up = weights[MLP[0]], weights[MLP[1]]
    reasons = {
        "weights are to be kept in FP8": model_init.current() is not None,
        f"{', '.join(sorted(tied))}: a tied weight": bool(tied),
        "projections have a bias": any(block.get_submodule(name).bias is not None for name in (*ATTENTION, *MLP)),
        "weights of several dtypes": len({weight.dtype for weight in weights.values()}) > 1,
        "gate and up differ in requires_grad": gate.requires_grad is not up.requires_grad,
        "its norms differ": len({(norm.eps, norm.zero_centered_gamma) for norm in norms}) > 1,
        f"its activation is {type(block.mlp.act_fn).__name__}": not _is_silu(block.mlp.act_fn),
        f"attention_dropout={attention.attention_dropout}": attention.attention_dropout != 0,
        "its attention is not causal": not (attention.is_causal and getattr(attention.config, "is_causal", True)),
        f"attention's scaling is {attention.scaling}": attention.scaling != attention.head_dim**-0.5,
        "its model has no rotary embedding of a kind that is known": not _is_known(rotary),
    }  # fmt: skip
    return next((reason for reason, holds in reasons.items() if holds), _other_code(block, rotary))


def _other_code(block: Any, rotary: Any) -> str | None:
    """What in a decoder layer is not the code of its class's file: a changed class, method or function, or a hook."""
    own, home = type(block).__module__, sys.modules[type(block).__module__]
    parts = {"it": block, **{name: block.get_submodule(name) for name in PARTS}, "rotary_emb": rotary}
    extra = {name for name, _ in block.named_modules()} - {"", *PARTS, *ATTENTION, *MLP, *NORMS}
    if extra:
        return f"it has {', '.join(sorted(extra))}"
    for name, part in parts.items():
        if name != "mlp.act_fn" and type(part).__module__ != own:
            return f"{name} is a {type(part).__module__}.{type(part).__qualname__}"
        if any(getattr(part, hooks) for hooks in HOOKS):
            return "hooks are registered on it" if part is block else f"hooks are registered on {name}"
        if "forward" in vars(part) or not is_as_written(type(part)):
            return f"the forward of {name} was replaced"
    changed = [name for name in FUNCTIONS if getattr(getattr(home, name, None), "__module__", own) != own]
    return f"{own}.{changed[0]} was replaced" if changed else None


def is_as_written(cls: Any) -> bool:
    """Whether the forward of a class is from the file of the class that defines it."""
    owner = next(one for one in cls.__mro__ if "forward" in vars(one))
    return bool(inspect.unwrap(owner.forward).__globals__["__name__"] == owner.__module__)


def _is_silu(function: Any) -> bool:
    cls = type(function)
    return cls is torch.nn.SiLU or f"{cls.__module__}.{cls.__name__}" == "transformers.activations.SiLUActivation"


def _is_known(rotary: Any) -> bool:
    known = getattr(rotary, "rope_type", None) in _ROPES and getattr(rotary, "attention_scaling", None) == 1.0
    return known and isinstance(getattr(rotary, "inv_freq", None), torch.Tensor)


def fill_block(layer: Any, block: Any, rotary: Any) -> None:
    """Give a block without numbers the decoder layer's parameters and attributes."""
    device = block.get_parameter(GATE).device
    for part in layer.modules():  # what else was made on the meta device: states, and biases without elements
        part._parameters.update(dict.fromkeys(part._parameters))
        plain = {key: value for key, value in vars(part).items() if isinstance(value, torch.Tensor) and value.is_meta}
        vars(part).update({key: torch.empty_like(value, device=device) for key, value in plain.items()})
    layer.to_empty(device=device)
    for ours, theirs in NAMES.items():
        owner, _, name = ours.rpartition(".")
        setattr(layer.get_submodule(owner), name, block.get_parameter(theirs))
    gate, up = block.get_parameter(GATE), block.get_parameter(UP)
    joined = torch.cat([gate.detach(), up.detach()])
    layer.layernorm_mlp.fc1_weight = torch.nn.Parameter(joined, gate.requires_grad)
    layer.train(block.training)
    vars(layer).update((key, value) for key, value in vars(block).items() if key not in vars(layer))
    # In a tuple, so that the embedding is no submodule: the model has it already.
    vars(layer).update(shared=(rotary, block.self_attn.config), layer_idx=block.self_attn.layer_idx)
    for part in (layer, layer.self_attention, layer.self_attention.core_attention):
        part.layer_number = block.self_attn.layer_idx + 1


class DecoderBlock(torch.nn.Module):
    """What a `te.TransformerLayer` needs in a decoder layer's place; `reference.conversion.layers.both` joins them."""

    shared: tuple[Any, Any]  # with the model: its rotary embedding and its config
    layer_idx: int
    self_attention: Any
    layernorm_mlp: Any
    generator: Any
    _add: Any

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """The decoder layer's forward; angles are computed from `position_ids` and the model's frequencies."""
        rotary, config = self.shared
        if config._attn_implementation != "sdpa":
            given = f"attn_implementation={config._attn_implementation!r}"
            raise NotImplementedError(f"te.convert's blocks: {given} is not offered; 'sdpa' is accepted.")
        for name in _PACKED:
            if kwargs.get(name) is not None:
                raise NotImplementedError(f"te.convert's blocks: {name} is not offered; attention_mask is accepted.")
        if kwargs.get("is_causal") is False:
            raise NotImplementedError("te.convert's blocks: is_causal=False is not offered; True is accepted.")
        if kwargs.get("inference_params") is not None:
            return self._generating(hidden_states, kwargs["inference_params"])
        if position_ids is None:
            position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None]
        frequencies = rotary.inv_freq.to(hidden_states.device, torch.float32)
        angles = position_ids[..., None].float() * frequencies
        angles = torch.cat([angles, angles], -1)  # [batch or 1, s, channels]
        mask = hidden_from(attention_mask)
        if past_key_values is None and angles.shape[0] == 1:
            mask_type = "causal" if mask is None else "arbitrary"
            # `forward` of te.TransformerLayer, which comes after this class.
            return super().forward(hidden_states, mask, mask_type, rotary_pos_emb=angles[0, :, None, None])  # type: ignore
        return self._by_parts(hidden_states, mask, angles, past_key_values)

    def _generating(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        """x [batch, s, hidden] or, packed, [1, tokens, hidden] after the tokens in an `InferenceParams`."""
        rotary, config = self.shared
        angles = cache.kept.get(rotary)
        if angles is None:
            frequencies = rotary.inv_freq.to(x.device, torch.float32)
            angles = torch.arange(cache.max_sequence_length, device=x.device)[:, None].float() * frequencies
            angles = cache.kept[rotary] = torch.cat([angles, angles], -1)[:, None, None]
        window = getattr(config, "sliding_window", None)
        limits = (-1 if window is None else window - 1, 0)
        # `forward` of te.TransformerLayer, which comes after this class.
        return super().forward(x, window_size=limits, inference_params=cache, rotary_pos_emb=angles)  # type: ignore

    def _by_parts(self, x: torch.Tensor, mask: Any, angles: torch.Tensor, cache: Any) -> torch.Tensor:
        attention, tokens = self.self_attention, x.shape[:2]
        mixed = attention.layernorm_qkv(x)
        q, k, v = attention._split(mixed, attention.num_attention_heads // attention.num_gqa_groups)
        rows = angles.expand(*tokens, -1).reshape(-1, 1, 1, angles.shape[-1])
        each = torch.arange(rows.shape[0], device=x.device).view(tokens)
        q, k = (rotated_at(t, rows, False, each) for t in (q, k))
        if cache is not None:
            k, v = cache.update(k.transpose(1, 2), v.transpose(1, 2), self.layer_idx)
            k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
        mask_type = "causal_bottom_right" if mask is None else "arbitrary"
        out = attention.core_attention(q, k, v, mask, attn_mask_type=mask_type)
        no_dropout = (0.0, self.generator)
        h = halves.add_residual(self, attention.proj(out), x, no_dropout, normed=True)
        return halves.add_residual(self, self.layernorm_mlp(h), h, no_dropout, normed=True)

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """As every module's, with Hugging Face's names."""
        found: dict[str, Any] = super().state_dict(*args, prefix=prefix, **kwargs)
        for ours, theirs in NAMES.items():
            found[prefix + theirs] = found.pop(prefix + ours)
        found[prefix + GATE], found[prefix + UP] = found.pop(prefix + FC1).chunk(2)
        return found

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for ours, theirs in NAMES.items():
            if prefix + theirs in state_dict:
                state_dict[prefix + ours] = state_dict.pop(prefix + theirs)
        if prefix + GATE in state_dict and prefix + UP in state_dict:
            state_dict[prefix + FC1] = torch.cat([state_dict.pop(prefix + GATE), state_dict.pop(prefix + UP)])
        super()._load_from_state_dict(state_dict, prefix, *args)


def hidden_from(mask: Any) -> torch.Tensor | None:
    """Our mask (True is hidden) of Hugging Face's (True is seen)."""
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4 or mask.dtype != torch.bool:
        shown = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, torch.Tensor) else f"a {type(mask).__name__}"
        raise TypeError(
            f"te.convert's blocks: attention_mask is {shown}; None or a torch.bool tensor of four dimensions is "
            f"accepted, as attn_implementation='sdpa' gives it."
        )
    return ~mask
