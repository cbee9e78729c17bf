"""What attention, or the halves of a layer, read beside the tensors that may want a gradient."""

from typing import Any, NamedTuple

import torch

from reference.nn.attentions.inference_step import StepTensors
from reference.ops.attentions.attention_packed import Maps

Tensor = torch.Tensor | None


class NoGradInputs(NamedTuple):
    """In the order of a context's `reads`; None where nothing is read.

    Attributes:
        mask, slopes, q_lengths, kv_lengths, q_starts, kv_starts: as `twin::attention` takes them.
        angles_q, angles_k: fp32 `[s, d]` or, of each token of packed sequences, `[t, d]`.
        head_gamma: the constant γ of `L2Normalization`.
        kept, mlp_kept: with stochastic depth m of each entry, fp32, of a layer's attention and of its MLP.
        q_token and so on: `Maps` of packed sequences that are gathered.
        step_*: `StepTensors` of a cache.
    """

    mask: Tensor = None
    slopes: Tensor = None
    q_lengths: Tensor = None
    kv_lengths: Tensor = None
    q_starts: Tensor = None
    kv_starts: Tensor = None
    angles_q: Any = None
    angles_k: Any = None
    head_gamma: Tensor = None
    kept: Any = None
    mlp_kept: Any = None
    q_token: Tensor = None
    q_vacant: Tensor = None
    q_place: Tensor = None
    q_alone: Tensor = None
    kv_token: Tensor = None
    kv_vacant: Tensor = None
    kv_place: Tensor = None
    kv_alone: Tensor = None
    step_keys: Tensor = None
    step_values: Tensor = None
    step_positions: Tensor = None
    step_rows: Tensor = None
    step_source: Tensor = None
    step_hidden: Tensor = None
    step_page_table: Tensor = None
    step_q_lengths: Tensor = None
    step_kv_lengths: Tensor = None
    step_q_starts: Tensor = None
    step_key_scales: Tensor = None
    step_value_scales: Tensor = None
    step_rows_lengths: Tensor = None
    step_rows_starts: Tensor = None

    @staticmethod
    def of(reads: Any) -> "NoGradInputs":
        """Those of a context, which has none at all where nothing is read."""
        return reads or NO_INPUTS

    def maps(self) -> tuple[Maps, Maps]:
        """Of queries and of keys."""
        return self._part(Maps, "q"), self._part(Maps, "kv")

    def with_maps(self, of_q: Maps, of_kv: Maps) -> "NoGradInputs":
        """These, and the maps of packed sequences."""
        return self._with("q", of_q)._with("kv", of_kv)

    def with_step(self, step: StepTensors) -> "NoGradInputs":
        """These, and what a step with a cache reads."""
        return self._with("step", step)

    def step(self) -> StepTensors:
        """The cache and what a step reads beside it."""
        return self._part(StepTensors, "step")

    def _part(self, cls: Any, prefix: str) -> Any:
        """The tensors of a NamedTuple of `cls`, whose names here begin with `prefix`."""
        return cls(*[getattr(self, f"{prefix}_{name}") for name in cls._fields])

    def _with(self, prefix: str, part: Any) -> "NoGradInputs":
        """These, and the tensors of `part`."""
        return self._replace(**{f"{prefix}_{name}": x for name, x in zip(part._fields, part, strict=True)})


NO_INPUTS = NoGradInputs()
