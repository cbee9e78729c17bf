"""Public attributes that Transformer Engine's constructors set, with the values that are true here.

Programs ask for them, often with a default: `getattr(module, "primary_weights_in_fp8", False)`. Without the attribute
that would be False whatever is the case. Where a value says something that does not exist here it is the one that
Transformer Engine has with that thing switched off: there is one rank, and no overlap of communication.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from itertools import accumulate
from typing import Any

import torch

from reference.ops.optimizers.adam_states import RANGES


class Sentence:
    """An attribute that means nothing here; `getattr` with a default does not swallow its error, and hide it."""

    def __init__(self, why: str) -> None:
        self.why = why

    @classmethod
    def several(cls, count: int, why: str) -> tuple["Sentence", ...]:
        """As many attributes for one reason."""
        return tuple(cls(why) for _ in range(count))

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        if obj is None:
            return self
        raise NotImplementedError(f"{type(obj).__name__}: {self.name} is not offered by Twin Engine: {self.why}.")


def _own(layer: Any, name: str, asked: str) -> Any:
    """What a layer keeps as `name`; a layer that does not has no attribute that is `asked` for."""
    if layer.__dict__.get(name) is None:
        raise AttributeError(asked)
    return layer.__dict__[name]


class WithSentences:
    """A class with such attributes."""

    def __dir__(self) -> list[str]:
        """The others: `inspect.getmembers` and torch.jit.trace read all that are listed."""
        cls = type(self)
        return [name for name in super().__dir__() if not isinstance(getattr(cls, name, None), Sentence)]


class OneRank(WithSentences):
    """Of every layer: what tensor, sequence and context parallelism over one rank mean."""

    tp_group: Any = None
    tp_size = 1
    sequence_parallel = False
    set_parallel_mode = False
    cp_group: Any = None
    cp_global_ranks: Any = None
    cp_stream: Any = None
    cp_comm_type = "p2p"
    cp_size: Any = 1
    cp_rank: Any = 0
    bottom_right_diagonal: Any = None
    enc_dec_bottom_right_diagonal: Any = None
    return_layernorm_output_gathered = False
    symmetric_ar_type: Any = None
    ub_overlap_ag = ub_overlap_rs = ub_overlap_ag_fprop = ub_overlap_rs_fprop = ub_overlap_ag_dgrad = False
    ub_overlap_rs_dgrad = ub_bulk_dgrad = ub_bulk_wgrad = False
    gemm_bias_unfused_add = False
    fwd_ln_sm_margin = bwd_ln_sm_margin = inf_ln_sm_margin = 0

    @property
    def get_rng_state_tracker(self) -> Callable[[], Any] | None:
        """What the constructor was given."""
        own = self.__dict__
        if "_rng" in own:
            return own["_rng"][0]  # type: ignore[no-any-return]
        if "_get_rng" in own:
            return own["_get_rng"]  # type: ignore[no-any-return]
        for part in ("self_attention", "core_attention"):
            if part in own["_modules"]:
                return getattr(self, part).get_rng_state_tracker  # type: ignore[no-any-return]
        return getattr(own["_modules"].get("generator"), "_get_rng", None)


class OfModule(OneRank):
    """Of layers with FP8 state."""

    fp8: bool
    fp8_meta: dict[str, Any]
    quantized_init: Any
    fsdp_wrapped = False
    fsdp_group: Any = None
    parallel_mode: str | None = None
    ub_name: str | None = None
    quantizers = Sentence("a layer's scales and amax histories are in layer.fp8_meta")
    wgrad_store = Sentence("delay_wgrad_compute, need_backward_dw() and backward_dw() are what there is")
    param_init_meta = Sentence("reset_parameters() draws a layer's parameters as its constructor did")
    activation_dtype = Sentence("a forward's dtype is torch.autocast's, or else its input's")
    fp8_calibration = Sentence("te.autocast(calibrating=True) holds for the forwards in it, and no layer keeps it")
    wgrad_accumulation_and_reduce_hooks = Sentence("register_post_accumulate_grad_hook of a parameter is what there is")
    next_iter_when_debug_should_be_run: Any = None
    gemm_gelu_fusion = False

    @property
    def rng_tracker_name(self) -> str | None:
        """What the constructor was given."""
        return self.__dict__.get("_rng", (None, None))[1]  # type: ignore[no-any-return]

    @property
    def bias_gelu_nvfusion(self) -> bool:
        """Whether bias and GELU are one op, in layers that have an activation."""
        return _own(self, "activation", "bias_gelu_nvfusion") == "gelu"  # type: ignore[no-any-return]

    @property
    def size_per_partition(self) -> int:
        """The size between the two GEMMs of an MLP, on this rank."""
        return int(_own(self, "ffn_hidden_size", "size_per_partition")) // self.tp_size

    @property
    def primary_weights_in_fp8(self) -> bool:
        """Whether the layer was made in `quantized_model_init`, which keeps its weights in FP8."""
        return self.quantized_init is not None

    @property
    def preserve_high_precision_init_val(self) -> bool:
        """Whether it keeps the values that its weights had before their cast."""
        return self.quantized_init is not None and bool(self.quantized_init.preserve)

    @property
    def fp8_initialized(self) -> bool:
        """Whether the last forward ran in FP8."""
        return self.fp8

    @property
    def fp8_meta_tensors_initialized(self) -> bool:
        """Whether the layer has scales and amax histories."""
        return "scaling_fwd" in self.fp8_meta

    @property
    def apply_bias(self) -> bool:
        """Whether the layer itself adds its bias."""
        return bool(getattr(self, "use_bias", False)) and not getattr(self, "return_bias", False)

    @property
    def normalization(self) -> str:
        """The norm's name, in layers that have one."""
        return "RMSNorm" if _own(self, "kind", "normalization") == "rmsnorm" else "LayerNorm"

    @property
    def parameter_split_sizes(self) -> list[int]:
        """Rows of each of the parameters that a weight consists of, in layers with one linear map."""
        return [len(getattr(self, name)) for name in _own(self, "weight_names", "parameter_split_sizes")]


class OfTransformerLayer(OneRank):
    """Of a whole layer."""

    bias_dropout_fusion = True
    bias_dropout_add_exec_handler = contextlib.nullcontext


class OfCoreAttention(OneRank):
    """Of the attention between the projections."""

    deterministic = True
    flash_attention, fused_attention, unfused_attention = Sentence.several(3, "attention is one op, in every case")
    logger = Sentence("attention writes no log")
    name: str | None = None

    @property
    def rng_states_tracker(self) -> Any:
        """The tracker in which seeds of dropout are drawn; None without one."""
        get = self.get_rng_state_tracker
        return None if get is None else get()


class OfAdam(WithSentences):
    """Of FusedAdam."""

    layout: Any
    multi_tensor_adam, multi_tensor_adam_fp8 = Sentence.several(2, "the ops are twin::adam and twin::adam_states")
    multi_tensor_adam_param_remainder = Sentence("the op is twin::adam_states")
    multi_tensor_adam_capturable, multi_tensor_adam_capturable_master = Sentence.several(2, "see adam_capturable")
    fuse_unscale = Sentence("what the moments are kept in is read and written by the op itself")

    exp_avg_dtype = property(lambda self: self.layout.exp_avg)
    exp_avg_sq_dtype = property(lambda self: self.layout.exp_avg_sq)
    master_weight_dtype = property(lambda self: self.layout.master)
    store_param_remainders = property(lambda self: self.layout.remainders)

    @property
    def name_to_dtype_map(self) -> dict[str, torch.dtype]:
        """What each part of the state is kept in."""
        layout = self.layout
        return {"exp_avg": layout.exp_avg, "exp_avg_sq": layout.exp_avg_sq, "master_param": layout.master}

    @property
    def dtype_to_range_map(self) -> dict[torch.dtype, torch.Tensor]:
        """The largest scaled number in a dtype."""
        return {dtype: torch.tensor([most], dtype=torch.float32, device="cpu") for dtype, most in RANGES.items()}


class OfSGD(WithSentences):
    """Of FusedSGD: what concerns apex's master gradients, which do not exist here."""

    materialize_master_grads = True
    most_recent_scale = 1.0
    scale_set_by_backward = False
    multi_tensor_sgd = Sentence("the op is twin::sgd")


class OfCache(WithSentences):
    """Of InferenceParams."""

    max_batch_size: int
    input_qkv_format: str
    device: torch.device
    sequences: dict[Hashable, int]
    _starts: list[int]
    _steps: list[int]
    cache_manager = Sentence("InferenceParams.cache has each layer's keys and values")

    @property
    def output_qkv_format(self) -> str:
        """The format of the new tokens, and of the caches if it is another."""
        return "bshd" if self.input_qkv_format == "bshd" else f"{self.input_qkv_format}_2_bshd"

    @property
    def sequences_pre_step(self) -> OrderedDict[Hashable, int]:
        """The length of each sequence before the step."""
        return OrderedDict(zip(self.sequences, self._starts, strict=True))

    @property
    def cu_seqlens_q(self) -> torch.Tensor:
        """int32 [max_batch_size + 1]: where the new tokens of each sequence begin. A copy, on the device."""
        return self._begins(self._steps)

    @property
    def cu_seqlens_kv(self) -> torch.Tensor:
        """int32 [max_batch_size + 1]: where each sequence begins, its new tokens included. A copy, on the device."""
        return self._begins(list(self.sequences.values()))

    def _begins(self, lengths: list[int]) -> torch.Tensor:
        padded = lengths + [0] * (self.max_batch_size - len(lengths))
        return torch.tensor([0, *accumulate(padded)], dtype=torch.int32, device=self.device)


class OfAttention(OneRank):
    """Of attention."""

    num_attention_heads: int
    num_gqa_groups: int

    @property
    def num_attention_heads_per_partition(self) -> int:
        """Those of this rank."""
        return self.num_attention_heads // self.tp_size

    @property
    def num_gqa_groups_per_partition(self) -> int:
        """Those of this rank."""
        return self.num_gqa_groups // self.tp_size
