"""Attention in FP8, `fp8_dpa=True` of `DelayedScaling`: its FP8 state, and its pair of functions.

    out = `twin::attention_fp8` of c(q), c(k), c(v)            c(t) is the cast to E4M3, with t ≈ c(t)·t_inv
    dq, dk, dv = `twin::attention_fp8_backward` of the same codes and the forward's results

Results are in the activation dtype, 16 bits. q, k and v are roles with a delayed scale each, in columns 0, 1 and 4 of
the forward's six, as checkpoints have them; the others, and the backward's four, stay unused. The softmax's weights
need no scale (`reference.ops.attentions.attention_fp8` says why).

Packed sequences are cast and read where they lie. Tokens that are in no sequence count for no amax (`twin::cast`), so
scales, codes and results are those of the same sequences in a batch padded with zeros.

The state enters checkpoints as that of other layers, under `_extra_state`; a checkpoint without the entry loads, too.
Transformer Engine's attention has one scale for q, k and v together; its state is accepted if it was not used.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from reference.checkpoints import checkpoint_format, transformer_engine_state
from reference.memory.recompute import Run, current_run
from reference.nn.attentions.fp8_keys_values import check_core
from reference.nn.attentions.heads import dense_rows
from reference.nn.core.compiled import before
from reference.nn.core.context import ModuleContext
from reference.nn.core.module import TransformerEngineBaseModule
from reference.ops.attentions.attention_options import Options
from reference.ops.library import twin
from reference.recipe import Recipe
from reference.recipes.quantized import Quantized
from reference.recipes.quantizer import Quantizer
from reference.recipes.roles import Role, Roles
from reference.state.scaling import KEYS
from reference.state.target_device import probe_target

ROLES = (Role("attention", "q", 0), Role("attention", "k", 1), Role("attention", "v", 4))
# Keys of attention's state: ours and Transformer Engine's, and that of its releases 1.6 and 1.7.
_STATES = (checkpoint_format.STATE, f"fused_attention.{checkpoint_format.STATE}")


class Saved(NamedTuple):
    """What backward reads.

    Attributes:
        q, k, v: codes `[b, h, s, d]` or, packed, `[t, h, d]`; where it calibrated, 16 bits.
        scales: those of q, k and v, fp32 `[1]`; none where it calibrated.
        out, m, inv: attention's results.
        state: the random state from before it.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scales: tuple[torch.Tensor, ...]
    out: torch.Tensor
    m: torch.Tensor
    inv: torch.Tensor
    state: torch.Tensor | None


def _quantized(
    quantizer: Quantizer, x: torch.Tensor, layout: str, places: tuple[Any, Any], transpose: bool
) -> Quantized:
    """x in its layout quantized: codes `[b, h, s, d]`, and a transpose `[b, h, d, s]` if wanted.

    Packed, x and its codes are `[t, h, d]`, and the transpose is `[h, d, t]`; `places`: its lengths and starts.
    """
    rows, (h, d) = x.shape[:-2], x.shape[-2:]
    tokens = rows.numel()
    if layout == "thd":
        row, column = quantizer.quantize_packed(x.reshape(tokens, h * d).contiguous(), *places, transpose)
        if column is not None:
            column = column._replace(codes=column.codes[:, :tokens].view(h, d, tokens))
        return Quantized(row._replace(codes=row.codes.view(x.shape)), column)
    first, second = rows
    if layout == "sbhd":
        row, column = quantizer.quantize(x.reshape(first, second * h * d).contiguous(), transpose)
        row = row._replace(codes=row.codes.view(x.shape).permute(1, 2, 0, 3))
        if column is not None:
            column = column._replace(codes=column.codes[:, :first].view(second, h, d, first))
    else:
        row, column = quantizer.quantize(x.reshape(tokens, h * d).contiguous(), transpose)
        row = row._replace(codes=row.codes.view(x.shape).permute(0, 2, 1, 3))
        if column is not None:
            turned = column.codes[:, :tokens].view(h, d, first, second).permute(2, 0, 1, 3)
            column = column._replace(codes=turned)
    return Quantized(row, column)


def attend(
    context: ModuleContext, layout: str, options: Options, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, Saved]:
    """out `[b, h, s, d]`, or packed as q, of q, k and v in their layout; in 16 bits where it calibrates."""
    of_q, of_k, of_v = [context.quantizers[role.name] for role in ROLES]
    of_keys, fp8, dtype = layout, of_v.fp8, q.dtype
    if fp8 and layout == "bshd" and k.shape[1] % 16:  # rows of v's transposed codes would start at any byte
        of_keys, k, v = "sbhd", k.transpose(0, 1), v.transpose(0, 1)
    q_places, kv_places = (options.q_lengths, options.q_starts), (options.kv_lengths, options.kv_starts)
    queries, _ = _quantized(of_q, q, layout, q_places, False)
    keys, _ = _quantized(of_k, k, of_keys, kv_places, False)
    seen, seen_t = _quantized(of_v, v, of_keys, kv_places, fp8)
    of_qk, codes = (queries.codes, keys.codes), (queries.codes, keys.codes, seen.codes)
    state_before = before(options.rng_state)
    scales: Any = ()
    if seen_t is None:
        out, m, inv = twin.attention(*codes, *options)
    else:
        scales = (queries.scales, keys.scales, seen.scales)
        operands = (*of_qk, seen_t.codes, *scales)
        out, m, inv = twin.attention_fp8(*operands, *options.of_pairs, dtype, *options.of_entries)
    return out, Saved(*codes, scales, out, m, inv, state_before)


def attend_backward(
    options: Options, saved: Saved, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv, of a gradient in the shape of `attend`'s out; the random state of `options` is that of `saved`."""
    codes, results = (saved.q, saved.k, saved.v), (saved.out, saved.m, saved.inv)
    operands = (dense_rows(grad), *codes, *saved.scales, *results)
    if not saved.scales:
        return twin.attention_backward(*operands, *options)
    return twin.attention_fp8_backward(*operands, *options.of_pairs, *options.of_entries)


class FP8Attention(TransformerEngineBaseModule):
    """The FP8 state of attention; `DotProductAttention` is the layer."""

    fp8_sizes = ("kv_channels",)
    return_max_logit = False
    fp8_kv = False  # whether keys and values go through FP8 codes (`keys_and_values_in_fp8`)

    def own_roles(self) -> Roles:
        return Roles(others=ROLES)

    def _set_device(self, device: torch.device) -> None:
        """Where the state will be created: there are no parameters that tell."""
        self._device = device

    def _parameter_device(self) -> torch.device:
        return self._device

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self._set_device(probe_target(fn, self._device).device)
        return self

    def runs_in(self, recipe: Recipe) -> bool:
        return recipe.fp8_dpa

    def attends_in_fp8(self, run: Run | None = None) -> bool:
        """Whether a forward would use, or calibrate, the FP8 state; `run` is None where nobody has asked yet."""
        run = current_run() if run is None else run
        if run.plain and not (self.fp8 or (self.own_recipe or run.state.recipe).fp8_dpa):
            return False  # the rule, without the calls below
        state = self.run_settings(run)
        if not run.compiling and self.fp8 and not state.enabled:  # a compiler would guard the attribute
            self.fp8 = False
        return state.enabled or state.calibrating

    def refuse_in_fp8(self, layer: str, dtype: torch.dtype, bias: bool, cached: bool) -> None:
        """Refuse what attention in FP8 does not take, if a forward now would run in it; `layer` names the caller."""
        core: Any = self
        if self.fp8_kv:
            check_core(layer, core, dtype)
        exact, vanilla, channels = core.attention_backend == "exact", core.softmax_type == "vanilla", core.kv_channels
        whole = core.key_segment is None
        fits, looks = isinstance(channels, int) and channels % 16 == 0, core.return_max_logit
        if (
            exact and vanilla and whole and fits and dtype != torch.float32 and not (bias or cached or looks)
        ) or not self.attends_in_fp8():
            return
        if not exact:
            what = f"attention_backend={core.attention_backend!r}"
        elif not vanilla:
            what = f"softmax_type={core.softmax_type!r}"
        elif not whole:
            what = f"key_segment={core.key_segment}"
        elif not fits:
            what = f"kv_channels={channels} (no multiple of 16: rows of FP8 operands start at multiples of 16 bytes)"
        elif looks:
            what = "return_max_logit=True"
        elif bias or cached:
            what = "a bias" if bias else "inference_params"
        else:
            what = "torch.float32 activations without torch.autocast"
        raise NotImplementedError(
            f"{layer}: {what} under a recipe with fp8_dpa=True is not offered; fp8_dpa=False is accepted, or a recipe "
            f"of the attention's own (te.recipe.by_layer)."
        )

    # --- checkpoints ---------------------------------------------------------------------------------

    def check_state(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Refuse broken state, and that of Transformer Engine's attention in FP8."""
        for name in (prefix + key for key in _STATES):
            value = state_dict.get(name)
            ours = name == prefix + checkpoint_format.STATE and checkpoint_format.is_ours(value)
            if value is not None and not ours:
                checkpoint_format.check_no_state(name, value)
            elif value is not None:
                checkpoint_format.check_state(name, value, self.state_columns())

    def get_extra_state(self) -> torch.Tensor:
        """As other layers'; one fresh on the CPU while the layer is on the meta device, which a loader of single
        parameters does not tell it to leave."""
        if self._device.type != "meta":
            return super().get_extra_state()
        return checkpoint_format.pack(self._unused_state(torch.device("cpu")), {})

    def set_extra_state(self, state: Any) -> None:
        """As other layers'; of Transformer Engine's, unused state is accepted and ignored."""
        name = f"{type(self).__name__}.{checkpoint_format.STATE}"
        self.check_state({name: state}, f"{type(self).__name__}.")
        if checkpoint_format.is_ours(state):
            self.load_state(checkpoint_format.unpack(state, self.state_columns(), self._device))

    def load_state(self, state: checkpoint_format.State | None) -> None:
        """Take FP8 state that was checked before; one that never ran in FP8, as most attention, needs no memory."""
        if state is not None and checkpoint_format.is_fresh(state):
            state = None
        elif state is not None and self._device.type == "meta":
            self._set_device(state[KEYS[0]].scale.device)
        super().load_state(state)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if transformer_engine_state.is_writing():
            destination[prefix + checkpoint_format.STATE] = transformer_engine_state.nothing()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *args: Any) -> None:
        assign = local_metadata.get("assign_to_params_buffers", False)
        checkpoint_format.check_all(self, state_dict, prefix, assign)
        found = {key: value for key, value in state_dict.items() if key not in {prefix + key for key in _STATES}}
        state: Any = state_dict.get(prefix + checkpoint_format.STATE)
        ours = checkpoint_format.is_ours(state)
        self.load_state(checkpoint_format.unpack(state, self.state_columns(), self._device) if ours else None)
        super()._load_from_state_dict(found, prefix, local_metadata, *args)
