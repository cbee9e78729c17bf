"""`TransformerLayer`: attention and feed-forward with their residuals, encoder or decoder.

    h = x + dropout(attention(norm(x)) + b)
    h = h + dropout(cross_attention(norm(h), encoder_output) + b)        decoder only
    y = h + dropout(mlp(norm(h)) + b)

or, with `parallel_attention_mlp`, both halves read x, and their sum T(attention + mlp), biases included, is added once:

    y = x + dropout( T( attention(norm(x)) + mlp(norm(x)) ) )            encoder only
    dx = T( dy + T( dx of the mlp + dx of attention ) )

Each sum rounds as in `reference.ops.random.dropout`. With `drop_path_rate` what is added to x is dropped as a whole now
and then (`reference.nn.core.dropout.DropPath`), in self-attention and in the MLP. With
`apply_residual_connection_post_layernorm` the residual is norm(x); with `output_layernorm` the first norm moves to the
end. Source: Transformer Engine's `pytorch/transformer.py`.
"""

from collections.abc import Callable, Iterator
from operator import is_not
from typing import Any

import torch

from reference.memory.recompute import Run, current_run
from reference.nn.attentions.attention_extras import NO_EXTRAS, Extras, defaults_of
from reference.nn.attentions.attention_lengths import with_longest
from reference.nn.attentions.exact_attention import Mask
from reference.nn.attentions.inference_step import ended
from reference.nn.attentions.kv_cache import InferenceParams
from reference.nn.attentions.multihead_around_torch import by_torch
from reference.nn.attentions.multihead_attention import MultiheadAttention
from reference.nn.core import checks
from reference.nn.core.attributes import OfTransformerLayer
from reference.nn.core.context_parallel import ContextGroup
from reference.nn.core.dropout import DropPath, Generator
from reference.nn.core.parameters import DeviceDefault, InitMethod
from reference.nn.core.tensor_parallel import TensorParallel, TensorParallelParts
from reference.nn.layers.layernorm import LayerNorm, RMSNorm
from reference.nn.layers.layernorm_mlp import LayerNormMLP
from reference.nn.transformer import halves, parallel_halves, transformer_layer_checks
from reference.nn.transformer.transformer_layer_checks import check_construction, check_forward, check_sequence
from reference.parallel.ordered_reduce import ranks_of
from reference.recipes.quantized import as_dtype

# Arguments of the layer that its attentions and its MLP have too, and those that its attentions have.
_COMMON = ["bias", "init_method", "output_layer_init_method", "normalization", "zero_centered_gamma", "params_dtype"]
_COMMON += ["get_rng_state_tracker", "fuse_wgrad_accumulation"]
_COMMON += ["tp_group", "tp_size", "sequence_parallel", "set_parallel_mode"]
_ATTENTION = ["kv_channels", "attention_dropout", "layernorm_epsilon", "num_gqa_groups", "fuse_qkv_params"]
_ATTENTION += ["qkv_weight_interleaved", "rotary_pos_interleaved", "attention_backend", "softmax_type"]
_ATTENTION += ["key_segment", "qk_norm_type", "qk_norm_eps", "qk_norm_before_rope"]
_NORM = ("normalization", "zero_centered_gamma", "layernorm_epsilon", "return_layernorm_output")


class TransformerLayer(TensorParallelParts, ContextGroup, OfTransformerLayer, DeviceDefault, torch.nn.Module):
    """A transformer layer. Arguments, defaults and submodule names are Transformer Engine's.

    Submodules: `self_attention`, `inter_attention` (decoder), `layernorm_mlp`, `layernorm` (with `output_layernorm`).

    Args:
        hidden_size, ffn_hidden_size, num_attention_heads, num_gqa_groups, kv_channels: sizes.
        layernorm_epsilon, normalization, zero_centered_gamma: of every norm.
        hidden_dropout: after the projection and after the MLP; attention_dropout: of attention's weights.
        init_method: of q, k, v and fc1; output_layer_init_method: of proj and fc2.
        attention_backend, key_segment: as in `DotProductAttention`.
        self_attn_mask_type, enc_dec_attn_mask_type, window_size, enc_dec_window_size: defaults of `forward`'s; those
            of cross-attention are a decoder's.
        apply_residual_connection_post_layernorm, output_layernorm, layer_type: see the module's formulas.
        fuse_qkv_params, qkv_weight_interleaved, rotary_pos_interleaved, attn_input_format, qk_norm_*: as in
            `MultiheadAttention`.
        activation, activation_params, bias, params_dtype, device, get_rng_state_tracker, fuse_wgrad_accumulation: as in
            `LayerNormMLP`.
        parallel_attention_mlp: see the module's formulas; each half has a norm of its own.
        drop_path_rate: the probability of stochastic depth, from 0 to 1. As in Transformer Engine, an entry of
            the input's first dimension is dropped: a sample with "bshd", a position of all samples with "sbhd".
        layer_number: of self-attention, as in `DotProductAttention`.
        name, seq_length, micro_batch_size: accepted as in Transformer Engine, without effect.
        softmax_type: as in `DotProductAttention`.
        sequence_parallel, set_parallel_mode, tp_group, tp_size: as in `MultiheadAttention` and `LayerNormMLP`. Dropout
            has the masks of one process if torch's seeds are the same on all ranks: each takes those of its place.
        softcap and ub_tp_comm_overlap: only "off"; without it, the other ub_* have no effect.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        ub_tp_comm_overlap: bool = False,
        ub_overlap_ag: bool = True,
        ub_overlap_rs: bool = True,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = True,
        ub_bulk_wgrad: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: dict[str, Any] | None = None,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        attn_input_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
        *,
        attention_backend: str = "exact",
        key_segment: int | None = None,
        use_fp8: None = None,
    ) -> None:
        if use_fp8 is not None:
            raise TypeError(f"TransformerLayer: use_fp8={use_fp8!r} is not offered; autocast() switches FP8 on.")
        given = dict(locals())
        check_construction(given)
        super().__init__()
        device = self.resolve_device(device)
        self.set_parallel_mode = set_parallel_mode
        self.take_tensor_group(tp_group, tp_size, sequence_parallel)
        self.settings_of_tokens = {"output_layernorm": output_layernorm, "drop_path_rate": drop_path_rate}
        check_sequence(self)
        self.hidden_size = int(hidden_size)
        self.hidden_dropout = float(hidden_dropout)
        self.layer_type = layer_type
        self.layer_number, self.name, self.softmax_type = layer_number, name, softmax_type
        self.kv_channels = kv_channels or self.hidden_size // int(num_attention_heads)
        self.seq_length = seq_length
        self.attn_input_format = attn_input_format
        self.self_attn_mask_type = self_attn_mask_type
        self.enc_dec_attn_mask_type = enc_dec_attn_mask_type
        self.window_size, self.enc_dec_window_size = window_size, enc_dec_window_size
        self.apply_residual_connection_post_layernorm = apply_residual_connection_post_layernorm
        self.parallel_attention_mlp = parallel_attention_mlp
        common: dict[str, Any] = {name: given[name] for name in _COMMON}
        common |= {
            "return_bias": not parallel_attention_mlp,
            "return_layernorm_output": apply_residual_connection_post_layernorm,
            "device": device,
        }
        attention = {**common, **{name: given[name] for name in _ATTENTION}, "qkv_format": attn_input_format}
        of_input = attention if not output_layernorm else {n: x for n, x in attention.items() if n not in _NORM}
        self.self_attention = self.same_side(MultiheadAttention)(
            hidden_size,
            num_attention_heads,
            attention_type="self",
            attn_mask_type=self_attn_mask_type,
            layer_number=layer_number,
            input_layernorm=not output_layernorm,
            **of_input,
        )
        if layer_type == "decoder":
            self.inter_attention = self.same_side(MultiheadAttention)(
                hidden_size,
                num_attention_heads,
                attention_type="cross",
                attn_mask_type=enc_dec_attn_mask_type,
                input_layernorm=True,
                **attention,
            )
        self.layernorm_mlp = self.same_side(LayerNormMLP)(
            hidden_size,
            ffn_hidden_size,
            eps=layernorm_epsilon,
            activation=activation,
            activation_params=activation_params,
            **common,
        )
        if output_layernorm:
            norm_type = LayerNorm if normalization == "LayerNorm" else RMSNorm
            self.layernorm = self.same_side(norm_type)(
                hidden_size,
                eps=layernorm_epsilon,
                params_dtype=params_dtype,
                zero_centered_gamma=zero_centered_gamma,
                device=device,
            )
        self.output_layernorm = output_layernorm
        self.drop_path = DropPath(drop_path_rate, device) if drop_path_rate > 0 else None
        self.generator = Generator(device)
        self.elements = sum(parameter.numel() for parameter in self.parameters())

    def check_context(self, here: str) -> None:
        transformer_layer_checks.check_context(self, here)

    parallel_modes = (None,)

    def parts_to_share(self, mode: str | None) -> Iterator[tuple[Any, str | None]]:
        yield self, None
        for part in self.children():
            if isinstance(part, TensorParallel):
                yield from part.parts_to_share(None)

    def divide(self, mode: str | None) -> None:
        self.set_parallel_mode = True
        check_sequence(self)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Mask = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: torch.Tensor | None = None,
        enc_dec_attn_mask: Mask = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: InferenceParams | None = None,
        rotary_pos_emb: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None,
        thd_attention_policies: list[dict[str, Any]] | None = None,
        thd_attention_policy_dispatch: str = "auto",
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Apply the layer. A call that is refused changes nothing.

        Args:
            hidden_states: `[s, b, hidden]` ("sbhd"), `[b, s, hidden]` ("bshd") or `[t, hidden]` ("thd"), bf16 or fp16.
                fp32 is cast to torch.autocast's dtype; without torch.autocast its attention is PyTorch's own.
            attention_mask, self_attn_mask_type, window_size: of self-attention, as in `DotProductAttention.forward`.
            encoder_output, enc_dec_attn_mask, enc_dec_attn_mask_type, enc_dec_window_size: of a decoder's
                cross-attention; an encoder takes None.
            is_first_microbatch: as in `Linear.forward`.
            checkpoint_core_attention: recompute attention in backward.
            rotary_pos_emb: of self-attention and of a decoder's cross-attention, whose angles are those of queries and
                of keys, or a pair of them: as in `MultiheadAttention.forward`. inference_params: of self-attention; a
                decoder takes one of the two.
            core_attention_bias_type, core_attention_bias, alibi_slopes: of self-attention and of a decoder's
                cross-attention, as in `DotProductAttention.forward`.
            cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv: as
                there; self-attention takes those of q alone.
            pad_between_seqs: as there. bottom_right_diagonal and the rest: Transformer Engine's, in its order; only
                "off" is offered.

        Returns:
            a tensor like hidden_states.
        """
        extras = NO_EXTRAS if inference_params is None else Extras(inference=inference_params)
        off_by_default = (
            core_attention_bias_type, core_attention_bias, alibi_slopes,
            cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded,
            max_seqlen_q, max_seqlen_kv, pad_between_seqs,
            bottom_right_diagonal, enc_dec_bottom_right_diagonal, enc_dec_window_size,
            fast_zero_fill, softcap, thd_attention_policies, thd_attention_policy_dispatch,
        )  # fmt: skip
        if (
            any(map(is_not, off_by_default, _DEFAULTS.values()))
            or type(checkpoint_core_attention) is not bool
            or not (is_first_microbatch is None or type(is_first_microbatch) is bool)
        ):
            extras = Extras.checked(
                "TransformerLayer",
                self.attn_input_format,
                inference_params,
                dict(zip(_DEFAULTS, off_by_default, strict=True)),
                self_attn_mask_type=self_attn_mask_type,
                window_size=window_size,
                enc_dec_attn_mask_type=enc_dec_attn_mask_type,
                is_first_microbatch=is_first_microbatch,
                checkpoint_core_attention=checkpoint_core_attention,
            )
        if inference_params is not None and torch.is_grad_enabled():
            of_self = (hidden_states, attention_mask, self_attn_mask_type, window_size, bottom_right_diagonal)
            of_cross = (encoder_output, enc_dec_attn_mask, enc_dec_attn_mask_type, enc_dec_window_size)
            both = (enc_dec_bottom_right_diagonal, is_first_microbatch, checkpoint_core_attention)
            return ended(self, *of_self, *of_cross, *both, rotary_pos_emb=rotary_pos_emb, **extras.arguments())
        mask_type = self.self_attn_mask_type if self_attn_mask_type is None else self_attn_mask_type
        cross_type = self.enc_dec_attn_mask_type if enc_dec_attn_mask_type is None else enc_dec_attn_mask_type
        window = self.window_size if window_size is None else window_size
        cross_window = self.enc_dec_window_size if enc_dec_window_size is None else enc_dec_window_size
        cross = (encoder_output, enc_dec_attn_mask, cross_type, cross_window)
        if self.attn_input_format == "thd" and inference_params is None:
            sides = 2 if self.layer_type == "decoder" else 1
            extras = extras._replace(lengths=with_longest("TransformerLayer", extras.lengths, sides))
        enc_dec = (enc_dec_attn_mask, enc_dec_attn_mask_type, enc_dec_window_size)
        run = current_run()
        checked = (hidden_states, attention_mask, mask_type, window, rotary_pos_emb, cross, enc_dec, extras, run)
        check_forward(self, *checked)
        hidden_states = as_dtype(hidden_states, checks.activation_dtype(hidden_states))
        dropout = (self.hidden_dropout if self.training else 0.0, self.generator)
        if dropout[0] > 0 and self.sequence_parallel and self.tp_name is not None and self.cp_name is None:
            self.generator.at(ranks_of(self.tp_name)[0] * hidden_states.numel())
        if dropout[0] > 0:
            self.generator.draw(hidden_states.device)
        drop_path = self.drop_path if self.training else None
        if drop_path is not None:
            drop_path.draw(hidden_states.device)
        attention, mlp = self.self_attention, self.layernorm_mlp
        if self.parallel_attention_mlp:
            given = (is_first_microbatch, rotary_pos_emb, checkpoint_core_attention, window, extras.of_self(), run)
            return parallel_halves.attend_and_mlp(self, hidden_states, attention_mask, mask_type, dropout, *given)
        first = (attention_mask, mask_type, dropout, is_first_microbatch, None, rotary_pos_emb)
        more = (checkpoint_core_attention, window)
        post = self.apply_residual_connection_post_layernorm
        fused = halves.is_mlp_block(mlp, post)
        if (
            fused
            and self.layer_type == "encoder"
            and halves.is_small(self.elements, hidden_states, run)
            and halves.is_attention_block(attention, post and not self.output_layernorm)
            and (
                (
                    hidden_states.dtype != torch.float32  # spares most layers the call
                    and attention._modules["core_attention"].attention_backend == "exact"
                )
                or not by_torch(attention, hidden_states.dtype, checkpoint_core_attention)
            )
        ):
            of_layer = (attention_mask, mask_type, dropout, is_first_microbatch, rotary_pos_emb)
            more_of_it = (*more, extras.of_self(), drop_path, run)
            return self._ended(halves.run_layer(attention, mlp, hidden_states, *of_layer, *more_of_it))
        hidden = self._attend(attention, hidden_states, *first, *more, extras.of_self(), run)
        if self.layer_type == "decoder":
            second = (enc_dec_attn_mask, cross_type, dropout, is_first_microbatch, encoder_output, rotary_pos_emb)
            more = (checkpoint_core_attention, cross_window)
            hidden = self._attend(self.inter_attention, hidden, *second, *more, extras.of_cross(), run)
        if fused:
            return self._ended(halves.mlp_block(mlp, hidden, dropout, is_first_microbatch, drop_path, run))
        return self._ended(halves.add_residual(self, mlp(hidden, is_first_microbatch), hidden, dropout, normed=True))

    def _ended(self, out: torch.Tensor) -> torch.Tensor:
        """The layer's output, of the last half's."""
        return self.layernorm(out) if self.output_layernorm else out

    def _attend(
        self,
        attention: Any,
        x: torch.Tensor,
        mask: Mask,
        mask_type: str,
        dropout: halves.Dropout,
        is_first_microbatch: bool | None,
        source: torch.Tensor | None,
        angles: Any,
        recomputes: bool,
        window: checks.Window,
        extras: Extras,
        run: Run,
    ) -> torch.Tensor:
        """x + dropout(attention(norm(x)) + b)."""
        more = (is_first_microbatch, source, angles, recomputes, window, extras)
        crosses = source is not None
        normed = crosses or not self.output_layernorm
        residual_is_norm = self.apply_residual_connection_post_layernorm and normed
        if halves.is_attention_block(attention, residual_is_norm):
            drop_path = self.drop_path if self.training and not crosses else None
            return halves.run_attention(attention, x, mask, mask_type, dropout, *more, drop_path, run)
        results = halves.run_module(attention, x, mask, mask_type, *more)
        return halves.add_residual(self, results, x, dropout, normed, drops_path=not crosses)


_DEFAULTS = defaults_of(
    TransformerLayer.forward,
    "pad_between_seqs "
    "bottom_right_diagonal enc_dec_bottom_right_diagonal enc_dec_window_size "
    "fast_zero_fill softcap thd_attention_policies thd_attention_policy_dispatch",
)
