"""`DotProductAttention`: softmax(q·kᵀ·scale, masked)·v per head.

Checks are here, the pair of functions in `reference.nn.attentions.dot_product_pair`, the arithmetic in
`reference.ops.attentions.attention`. As in Transformer Engine, True in a mask means hidden, and a query that sees no
key gives zeros. In fp32 attention is PyTorch's own, and with `attention_backend="cudnn"` it is cuDNN's; both are
outside the bit contract. Under a recipe with fp8_dpa=True the forward is in FP8
(`reference.nn.attentions.attention_fp8`). Source: Transformer Engine's `pytorch/attention/dot_product_attention`.
"""

from collections.abc import Callable
from operator import is_not
from typing import Any

import torch

from reference.arguments import MASK_TYPES, check_arguments
from reference.nn.attentions import context_parallel_attention
from reference.nn.attentions.attention_bias import Bias
from reference.nn.attentions.attention_extras import NO_EXTRAS, Extras, defaults_of, unpacked
from reference.nn.attentions.attention_fp8 import FP8Attention
from reference.nn.attentions.attention_lengths import check_packed, packed, sizes_of
from reference.nn.attentions.dot_product_pair import Plan, backward, forward
from reference.nn.attentions.dot_product_plan import cached_call_of, call_of, context_of
from reference.nn.attentions.exact_attention import Equation, Mask, max_logit
from reference.nn.attentions.inference_step import ended
from reference.nn.attentions.kv_cache import InferenceParams
from reference.nn.attentions.torch_attention import attend_by_torch
from reference.nn.core.attributes import OfCoreAttention
from reference.nn.core.autograd import differentiable, wanted
from reference.nn.core.checks import (
    MASK_NAMES,
    Window,
    activation_dtype,
    check_equal_heads,
    check_groups,
    check_mask_type,
    check_no_segments,
    check_qkv,
    window_of,
)
from reference.nn.core.context import BlockContext
from reference.nn.core.context_parallel import ContextGroup, take_context_group
from reference.nn.core.dropout import Generator
from reference.nn.core.tensor_parallel import refuse_compiler
from reference.ops.attentions.attention_bias import default_slopes
from reference.parallel.ordered_reduce import ranks_of
from reference.recipes.quantized import as_dtype
from reference.support.notice import say_once


class DotProductAttention(ContextGroup, OfCoreAttention, FP8Attention):
    """softmax(q·kᵀ)·v with Transformer Engine's arguments.

    Args:
        num_attention_heads: heads of the queries, of all ranks.
        kv_channels: size of a head; a multiple of 8, at most 256. Or a pair of them, of queries and keys and of values,
            as multi-head latent attention has.
        num_gqa_groups: heads of keys and values, a divisor of num_attention_heads; None is num_attention_heads.
        attention_dropout: probability of dropping a weight in training.
        qkv_format: "sbhd", "bshd" or "thd".
        attn_mask_type: default of `forward`'s, one of `MASK_TYPES`.
        window_size: default of `forward`'s. (left, right) lets query i see only the keys from i + shift - left to
            i + shift + right, where shift is 0 under a causal mask type, otherwise, and for "..._bottom_right", the
            number of keys less that of queries. Causal types make right 0. None, (-1, -1) and (-1, 0) are no window.
        softmax_scale: None is 1 / sqrt(kv_channels), of queries and keys.
        attention_type: "self" or "cross".
        layer_number: whose cache in `inference_params` is this one's; None is 1.
        name: accepted as in Transformer Engine, without effect.
        softmax_type: "vanilla", "off-by-one" or "learnable": with a sink in each head
            (`reference.ops.attentions.attention_sink`), of which `softmax_offset` is None, fp32 zeros `[h]`, or a
            parameter.
        return_max_logit: `forward` also returns each head's largest score (scaled, biased, not hidden; without sinks),
            `[h]` in the output's dtype, without gradient: see `reference.nn.attentions.exact_attention.max_logit`. It
            costs a reduction of `[b, h, sq]` numbers.
        get_rng_state_tracker: dropout draws inside `tracker().fork()`; without dropout nothing does.
        tp_group, tp_size: whose ranks have some of the heads each, as a column-parallel projection gives them: the
            r-th part of num_attention_heads and of num_gqa_groups; biases, slopes and sinks are of these. Nothing is
            sent; the group says which heads drop what, and which ranks share a scale.
        sequence_parallel: without effect: heads have all tokens.
        cp_group, cp_global_ranks, cp_comm_type: context parallelism (`reference.parallel.context`): q, k and v are of
            this rank's tokens, two chunks of the sequence. Several ranks need "all_gather", a causal mask type or none,
            and 16 bits.
        cp_stream: without effect. softcap and the rest: only "off" is offered.
        device: of the random state; None is the package's own.
        attention_backend: "exact" gives the bits of `reference.ops.attentions.attention` on every device. "cudnn" is
            PyTorch's SDPA on its cuDNN backend, on CUDA, in bf16 or fp16, without a mask or causal with as many keys as
            queries. Its bits may change with cuDNN's version, the GPU, and from run to run; its dropout draws from
            torch's generator. (Transformer Engine chooses by NVTE_FUSED_ATTN and similar variables.)
        key_segment: 4096 takes keys in segments, in the order of `reference.ops.attentions.attention_segments`, in
            training as in inference: a GPU shares a few queries' many keys out, and queries that see more keys than
            that have other last bits. With "exact" alone, and not in FP8 (`fp8_dpa`); in fp32 attention is PyTorch's,
            which knows no segments. None is one chain along all keys.
    """

    key_segment: int | None = None  # of modules that were pickled before there were segments, too

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        name: str | None = None,
        *,
        device: torch.device | str | None = None,
        attention_backend: str = "exact",
        key_segment: int | None = None,
    ) -> None:
        check_arguments("DotProductAttention", locals())
        super().__init__()
        self.num_attention_heads = int(num_attention_heads)
        self.num_gqa_groups = check_groups("DotProductAttention", num_gqa_groups, self.num_attention_heads)
        self.take_tensor_group(tp_group, tp_size, sequence_parallel)
        self._divide_heads()
        take_context_group(self, cp_group, cp_global_ranks, cp_comm_type)
        sizes = kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
        of_keys, of_values = map(int, sizes)
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = of_keys, of_values
        self.kv_channels = of_keys if of_keys == of_values else (of_keys, of_values)
        self.attention_dropout = float(attention_dropout)
        self.qkv_format = qkv_format
        self.attn_mask_type = attn_mask_type
        self.window_size = window_of("DotProductAttention", MASK_NAMES, attn_mask_type, window_size)
        self.attention_type = attention_type
        self.layer_number = 1 if layer_number is None else int(layer_number)
        usual = of_keys**-0.5
        self.softmax_scale = usual if softmax_scale is None else float(softmax_scale)
        self.attention_backend = attention_backend
        if attention_backend == "cudnn":
            check_equal_heads(of_keys, of_values)
            check_no_segments(key_segment)
            say_once("cudnn", "attention_backend='cudnn': attention is cuDNN's and outside the bit contract")
        if key_segment is not None:
            self.key_segment = int(key_segment)
        device = self.resolve_device(device)
        self._set_device(device)
        self.generator = Generator(device, get_rng_state_tracker)
        self._default_slopes: torch.Tensor | None = None  # ALiBi's
        self.return_max_logit = bool(return_max_logit)
        self.softmax_type = softmax_type
        zeros = None if softmax_type == "vanilla" else self._zeros(device)
        self.softmax_offset = torch.nn.Parameter(zeros) if softmax_type == "learnable" and zeros is not None else zeros

        self.mark_parameters()

    def _divide_heads(self) -> None:
        """Count this rank's heads, of which queries, keys and values are."""
        self.num_attention_heads_per_partition = self.divided("num_attention_heads", self.num_attention_heads, "")
        self.num_gqa_groups_per_partition = self.divided("num_gqa_groups", self.num_gqa_groups, "")

    parallel_modes = (None,)

    def divide(self, mode: str | None) -> None:
        self._divide_heads()
        if self.softmax_type == "off-by-one":
            self.softmax_offset = self._zeros(self._device)
        self.forget_precision()

    def partitions(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        return {"softmax_offset": (0, (self.num_attention_heads_per_partition,))}

    @property
    def of_heads(self) -> tuple[int, int, int] | None:
        """Where ranks have some of the heads: how many are here, how many there are, which is the first here."""
        if self.tp_name is None:
            return None
        here = self.num_attention_heads_per_partition
        return here, self.num_attention_heads, here * ranks_of(self.tp_name)[0]

    def _zeros(self, device: torch.device) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.zeros(self.num_attention_heads_per_partition, dtype=torch.float32, device=device)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Follow the module's device with the sinks of "off-by-one", which are no parameter; they stay fp32."""
        super()._apply(fn, recurse)
        offset, device = self.softmax_offset, self._device
        if self.softmax_type == "off-by-one" and offset is not None and offset.device != device:
            moved = self._zeros(device) if offset.is_meta else offset.detach().to(device)
            self.softmax_offset = moved.requires_grad_(offset.requires_grad)
        return self

    def forward(
        self,
        query_layer: torch.Tensor | None = None,
        key_layer: torch.Tensor | None = None,
        value_layer: torch.Tensor | None = None,
        attention_mask: Mask = None,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: InferenceParams | None = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool = False,
        bf16_backward: bool = False,
        num_splits: int = 1,
        score_mod: Callable[..., Any] | None = None,
        score_mod_bprop: Callable[..., Any] | None = None,
        score_mod_tensors: dict[str, torch.Tensor] | None = None,
        score_mod_bprop_tensors: dict[str, torch.Tensor] | None = None,
        qkv_layer: torch.Tensor | None = None,
        kv_layer: torch.Tensor | None = None,
        qkv_interleave_dim: int = -3,
        thd_attention_policies: list[dict[str, Any]] | None = None,
        thd_attention_policy_dispatch: str = "auto",
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend.

        Args:
            query_layer: `[s, b, h, d]` ("sbhd"), `[b, s, h, d]` ("bshd") or `[t, h, d]` ("thd": sequences one after the
                other; see `reference.nn.attentions.attention_lengths`), bf16 or fp16. fp32 is cast to
                torch.autocast's dtype; without torch.autocast attention is PyTorch's own.
            key_layer, value_layer: the same with the keys' length and heads; values have their own d.
            attention_mask: bool, True = hidden; `[b, 1, 1, s]` (for cross-attention a pair, queries' and keys') with a
                padding mask type, broadcastable to `[b, h, sq, skv]` with "arbitrary". The other types do not read it.
                Where a diagonal ends at each sequence's last query and key ("padding_causal_bottom_right", and a window
                or ALiBi with "padding"), what two masks hide is at the end.
            qkv_format, attn_mask_type, window_size: None is the constructor's.
            checkpoint_core_attention: recompute in backward.
            core_attention_bias_type: "no_bias", "post_scale_bias" (scaled scores plus core_attention_bias) or "alibi".
            core_attention_bias: `[1 or b, 1 or h, sq, skv]`, fp32 or the queries' dtype; it may want a gradient.
            alibi_slopes: fp32 `[h]` or `[b, h]`; None are Transformer Engine's own.
            cu_seqlens_q, cu_seqlens_kv: int32 `[b + 1]` on the device, where each sequence ends, for padding mask
                types, which then do not read a mask; the other types do not read lengths. cu_seqlens_q_padded,
                cu_seqlens_kv_padded: where they start in "thd", if apart; other layouts do not read them.
            max_seqlen_q, max_seqlen_kv: of "thd" the longest lengths; None waits for the device to find them.
            inference_params: keys and values go to its cache, and queries see what is there:
                `reference.nn.attentions.kv_cache`. The causal types mean one thing; masks, lengths and biases are not
                given.
            pad_between_seqs: with "thd" whether cu_seqlens_*_padded say that sequences begin apart, which they must not
                with False and one of them must with True; None takes what they say.
            qkv_layer: instead of the first three `[s, b, 3, h, d]`, `[b, s, 3, h, d]` or `[t, 3, h, d]`; kv_layer:
                instead of keys and values, with 2. With qkv_interleave_dim=-2 the 3, or 2, comes after the heads.
            fp8_output and the rest: Transformer Engine's, in its order; only "off" is offered.

        Returns:
            `[s, b, h·d]`, `[b, s, h·d]` or `[t, h·d]`, d of the values; with `return_max_logit` also `[h]`.
        """
        extras = NO_EXTRAS if inference_params is None else Extras(inference=inference_params)
        off_by_default = (
            core_attention_bias_type, core_attention_bias, alibi_slopes,
            cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded,
            max_seqlen_q, max_seqlen_kv, pad_between_seqs,
            bottom_right_diagonal, fast_zero_fill, softcap, thd_attention_policies, thd_attention_policy_dispatch,
            fp8_output, bf16_backward, num_splits, qkv_layer, kv_layer, qkv_interleave_dim,
            score_mod, score_mod_bprop, score_mod_tensors, score_mod_bprop_tensors,
        )  # fmt: skip
        if (
            any(map(is_not, off_by_default, _DEFAULTS.values()))
            or type(checkpoint_core_attention) is not bool
            or qkv_format not in (None, "sbhd", "bshd")  # "thd" comes with lengths
        ):
            extras = Extras.checked(
                "DotProductAttention",
                self.qkv_format,
                inference_params,
                dict(zip(_DEFAULTS, off_by_default, strict=True)),
                qkv_format=qkv_format,
                attn_mask_type=attn_mask_type,
                window_size=window_size,
                checkpoint_core_attention=checkpoint_core_attention,
            )
        layout = self.qkv_format if qkv_format is None else qkv_format
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        check_mask_type("DotProductAttention", "attn_mask_type", mask_type)
        equation = self.equation(mask_type, window_size)
        extras.check_cache("DotProductAttention", layout)
        if self.tp_size > 1:
            self.check_heads_of_rank(query_layer)
        given: Any = (query_layer, key_layer, value_layer)
        if qkv_layer is not None or kv_layer is not None or qkv_interleave_dim != _DEFAULTS["qkv_interleave_dim"]:
            packed_by = (qkv_layer, kv_layer, qkv_interleave_dim)
            given = unpacked("DotProductAttention", given, *packed_by, layout, inference_params is not None)
        if inference_params is not None and torch.is_grad_enabled():
            how: dict[str, Any] = {"attn_mask_type": mask_type, "window_size": window_size, **extras.arguments()}
            return ended(self, *given, attention_mask, layout, bottom_right_diagonal=bottom_right_diagonal, **how)
        tokens = None
        if layout == "thd" and inference_params is None:
            lengths, tokens = packed("DotProductAttention", given, extras.lengths)
            extras = extras._replace(lengths=lengths)
            check_qkv(self, given[0][None], given[1][None], given[2][None], False)
        elif layout == "thd":
            check_packed("DotProductAttention", given)
            check_qkv(self, given[0][None], given[1][None], given[2][None], False)
        else:
            check_qkv(self, given[0], given[1], given[2], layout == "sbhd")
        if given[0].dtype == torch.float32:
            given = [as_dtype(t, activation_dtype(t)) for t in given]
        x, mask, heads = given[0], attention_mask, self.num_attention_heads_per_partition
        shape = sizes_of(layout, extras.lengths, heads, x.shape, given[1].shape)
        if inference_params is not None:
            sizes = (shape[0], shape[2])
            inference_params.check("DotProductAttention", self, x.dtype, x.device, sizes, mask, mask_type, True)
        masked = (mask_type, equation.window, mask)
        extras.check("DotProductAttention", MASK_NAMES, self, *masked, shape, tokens, x.dtype, x.device)
        self.refuse_in_fp8("DotProductAttention", x.dtype, extras.bias.given, inference_params is not None)
        fp8 = context_of(self, x.dtype, x.device) if x.dtype != torch.float32 else None
        if self.cp_name is not None:
            others = {
                "a bias": extras.bias.given,
                "inference_params": inference_params is not None,
                "fp8_dpa=True": fp8 is not None,
                "return_max_logit=True": self.return_max_logit,
                "checkpoint_core_attention=True": checkpoint_core_attention,
            }
            context_parallel_attention.check(self, equation, layout, others, *given)
            return context_parallel_attention.attend(self, equation, layout, self.random_state(x, equation), *given)
        by_torch = x.dtype == torch.float32 or equation.backend == "cudnn"
        cached = None
        if inference_params is not None:
            cached, step = inference_params.step_of(self, MASK_TYPES[mask_type][0] != "none", equation.window)
            call = cached_call_of(self, equation, cached, step, x, layout)
        else:
            call = call_of(self, equation, mask, extras, shape, x, by_torch, tokens)
        if by_torch:
            return attend_by_torch(call, cached, layout, checkpoint_core_attention, *given)
        tensors = given if call.added is None else (*given, call.added)
        recomputes = checkpoint_core_attention and fp8 is None and not torch.compiler.is_compiling()
        settings: Any = (recomputes, self.return_max_logit, None if fp8 is None else fp8.key, cached, call.longest)
        plan = Plan(wanted(*tensors), call.equation, layout, self.num_attention_heads_per_partition, *settings)
        context = BlockContext(() if fp8 is None else (fp8,), (self.random_state(x, call.equation),), call.reads)
        results = differentiable(forward, backward, plan, context, *tensors)
        if not self.return_max_logit:
            return results  # type: ignore[no-any-return]
        out, m, inv = results
        return out, max_logit(m, inv, out.dtype)

    def check_heads_of_rank(self, x: Any) -> None:
        """Refuse a forward of some of the heads where nobody says which, or whose dropout cannot be placed."""
        if self.tp_name is None:
            raise RuntimeError(
                f"DotProductAttention: tp_size={self.tp_size} and no tp_group; set_tensor_parallel_group(group) before "
                f"a forward is accepted."
            )
        refuse_compiler("DotProductAttention", f"tp_size={self.tp_size}")

    def sinks(self, device: torch.device) -> torch.Tensor | None:
        """The sinks, fp32 `[h]`; None with the usual softmax."""
        if self.softmax_type == "vanilla":
            return None
        offset = self.softmax_offset
        if offset is None or self.softmax_type == "learnable" or offset.device == device:
            return self._zeros(device) if offset is None else offset.float()
        return self._zeros(device) if offset.is_meta else offset.to(device)  # tensors elsewhere than the module

    def slopes(self, bias: Bias, device: torch.device) -> torch.Tensor | None:
        """ALiBi's slopes: those given, or the default ones, which stay on the device that they were needed on."""
        if bias.bias_type != "alibi" or bias.slopes is not None:
            return bias.slopes
        if self._default_slopes is None or self._default_slopes.device != device:
            slopes = default_slopes(self.num_attention_heads).to(device)
            if self.of_heads is not None:
                here, _, first = self.of_heads
                slopes = slopes[first : first + here].contiguous()
            if torch.compiler.is_compiling():  # memory of the graph, and another attribute would mean another graph
                return slopes
            self._default_slopes = slopes
        return self._default_slopes

    def equation(self, mask_type: str, window: Window = None) -> Equation:
        """How to attend now; a window of None is the constructor's."""
        window = window_of("DotProductAttention", MASK_NAMES, mask_type, self.window_size if window is None else window)
        p = self.attention_dropout if self.training else 0.0
        found = Equation(self.softmax_scale, mask_type, window, p, self.attention_backend)
        if self.key_segment is not None:
            found = found._replace(key_segment=self.key_segment)
        return found._replace(fp8_kv=True) if self.fp8_kv else found

    def random_state(self, inp: torch.Tensor, equation: Equation) -> torch.Tensor | None:
        """The newly seeded state from which `twin::attention` drops in this forward; None where it drops nothing."""
        if equation.p == 0 or equation.backend == "cudnn":
            return None
        of_heads = self.of_heads
        if of_heads is not None:
            self.generator.at(*of_heads)
        self.generator.draw(inp.device)
        return self.generator.take()


_DEFAULTS = defaults_of(
    DotProductAttention.forward,
    "pad_between_seqs "
    "bottom_right_diagonal fast_zero_fill softcap thd_attention_policies thd_attention_policy_dispatch "
    "fp8_output bf16_backward num_splits qkv_layer kv_layer qkv_interleave_dim "
    "score_mod score_mod_bprop score_mod_tensors score_mod_bprop_tensors",
)
