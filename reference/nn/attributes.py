"""Public attributes that Transformer Engine's constructors set, with the values that are true here.

Programs ask for them, often with a default: `getattr(module, "primary_weights_in_fp8", False)`. Without the attribute
that would be False whatever is the case. Where a value says something that does not exist here it is the one that
Transformer Engine has with that thing switched off: there is one rank, and no overlap of communication.
"""

from typing import Any

import torch


class Sentence:
    """An attribute that means nothing here; `getattr` with a default does not swallow its error, and hide it."""

    def __init__(self, why: str) -> None:
        self.why = why

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        if obj is None:
            return self
        raise NotImplementedError(f"{type(obj).__name__}: {self.name} is not offered by Twin Engine: {self.why}.")


class OneRank:
    """Of every layer: what tensor, sequence and context parallelism over one rank mean."""

    tp_group: Any = None
    tp_size = 1
    sequence_parallel = False
    set_parallel_mode = False
    cp_group: Any = None
    cp_global_ranks: Any = None
    cp_stream: Any = None
    cp_comm_type = "p2p"
    cp_size, cp_rank = 1, 0
    bottom_right_diagonal: Any = None
    enc_dec_bottom_right_diagonal: Any = None
    return_layernorm_output_gathered = False
    symmetric_ar_type: Any = None
    ub_overlap_ag = ub_overlap_rs = ub_overlap_ag_fprop = ub_overlap_rs_fprop = ub_overlap_ag_dgrad = False
    ub_overlap_rs_dgrad = ub_bulk_dgrad = ub_bulk_wgrad = False
    gemm_bias_unfused_add = False
    fwd_ln_sm_margin = bwd_ln_sm_margin = inf_ln_sm_margin = 0


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
        kind = self.__dict__.get("kind")
        if kind is None:
            raise AttributeError("normalization")
        return "RMSNorm" if kind == "rmsnorm" else "LayerNorm"

    @property
    def parameter_split_sizes(self) -> list[int]:
        """Rows of each of the parameters that a weight consists of."""
        return [len(torch.nn.Module.__getattr__(self, name)) for name in self.__dict__["weight_names"]]  # type: ignore


class OfAttention(OneRank):
    """Of attention."""

    num_attention_heads: int
    num_gqa_groups: int

    @property
    def num_attention_heads_per_partition(self) -> int:
        """All heads: there is one rank."""
        return self.num_attention_heads

    @property
    def num_gqa_groups_per_partition(self) -> int:
        """All groups: there is one rank."""
        return self.num_gqa_groups
