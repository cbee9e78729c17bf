"""`MultiheadAttention`: (norm +) QKV projection, optional rotary embedding, attention, output projection.

Source: Transformer Engine's `pytorch/attention/multi_head_attention.py`.
"""

from collections.abc import Callable, Iterator
from operator import is_not
from typing import Any

import torch

from reference.arguments import MASK_TYPES, check_arguments
from reference.memory.recompute import current_run
from reference.nn.attentions import multihead_checks
from reference.nn.attentions.apply_rotary import rotated
from reference.nn.attentions.attention_extras import NO_EXTRAS, Extras, defaults_of
from reference.nn.attentions.attention_lengths import with_longest
from reference.nn.attentions.dot_product_attention import DotProductAttention
from reference.nn.attentions.exact_attention import Mask
from reference.nn.attentions.heads import Heads, SplitPlan, split_backward, split_forward
from reference.nn.attentions.inference_step import ended
from reference.nn.attentions.kv_cache import InferenceParams
from reference.nn.attentions.multihead_plan import is_block, run_block
from reference.nn.attentions.packing import positions_of
from reference.nn.core import checks
from reference.nn.core.attributes import OfAttention
from reference.nn.core.autograd import differentiable, wanted
from reference.nn.core.context import BlockContext
from reference.nn.core.context_parallel import ContextGroup
from reference.nn.core.parameters import DeviceDefault, InitMethod
from reference.nn.core.tensor_parallel import TensorParallelParts
from reference.nn.layers.layernorm import head_norms
from reference.nn.layers.layernorm_linear import LayerNormLinear
from reference.nn.layers.linear import Linear


class MultiheadAttention(TensorParallelParts, ContextGroup, OfAttention, DeviceDefault, torch.nn.Module):
    """Attention with its projections. Arguments, defaults and submodule names are Transformer Engine's.

    Submodules: `layernorm_qkv` (or `qkv` without `input_layernorm`), or for cross-attention `layernorm_query` (or
    `query_layer`) and `key_value`; `core_attention`; `proj`; `q_norm` and `k_norm` with `qk_norm_type`. Without
    `fuse_qkv_params` the projection's parameters are `query_weight`, `key_weight`, `value_weight` and their biases.

    Args:
        hidden_size, num_attention_heads, kv_channels, num_gqa_groups: sizes; kv_channels None is hidden / heads.
        attention_dropout, attn_mask_type, window_size, qkv_format, attention_backend, key_segment: as in
            `DotProductAttention`.
        attention_type: "self" or "cross".
        input_layernorm, normalization, layernorm_epsilon, zero_centered_gamma, return_layernorm_output: as in
            `LayerNormLinear`; without input_layernorm the others keep their defaults.
        fuse_qkv_params, qkv_weight_interleaved: one parameter for q, k and v, whose rows are
            `[group, q.. k v, channel]` if interleaved, else `[q.. k v, group, channel]`. Three parameters are never
            interleaved, whatever is given.
        bias, return_bias, init_method (q, k, v), output_layer_init_method (proj), params_dtype, device, ...: as in
            `Linear`.
        rotary_pos_interleaved: layout of the rotary embedding.
        layer_number: as in `DotProductAttention`.
        name, seq_length, micro_batch_size: accepted as in Transformer Engine, without effect.
        softmax_type: as in `DotProductAttention`.
        sequence_parallel, tp_group, tp_size: as in `Linear`: the first projection is column-, proj row-parallel, and a
            rank has its groups of heads. sequence_parallel: a rank has its part of hidden_states' first dimension. More
            than one rank need set_parallel_mode=True, and three parameters or interleaved ones.
        qk_norm_type: None, or normalise each head of q and k: "RMSNorm", "LayerNorm", or "L2Normalization" (without
            parameters). qk_norm_eps: its eps; of none, it has no effect, as in Transformer Engine.
            qk_norm_before_rope: before the rotary embedding instead of after it.
        softcap and ub_*: only "off" is offered.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        tp_group: Any = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        qkv_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        softmax_type: str = "vanilla",
        *,
        attention_backend: str = "exact",
        key_segment: int | None = None,
    ) -> None:
        given = dict(locals())
        check_arguments("MultiheadAttention", given)
        checks.check_norms("MultiheadAttention", given, input_layernorm)
        channels = checks.check_channels("MultiheadAttention", hidden_size, num_attention_heads, kv_channels)
        groups = checks.check_groups("MultiheadAttention", num_gqa_groups, int(num_attention_heads))
        super().__init__()
        self.num_attention_heads, self.num_gqa_groups, self.channels = int(num_attention_heads), groups, channels
        self.set_parallel_mode = set_parallel_mode
        self.take_tensor_group(tp_group, tp_size, sequence_parallel)
        kept = ("qk_norm_type", "fuse_qkv_params", "qkv_weight_interleaved")
        self.settings_of_heads = {name: given[name] for name in kept}
        if self.tp_size > 1:
            multihead_checks.check_shared_heads(self)
        self.hidden_size = int(hidden_size)
        self.hidden_size_per_attention_head = channels
        self.hidden_size_q, self.hidden_size_kv = channels * self.num_attention_heads, channels * groups
        self.layer_number = 1 if layer_number is None else int(layer_number)
        self.params_dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        self.softmax_type, self.name = softmax_type, name
        self.attention_type = attention_type
        self.attn_mask_type = attn_mask_type
        self.window_size = window_size
        self.input_layernorm = input_layernorm
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output
        self.rotary_pos_interleaved = rotary_pos_interleaved
        names = ("layernorm_qkv", "qkv") if attention_type == "self" else ("layernorm_query", "query_layer")
        self._first_name = names[0 if input_layernorm else 1]
        self.qkv_weight_interleaved = self.interleaved = fuse_qkv_params and qkv_weight_interleaved
        self.qkv_format, self._batch = qkv_format, 1 if qkv_format == "sbhd" else 0  # "thd" has no batch
        device = self.resolve_device(device)
        common: dict[str, Any] = {
            "bias": bias,
            "params_dtype": params_dtype,
            "device": device,
            "get_rng_state_tracker": get_rng_state_tracker,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "tp_group": tp_group,
            "tp_size": tp_size,
            "sequence_parallel": sequence_parallel,
        }
        column, row = ("column", "row") if set_parallel_mode else (None, None)
        norm: dict[str, Any] = {
            "eps": layernorm_epsilon,
            "normalization": normalization,
            "zero_centered_gamma": zero_centered_gamma,
            "return_layernorm_output": return_layernorm_output,
        }
        self.q_norm, self.k_norm = head_norms(self.same_side, qk_norm_type, channels, qk_norm_eps, params_dtype, device)
        self.qk_norm_before_rope = qk_norm_before_rope
        q_size, kv_size = channels * self.num_attention_heads, channels * groups

        def project(out: int, split: Any, normed: bool) -> Any:
            split = None if fuse_qkv_params else split
            arguments = {"init_method": init_method, "parameters_split": split, "parallel_mode": column, **common}
            if normed:
                return self.same_side(LayerNormLinear)(hidden_size, out, **norm, **arguments)
            return self.same_side(Linear)(hidden_size, out, **arguments)

        if attention_type == "self":
            parts = {"query": q_size, "key": kv_size, "value": kv_size}
            qkv = project(q_size + 2 * kv_size, parts, input_layernorm)
            setattr(self, self._first_name, qkv)
        else:
            query = project(q_size, {"query": q_size} if input_layernorm else None, input_layernorm)
            setattr(self, self._first_name, query)
            self.key_value = project(2 * kv_size, {"key": kv_size, "value": kv_size}, False)
        self.core_attention = self.same_side(DotProductAttention)(
            self.num_attention_heads,
            channels,
            num_gqa_groups=groups,
            tp_group=tp_group,
            tp_size=tp_size,
            attention_dropout=attention_dropout,
            qkv_format=qkv_format,
            attn_mask_type=attn_mask_type,
            layer_number=layer_number,
            attention_type=attention_type,
            get_rng_state_tracker=get_rng_state_tracker,
            device=device,
            softmax_type=softmax_type,
            attention_backend=attention_backend,
            key_segment=key_segment,
        )
        self.proj = self.same_side(Linear)(
            *(q_size, hidden_size),
            init_method=output_layer_init_method,
            return_bias=return_bias,
            parallel_mode=row,
            **common,
        )

    check = multihead_checks.check_forward

    def check_context(self, here: str) -> None:
        multihead_checks.check_context(self, here)

    parallel_modes = (None,)

    def parts_to_share(self, mode: str | None) -> Iterator[tuple[Any, str | None]]:
        yield self, None
        for name in (self._first_name, *(["key_value"] if self.attention_type == "cross" else [])):
            yield self._modules[name], "column"
        yield self.core_attention, None
        yield self.proj, "row"

    def divide(self, mode: str | None) -> None:
        self.set_parallel_mode = True
        multihead_checks.check_shared_heads(self)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Mask = None,
        encoder_output: torch.Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
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
    ) -> Any:
        """Attend within `hidden_states`, or from it to `encoder_output`.

        Args:
            hidden_states: `[s, b, hidden]`, `[b, s, hidden]` or `[t, hidden]`, bf16, fp16 or fp32 (whose attention is
                PyTorch's own).
            attention_mask, attn_mask_type, window_size, checkpoint_core_attention, inference_params: as in
                `DotProductAttention.forward`; here the layer's cache is allocated where it is missing.
            encoder_output: for cross-attention; same batch and dtype as hidden_states.
            is_first_microbatch: as in `Linear.forward`.
            rotary_pos_emb: fp32 angles `[s, 1, 1, channels]`, or a pair of them, for queries and for keys. In "thd" the
                positions of each sequence start at 0; with inference_params they are those of all positions from 0 on.
            core_attention_bias_type, core_attention_bias, alibi_slopes: as in `DotProductAttention.forward`.
            cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv: as
                there.
            pad_between_seqs: as there. The rest: Transformer Engine's, in its order; only "off" is offered.

        Returns:
            the projection; with `return_bias` its bias after it, with `return_layernorm_output` the norm's output last.
        """
        extras = NO_EXTRAS if inference_params is None else Extras(inference=inference_params)
        off_by_default = (
            core_attention_bias_type, core_attention_bias, alibi_slopes,
            cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded,
            max_seqlen_q, max_seqlen_kv, pad_between_seqs,
            bottom_right_diagonal, fast_zero_fill, softcap, thd_attention_policies, thd_attention_policy_dispatch,
        )  # fmt: skip
        if (
            any(map(is_not, off_by_default, _DEFAULTS.values()))
            or type(checkpoint_core_attention) is not bool
            or not (is_first_microbatch is None or type(is_first_microbatch) is bool)
        ):
            extras = Extras.checked(
                "MultiheadAttention",
                self.qkv_format,
                inference_params,
                dict(zip(_DEFAULTS, off_by_default, strict=True)),
                attn_mask_type=attn_mask_type,
                window_size=window_size,
                is_first_microbatch=is_first_microbatch,
                checkpoint_core_attention=checkpoint_core_attention,
            )
        if inference_params is not None and torch.is_grad_enabled():
            given = (hidden_states, attention_mask, encoder_output, attn_mask_type, window_size)
            others = (bottom_right_diagonal, is_first_microbatch, checkpoint_core_attention)
            return ended(self, *given, *others, rotary_pos_emb=rotary_pos_emb, **extras.arguments())
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        window = self.window_size if window_size is None else window_size
        if self.tp_size > 1 and core_attention_bias_type != "no_bias":
            raise NotImplementedError(
                f"MultiheadAttention: core_attention_bias_type={core_attention_bias_type!r} with "
                f"tp_size={self.tp_size} is not offered; 'no_bias' is accepted."
            )
        if self.qkv_format == "thd" and inference_params is None:
            extras = extras._replace(lengths=with_longest("MultiheadAttention", extras.lengths))
        arguments = (hidden_states, encoder_output, attention_mask, mask_type, window, rotary_pos_emb)
        self.check("MultiheadAttention", *arguments, extras=extras)
        run = current_run()
        if run.state.enabled and not checks.has_run_in_fp8(self._modules["proj"]):
            checks.check_fp8_sizes(*self._modules.values())
        returns_norm = self.return_layernorm_output and self.input_layernorm
        dtype = checks.activation_dtype(hidden_states)
        if is_block(self):
            of_block = (hidden_states, attention_mask, mask_type, None, is_first_microbatch, encoder_output)
            more = (rotary_pos_emb, checkpoint_core_attention, window, extras, None, run)
            found = run_block(self, dtype, *of_block, *more)
            return self._results(found, hidden_states.shape, dtype)
        first = getattr(self, self._first_name)(hidden_states, is_first_microbatch)
        mixed, *normed = first if returns_norm else (first,)
        if self.attention_type == "self":
            q, k, v = self._split(mixed, self.num_attention_heads // self.num_gqa_groups)
        else:
            q = mixed.view(*mixed.shape[:-1], self.num_attention_heads_per_partition, self.channels)
            k, v = self._split(self.key_value(encoder_output, is_first_microbatch), 0)
        step, core = None, self.core_attention
        if inference_params is not None:
            step = inference_params.step_of(
                core, MASK_TYPES[mask_type][0] != "none", core.equation(mask_type, window).window
            )
        q, k = self._normed(q, k, before_rope=True)
        if rotary_pos_emb is not None:
            both: Any = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
            if self.tokens is not None:
                both = tuple([self.tokens.angles(freqs, len(q)) for freqs in both])
            layout = (self.rotary_pos_interleaved, self.qkv_format)
            places: Any = (None, None)
            if self.qkv_format == "thd" and step is not None:
                places, step = (step[1].positions, step[1].positions), None
            elif self.qkv_format == "thd":
                places = positions_of(extras.lengths, (q.shape[0], k.shape[0]))
            q, k = (rotated(t, freqs, *layout, one, step) for t, freqs, one in zip((q, k), both, places, strict=True))
        q, k = self._normed(q, k, before_rope=False)
        shared: dict[str, Any] = {"attn_mask_type": mask_type, "checkpoint_core_attention": checkpoint_core_attention}
        if window is not None:
            shared["window_size"] = window
        shared |= extras.arguments()
        out = self.proj(core(q, k, v, attention_mask, **shared), is_first_microbatch)
        results = (*(out if self.return_bias else (out,)), *normed)
        return results[0] if len(results) == 1 else results

    def _results(self, found: Any, shape: torch.Size, dtype: torch.dtype) -> Any:
        """The block's results as those of `forward`."""
        y, *normed = found if isinstance(found, tuple) else (found,)
        results = [y]
        if self.return_bias:
            bias = self.proj.joined_bias()
            results.append(None if bias is None else bias.to(dtype))
        results += [t.view(shape) for t in normed]
        return results[0] if len(results) == 1 else tuple(results)

    def _split(self, mixed: torch.Tensor, queries: int) -> tuple[torch.Tensor, ...]:
        """Split `[.., .., features]` into q (if `queries` per group > 0), k and v, each `[.., .., heads, channels]`."""
        plan = SplitPlan(wanted(mixed), self.heads(queries))
        return differentiable(split_forward, split_backward, plan, BlockContext(), mixed)

    def _normed(self, q: torch.Tensor, k: torch.Tensor, before_rope: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """q and k, each head normalised if that happens on this side of the rotary embedding."""
        if self.q_norm is None or self.k_norm is None or self.qk_norm_before_rope is not before_rope:
            return q, k
        return self.q_norm(q), self.k_norm(k)

    def heads(self, queries: int) -> Heads:
        """The layout of q (if `queries` per group > 0), k and v in a projection of this layer."""
        parts = (queries, 1, 1) if queries else (1, 1)
        return Heads(parts, self.num_gqa_groups // self.tp_size, self.channels, self.interleaved)


_DEFAULTS = defaults_of(
    MultiheadAttention.forward,
    "pad_between_seqs "
    "bottom_right_diagonal fast_zero_fill softcap thd_attention_policies thd_attention_policy_dispatch",
)
